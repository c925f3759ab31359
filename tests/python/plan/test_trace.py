"""What is counted without running is what a run allocates and computes."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

import oomb
from engine.models import make
from oomb.core import pools
from oomb.core.recompute import Recompute
from oomb.engine import calls, needs
from oomb.engine.needs import counted_tokens
from oomb.errors import UnsupportedModelError
from oomb.model import causal
from oomb.plan import Machine, Planner
from oomb.trace.bare import bare_model
from oomb.trace.setting import Setting
from oomb.trace.shapes import SHAPES
from oomb.trace.trace import Tracer

from .allocations import peak_allocated

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "full": ("llama", torch.float32, {}),
    "recompute": ("qwen3-tied", torch.float32, {"recompute": "layer"}),
    "windows": ("mistral", torch.float32, {}),
    "bf16": ("qwen2", torch.bfloat16, {}),
    "fp64": ("granite", torch.float64, {"recompute": "layer"}),
    "lora": ("llama", torch.float32, {"lora": True}),
    "batch": ("llama", torch.float32, {"batch": 2}),
    "sparse": ("llama", torch.float32, {"attention": oomb.TopKPages(budget=8)}),
    "mean keys": (  # of the fill outweigh what the sweep has
        "llama",
        torch.float32,
        {
            "attention": oomb.TopKPages(budget=2),
            "chunk_size": 16,
            "page_size": 2,
            "tokens": 6001,
        },
    ),
    "waves": ("llama", torch.float32, {"device_memory": "300KiB", "host_memory": "1GiB"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(5)
def test_memory_of_a_call(name: str) -> None:
    """Torch's own allocations of one call, counted block by block."""
    architecture, dtype, settings = CASES[name]
    settings = dict(settings)
    lora, batch = settings.pop("lora", False), settings.pop("batch", 1)
    tokens = settings.pop("tokens", 1025)
    config = oomb.Config(**{"chunk_size": 256, "page_size": 32, "recompute": "none"} | settings)
    model: Any = make(architecture, dtype, max_position_embeddings=8192)
    if lora:
        model = get_peft_model(model, LORA)
    ids = torch.randint(97, (batch, tokens))
    predicted = Planner(model, Machine.here("cpu")).predict(
        tokens, config, batch_size=batch, optimizer=None, timed=False
    )
    with oomb.Engine(model, config) as engine:
        measured = peak_allocated(lambda: engine.forward_backward(ids, ids))
    made = predicted.call_bytes - batch * (tokens - 1) * 3 * 8  # ids, labels, mask are there
    made += predicted.list_bytes  # on a CPU in the same memory
    assert made == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_memory_of_lora_without_casts(recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; PEFT's own forward, with its casts to fp32, would keep a half more."""
    model: Any = make("llama", torch.bfloat16, max_position_embeddings=8192, hidden_size=96)
    model = get_peft_model(model, LORA)
    config = oomb.Config(chunk_size=256, page_size=32, recompute=recompute)
    ids = torch.randint(97, (2, 1025))

    def predicted() -> int:
        planner = Planner(model, Machine.here("cpu"))
        call = planner.predict(1025, config, batch_size=2, optimizer=None, timed=False)
        return call.call_bytes - 2 * 1024 * 3 * 8  # ids, labels, mask are there

    with_casts = predicted()
    monkeypatch.setattr(causal, "device_multiplies_wide", lambda _: True)
    monkeypatch.setattr(causal.Products, "wide", lambda _, left, right: (left @ right).float())
    with oomb.Engine(model, config) as engine:
        measured = peak_allocated(lambda: engine.forward_backward(ids, ids))
    assert predicted() == pytest.approx(measured, rel=0.05)
    if recompute == "none":
        assert with_casts > 1.3 * measured


def test_the_model_is_left_alone() -> None:
    model = make("llama", torch.float32)
    seen: list[object] = []
    model.model.layers[0].register_forward_hook(lambda *given: seen.append(given))
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    Planner(model, Machine.here("cpu")).predict(300, oomb.Config(chunk_size=64, page_size=16))
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


@pytest.mark.parametrize("fused", [False, True])
def test_work_of_a_large_model(fused: bool) -> None:
    """No memory is touched; the products are those of the weights, and layers are extrapolated."""
    shape, tokens = SHAPES["qwen2.5-7b"], 2048
    tracer = Tracer(bare_model("qwen2.5-7b"), "cuda", fused)
    assert tracer.parameter_bytes == pytest.approx(2 * 7.616e9, rel=0.001)
    trace = tracer.trace(Setting(tokens, 1, "none", False))
    assert trace.sweep.flops == pytest.approx(6 * tokens * shape.linear_weights, rel=0.001)
    assert trace.sum_bytes == 4 * sum(p.numel() for p in tracer.trainable)
    assert [s.window for s in tracer.shapes] == [0] * shape.layers
    recomputed = tracer.trace(Setting(tokens, 1, "layer", False))
    kept = recomputed.sweep_peak_bytes - trace.sum_bytes
    assert kept < 0.6 * (trace.sweep_peak_bytes - trace.sum_bytes)
    assert recomputed.sweep.flops > 1.2 * trace.sweep.flops


def test_extrapolation_over_layers() -> None:
    model = make("qwen2", torch.float32, num_hidden_layers=9)
    whole, some = Tracer(model, "cpu", False), Tracer(model, "cpu", False)
    whole._samples = None
    for setting in (Setting(512, 1, "none", False), Setting(256, 2, "layer", True)):
        assert vars(some.trace(setting)) == vars(whole.trace(setting))


def latent(**settings: Any) -> Any:
    """Twelve layers; the first is dense, the others have experts."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 97,
        "pad_token_id": 0,
        **settings,
    }
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))


@pytest.mark.parametrize("inner", [48, 16384])
@pytest.mark.sampled(1)
def test_layers_behind_another_kind_are_extrapolated(inner: int) -> None:
    """Also where the peak is at that kind."""
    model = latent(intermediate_size=inner)
    whole, some = Tracer(model, "cpu", False), Tracer(model, "cpu", False)
    whole._samples = None
    assert some._samples == (4, 5)
    found, true = (dict(vars(t.trace(Setting(64, 1, "layer", True)))) for t in (some, whole))
    peak = true.pop("sweep_peak_bytes")
    assert found.pop("sweep_peak_bytes") == pytest.approx(peak, rel=1e-5)
    assert found == true


@pytest.mark.parametrize("layers", [9, 40])
def test_a_peak_that_more_layers_move_is_extrapolated(layers: int) -> None:
    """Of a few it is at the embedding's gradient, of many at the last layer."""
    model = make("llama", torch.bfloat16, num_hidden_layers=layers, vocab_size=8192)
    whole, some = Tracer(model, "cpu", False), Tracer(model, "cpu", False)
    whole._samples = None
    setting = Setting(32, 1, "none", False, "bfloat16")
    assert vars(some.trace(setting)) == vars(whole.trace(setting))


def test_an_unreached_parameter_has_no_sum() -> None:
    model: Any = make("llama", torch.float32)
    setting = Setting(16, 1, "none", False)
    reached = Tracer(model, "cpu", False).trace(setting)
    model.model.layers[0].register_parameter("unused", torch.nn.Parameter(torch.empty(10**6)))
    assert vars(Tracer(model, "cpu", False).trace(setting)) == vars(reached)


def test_fused_kernels_keep_less() -> None:
    setting = Setting(1024, 1, "none", False)
    plain, fused = (Tracer(bare_model("qwen2.5-1.5b"), "cuda", f).trace(setting) for f in (0, 1))
    assert fused.sweep_peak_bytes < plain.sweep_peak_bytes


def test_what_is_made_again_is_not_kept() -> None:
    """Of each layer two norms and a product."""
    tokens, shape = 4096, SHAPES["qwen2.5-7b"]
    values = tokens * (2 * shape.hidden + shape.inner)

    tracer = Tracer(bare_model("qwen2.5-7b"), "cuda", True)
    none, pointwise, layer = (
        tracer.trace(Setting(tokens, 1, recompute, False)) for recompute in get_args(Recompute)
    )
    more = none.sweep_peak_bytes - pointwise.sweep_peak_bytes
    assert more == pytest.approx(2 * shape.layers * values, abs=2 * tokens * shape.inner)
    assert layer.sweep_peak_bytes < pointwise.sweep_peak_bytes
    assert pointwise.sweep.flops == none.sweep.flops < layer.sweep.flops
    assert none.sweep.moved_bytes < pointwise.sweep.moved_bytes
    plain = Tracer(bare_model("qwen2.5-0.5b"), "cuda", False)  # no kernels whose inputs are known
    assert plain.trace(Setting(64, 1, "pointwise", False)) == plain.trace(
        Setting(64, 1, "none", False)
    )


def test_soft_caps_are_planned() -> None:
    config = transformers.Gemma2Config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=8, vocab_size=97
    )
    Planner(config, Machine.here("cpu"))


