"""Raises at one line of oomb after the other, and looks at what is left behind."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import oomb
from oomb.core import chunk_run
from oomb.core.attention import ChunkAttention
from oomb.model import interface, swap

PACKAGE = str(Path(oomb.__file__).parent)
Place = tuple[str, int]  # file, line


class Interrupt(BaseException):
    """What Ctrl-C, or the handler of a signal, would raise."""


class Lines:
    """Traces lines of oomb, where tracing comes before the line; raises at one of them.

    Args:
        place: where to raise; None: nowhere, which tells all ``places`` and how often each came.
        visit: which time.
    """

    def __init__(self, place: Place | None = None, visit: int = 1) -> None:
        self.places: dict[Place, int] = {}
        self.raised = False
        self._place, self._left = place, visit

    def run(self, work: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            work()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self._place is None:
            return self._line if code.co_filename.startswith(PACKAGE) else None
        # Other functions run untraced, which is most of the time that a call would take.
        file, line = self._place
        return self._line if code.co_filename == file and line >= code.co_firstlineno else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            if self._place is None:
                self.places[place] = self.places.get(place, 0) + 1
            elif place == self._place:
                self._left -= 1
                if self._left == 0:
                    self.raised = True
                    raise Interrupt(f"{place[0]}:{place[1]}")
        return self._line


def every_line(work: Callable[[], object]) -> dict[Place, int]:
    """Lines of oomb that ``work`` comes by, and how often."""
    lines = Lines()
    lines.run(work)
    return lines.places


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a call could leave behind in a model, in oomb, in torch and in the process."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = vars(module)
        for key in ("forward", "training", "gradient_checkpointing"):
            state[f"{name}.{key}"] = own.get(key, "absent")
        for key in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            state[f"{name}.{key}"] = list(own[key])
        config = getattr(module, "config", None)
        state[f"{name}.attention"] = getattr(config, "_attn_implementation", None)
    for name, parameter in model.named_parameters():
        state[f"{name}.requires_grad"] = parameter.requires_grad
        state[f"{name}.hooks"] = list(getattr(parameter, "_post_accumulate_grad_hooks", None) or [])
        state[f"{name}.grad"] = parameter.grad
        state[f"{name}.memory"] = parameter.data_ptr()
    state["handler"] = interface._handler, interface._observer, interface._mask_probe
    state["active"] = list(ChunkAttention.active)
    state["swaps"] = swap._of_call.get()
    state["run"] = chunk_run._current.get()
    state["frozen"] = gc.get_freeze_count()
    state["modes"] = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), _nesting()
    state["signals"] = [signal.getsignal(number) for number in signal.valid_signals()]
    return state


def _nesting() -> int:
    inside: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return inside - 1


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    assert before.keys() == after.keys()
    return [
        f"{key}: {before[key]} → {after[key]}"
        for key in before
        if before[key] is not after[key] and before[key] != after[key]
    ]
