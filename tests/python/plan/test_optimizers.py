"""Bytes of optimizers' states and seconds of their step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oomb.optim import HostStates, host_states
from oomb.plan import Machine, Planner, Prediction
from oomb.plan.optimizers import optimizer_use

GIB = 2**30


@pytest.fixture(scope="module")
def planner() -> Planner:
    machine = Machine.described(gpu="h100", host_memory=256 * GIB)
    return Planner("qwen2.5-7b", machine)


def _step(planner: Planner, name: str | None, states: str = "device") -> Prediction:
    return planner.predict(8192, optimizer=name, optimizer_states=states, dry_run=False)


def test_states_on_the_host_leave_the_device(planner: Planner) -> None:
    on_device = _step(planner, "adamw_torch_fused")
    on_host = _step(planner, "adamw_torch_fused", "host")
    assert on_host.optimizer_bytes == 0
    assert on_host.optimizer_host_bytes == on_device.optimizer_bytes
    assert on_host.host_bytes >= on_device.optimizer_bytes
    # Embedding and head are the largest parts, with 545 M values each; two states in bf16.
    working = on_host.step_bytes - on_device.step_bytes
    assert 2 * 2 * 152064 * 3584 <= working <= 2 * 2 * 152064 * 3584 + 4 * 2**28


def test_seconds_of_a_step(planner: Planner) -> None:
    """By hand: parameters and gradients in bf16; states once each way at the link's rate."""
    values = planner.tracer.parameter_bytes / 2
    on_device = _step(planner, "adamw_torch_fused").optimizer_seconds
    on_host = _step(planner, "adamw_torch_fused", "host").optimizer_seconds
    assert on_device is not None and on_host is not None
    assert values * 14 / 3.35e12 <= on_device <= 2 * values * 14 / 3.35e12
    assert values * 4 / 64e9 <= on_host <= values * 4 / 40e9
    assert _step(planner, None).optimizer_seconds == 0
    paged = _step(planner, "paged_adamw_32bit").optimizer_seconds
    eight = _step(planner, "adamw_torch_8bit", "host").optimizer_seconds
    assert paged is not None and eight is not None and eight < on_host < paged


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit", "adamw_bnb_8bit"])
def test_state_bytes_are_those_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [nn.Parameter(torch.randn(256, 512)), nn.Parameter(torch.randn(4096, 8))]
    if "bnb" in name:
        made: Any = pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters)
        monkeypatch.setattr(made.mng, "index2config", {})  # what others have told all optimizers
    else:
        kind = {"adamw_torch_8bit": "AdamW8bit", "adamw_torch_4bit": "AdamW4bit"}[name]
        made = getattr(pytest.importorskip("torchao.optim"), kind)(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    with torch.compiler.set_stance("force_eager"):
        made.step()
    held = sum(
        part.nbytes
        for state in made.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 256
        for part in host_states._plain(value)
    )
    assert optimizer_use(name, parameters).device_bytes == pytest.approx(held, rel=0.02)
    wrapped = HostStates(made)
    kept = optimizer_use(name, parameters, "host").host_bytes
    assert wrapped.host_bytes == pytest.approx(kept, rel=0.05)


def test_embeddings_of_bitsandbytes_are_in_32_bits(planner: Planner) -> None:
    values = planner.tracer.parameter_bytes / 2 - 152064 * 3584
    expected = 2 * 1.02 * values + 2 * 4 * 152064 * 3584
    found = _step(planner, "adamw_bnb_8bit").optimizer_bytes
    assert found == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize(
    ("name", "states", "words"),
    [
        ("paged_adamw_8bit", "host", "take 'adamw_8bit'"),
        ("sgd", "disk", "expected 'device' or 'host', got 'disk'"),
        ("adam", "host", "optimizer: expected one of"),
    ],
)
def test_refused(name: str, states: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimizer_use(name, [], states)