class LooksAtValues(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) if float(x.sum()) > 0 else x


def test_refuses_what_looks_at_values() -> None:
    model = make("llama", torch.float32)
    model.model.layers[0].mlp = LooksAtValues(model.model.layers[0].mlp)
    with pytest.raises(UnsupportedModelError, match=r"Llama.*cannot be planned"):
        Planner(model, Machine.here("cpu"))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "Qwen3Moe"])
def test_experts_in_fp32_are_those_in_bf16_at_twice_the_size(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=100,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=None,
    )
    traces = []
    for dtype in (torch.float32, torch.bfloat16):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
        traces.append(Tracer(model, "cuda", False).trace(Setting(512, 1, "none", False)))
    experts = 2 * 512 * 2 * 3 * 2 * 64 * 96  # two layers, two experts a token, three products
    fp32, bf16 = traces
    assert fp32.sum_bytes == bf16.sum_bytes
    for work in ("fill", "sweep"):
        ours, known = getattr(fp32, work), getattr(bf16, work)
        assert ours.operations == pytest.approx(known.operations, rel=0.25)
        assert known.flops > (1 if work == "fill" else 3) * experts / 2
        assert known.flops <= ours.flops <= 2.01 * known.flops  # as far as bytes bound them


@pytest.mark.parametrize(("batch", "tokens"), [(16, 500), (3, 1500), (40, 20)])
def test_a_text_shorter_than_a_chunk(batch: int, tokens: int) -> None:
    """Counted as long as it is: chunks of the default size would take 3 to 200 times as much."""
    model: Any = make("llama", torch.float32, max_position_embeddings=2048)
    ids = torch.randint(97, (batch, tokens))
    config = oomb.Config(recompute="none")
    predicted = Planner(model, Machine.here("cpu")).predict(
        tokens, config, batch_size=batch, optimizer=None, timed=False
    )
    with oomb.Engine(model, config) as engine:
        planned = engine.plan(tokens, batch)
        measured = peak_allocated(lambda: engine.forward_backward(ids, ids))
    made = predicted.call_bytes - batch * (tokens - 1) * 3 * 8  # ids, labels, mask are there
    assert made == pytest.approx(measured, rel=0.05)
    assert 0.95 * measured < planned.device_bytes < 1.2 * measured  # rounded up by an eighth
    assert planned.host_bytes == 0


