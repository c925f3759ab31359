"""Dropout: the same in fill, sweep and recompute, another in every chunk and layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import oomb

from .models import make
from .reference import Result, assert_identical, chunked, random_ids, take_gradients
from .tiers import HOST, slot_bytes

IDS = random_ids(2, 75)


def config(**settings: Any) -> oomb.Config:
    return oomb.Config(chunk_size=16, page_size=8, **settings)


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


def gpt2_with_dropped_embeddings() -> Any:
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=128, embd_pdrop=0.2,
        attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).double().train()


def llama_with_a_module_in_training() -> Any:
    model = with_dropout(0.3).eval()
    model.model.layers[0].mlp.down_proj.dropout.train()
    return model


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("make", [gpt2_with_dropped_embeddings, llama_with_a_module_in_training])
def test_gradients_are_of_the_loss_that_is_returned(
    make: Callable[[], Any], recompute: str
) -> None:
    """What is drawn in front of the layers; and modules that drop in a model that evaluates."""
    model = make()
    result = seeded(model, recompute, 1)
    name, parameter = next(iter(model.named_parameters()))
    direction = torch.randn(parameter.shape, dtype=parameter.dtype)
    losses = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            parameter += step * direction
        losses.append(float(seeded(model, recompute, 1).loss))
        with torch.no_grad():
            parameter -= step * direction
    slope = (losses[0] - losses[1]) / 2e-6
    assert slope == pytest.approx(float((result.gradients[name] * direction).sum()), rel=1e-5)
