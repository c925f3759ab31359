"""What surrounds a call in training: adapters, accumulation, dropout, gradient sums, clipping."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import torch
from torch import nn

import oomb
from oomb.engine.attention import ChunkAttention
from oomb.engine.main_grad import MainGrads

from .models import make
from .reference import (
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    relative_error,
    take_gradients,
)
from .tiers import HOST, slot_bytes

IDS = random_ids(2, 75)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers inside peft


def config(**settings: Any) -> oomb.Config:
    return oomb.Config(chunk_size=16, page_size=8, **settings)


# Adapters -----------------------------------------------------------------------------------------


def lora(name: str, **settings: Any) -> nn.Module:
    adapters = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **settings
    )
    model = peft.get_peft_model(make(name), adapters).double()
    generator = torch.Generator().manual_seed(2)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:  # zero at first: A would have no gradient
            with torch.no_grad():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_lora(name: str, recompute: str) -> None:
    model = lora(name)
    expected = ordinary(model, IDS, IDS)  # type: ignore[arg-type]
    assert expected.gradients
    assert all("lora" in key for key in expected.gradients)
    assert_equal(chunked(model, config(recompute=recompute), IDS, IDS), expected)


def test_lora_with_a_saved_head_and_norms() -> None:
    model = lora("llama", modules_to_save=["lm_head"])
    expected = ordinary(model, IDS, IDS)  # type: ignore[arg-type]
    assert any("lm_head" in key for key in expected.gradients)
    assert_equal(chunked(model, config(), IDS, IDS), expected)


def test_lora_after_input_gradients_were_enabled() -> None:
    """As peft asks for under gradient checkpointing."""
    model: Any = lora("llama")
    expected = ordinary(model, IDS, IDS)
    model.enable_input_require_grads()
    assert_equal(chunked(model, config(recompute="layer"), IDS, IDS), expected)


# Accumulation -------------------------------------------------------------------------------------


def test_two_calls_accumulate() -> None:
    model = make("llama")
    first, second = random_ids(1, 75, seed=1), random_ids(3, 40, seed=2)
    model.zero_grad()
    items = 74 + 3 * 39
    expected = ordinary(model, first, first, num_items_in_batch=items)
    more = ordinary(model, second, second, num_items_in_batch=items)
    for name, gradient in more.gradients.items():
        expected.gradients[name] += gradient
    with oomb.Engine(model, config()) as engine:
        one = engine.forward_backward(first, first, num_items_in_batch=items)
        two = engine.forward_backward(second, second, num_items_in_batch=items)
    total = Result(one.loss + two.loss, take_gradients(model))
    assert_equal(total, Result(expected.loss + more.loss, expected.gradients))


def test_gradients_stay_the_same_tensors() -> None:
    """An optimizer or a flat buffer may hold on to them."""
    model = make("llama")
    with oomb.Engine(model, config()) as engine:
        engine.forward_backward(IDS, IDS)
        before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}  # type: ignore[union-attr]
        engine.forward_backward(IDS, IDS)
    for name, parameter in model.named_parameters():
        grad, value = before[name]
        assert parameter.grad is grad
        assert relative_error(grad, 2 * value) < 1e-12


def test_an_optimizer_step_equals_ordinary_training() -> None:
    """Three steps of AdamW with clipping."""
    losses: dict[bool, list[float]] = {}
    for through_engine in (False, True):
        model = make("qwen2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine = oomb.Engine(model, config())
        losses[through_engine] = []
        for step in range(3):
            ids = random_ids(2, 75, seed=step)
            if through_engine:
                loss = engine.forward_backward(ids, ids).loss
            else:
                result = ordinary(model, ids, ids)
                loss = result.loss
                for name, parameter in model.named_parameters():
                    parameter.grad = result.gradients[name]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses[through_engine].append(float(loss))
    assert losses[True] == pytest.approx(losses[False], rel=1e-8)
    assert losses[True][0] != losses[True][1]


# Sums in higher precision -------------------------------------------------------------------------


def test_main_grad() -> None:
    model = make("llama", torch.bfloat16)
    with oomb.Engine(model, config(keep_main_grad=True)) as engine:
        engine.forward_backward(IDS, IDS)
        first = take_gradients(model)
        for name, parameter in model.named_parameters():
            total = engine.main_grad(parameter)
            assert total.dtype == torch.float32
            assert torch.equal(total.bfloat16(), first[name])
        engine.forward_backward(IDS, IDS)
        # Of the last call alone, whatever param.grad holds.
        for name, parameter in model.named_parameters():
            assert torch.equal(engine.main_grad(parameter).bfloat16(), first[name])
        with pytest.raises(ValueError, match="parameter: expected"):
            engine.main_grad(nn.Parameter(torch.ones(3)))
    with oomb.Engine(model, config()) as engine:
        engine.forward_backward(IDS, IDS)
        with pytest.raises(ValueError, match="keep_main_grad"):
            engine.main_grad(next(model.parameters()))


def test_main_grad_is_not_the_gradient_itself() -> None:
    """In fp32 both have the same values; clipping one must not change the other."""
    model = make("llama", torch.float32)
    with oomb.Engine(model, config(keep_main_grad=True)) as engine:
        engine.forward_backward(IDS, IDS)
        parameter = next(model.parameters())
        before = engine.main_grad(parameter).clone()
        assert parameter.grad is not None
        parameter.grad.zero_()
        assert torch.equal(engine.main_grad(parameter), before)


# Weight gradients inside the products -------------------------------------------------------------


def test_linear_weights_are_summed_inside_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    taken: dict[int, int] = {}
    plain = MainGrads.add_product

    def counted(self: MainGrads, parameter: nn.Parameter, *factors: torch.Tensor) -> None:
        taken[id(parameter)] = taken.get(id(parameter), 0) + 1
        plain(self, parameter, *factors)

    monkeypatch.setattr(MainGrads, "add_product", counted)
    result = chunked(model, config(), IDS, IDS)
    assert_equal(result, ordinary(model, IDS, IDS))
    chunks = -(-(IDS.shape[1] - 1) // 16)
    layers = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    assert {taken[id(m.weight)] for m in layers} == {chunks}


def test_a_hook_on_a_linear_weight_sees_its_gradient() -> None:
    model = make("llama")
    expected = ordinary(model, IDS, IDS)
    name = "model.layers.0.mlp.up_proj.weight"
    handle = model.get_parameter(name).register_hook(lambda grad: 2 * grad)
    result = chunked(model, config(), IDS, IDS)
    handle.remove()
    assert relative_error(result.gradients[name], 2 * expected.gradients[name]) < 1e-12


# Dropout ------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A projection with dropout behind it."""

    def __init__(self, inner: nn.Module, probability: float) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(probability)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.inner(x))  # type: ignore[no-any-return]


