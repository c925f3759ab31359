"""What a training step will take, before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomb.lazy import lazy_names

if TYPE_CHECKING:
    from oomb.core.page_demand import UNIFORM, Choices
    from oomb.plan.duration import Duration
    from oomb.plan.gpus import GPUS, Gpu
    from oomb.plan.machine import Machine
    from oomb.plan.optimizers import OPTIMIZERS
    from oomb.plan.planner import Planner
    from oomb.plan.prediction import Prediction
    from oomb.plan.recommendation import Recommendation, predict, recommend
    from oomb.plan.record import write_measured, write_plan
    from oomb.plan.remedies import Remedy

__all__ = [
    "GPUS",
    "OPTIMIZERS",
    "UNIFORM",
    "Choices",
    "Duration",
    "Gpu",
    "Machine",
    "Planner",
    "Prediction",
    "Recommendation",
    "Remedy",
    "predict",
    "recommend",
    "write_measured",
    "write_plan",
]

if not TYPE_CHECKING:  # a checker knows the names, and would take any other one too
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "GPUS": "oomb.plan.gpus",
            "OPTIMIZERS": "oomb.plan.optimizers",
            "UNIFORM": "oomb.core.page_demand",
            "Choices": "oomb.core.page_demand",
            "Duration": "oomb.plan.duration",
            "Gpu": "oomb.plan.gpus",
            "Machine": "oomb.plan.machine",
            "Planner": "oomb.plan.planner",
            "Prediction": "oomb.plan.prediction",
            "Recommendation": "oomb.plan.recommendation",
            "Remedy": "oomb.plan.remedies",
            "predict": "oomb.plan.recommendation",
            "recommend": "oomb.plan.recommendation",
            "write_measured": "oomb.plan.record",
            "write_plan": "oomb.plan.record",
        },
    )
