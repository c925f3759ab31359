"""Recurrent layers on a GPU: flash-linear-attention's kernels where it is installed, states that
travel to the host, and rounding as of ordinary training."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util
from types import ModuleType
from typing import Any

import pytest
import torch

import oomb
from engine.recurrent_models import make_recurrent
from engine.reference import Result, chunked, ordinary, random_ids, relative_error

pytestmark = pytest.mark.gpu

CONFIG = {"chunk_size": 256, "page_size": 64}
_SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
CASES: dict[str, dict[str, Any]] = {
    "qwen3.5": {**_SHAPE, **_DELTA},
    "qwen3-next": {**_SHAPE, **_DELTA},
    "olmo-hybrid": {**_SHAPE, **_DELTA},
    # causal-conv1d takes projections whose width 8 divides.
    "nemotron-h": {
        **_SHAPE,
        "ssm_state_size": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "chunk_size": 64,
    },
    "lfm2": _SHAPE,
    "kimi-linear": {**_SHAPE, "linear_head_dim": 64},
}
DELTA = ("qwen3.5", "qwen3-next", "olmo-hybrid")
TOKENS = 1100


def on_gpu(name: str, dtype: torch.dtype) -> Any:
    return make_recurrent(name, dtype, **CASES[name]).to("cuda")


def step(model: Any, **settings: Any) -> Result:
    ids = random_ids(2, TOKENS).to("cuda")
    return chunked(model, oomb.Config(**{**CONFIG, **settings}), ids, ids)


def modeling(model: Any) -> ModuleType:
    return importlib.import_module(type(model).__module__)


def expect_backward(name: str) -> None:
    """flash-linear-attention refuses gated delta nets on Hopper under Triton 3.4 to 3.7.0."""
    of_triton = tuple(map(int, metadata.version("triton").split(".")[:3]))
    hopper = torch.cuda.get_device_capability()[0] == 9 and util.find_spec("fla") is not None
    if name in DELTA and hopper and (3, 4) <= of_triton < (3, 7, 1):
        pytest.skip(f"flash-linear-attention has no backward here under Triton {of_triton}")


@contextmanager
def in_plain_torch(module: ModuleType) -> Iterator[None]:
    """Inside, a modeling file's recurrences and convolutions are transformers' own code."""
    with pytest.MonkeyPatch.context() as patch:
        for name, found in list(vars(module).items()):
            inner = getattr(found, "__wrapped__", None)
            if callable(found) and inner is not None and inner.__module__ == module.__name__:
                patch.setattr(module, name, inner)
        yield


def worst(found: Result, exact: Result) -> float:
    pairs = ((found.gradients[name], exact.gradients[name]) for name in exact.gradients)
    return max(relative_error(one.double(), other.double()) for one, other in pairs)


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_as_far_from_wide_arithmetic_as_ordinary_training(name: str) -> None:
    """Recurrences of transformers are in fp32 at most, so the reference is."""
    expect_backward(name)
    ids = random_ids(2, TOKENS).to("cuda")
    wide = on_gpu(name, torch.bfloat16).float()  # the same weights
    with in_plain_torch(modeling(wide)):
        exact = ordinary(wide, ids, ids)
    model = on_gpu(name, torch.bfloat16)
    beside = ordinary(model, ids, ids)
    for recompute in ("none", "layer"):
        found = step(model, recompute=recompute)
        assert worst(found, exact) < 2 * worst(beside, exact)
        assert found.step is not None
        assert found.step.stats.border_state_bytes > 0


def expect_same_bits(found: Result, exact: Result) -> None:
    assert found.loss.equal(exact.loss)
    for parameter, gradient in exact.gradients.items():
        assert found.gradients[parameter].equal(gradient), parameter


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_with_the_host_tier(name: str) -> None:
    expect_backward(name)
    model = on_gpu(name, torch.bfloat16)
    step(model)  # kernels that choose their tiles by timing have chosen
    whole = step(model)
    # First that the kernels repeat themselves at all: what differs there is not the tier's.
    expect_same_bits(step(model), whole)
    latent = name == "kimi-linear"  # one step of its attention takes more than all its pages
    few = step(model, device_memory="1MiB" if latent else "512KiB", host_memory="1GiB")
    assert few.step is not None
    if not latent:
        assert few.step.stats.h2d_bytes > 0
    expect_same_bits(few, whole)


@pytest.mark.parametrize("decay", [-20.0, -1.0, -0.01])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 200])
def test_gradient_of_a_carried_state_under_decay(decay: float, tokens: int) -> None:
    """Of the kernels beside transformers' own code, in fp32 and in bf16.

    A decay's gradient is a difference of sums of ``q * dq`` and ``k * dk``, which strong decay all
    but cancels: it is as near as their rounding allows.
    """
    pytest.importorskip("fla")
    expect_backward("qwen3.5")
    rules = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    fast = rules.torch_chunk_gated_delta_rule
    generator = torch.Generator("cuda").manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    heads, dim = 4, 64
    q, k, v = (random(1, tokens, heads, dim) for _ in range(3))
    beta = random(1, tokens, heads).sigmoid()
    g = torch.full((1, tokens, heads), decay, device="cuda") * (1 + 0.1 * random(1, tokens, heads))
    state, d_o, d_state = random(1, heads, dim, dim), random(1, tokens, heads, dim), None

    def gradients(rule: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        nonlocal d_state
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        carried = state.clone().requires_grad_()
        decays = g.clone().requires_grad_()
        o, last = rule(
            *inputs,
            g=decays,
            beta=beta.to(dtype),
            initial_state=carried,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        if d_state is None:
            d_state = random(*last.shape)
        torch.autograd.backward((o, last), (d_o.to(o.dtype), d_state))
        return [x.grad.float() for x in (carried, decays, *inputs) if x.grad is not None]

    exact = gradients(fast.__wrapped__, torch.float32)
    assert len(exact) == 5
    _, _, d_q, d_k, _ = exact
    summed = (q * d_q).norm() + (k * d_k).norm()
    for dtype, tolerance, rounding in (
        (torch.float32, 1e-2, 2**-10),  # products in TF32
        (torch.bfloat16, 4e-2, 2**-7),
    ):
        found = gradients(fast, dtype)
        for which, (one, other) in enumerate(zip(found, exact, strict=True)):
            assert one.isfinite().all()
            allowed = tolerance * other.norm().clamp_min(1e-6)
            if which == 1:
                allowed += rounding * summed
            assert (one - other).norm() <= allowed, (which, dtype)
