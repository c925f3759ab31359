"""Kept outputs in torch's memory: earlier chunks compute less again in the room that they leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import oomb
from oomb import _C
from oomb.core.attention import ChunkAttention
from oomb.core.chunk_run import current_run
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.loose_outputs import LooseOutputs
from oomb.core.recompute import LayerRunner
from oomb.engine import needs
from oomb.plan import Machine, Planner

from .models import make
from .reference import assert_identical, chunked, random_ids

CHUNKS = 32  # so many that their outputs take more than a chunk's activations
TOKENS = 16 * CHUNKS
SETTINGS: dict[str, Any] = {"chunk_size": 16, "page_size": 8}
NOTHING_KEPT = oomb.Config(**SETTINGS, keep_outputs="none", recompute="none")


def outputs(kept: np.ndarray[Any, Any], o_bytes: int = 64, lse_bytes: int = 8) -> KeptOutputs:
    layers = kept.shape[1]
    return KeptOutputs(kept, 32, (o_bytes,) * layers, (lse_bytes,) * layers, int(kept.sum()))


@pytest.mark.parametrize("seed", range(50))
def test_no_chunk_holds_more_than_the_last(seed: int) -> None:
    random = np.random.default_rng(seed)
    kept = random.random((random.integers(1, 20), 3)) < random.random()
    found = outputs(kept)
    of_level = sorted((int(x) for x in random.integers(1, 3000, 3)), reverse=True)
    levels = found.loosened(of_level).levels or ("layer",) * len(kept)
    names = ("none", "pointwise", "layer")
    most = of_level[-1] + 72 * int(kept.sum())
    for chunk, level in enumerate(levels):
        before = 72 * int(kept[:chunk].sum())
        number = names.index(level)
        assert of_level[number] + before <= most
        assert number == 0 or of_level[number - 1] + before > most  # no less would fit


def test_outputs_stay_among_the_pages_where_no_chunk_gets_room() -> None:
    few = outputs(np.ones((4, 2), dtype=np.bool_))
    assert few.loosened([10_000, 9_000, 100]) is few
    assert few.loosened([500]) is few  # of "none" nothing is less
    many = few.loosened([600, 500, 100])  # at most 100 + 4 * 144, with outputs of chunks before
    assert many.levels == ("none", "pointwise", "layer", "layer")
    assert (many.slots, many.pieces_of_layer) == (0, 0)
    assert many.num_bytes == many.loose_bytes == 8 * 72


DENSE, SPARSE = oomb.Dense(), oomb.TopKPages(budget=3)
CASES = {
    "dense": ("llama", DENSE, oomb.AllChunks()),
    "dense, sampled": ("llama", DENSE, oomb.SampledChunks(keep=0.8, seed=3)),
    "dense, truncated": ("llama", DENSE, oomb.TruncatedChunks(window=3)),
    "sparse": ("llama", SPARSE, oomb.AllChunks()),
    "sparse, sampled": ("llama", SPARSE, oomb.SampledChunks(keep=0.8, seed=3)),
    "sinks and windows": ("gpt-oss", DENSE, oomb.AllChunks()),
    "windows, truncated": ("mistral", DENSE, oomb.TruncatedChunks(window=2)),
    "windows, sparse": ("gpt-oss", SPARSE, oomb.AllChunks()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(4)
def test_the_bits_are_those_of_nothing_kept(case: str) -> None:
    name, attention, backward = CASES[case]
    model, ids = make(name, torch.float32), random_ids(2, TOKENS - 5)
    rules: dict[str, Any] = {"attention": attention, "backward": backward}
    without = oomb.Config(**SETTINGS, **rules, keep_outputs="none", recompute="none")
    config = oomb.Config(**SETTINGS, **rules, keep_outputs="all", recompute="layer")
    found = chunked(model, config, ids, ids)
    assert found.step is not None
    assert min(found.step.stats.recomputed[level] for level in ("none", "layer")) > 0
    assert found.step.stats.kept_output_share == 1
    assert_identical(found, chunked(model, without, ids, ids))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_mode_and_autocast_have_the_same_bits(dropout: float) -> None:
    model, ids = make("granite", torch.float32), random_ids(1, TOKENS)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda mlp, _, out: torch.nn.functional.dropout(out, dropout, mlp.training)
        )
    model.train()
    results = []
    for kept, recompute in ((1.0, "layer"), ("none", "none")):
        torch.manual_seed(7)
        config = oomb.Config(**SETTINGS, keep_outputs=kept, recompute=recompute)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16):
            results.append(chunked(model, config, ids, ids))
    assert len(results[0].step.stats.recomputed) > 1
    assert_identical(*results)


class OfSweep:
    """What a sweep does, chunk by chunk."""

    def __init__(self) -> None:
        self.levels: dict[int, set[str]] = {}
        self.attended: list[int] = []
        self.held: list[int] = []


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[OfSweep]:
    seen, run, forward = OfSweep(), LayerRunner.__call__, _C.attention_forward

    def layer(self: LayerRunner, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and type(self) is LayerRunner:  # none that a trace runs
            chunk, again = current_run().chunk, self._recompute
            level = again[chunk] if isinstance(again, tuple) else again
            seen.levels.setdefault(chunk, set()).add(level)
            attention = next(iter(ChunkAttention.active.values()))
            seen.held.append(len(attention.pages.loose._held))
        return run(self, *arguments)

    def attend(**arguments: Any) -> None:
        if current_run().phase == "sweep":
            seen.attended.append(current_run().chunk)
        forward(**arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LayerRunner, "__call__", layer)
        patch.setattr(_C, "attention_forward", attend)
        yield seen


def test_what_is_kept_goes_as_the_sweep_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    config = oomb.Config(**SETTINGS, keep_outputs=0.75, recompute="layer")
    with oomb.Engine(model, config) as engine:
        with watched(monkeypatch) as seen:
            stats = engine.forward_backward(ids, ids).stats
        nothing = engine.snapshot()["device"]["taken_slots"]
    kept = round(0.75 * 2 * (CHUNKS - 1))
    assert stats.kept_output_bytes == kept * 16 * 6 * (8 * 4 + 4)
    assert seen.held[0] == kept and seen.held == sorted(seen.held, reverse=True)
    assert seen.held[-1] == nothing == 0
    assert len(seen.attended) == 3 * CHUNKS - kept
    levels = [seen.levels[chunk] for chunk in range(CHUNKS)]
    assert all(len(of_chunk) == 1 for of_chunk in levels)
    counted = {level: levels.count({level}) for level in stats.recomputed}
    assert counted == stats.recomputed
    assert levels[-1] == {"layer"} and levels[0] == {"none"}


def test_the_pools_hold_pages_alone() -> None:
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    config = oomb.Config(**SETTINGS, keep_outputs="all", recompute="layer")
    with oomb.Engine(model, config) as engine:
        plan, stats = engine.plan(TOKENS), engine.forward_backward(ids, ids).stats
    without = chunked(model, NOTHING_KEPT, ids, ids)
    assert without.step is not None
    assert stats.device_peak_bytes == without.step.stats.device_peak_bytes
    with oomb.Engine(
        model, oomb.Config(**SETTINGS, keep_outputs="none", recompute="layer")
    ) as other:
        bare = other.plan(TOKENS)
    assert plan.kept_output_bytes == stats.kept_output_bytes == stats.loose_output_bytes
    assert plan.device_bytes == bare.device_bytes + stats.kept_output_bytes


def test_pages_that_spill_keep_outputs_beside_them() -> None:
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    little: dict[str, Any] = {**SETTINGS, "device_memory": "128KiB", "host_memory": "64MiB"}
    found = chunked(model, oomb.Config(**little, keep_outputs="all", recompute="layer"), ids, ids)
    assert found.step is not None
    assert found.step.stats.host_peak_bytes > 0
    assert found.step.stats.recomputed == {"layer": CHUNKS}
    assert_identical(found, chunked(model, NOTHING_KEPT, ids, ids))


@pytest.mark.parametrize(
    ("settings", "chunks", "times"),
    [
        pytest.param({"recompute": "layer"}, 5, 3, id="each level"),
        pytest.param({"recompute": "layer"}, 4, 0, id="too few chunks"),
        pytest.param({"recompute": "layer", "keep_outputs": "none"}, 5, 0, id="nothing kept"),
        pytest.param({"recompute": "none"}, 5, 0, id="nothing again"),
    ],
)
def test_activations_are_counted_where_they_may_decide(
    settings: dict[str, Any], chunks: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 24 GiB of memory a tiny model's are a trifle; a run on no memory takes time."""
    levels, real = set[str](), needs.traced

    def traced(*arguments: Any) -> int | None:
        levels.add(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(needs, "traced", traced)
    model, ids = make("llama", torch.float32), random_ids(1, 16 * chunks)
    chunked(model, oomb.Config(**SETTINGS, **settings), ids, ids)
    assert len(levels) == times


@pytest.mark.parametrize("tokens", [[TOKENS] * 3, [TOKENS, TOKENS - 80, TOKENS]])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.sampled(2)
def test_later_calls_keep_as_much(heads: tuple[int, int], tokens: list[int]) -> None:
    """Pools that are kept from call to call hold pages alone: outputs need none of them."""
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    model = make("llama", torch.float32, **sizes)
    config = oomb.Config(**SETTINGS, keep_outputs="auto", recompute="layer")

    def kept(engine: oomb.Engine, length: int) -> tuple[float, dict[str, int]]:
        ids = random_ids(1, length)
        stats = engine.forward_backward(ids, ids).stats
        return stats.kept_output_share, stats.recomputed

    alone = []
    for length in tokens:
        with oomb.Engine(model, config) as engine:
            alone.append(kept(engine, length))
    with oomb.Engine(model, config) as engine:
        together = [kept(engine, length) for length in tokens]
    assert together == alone
    assert all(len(recomputed) > 1 for _, recomputed in together)


def test_what_a_model_does_not_show_decides_nothing() -> None:
    """A rule of thumb may be too low for activations that are kept, of experts by far."""
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    for layer in model.model.layers:
        plain = layer.mlp.forward

        def looks_at_values(x: torch.Tensor, plain: Any = plain) -> torch.Tensor:
            assert not x.isnan().any()
            result: torch.Tensor = plain(x)
            return result

        layer.mlp.forward = looks_at_values
    config = oomb.Config(**SETTINGS, keep_outputs="all", recompute="layer")
    with oomb.Engine(model, config) as engine:
        stats = engine.forward_backward(ids, ids).stats
    assert (stats.recomputed, stats.loose_output_bytes) == ({"layer": CHUNKS}, 0)
    assert stats.kept_output_share == 1


def test_an_error_in_the_sweep_leaves_nothing_held() -> None:
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    expected = chunked(model, NOTHING_KEPT, ids, ids)
    config = oomb.Config(**SETTINGS, keep_outputs="all", recompute="layer")
    held: list[LooseOutputs] = []

    def stop(progress: oomb.Progress) -> None:
        if progress.phase == "sweep" and progress.chunk == 20:
            held.append(next(iter(ChunkAttention.active.values())).pages.loose)
            assert held[0]._held
            raise KeyboardInterrupt

    with oomb.Engine(model, config) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(ids, ids, on_progress=stop)
        assert not held[0]._held and not held[0]._filling
        again = engine.forward_backward(ids, ids)
    assert torch.equal(again.loss, expected.loss)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name])


