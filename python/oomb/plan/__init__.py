"""What a training step will take, before any weight is loaded."""

from oomb.plan.choices import UNIFORM, Choices
from oomb.plan.duration import Duration
from oomb.plan.machine import GPUS, Gpu, Machine
from oomb.plan.optimizers import OPTIMIZERS
from oomb.plan.planner import Planner
from oomb.plan.prediction import Prediction
from oomb.plan.recommendation import Recommendation, predict, recommend
from oomb.plan.record import write_measured, write_plan

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
    "predict",
    "recommend",
    "write_measured",
    "write_plan",
]
