"""What surrounds a call in training: adapters, accumulation, gradient sums, clipping, recompute."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import torch
from torch import nn

import oomb
from oomb.core import pools
from oomb.core.attention import ChunkAttention
from oomb.core.chunk_run import ChunkRun
from oomb.core.main_grad import MainGrads
from oomb.engine import needs

from .models import make
from .reference import (
    Result,
    assert_equal,
    chunked,
    ordinary,
    random_ids,
    relative_error,
    take_gradients,
)

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


def test_kept_sums_are_gone_before_the_next_call_counts_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would be counted twice: as memory in use, and as what the call will need."""
    model, held = make("llama", torch.float32), list[int]()
    with oomb.Engine(model, config(keep_main_grad=True)) as engine:
        engine.forward_backward(IDS, IDS)
        assert engine._grads._sums
        real = pools.fit

        def noted(*arguments: Any, **settings: Any) -> Any:
            held.append(len(engine._grads._sums))
            return real(*arguments, **settings)

        monkeypatch.setattr(pools, "fit", noted)
        engine.forward_backward(IDS, IDS)
    assert held and not any(held)


def test_a_model_that_cannot_be_copied_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of autograd on a module makes deepcopy raise; what a chunk takes is guessed then."""
    monkeypatch.setattr(needs, "_TRIFLE", 0.0)
    model = make("llama")
    model.model.layers[0].cached = model.model.layers[0].mlp.up_proj.weight * 2
    assert_equal(chunked(model, config(), IDS, IDS), ordinary(model, IDS, IDS))


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


# Recompute ----------------------------------------------------------------------------------------


def test_recompute_leaves_attention_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are run once more in the sweep, their attention is not."""
    model = make("llama")
    attended, layers = [], []
    forward = ChunkAttention.forward

    def counted(
        self: ChunkAttention, run: ChunkRun, *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended.append(run.chunk)
        return forward(self, run, *arguments)

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
