"""The check at construction: it takes what is exact and refuses what is not, whatever rounds."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

import oomb
from oomb.model import probe, structure
from oomb.model.causal import CausalModel
from oomb.model.mixers import StateCache, cache_argument

from .models import make
from .recurrent_models import RECURRENT, make_recurrent
from .structure_cases import (
    DTYPES,
    FAMILIES,
    SILENT,
    STRENGTHS,
    WRONG,
    exact,
    falcon_h1,
    zaya1,
)

CONFIG = oomb.Config(chunk_size=16, page_size=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_takes_what_is_exact(family: str) -> None:
    """bf16 and experts that make up much of the hidden state: routers flip by rounding."""
    for seed in range(3):
        oomb.Engine(exact(family, torch.bfloat16, 6, seed, loud=True), CONFIG)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("family", FAMILIES)
def test_takes_what_is_exact_whatever_its_size(family: str) -> None:
    for dtype, loud in itertools.product(DTYPES, (False, True)):
        for layers, seeds in ((4, 20), (24, 4)):
            for seed in range(seeds):
                model = exact(family, dtype, layers, seed, loud=loud)
                page = (16, 128)[seed % 2]
                oomb.Engine(model, oomb.Config(chunk_size=page, page_size=page))


@pytest.mark.parametrize(("build", "text"), WRONG.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_refuses_what_is_not(build: Callable[[float], PreTrainedModel], text: str) -> None:
    with pytest.raises(oomb.UnsupportedModelError, match=text):
        oomb.Engine(build(STRENGTHS[-1]).bfloat16(), CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "text"), WRONG.items(), ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.sampled(4)
def test_refuses_what_is_not_at_any_strength(
    build: Callable[[float], PreTrainedModel], text: str
) -> None:
    for strength, dtype in itertools.product(STRENGTHS, DTYPES):
        with pytest.raises(oomb.UnsupportedModelError, match=text):
            oomb.Engine(build(strength).to(dtype), CONFIG)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("build", "text"), SILENT.items(), ids=lambda x: getattr(x, "__name__", "")
)
def test_refuses_what_values_do_not_tell(
    build: Callable[[], PreTrainedModel], text: str, dtype: torch.dtype
) -> None:
    """And weights and their gradients are as before."""
    model = build().to(dtype)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(oomb.UnsupportedModelError, match=text):
        oomb.Engine(model, CONFIG)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    assert all(p.grad is None for p in model.parameters())


class _NoMemory(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")


def test_what_the_machine_refuses_meanwhile_is_its_own() -> None:
    model = make("llama", torch.float32)
    inner = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: inner(_NoMemory.apply(x))
    with pytest.raises(RuntimeError, match="^CUBLAS_STATUS_ALLOC_FAILED"):
        oomb.Engine(model, CONFIG)


def test_hooks_on_gradients_see_those_of_training_alone() -> None:
    model, seen = make("llama", torch.float32), []
    model.model.layers[1].mlp.register_full_backward_hook(lambda *_: seen.append(0))
    ids = torch.randint(1, 97, (1, 40))
    with oomb.Engine(model, CONFIG) as engine:
        assert not seen
        engine.forward_backward(ids, ids)
    assert seen


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "lfm2"])
def test_takes_recurrences_inside_an_inference_mode(name: str) -> None:
    model = make_recurrent(name, torch.float32)
    with torch.inference_mode():
        oomb.Engine(model, CONFIG).close()


def test_weights_that_are_zero_stay_so() -> None:
    model = make("llama", torch.float32)
    bias = model.model.layers[1].input_layernorm.weight
    with torch.no_grad():
        bias.fill_(-0.0)
    oomb.Engine(model, CONFIG).close()
    assert not bias.any() and bool(bias.signbit().all())


@pytest.mark.parametrize("build", [falcon_h1, zaya1])
def test_refuses_a_recurrence_that_asks_no_cache(
    build: Callable[[float], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer asks of a cache is not all that tells."""
    shapes = probe._shapes
    monkeypatch.setattr(probe, "_shapes", lambda model, _: shapes(model, None))
    with pytest.raises(oomb.UnsupportedModelError, match="depend on the tokens before it"):
        oomb.Engine(build(0.1).bfloat16(), CONFIG)


