"""Names what mixes tokens in a layer that calls no attention of transformers' interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oomb.model.causal import CausalModel
from oomb.model.crossing import gradient_reaches

_NO_CALL = "does not call attention through transformers' interface"
_TOKENS = 12
# What attention takes of its scores, by parts of the names of torch's operations.
_OF_ATTENTION = ("softmax", "logsumexp", "attention")


def why_no_call(model: CausalModel, layer: int) -> str:
    """Why a layer is refused that calls no attention of the interface: its name, what in it mixes
    tokens, and what would help.

    The model's own forward runs once more. Where that does not tell, the words are general.
    """
    where = f"{model.layer_names[layer]}: {_NO_CALL}"
    found = None
    with suppress(Exception):  # it only words a refusal, which is certain
        found = _mixing(model, layer)
    if found is None:
        return (
            f"{where}, and none of its parts was seen to mix tokens: the engine carries from chunk "
            "to chunk what goes through that interface, or through transformers' cache"
        )
    name, attends = found
    if attends:
        return (
            f"{where}: {name} computes attention by itself, where the engine cannot take it over; "
            "it would have to call ALL_ATTENTION_FUNCTIONS of transformers"
        )
    return (
        f"{where}: {name} is a recurrence or a convolution that keeps its state to itself, so that "
        "the next chunk would not get it; it would have to ask transformers' cache for it"
    )


def _mixing(model: CausalModel, layer: int) -> tuple[str, bool] | None:
    """Name of the innermost module of a layer whose last token depends on earlier ones, and whether
    it takes a softmax meanwhile; None: there is none."""
    inside = {
        part: f"its {name} ({type(part).__name__})" if name else "it"
        for name, part in model.layers[layer].named_modules()
        if not type(part).__module__.startswith("torch.")  # of a shift by padding, say, who shifts
    }
    ids = torch.arange(_TOKENS, device=model.device)[None] % model.vocab_size
    with torch.no_grad(), _calls(inside) as calls:
        model.causal(input_ids=ids, use_cache=False)
    # Modules end before those that they are part of.
    for module, args, keywords in calls:
        watch = _Operations()
        with suppress(Exception), torch.no_grad(), watch:
            if _mixes(module, args, keywords):
                return inside[module], watch.of_attention
    return None


@contextmanager
def _calls(inside: dict[nn.Module, str]) -> Iterator[list[tuple[nn.Module, Any, Any]]]:
    """Calls of these modules, in the order in which they end."""
    calls: list[tuple[nn.Module, Any, Any]] = []

    def ended(module: nn.Module, args: Any, keywords: Any, _: Any) -> None:
        calls.append((module, _copied(args), _copied(keywords)))

    hooks: list[Any] = []
    try:
        for part in inside:
            hooks.append(part.register_forward_hook(ended, with_kwargs=True))
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _mixes(module: nn.Module, args: Any, keywords: Any) -> bool:
    """Whether what a module gives for its last token changes with the tokens before it.

    Small inputs are tried too, and gradients: with large ones a token may see none but itself.
    """
    given = next(x for x in (*args, *keywords.values()) if _is_hidden(x))
    dim = int(given.shape[1] >= _TOKENS)  # of the tokens: behind the batch, or before it
    last = given.shape[dim] - 1

    def of_last(hidden: torch.Tensor) -> torch.Tensor:
        changed = [hidden if x is given else x for x in args]
        named = {name: hidden if x is given else x for name, x in keywords.items()}
        torch.manual_seed(0)  # dropout drops the same each time
        output = module(*_copied(changed), **_copied(named))
        first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
        return first.narrow(dim, last, 1).float()

    with torch.random.fork_rng(devices=[given.device] if given.is_cuda else []):
        for hidden in (given, given / (10 * given.float().square().mean().sqrt()).to(given.dtype)):
            parts = hidden.narrow(dim, 0, last).flip(-1), hidden.narrow(dim, last, 1)
            one, two = of_last(hidden), of_last(torch.cat(parts, dim))
            if not float((one - two).norm()) <= 1e-3 * float(one.norm()):
                return True
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad():
                [reached] = gradient_reaches(of_last(leaf), [leaf])
            if reached is not None and bool(reached.narrow(dim, 0, last).any()):
                return True
    return False


def _copied(values: Any) -> Any:
    """The same with tensors of its own: modules may write to what they are given."""
    if isinstance(values, dict):
        return {name: _copied(x) for name, x in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_copied(x) for x in values) if type(values) in (list, tuple) else values
    return values.clone() if isinstance(values, torch.Tensor) else values


def _is_hidden(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 3
        and value.is_floating_point()
        and max(value.shape[:2]) >= _TOKENS  # some models add tokens of their own
    )


class _Operations(TorchDispatchMode):
    """Notes whether one of those that attention takes of its scores was run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of_attention = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of_attention |= any(part in str(func) for part in _OF_ATTENTION)
        return func(*args, **(kwargs or {}))
