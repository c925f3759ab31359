"""Training of large language models on million-token contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomb.lazy import lazy_names
from oomb.waiting import wait_asleep

if TYPE_CHECKING:
    from oomb import _C as _C
    from oomb import audit as audit
    from oomb import checkpoint as checkpoint
    from oomb import config as config
    from oomb import engine as engine
    from oomb import errors as errors
    from oomb import hf as hf
    from oomb import monitor as monitor
    from oomb import ops as ops
    from oomb import plan as plan
    from oomb import report as report
    from oomb import train as train
    from oomb.config import (
        AllChunks,
        Config,
        Dense,
        PageRule,
        Past,
        SampledChunks,
        TopKPages,
        TruncatedChunks,
    )
    from oomb.core.loss import TokenRows
    from oomb.engine.engine import Engine
    from oomb.engine.plan import Plan
    from oomb.engine.teacher import TeacherTargets
    from oomb.engine.two_pass import TwoPass
    from oomb.errors import Error, OutOfMemoryError, UnsupportedModelError
    from oomb.results import Progress, Stats, Step
    from oomb.version import __version__

__all__ = [
    "AllChunks",
    "Config",
    "Dense",
    "Engine",
    "Error",
    "OutOfMemoryError",
    "PageRule",
    "Past",
    "Plan",
    "Progress",
    "SampledChunks",
    "Stats",
    "Step",
    "TeacherTargets",
    "TokenRows",
    "TopKPages",
    "TruncatedChunks",
    "TwoPass",
    "UnsupportedModelError",
    "__version__",
]

wait_asleep()  # before whatever imports torch

_lazy, __dir__ = lazy_names(
    __name__,
    {
        "AllChunks": "oomb.config",
        "Config": "oomb.config",
        "Dense": "oomb.config",
        "Engine": "oomb.engine.engine",
        "Error": "oomb.errors",
        "OutOfMemoryError": "oomb.errors",
        "PageRule": "oomb.config",
        "Past": "oomb.config",
        "Plan": "oomb.engine.plan",
        "Progress": "oomb.results",
        "SampledChunks": "oomb.config",
        "Stats": "oomb.results",
        "Step": "oomb.results",
        "TeacherTargets": "oomb.engine.teacher",
        "TokenRows": "oomb.core.loss",
        "TopKPages": "oomb.config",
        "TruncatedChunks": "oomb.config",
        "TwoPass": "oomb.engine.two_pass",
        "UnsupportedModelError": "oomb.errors",
        "__version__": "oomb.version",
    },
    submodules=(
        "_C",
        "audit",
        "checkpoint",
        "config",
        "engine",
        "errors",
        "hf",
        "monitor",
        "ops",
        "optim",
        "plan",
        "report",
        "train",
    ),
)

if not TYPE_CHECKING:  # a checker knows the names, and would take any other one too

    def __getattr__(name: str) -> Any:
        try:
            return _lazy(name)
        except ModuleNotFoundError as error:
            if error.name != "oomb._C":
                raise
            raise ModuleNotFoundError(
                "oomb._C, the native core, is not built for this Python: pip install . in the "
                "repository, or make in-place PYTHON=python",
                name=error.name,
            ) from None