def test_a_model_may_change_attentions_output_in_the_fill() -> None:
    """What is kept is a copy: in the fill no graph forbids to write over the output."""

    def scaled(module: Any, arguments: Any) -> Any:
        (o,) = arguments
        return (o * 2,) if torch.is_grad_enabled() else (o.mul_(2),)

    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(scaled)
    config = oomb.Config(**SETTINGS, keep_outputs="all", recompute="layer")
    found = chunked(model, config, ids, ids)
    assert len(found.step.stats.recomputed) > 1  # type: ignore[union-attr]
    assert_identical(found, chunked(model, NOTHING_KEPT, ids, ids))


def test_logprobs_first_and_their_gradient_later() -> None:
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    config = oomb.Config(**SETTINGS, keep_outputs="all", recompute="layer")
    gradients = []
    for settings in (config, NOTHING_KEPT):
        model.zero_grad()
        with oomb.Engine(model, settings) as engine, engine.two_pass(ids) as call:
            call.logprobs.sum().backward()
            call.sweep()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


@pytest.mark.parametrize("keep", [0.5, "all", "auto"])
def test_oomb_plan_foretells_the_levels(keep: Any) -> None:
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    config = oomb.Config(**SETTINGS, keep_outputs=keep, recompute="layer")
    with oomb.Engine(model, config) as engine:
        stats = engine.forward_backward(ids, ids).stats
    foretold = Planner(model, Machine.here()).predict(TOKENS, config, optimizer=None)
    assert foretold.recomputed == stats.recomputed
    assert foretold.kept_output_bytes == stats.kept_output_bytes
    assert foretold.loose_output_bytes == stats.loose_output_bytes
    assert foretold.device_pool_bytes == stats.device_peak_bytes
    bare = Planner(model, Machine.here()).predict(
        TOKENS, oomb.Config(**SETTINGS, keep_outputs="none", recompute="layer"), optimizer=None
    )
    assert foretold.call_bytes - bare.call_bytes == stats.loose_output_bytes


@pytest.mark.parametrize(("weights", "varies"), [("replicated", True), ("zero3", False)])
def test_sharded_weights_have_one_level(weights: Any, varies: bool) -> None:
    """A rank cannot trace them, so a plan counts on nothing that needs it."""
    machine = replace(Machine.here(), ranks=2, neighbours=2, weights=weights)
    config = oomb.Config(**SETTINGS, keep_outputs="all", recompute="layer")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    planner = Planner(make("llama", torch.float32, **sizes), machine)
    foretold = planner.predict(2 * TOKENS, config, optimizer=None, timed=False)
    assert foretold.kept_output_share == 1
    assert (len(foretold.recomputed) > 1, foretold.loose_output_bytes > 0) == (varies, varies)