def test_looks_at_positions_far_away() -> None:
    """A running sum that begins to act where no short text reaches."""
    model = make("llama", torch.float32)
    decoder: Any = model.model
    mlp = decoder.layers[1].mlp
    inner, seen = mlp.forward, {"far": False}

    def watch(_: nn.Module, __: Any, keywords: dict[str, Any]) -> None:
        positions = keywords.get("position_ids")
        seen["far"] = positions is not None and int(positions.max()) > 50_000

    decoder.register_forward_pre_hook(watch, with_kwargs=True)
    mlp.forward = lambda x: inner(x) + seen["far"] * 0.1 * x.cumsum(1)
    with pytest.raises(oomb.UnsupportedModelError, match=r"layers\.1 .*at positions from 9\d+ on"):
        oomb.Engine(model, CONFIG)


def test_never_reads_behind_a_table_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would end the process's work on it."""
    from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    opt = OPTConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, ffn_dim=32, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=128,
    )  # fmt: skip
    gpt2 = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    largest: list[int] = []
    chunks = structure.observe_chunks

    def observed(
        model: CausalModel, ids: Any, positions: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        largest.append(int(positions.max()))
        return chunks(model, ids, positions, *rest, **named)

    monkeypatch.setattr(structure, "observe_chunks", observed)
    for model in (OPTForCausalLM(opt), GPT2LMHeadModel(gpt2)):
        largest.clear()
        oomb.Engine(model.eval(), CONFIG)
        assert 80 < max(largest) < 128


def test_takes_a_model_in_training_mode_and_leaves_it_as_it_was() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=256, resid_pdrop=0.3,
        embd_pdrop=0.3, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.transformer.h[1].eval()
    modes: list[bool] = []
    model.transformer.h[0].register_forward_hook(lambda m, *_: modes.append(m.training))
    _expect_untouched(model, None)
    assert modes
    assert all(modes)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_leaves_rotary_modules_as_they_were(name: str) -> None:
    """They choose their frequencies by the largest position they have seen."""
    from .models import ROPES

    architecture, settings = ROPES[name]
    _expect_untouched(make(architecture, torch.float32, **settings), None)


def test_leaves_a_refused_model_as_it_was() -> None:
    """A layer that counts its calls in a buffer, and fails in the end."""
    model = make("llama", torch.float32)
    layer = model.model.layers[1]
    layer.register_buffer("calls", torch.zeros(()))

    def count(module: Any, inputs: Any) -> None:
        module.calls += 1
        torch.rand(1)
        if inputs[0].shape[1] == 16:
            module.calls = torch.ones(3)
            raise ValueError("sizes differ")

    layer.register_forward_pre_hook(count)
    _expect_untouched(model, "sizes differ")


def _expect_untouched(model: nn.Module, refusal: str | None) -> None:
    """Random state, gradients, modes, buffers, and what modules carry, before and after."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    buffers = {name: (x, x.clone()) for name, x in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    held = [
        {n: x for n, x in vars(m).items() if isinstance(x, (int, float, torch.Tensor))}
        for m in model.modules()
    ]
    own = [set(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    interface = AttentionInterface.get_interface, AttentionInterface.__getitem__
    if refusal is None:
        oomb.Engine(model, CONFIG)
    else:
        with pytest.raises(oomb.UnsupportedModelError, match=refusal):
            oomb.Engine(model, CONFIG)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert (AttentionInterface.get_interface, AttentionInterface.__getitem__) == interface
    assert [set(vars(module)) for module in model.modules()] == own
    for module, before in zip(model.modules(), held, strict=True):
        assert all(vars(module)[name] is x for name, x in before.items())
    assert [name for name, _ in model.named_buffers()] == list(buffers)
    for name, now in model.named_buffers():
        assert now is buffers[name][0]
        assert torch.equal(now, buffers[name][1])
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def test_takes_a_registered_attention_that_is_plain() -> None:
    """Only what it computes counts, not what it is called."""
    AttentionInterface.register("test_plain", AttentionInterface()["sdpa"])
    model = make("llama", torch.bfloat16)
    model.set_attn_implementation("test_plain")
    oomb.Engine(model, CONFIG)


@pytest.mark.parametrize(("factor", "refusal"), [(1 + 2**-20, None), (1.1, "fused kernels")])
def test_fused_kernels_may_round_elsewhere(
    factor: float, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's norms stood for by ones that are off by a factor."""

    def fused(decoder: nn.Module, _: torch.device) -> dict[nn.Module, Callable[..., Any]]:
        norms = [m for m in decoder.modules() if type(m).__name__ == "LlamaRMSNorm"]
        return {m: (lambda x, own=m.forward: factor * own(x)) for m in norms}

    model = make("llama", torch.float32)
    monkeypatch.setattr("oomb.model.causal.fused_forwards", fused)
    if refusal is None:
        oomb.Engine(model, CONFIG)
    else:
        with pytest.raises(oomb.UnsupportedModelError, match=refusal):
            oomb.Engine(model, CONFIG)


def test_takes_layers_that_change_their_input_in_place() -> None:
    model = make("llama", torch.float32)
    for layer in model.model.layers:
        inner = layer.forward

        def forward(hidden_states: torch.Tensor, inner: Any = inner, **keywords: Any) -> Any:
            return hidden_states.add_(inner(hidden_states, **keywords))

        layer.forward = forward
    oomb.Engine(model, CONFIG)


@pytest.mark.parametrize("name", RECURRENT)
def test_takes_states_in_bf16_and_leaves_their_weights(name: str) -> None:
    """Mixers run in fp32 too."""
    model = make_recurrent(name, torch.bfloat16)
    weights = dict(model.named_parameters())
    oomb.Engine(model, CONFIG).close()
    assert all(weights[name] is weight for name, weight in model.named_parameters())


class _OfCompiler(Exception):
    """Neither an assertion nor one of Python's."""


@pytest.mark.parametrize("kind", [AssertionError, TypeError, torch.OutOfMemoryError, _OfCompiler])
def test_states_whose_kernels_know_no_fp32(kind: type[Exception]) -> None:
    """They are compared in the model's dtype alone."""
    model = make_recurrent("qwen3.5", torch.bfloat16)
    for mixer in model.modules():
        if type(mixer).__name__.endswith("GatedDeltaNet"):
            inner = mixer.forward

            def in_bf16(hidden_states: Any, *rest: Any, inner: Any = inner, **named: Any) -> Any:
                if hidden_states.dtype == torch.float32:
                    raise kind("out of memory, or no fp32")
                return inner(hidden_states, *rest, **named)

            mixer.forward = in_bf16
    oomb.Engine(model, CONFIG).close()


def _forgets(cache: StateCache, again: Callable[[StateCache], Any]) -> None:
    """What is handed on is the state of the latest tokens alone."""
    if cache.has_previous_state():
        alone = StateCache(None)
        again(alone)
        cache.left["recurrent", 0] = alone.left["recurrent", 0]


def _detaches(cache: StateCache, _: Callable[[StateCache], Any]) -> None:
    """What is handed on has no gradient towards what was handed in."""
    cache.left = {name: state.detach() for name, state in cache.left.items()}


def _fades(cache: StateCache, _: Callable[[StateCache], Any]) -> None:
    """What is handed on is 1 % too small: less than a model in bf16 rounds by."""
    cache.left["recurrent", 0] = cache.left["recurrent", 0] * 0.99


@pytest.mark.parametrize(
    ("change", "dtype", "refusal"),
    [
        (_forgets, torch.float32, "starts anew, or keeps more than that state"),
        (_detaches, torch.float32, "no gradient would reach"),
        (_fades, torch.float32, "starts anew, or keeps more than that state"),
        (_fades, torch.bfloat16, "starts anew, or keeps more than that state"),
    ],
)
def test_refuses_a_mixer_that_hands_on_less_than_it_was_given(
    change: Callable[..., None], dtype: torch.dtype, refusal: str
) -> None:
    """Its first stretch is right, and so is its second: only what the second hands on is not."""
    model = make_recurrent("qwen3.5", dtype)
    mixer = next(m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))
    inner, signature = mixer.forward, inspect.signature(type(mixer).forward)
    cache_name = cache_argument(signature)
    assert cache_name is not None

    def forward(*args: Any, **named: Any) -> Any:
        output = inner(*args, **named)
        bound = signature.bind(mixer, *args, **named)
        cache = bound.arguments.get(cache_name)

        def again(other: StateCache) -> None:
            bound.arguments[cache_name] = other
            inner(*bound.args[1:], **bound.kwargs)

        if isinstance(cache, StateCache):
            change(cache, again)
        return output

    oomb.Engine(model).close()
    mixer.forward = forward
    with pytest.raises(oomb.UnsupportedModelError, match=rf"GatedDeltaNet\): .*{refusal}"):
        oomb.Engine(model)
