"""States on the host: the bits of the same optimizer with its states on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import oomb
from oomb.optim import HostStates, host_states
from oomb.optim.lanes import Lanes

SIZES = [(80, 64), (3,), (64, 128), (5000,), (), (70, 70)]


def _bitsandbytes(name: str) -> Callable[..., torch.optim.Optimizer]:
    def make(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        bnb = pytest.importorskip("bitsandbytes")
        return getattr(bnb.optim, name)(parameters, **settings)  # type: ignore[no-any-return]

    return make


def _torchao(name: str) -> Callable[..., torch.optim.Optimizer]:
    def make(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        optim = pytest.importorskip("torchao.optim")
        return getattr(optim, name)(parameters, **settings)  # type: ignore[no-any-return]

    return make


MADE: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "Adafactor": (transformers.Adafactor, {"relative_step": False}),
    "AdamW8bit of bitsandbytes": (_bitsandbytes("AdamW8bit"), {}),
    "Lion8bit of bitsandbytes": (_bitsandbytes("Lion8bit"), {}),
    "AdamW8bit of torchao": (_torchao("AdamW8bit"), {}),
    "AdamW4bit of torchao": (_torchao("AdamW4bit"), {}),
}


@pytest.fixture(autouse=True)
def _eager() -> Any:
    """torchao compiles its steps; their arithmetic is the same without."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def _made(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    kind, settings = MADE[name]
    groups = [
        {"params": parameters[:2], "lr": 1e-2},
        {"params": parameters[2:], "lr": 3e-3},
    ]
    return kind(groups, lr=1e-3, **settings)


