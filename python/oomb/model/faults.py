"""Whose fault an error is: the machine's, or the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from oomb.errors import Error, UnsupportedModelError

# How torch and the libraries under it say that there is no memory, and that a device has failed.
_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
_DEVICE_FAILED = ("CUDA error", "CUDA driver error", "cuDNN error")
_OF_A_MODEL = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def is_out_of_memory(error: BaseException) -> bool:
    """Memory was refused."""
    return _says(error, _NO_MEMORY)


def is_models_own(error: BaseException) -> bool:
    """A model's own code failed: neither the machine's memory or device, nor the engine."""
    machine = is_out_of_memory(error) or _says(error, _DEVICE_FAILED)
    return isinstance(error, _OF_A_MODEL) and not isinstance(error, Error) and not machine


@contextmanager
def models_own(model: nn.Module, what: str) -> Iterator[None]:
    """Inside, an error of the model's own code is one of a model that cannot be run.

    What the machine refuses or breaks passes as it is, and so does what the engine says itself.

    Args:
        what: follows the name of the model's class, as in ``"its own forward fails"``.

    Raises:
        UnsupportedModelError: with the error as its cause.
    """
    try:
        yield
    except _OF_A_MODEL as error:
        if not is_models_own(error):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__}: {what}: {_said(error)}{_where(model, error)}"
        ) from error


def _said(error: BaseException) -> str:
    """Its words; "index 1 is out of bounds" tells nobody anything without the line that raised."""
    text = str(error)
    past_end = isinstance(error, IndexError) and "index" in text and " out of " in text
    return "it reads past the end of a tensor or list" if past_end else text


def _where(model: nn.Module, error: BaseException) -> str:
    """Name and class of the innermost part of a model that was running when an error came."""
    parts = {id(part): name for name, part in model.named_modules() if name}
    found, trace = "", error.__traceback__
    while trace is not None:
        part = trace.tb_frame.f_locals.get("self")
        if id(part) in parts:
            found = f" (in {parts[id(part)]}, {type(part).__name__})"
        trace = trace.tb_next
    return found


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(part in str(error) for part in words)