def test_texts_of_many_lengths_are_few_cases() -> None:
    counted = {tokens: counted_tokens(oomb.Config(), tokens) for tokens in range(1, 9999)}
    for tokens, found in counted.items():
        assert min(tokens, 4096) <= found <= min(1.126 * tokens, 4096)
    assert len(set(counted.values())) <= 80


def test_short_texts_do_not_recompute_for_the_sake_of_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor are they refused: there is what they need, and a chunk of 4096 tokens would need more."""
    model: Any = make("llama", torch.float32, max_position_embeddings=8192)
    ran = [0]

    def count(*_: Any) -> None:
        ran[0] += 1

    tokens, batch = 200, 8
    activations = Tracer(model, "cpu", False).trace(Setting(tokens, batch, "none", True))
    free = 3 * activations.sweep_peak_bytes
    for module in (calls, needs, pools):
        monkeypatch.setattr(module, "free_memory", lambda _: free)
    with oomb.Engine(model, oomb.Config()) as engine:
        assert engine.plan(tokens, batch).fits
        model.model.layers[0].mlp.register_forward_hook(count)
        engine.forward_backward(*[torch.randint(97, (batch, tokens))] * 2)
        assert ran == [1]
        assert not engine.plan(4096, batch).fits
        ids = torch.randint(97, (1, 700))
        engine.forward_backward(ids, ids)  # of another size, and decided for itself
    with oomb.Engine(model, oomb.Config()) as engine, pytest.raises(oomb.OutOfMemoryError):
        engine.forward_backward(*[torch.randint(97, (batch, 4096))] * 2)


def test_compiled_layers_are_traced_as_they_are() -> None:
    """A compiler that failed on a shape without memory would leave the whole class alone after."""
    model: Any = make("llama", torch.float32)
    compiled = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        compiled.append(graph)
        return graph.forward

    layer = model.model.layers[0].mlp
    layer.compile(backend=backend)
    Tracer(model, "cuda", False).trace(Setting(64, 1, "none", False))
    assert not compiled
    layer(torch.randn(3, model.config.hidden_size))
    assert compiled
