"""Training of large language models on million-token contexts, on one GPU."""

from oomb.config import AllChunks, Config, Dense, SampledChunks, TopKPages
from oomb.engine.engine import Engine
from oomb.engine.plan import Plan
from oomb.engine.results import Progress, Stats, Step
from oomb.errors import Error, OutOfMemoryError, UnsupportedModelError

__all__ = [
    "AllChunks",
    "Config",
    "Dense",
    "Engine",
    "Error",
    "OutOfMemoryError",
    "Plan",
    "Progress",
    "SampledChunks",
    "Stats",
    "Step",
    "TopKPages",
    "UnsupportedModelError",
]
