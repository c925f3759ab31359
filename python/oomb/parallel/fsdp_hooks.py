"""Modules that FSDP2 has sharded, without the class and the hooks that it gave them for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

Afterwards = Callable[[Callable[[], object]], None]

_MARK = "_is_fsdp_managed_module"


def hide(module: FSDPModule, afterwards: Afterwards) -> None:
    """Give a module the class that it had, and hooks without FSDP2's.

    Args:
        afterwards: takes what undoes it.
    """
    kind: Any = type(module)
    afterwards(partial(setattr, module, "__class__", kind))
    module.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    _hide_hooks(module, afterwards)


def hide_marks(model: nn.Module, afterwards: Afterwards) -> None:
    """Take away by which transformers' ``generate`` knows FSDP2 and waits for all ranks.

    Args:
        afterwards: takes what undoes it.
    """
    for module in model.modules():
        items = vars(module)
        if items.get(_MARK):
            afterwards(partial(items.__setitem__, _MARK, True))
            items[_MARK] = False


@contextmanager
def hooks_aside(model: nn.Module) -> Iterator[None]:
    """Inside, calling a model does not gather its weights; a call of an engine does.

    For calls that are answered without the model's own forward.
    """
    undo: list[Callable[[], object]] = []
    try:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _hide_hooks(module, undo.append)
        yield
    finally:
        for one in reversed(undo):
            one()


def _hide_hooks(module: Any, afterwards: Afterwards) -> None:
    items = vars(module)
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = items[name]
        afterwards(partial(items.__setitem__, name, hooks))
        items[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _theirs(hook))


def _theirs(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
