"""Hugging Face models under the engine, and the trainers that drive it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomb.hf.interrupt import Interrupted
    from oomb.hf.sft import SFTTrainer
    from oomb.hf.trainer import EngineTrainerMixin, Trainer
    from oomb.hf.two_pass import (
        DPOTrainer,
        GRPOTrainer,
        KTOTrainer,
        RewardTrainer,
        RLOOTrainer,
        TwoPassTrainerMixin,
    )

__all__ = [
    "DPOTrainer",
    "EngineTrainerMixin",
    "GRPOTrainer",
    "Interrupted",
    "KTOTrainer",
    "RLOOTrainer",
    "RewardTrainer",
    "SFTTrainer",
    "Trainer",
    "TwoPassTrainerMixin",
]

# Trainers need accelerate, and TRL's needs trl: imported where they are first used.
_MODULE_OF = {
    "DPOTrainer": "oomb.hf.two_pass",
    "EngineTrainerMixin": "oomb.hf.trainer",
    "GRPOTrainer": "oomb.hf.two_pass",
    "Interrupted": "oomb.hf.interrupt",
    "KTOTrainer": "oomb.hf.two_pass",
    "RLOOTrainer": "oomb.hf.two_pass",
    "RewardTrainer": "oomb.hf.two_pass",
    "SFTTrainer": "oomb.hf.sft",
    "Trainer": "oomb.hf.trainer",
    "TwoPassTrainerMixin": "oomb.hf.two_pass",
}
_EXTRA_OF = {"accelerate": "train", "datasets": "train", "trl": "trl"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = _EXTRA_OF.get(package)
        if extra is None:
            raise
        raise ModuleNotFoundError(
            f"oomb.hf.{name} needs {package}: pip install 'oomb[{extra}]'", name=package
        ) from error
