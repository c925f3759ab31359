"""Checkpoints that survive a crash, a full disk and a flipped bit."""

from oomb.checkpoint.identity import model_identity
from oomb.checkpoint.manifest import CheckpointError
from oomb.checkpoint.state_tree import load_state, save_state
from oomb.checkpoint.store import Checkpoint, CheckpointStore

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "load_state",
    "model_identity",
    "save_state",
]
