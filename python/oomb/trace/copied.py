"""A copy of a model; functions that somebody put on its modules run the copy too."""

from __future__ import annotations

import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import nn


def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy; where ``memo`` has an object's id, what it has stands in that object's place.

    ``copy.deepcopy`` takes functions as they are. One that somebody put on a module (a wrapped
    ``forward``) would still run the model that it was made for, which its closure or an argument
    holds; here it is made again around the copy.
    """
    made = copy.deepcopy(model, memo)
    functions = _Functions(memo)
    for module in model.modules():
        own = vars(memo[id(module)])
        for name, value in vars(module).items():
            if callable(value):
                own[name] = functions.around_copy(value)
    return made


class _Functions:
    """Makes functions again whose closures, arguments or attributes hold what was copied.

    Args:
        memo: copies by the id of what they are copies of.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, tuple[object, Any]] = {}  # with what it was made of: ids stay taken

    def around_copy(self, value: Any) -> Any:
        """``value``, or another in its place that holds copies."""
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self.around_copy(value.__func__), self.around_copy(value.__self__))
        if isinstance(value, partial):
            args, keywords = self.around_copy(value.args), self.around_copy(value.keywords)
            made = partial(self.around_copy(value.func), *args, **keywords)
            vars(made).update(self._of_each(vars(value)))
            return made
        if type(value) is ref:
            target = value()
            known = self._memo.get(id(target))
            return value if target is None or known is None else ref(known)
        if type(value) is tuple:
            return tuple(self.around_copy(item) for item in value)
        if type(value) is list:
            items: list[Any] = []
            self._made[id(value)] = value, items  # it may hold itself
            items.extend(self.around_copy(item) for item in value)
            return items
        if type(value) is dict:
            named: dict[Any, Any] = {}
            self._made[id(value)] = value, named
            named.update(self._of_each(value))
            return named
        known = self._memo.get(id(value), value)
        if callable(known) and not isinstance(known, (nn.Module, type)):
            return self._callable_object(value, known)
        return known

    def _function(self, function: FunctionType) -> FunctionType:
        cells = function.__closure__ or ()
        if not (cells or function.__defaults__ or function.__kwdefaults__ or vars(function)):
            return function
        made = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            None,
            tuple(CellType() for _ in cells) or None,
        )
        self._made[id(function)] = function, made  # before its closure, which may hold it
        for cell, old in zip(made.__closure__ or (), cells, strict=True):
            try:
                content = old.cell_contents
            except ValueError:  # a name that has no value yet
                continue
            cell.cell_contents = self.around_copy(content)
        made.__defaults__ = self.around_copy(function.__defaults__)
        made.__kwdefaults__ = self.around_copy(function.__kwdefaults__)
        for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
            setattr(made, name, getattr(function, name))
        vars(made).update(self._of_each(vars(function)))
        return made

    def _callable_object(self, value: Any, known: Any) -> Any:
        """An instance with ``__call__``, which keeps what it wraps in an attribute."""
        own: dict[str, Any] = getattr(value, "__dict__", {})
        self._made[id(value)] = value, known  # it may hold itself
        inside = self._of_each(own)
        if all(inside[name] is item for name, item in own.items()):
            return known
        if known is value:
            known = object.__new__(type(value))  # some refuse to be copied, as to be pickled
            self._made[id(value)] = value, known
        vars(known).update(inside)
        return known

    def _of_each(self, values: dict[Any, Any]) -> dict[Any, Any]:
        return {name: self.around_copy(value) for name, value in values.items()}