def _gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Another parameter is without one in each step."""
    generator = torch.Generator().manual_seed(step)
    for place, parameter in enumerate(parameters):
        grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if place == step % len(SIZES) else grad


def _steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        _gradients(parameters, step)
        for group in optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = rate.mul_(0.9) if isinstance(rate, torch.Tensor) else rate * 0.9
        optimizer.step()


class Late(Lanes):
    """Lanes whose copies are made as late as can be: loads where they are awaited, stores likewise.

    What compute has put in their place until then is what such a store would find.
    """

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []

    def load(self, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        there = [torch.full_like(source, 77) for source in sources]
        return there, self._later(there, sources)

    def store(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        return self._later(targets, sources)

    def _later(self, to: list[torch.Tensor], of: list[torch.Tensor]) -> Callable[[], None]:
        def copy() -> None:
            for target, source in zip(to, of, strict=True):
                target.copy_(source)

        self.pending.append(copy)
        return copy

    def wait(self, batch: Any) -> None:
        if batch in self.pending:
            self.pending.remove(batch)
            batch()

    def finish(self) -> None:
        while self.pending:
            self.pending.pop()()


@pytest.mark.parametrize("lanes", ["at once", "late"])
@pytest.mark.parametrize("part_bytes", [1, 2**15, 2**28])
@pytest.mark.parametrize("name", MADE)
def test_bits_are_those_of_states_on_the_device(
    name: str, part_bytes: int, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_states, "_PART_BYTES", part_bytes)
    expected, ours = _parameters(), _parameters()
    _steps(_made(name, expected), expected, range(8))
    optimizer = HostStates(_made(name, ours))
    if lanes == "late":
        optimizer._lanes = Late()
    _steps(optimizer, ours, range(8))
    for one, other in zip(expected, ours, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MADE)
def test_a_state_goes_on_on_either_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "_PART_BYTES", 2**14)
    expected = _parameters()
    _steps(_made(name, expected), expected, range(6))
    ours = _parameters()
    first = HostStates(_made(name, ours))
    _steps(first, ours, range(2))
    second = _made(name, ours)
    second.load_state_dict(first.state_dict())
    _steps(second, ours, range(2, 4))
    third = HostStates(_made(name, ours))
    third.load_state_dict(second.state_dict())
    assert (third.host_bytes > 0) == (first.host_bytes > 0)
    _steps(third, ours, range(4, 6))
    for one, other in zip(expected, ours, strict=True):
        assert torch.equal(one, other)


def test_one_that_has_stepped_before() -> None:
    expected, ours = _parameters(), _parameters()
    _steps(_made("AdamW", expected), expected, range(6))
    plain = _made("AdamW", ours)
    _steps(plain, ours, range(3))
    _steps(HostStates(plain), ours, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(expected, ours, strict=True))


def test_large_states_are_in_its_blocks_and_small_ones_stay() -> None:
    parameters = _parameters()
    optimizer = HostStates(_made("AdamW", parameters))
    _steps(optimizer, parameters, range(1, 2))
    large = [p for p in parameters if p.numel() >= 4096 and p in optimizer.state]
    assert optimizer.host_bytes >= sum(2 * p.nbytes for p in large) > 0
    for parameter in large:
        state, homes = optimizer.state[parameter], optimizer._homes[parameter]
        assert all(state[name] is homes[name][0] for name in ("exp_avg", "exp_avg_sq"))


def test_gradients_stay_unless_they_shall_go() -> None:
    for frees in (False, True):
        parameters = _parameters()
        optimizer = HostStates(_made("AdamW", parameters), free_gradients=frees)
        _gradients(parameters, 1)
        before = [p.grad for p in parameters]
        optimizer.step()
        expected = [None] * len(SIZES) if frees else before
        assert all(p.grad is grad for p, grad in zip(parameters, expected, strict=True))


def test_a_failed_step_leaves_gradients_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "_PART_BYTES", 1)
    parameters = _parameters()
    inner = _made("AdamW", parameters)
    optimizer = HostStates(inner)
    _steps(optimizer, parameters, range(1, 2))
    _gradients(parameters, 1)
    before = [p.grad for p in parameters]
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("made to fail")

    monkeypatch.setattr(inner, "step", fails)
    with pytest.raises(RuntimeError, match="made to fail"):
        optimizer.step()
    assert all(p.grad is grad for p, grad in zip(parameters, before, strict=True))
    for parameter, homes in optimizer._homes.items():
        assert all(optimizer.state[parameter][name] is home[0] for name, home in homes.items())


def test_a_host_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "free_memory", lambda device: 1000)
    parameters = _parameters()
    optimizer = HostStates(_made("AdamW", parameters))
    with pytest.raises(oomb.OutOfMemoryError, match=r"optimizer states: the host has 1000 B free"):
        _steps(optimizer, parameters, range(1))


def _paged() -> torch.optim.Optimizer:
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.optim.PagedAdamW8bit(_parameters())  # type: ignore[no-any-return]


class _OfOnesOwn(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.optim.LBFGS(_parameters()), "got LBFGS; keep its states on the device"),
        (lambda: _OfOnesOwn(_parameters()), "got _OfOnesOwn"),
        (_paged, "PagedAdamW8bit"),
    ],
)
def test_refused_by_name(make: Callable[[], torch.optim.Optimizer], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HostStates(make())


def test_a_closure_is_refused() -> None:
    optimizer = HostStates(_made("AdamW", _parameters()))
    with pytest.raises(ValueError, match="closure: expected None"):
        optimizer.step(lambda: 1.0)


def test_hooks_of_states_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of saving and loading, as torch's: what they return takes the state's place."""
    monkeypatch.setattr(host_states, "_PART_BYTES", 1)  # each parameter is a part
    weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(3)]
    optimizer = HostStates(torch.optim.AdamW(weights))
    for weight in weights:
        weight.grad = torch.ones(8)
    optimizer.step()
    seen: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda one: seen.append(("before saving", one)))
    optimizer.register_state_dict_post_hook(lambda one, state: {"note": 1, **state})
    optimizer.register_load_state_dict_pre_hook(
        lambda one, state: {name: value for name, value in state.items() if name != "note"}
    )
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(("loaded", one)))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert seen == [("before saving", optimizer), ("loaded", optimizer)]
    assert all(float(optimizer.state[weight]["step"]) == 1 for weight in weights)


def test_hooks_of_a_step_run_once_around_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "_PART_BYTES", 20_000)
    parameters = _parameters()
    optimizer = HostStates(_made("AdamW", parameters))
    seen: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def of_step(given: torch.optim.Optimizer, *_: Any) -> None:
            assert given is optimizer and all(p.grad is not None for p in parameters)
            seen.append(name)

        return of_step

    optimizer.register_step_pre_hook(hook("before"))
    optimizer.register_step_post_hook(hook("after"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert seen == ["before", "after"]


def test_a_resumed_bitsandbytes_leaves_states_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step would move all of them at once."""
    first, second = _parameters(), _parameters()
    before = HostStates(_made("AdamW8bit of bitsandbytes", first))
    _steps(before, first, range(1))
    inner: Any = _made("AdamW8bit of bitsandbytes", second)
    resumed = HostStates(inner)
    resumed.load_state_dict(before.state_dict())

    def moves_all() -> None:
        raise AssertionError("to_gpu")

    monkeypatch.setattr(inner, "to_gpu", moves_all)
    _steps(resumed, second, range(1, 2))
    assert inner.initialized