def with_dropout(probability: float = 0.1) -> Any:
    model = make("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = Noisy(layer.mlp.down_proj, probability)
        layer.self_attn.k_proj = Noisy(layer.self_attn.k_proj, probability)
    return model.train()


def seeded(model: Any, recompute: str, seed: int) -> Result:
    torch.manual_seed(seed)
    return chunked(model, config(recompute=recompute), IDS, IDS)


def test_dropout_depends_on_the_seed_alone() -> None:
    model = with_dropout()
    one = seeded(model, "none", 1)
    assert_identical(seeded(model, "none", 1), one)
    assert not torch.equal(seeded(model, "none", 2).loss, one.loss)
    torch.manual_seed(1)
    with oomb.Engine(model, config()) as engine:  # calls draw anew
        torch.manual_seed(1)
        first = engine.forward_backward(IDS, IDS).loss
        second = engine.forward_backward(IDS, IDS).loss
    take_gradients(model)
    assert not torch.equal(first, second)


def test_layers_seed_only_generators_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would note every seed for each backend that was never started."""

    def refuse(seed: int) -> None:
        raise AssertionError("torch.manual_seed in a call")

    with oomb.Engine(with_dropout(), config()) as engine:
        monkeypatch.setattr(torch, "manual_seed", refuse)
        engine.forward_backward(IDS, IDS)


def test_only_generators_of_the_model_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU beside the model would go on from a layer's seed after the call."""

    class Generator:
        def manual_seed(self, seed: int) -> None:
            raise AssertionError("a generator that no layer draws from was seeded")

    with oomb.Engine(with_dropout(), config()) as engine:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
        engine.forward_backward(IDS, IDS)


def test_recompute_leaves_attention_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are run once more in the sweep, their attention is not."""
    model = make("llama")
    attended, layers = [], []
    forward = ChunkAttention.forward

    def counted(self: ChunkAttention, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        attended.append(self.chunk)
        return forward(self, *arguments)

    monkeypatch.setattr(ChunkAttention, "forward", counted)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: layers.append(0))
    runs = []
    for recompute in ("none", "layer"):
        attended.clear()
        layers.clear()
        chunked(model, config(recompute=recompute), IDS, IDS)
        runs.append((len(attended), len(layers)))
    (once, of_layers), (again, of_layers_again) = runs
    assert once == again
    assert of_layers_again > of_layers


def test_dropout_is_the_same_in_recompute() -> None:
    model = with_dropout()
    assert_identical(seeded(model, "layer", 1), seeded(model, "none", 1))


def test_dropout_is_the_same_when_chunks_take_turns() -> None:
    """As they do in a sparse fill whose pages travel."""
    model = with_dropout()
    attention = oomb.TopKPages(budget=2)
    memory = 12 * slot_bytes(model, config())

    def run(**tiers: Any) -> Result:
        torch.manual_seed(1)
        return chunked(model, config(attention=attention, **tiers), IDS, IDS)

    spilled = run(device_memory=memory, host_memory=HOST)
    assert spilled.step is not None
    assert spilled.step.stats.host_peak_bytes > 0
    assert_identical(spilled, run())


def test_dropout_is_the_same_in_fill_and_sweep() -> None:
    """Else the gradient would not be that of the loss: compare with finite differences."""
    model = with_dropout()
    result = seeded(model, "layer", 1)
    generator = torch.Generator().manual_seed(4)
    for name in ("model.layers.0.self_attn.k_proj.inner.weight", "model.embed_tokens.weight"):
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-6 * direction)
            losses.append(float(seeded(model, "none", 1).loss))
            with torch.no_grad():
                parameter.sub_(sign * 1e-6 * direction)
        slope = (losses[0] - losses[1]) / 2e-6
        assert slope == pytest.approx(float((result.gradients[name] * direction).sum()), rel=1e-5)


def test_dropout_differs_between_chunks_and_layers() -> None:
    """And what fill and sweep of a chunk drop at a layer is the same."""
    model = with_dropout(0.5)
    dropped: dict[tuple[str, int, int], list[torch.Tensor]] = {}
    now: list[int] = [0]
    for index, layer in enumerate(model.model.layers):

        def record(_: Any, __: Any, output: torch.Tensor, index: int = index) -> None:
            phase = "sweep" if torch.is_grad_enabled() else "fill"
            dropped.setdefault((phase, now[0], index), []).append(output == 0)

        layer.mlp.down_proj.dropout.register_forward_hook(record)

    def report(progress: oomb.Progress) -> None:
        now[0] = progress.chunk + 1 if progress.phase == "fill" else progress.chunk - 1

    ids = IDS[:, :64]  # four chunks; the engine's probe has its own
    with oomb.Engine(model, config()) as engine:
        dropped.clear()
        engine.forward_backward(ids, ids.roll(1), on_progress=report)
    for (phase, chunk, layer), masks in dropped.items():
        if phase == "fill":
            assert torch.equal(masks[0], dropped["sweep", chunk, layer][0])
    masks = [
        masks[0] for (phase, chunk, _), masks in dropped.items() if phase == "sweep" and chunk < 3
    ]
    for i, one in enumerate(masks):
        for other in masks[i + 1 :]:
            assert 0.4 < float((one == other).float().mean()) < 0.6


def test_dropout_leaves_the_callers_generator_one_draw_further() -> None:
    """So that a run is reproducible whatever the chunk size."""
    model = with_dropout()
    after = []
    for chunk in (16, 32):
        torch.manual_seed(1)
        with oomb.Engine(model, oomb.Config(chunk_size=chunk, page_size=8)) as engine:
            torch.manual_seed(1)
            engine.forward_backward(IDS, IDS)
        after.append(torch.rand(3))
    assert torch.equal(after[0], after[1])


def test_evaluate_in_training_mode_drops_too() -> None:
    """The model's mode is the caller's business, as in an ordinary call."""
    model = with_dropout()
    with oomb.Engine(model, config()) as engine:
        noisy = engine.evaluate(IDS, IDS).loss
        model.eval()
        quiet = engine.evaluate(IDS, IDS).loss
        assert torch.equal(engine.evaluate(IDS, IDS).loss, quiet)
    assert not torch.equal(noisy, quiet)


# The caller's surroundings ------------------------------------------------------------------------


def in_a_thread(call: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def without_grad(call: Callable[[], Result]) -> Result:
    with torch.no_grad():
        return call()


def detecting_anomalies(call: Callable[[], Result]) -> Result:
    with torch.autograd.set_detect_anomaly(True):
        return call()


def beside_another_engine(call: Callable[[], Result]) -> Result:
    model = make("llama")
    with oomb.Engine(model, config(attention=oomb.TopKPages(budget=2))) as other:
        other.forward_backward(IDS, IDS)
        result = call()
        other.forward_backward(IDS, IDS)
    return result


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "surroundings", [in_a_thread, without_grad, detecting_anomalies, beside_another_engine]
)
def test_surroundings(surroundings: Callable[[Callable[[], Result]], Result]) -> None:
    model = make("llama")
    expected = ordinary(model, IDS, IDS)
    assert_equal(surroundings(lambda: chunked(model, config(), IDS, IDS)), expected)


def test_evaluate_in_inference_mode() -> None:
    model = make("llama")
    expected = ordinary(model, IDS, IDS)
    with torch.inference_mode(), oomb.Engine(model, config()) as engine:
        assert relative_error(engine.evaluate(IDS, IDS).loss, expected.loss) <= 1e-12
    assert_equal(chunked(model, config(), IDS, IDS), expected)


# State and reports --------------------------------------------------------------------------------


def test_state_dict_goes_through_a_file() -> None:
    model = make("llama")
    rule = oomb.SampledChunks(keep=0.9, seed=7)
    with oomb.Engine(model, config(backward=rule)) as engine:
        engine.forward_backward(IDS, IDS)
        engine.forward_backward(IDS, IDS)
        file = io.BytesIO()
        torch.save(engine.state_dict(), file)
    file.seek(0)
    with oomb.Engine(model, config(backward=rule)) as engine:
        engine.load_state_dict(torch.load(file))
        assert engine.state_dict()["step"] == 2


def test_snapshot() -> None:
    with oomb.Engine(make("llama"), config()) as engine:
        assert engine.snapshot() == {}
        seen: list[dict[str, Any]] = []
        engine.forward_backward(IDS, IDS, on_progress=lambda _: seen.append(engine.snapshot()))
    assert len(seen) == 9
    assert all(isinstance(one, dict) and one for one in seen)


def test_stats() -> None:
    model = make("llama")
    step = chunked(model, config(), IDS, IDS).step
    assert step is not None
    stats = step.stats
    assert stats.fill_seconds > 0
    assert stats.sweep_seconds > 0
    pages = 2 * 4 * 2 * 3  # batch, chunks with a past to serve, pages per chunk, layers
    page_bytes = 2 * 2 * 8 * 8 * 8  # K and V, heads, tokens, head_dim, bytes
    assert stats.device_peak_bytes >= 2 * pages * page_bytes  # with their gradients
    assert stats.host_peak_bytes == stats.h2d_bytes == stats.d2h_bytes == 0
    assert stats.hit_rate == 1


def test_plan_says_where_ordinary_training_needs_less() -> None:
    """Many key/value heads make large pages; a short sequence is not worth the sums in fp32."""

    def says_so(num_tokens: int, **settings: int) -> bool:
        with oomb.Engine(make("llama", torch.bfloat16, **settings), config()) as engine:
            return any("ordinary training" in text for text in engine.plan(num_tokens).advice)

    assert says_so(5000, num_key_value_heads=6, num_attention_heads=6, head_dim=32)
    assert not says_so(5000, num_key_value_heads=1)
    assert says_so(50, num_key_value_heads=1)


def test_plan() -> None:
    model = make("llama")
    with oomb.Engine(model, config()) as engine:
        plan = engine.plan(75, batch_size=2)
        assert plan.fits
        assert plan.seconds is None
        assert engine.plan(5000, batch_size=2).advice == ()
        step = engine.forward_backward(IDS, IDS)
        measured = engine.plan(75, batch_size=2)
        assert measured.seconds == pytest.approx(step.stats.fill_seconds + step.stats.sweep_seconds)
        parameters = sum(p.numel() * 8 for p in model.parameters())
        assert plan.device_bytes >= parameters + 96 * 2048
        assert engine.plan(10**12).fits is False
        assert engine.plan(10**12).advice
    small = config(device_memory=4 * 2048, host_memory=8 * 2048)
    with oomb.Engine(model, small) as engine:
        plan = engine.plan(75, batch_size=2)
        assert not plan.fits
        assert any("host_memory" in text for text in plan.advice)
        with pytest.raises(oomb.OutOfMemoryError):
            engine.forward_backward(IDS, IDS)


def test_plan_says_what_a_call_takes() -> None:
    """Where plan says it fits just so, it does; a page less, and it does not."""
    model = make("llama")
    device = 8 * 2048
    with oomb.Engine(model, config(device_memory=device, host_memory="1GiB")) as engine:
        host = engine.plan(75, batch_size=2).host_bytes
    assert host > 0
    with oomb.Engine(model, config(device_memory=device, host_memory=host)) as engine:
        assert engine.plan(75, batch_size=2).fits
        engine.forward_backward(IDS, IDS)
    with oomb.Engine(model, config(device_memory=device, host_memory=host - 2048)) as engine:
        assert not engine.plan(75, batch_size=2).fits
        with pytest.raises(oomb.OutOfMemoryError):
            engine.forward_backward(IDS, IDS)
