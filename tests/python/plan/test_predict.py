"""Predictions and recommendations: what fits, what is said where nothing does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

import oomb
from engine.models import make
from oomb.plan import (
    Machine,
    Planner,
    Prediction,
    predict,
    rates,
    recommend,
    recommendation,
    write_measured,
    write_plan,
)
from oomb.trace.bare import bare_model

GIB = 2**30
H200: dict[str, Any] = {"gpu": "h200", "host_bytes": 125 * GIB}
PAGED = {"chunk_size": 64, "page_size": 16}


def test_a_model_that_fits() -> None:
    result = recommend("qwen2.5-7b", 2**17, **H200)
    prediction = result.prediction
    assert result.fits
    assert result.longest_context is None
    assert prediction.config.kv_grad_dtype == "float32"
    assert prediction.device_bytes < prediction.machine.device_bytes
    # keys and values and their fp32 gradients, of all but the last chunk
    pages = (2**17 - 4096) * 28 * 2 * 4 * 128 * (2 + 4)
    alone = recommend("qwen2.5-7b", 2**17, config=oomb.Config(keep_outputs="none"), **H200)
    of_pages = alone.prediction.device_pool_bytes + alone.prediction.host_pool_bytes
    assert of_pages == pytest.approx(pages, rel=0.02)
    pools = prediction.device_pool_bytes + prediction.host_pool_bytes
    kept = prediction.kept_output_bytes + prediction.kept_mlp_output_bytes
    in_transit = 0.01 * pools  # what moves is in both tiers, and they peak at times of their own
    assert of_pages + kept <= pools <= of_pages + kept + in_transit
    assert prediction.host_pool_bytes < kept  # no page leaves the device
    assert prediction.basis == "datasheet"
    assert prediction.seconds == pytest.approx(34.2, rel=0.1)  # as measured on an H200
    assert prediction.torch_peak_bytes < prediction.device_bytes


def on_h200(layers: int, tokens: int, batch: int = 1, **settings: Any) -> Prediction:
    """Of Qwen2.5-0.5B (24 layers) or of so many layers of Qwen2.5-7B, in bf16 with AdamW."""
    small = layers == 24
    config = Qwen2Config(
        hidden_size=896 if small else 3584,
        intermediate_size=4864 if small else 18944,
        num_hidden_layers=layers,
        num_attention_heads=14 if small else 28,
        num_key_value_heads=2 if small else 4,
        vocab_size=151936 if small else 152064,
        tie_word_embeddings=small,
        max_position_embeddings=2**20,
    )
    return predict(
        config,
        tokens,
        oomb.Config(**{"recompute": "none", **settings}),
        machine=Machine.described(gpu="h200", host_memory="125GiB"),
        batch_size=batch,
        dtype=torch.bfloat16,
        optimizer="adamw_torch",
    )


SPARSE = {"attention": oomb.TopKPages(budget=16)}


@pytest.mark.parametrize(
    ("prediction", "mebibytes", "seconds"),
    [
        pytest.param(lambda: on_h200(6, 32768), 28782, 1.14, id="7b"),
        pytest.param(lambda: on_h200(24, 32768, recompute="layer"), 6289, 1.50, id="recompute"),
        pytest.param(lambda: on_h200(24, 49152, **SPARSE), 9750, 1.54, id="sparse"),
        pytest.param(lambda: on_h200(24, 16384, 2), 13631, 0.55, id="batch"),
    ],
)
def test_measured_steps(
    prediction: Callable[[], Prediction], mebibytes: int, seconds: float
) -> None:
    """Torch's peak and seconds of steps in chunks of 4096 that were measured on an H200; the host
    takes longer than the GPU for those of the small model."""
    found = prediction()
    assert found.torch_peak_bytes == pytest.approx(mebibytes * 2**20, rel=0.01)
    assert found.seconds == pytest.approx(seconds, rel=0.2)


def test_what_grows_under_a_cap() -> None:
    """Ids, labels and a mask; positions and targets: the sweep has no mean keys nor page lists."""
    settings: dict[str, Any] = {"attention": oomb.TopKPages(), "device_memory": "512MiB"}
    short, long = (on_h200(2, chunks * 4096 + 1, **settings) for chunks in (16, 48))
    tokens = 32 * 4096
    assert long.device_pool_bytes == short.device_pool_bytes
    assert long.call_bytes - short.call_bytes == tokens * (3 * 8 + 2 * 4)
    chunk_bytes = 2 * 4096 // 128 * 64 * 4
    # Chunks whose past is longer than the budget: 14 and 46; pinned in powers of two.
    assert (short.list_bytes, long.list_bytes) == (16 * chunk_bytes, 64 * chunk_bytes)
    assert long.host_bytes == long.host_pool_bytes + long.list_bytes


def test_pages_go_to_the_host_before_precision_goes() -> None:
    result = recommend("qwen2.5-7b", 2**19, timed=False, **H200)
    assert result.fits
    assert result.prediction.host_pool_bytes > 0
    assert result.config.kv_grad_dtype == "float32"
    tighter = recommend("qwen2.5-7b", 2**20, timed=False, **H200)
    assert tighter.fits
    assert tighter.config.kv_grad_dtype == "bfloat16"


def test_settings_that_are_kept() -> None:
    config = oomb.Config(chunk_size=1024, recompute="layer")
    keep = frozenset({"chunk_size", "recompute"})
    result = recommend("qwen2.5-7b", 2**15, config=config, keep=keep, timed=False, **H200)
    assert (result.config.chunk_size, result.config.recompute) == (1024, "layer")


def test_the_nearest_thing_where_nothing_fits() -> None:
    result = recommend("qwen2.5-7b", 2**22, timed=False, **H200)
    assert not result.fits
    assert "host" in result.advice[0]
    longest = result.longest_context
    assert longest is not None
    assert any(f"{longest:,} tokens" in sentence for sentence in result.advice)
    planner = Planner("qwen2.5-7b", result.prediction.machine)
    config, beyond = result.config, longest + result.config.chunk_size + 1
    assert planner.predict(longest, config, timed=False, dry_run=False).fits
    assert not planner.predict(beyond, config, timed=False, dry_run=False).fits


@pytest.mark.parametrize("fitting", [5_000, 300_000, 90_000_000, 1_500_000_000])
def test_the_longest_of_very_long_contexts(fitting: int) -> None:
    asked: list[int] = []

    def predict(num_tokens: int, *_: object, **__: object) -> Any:
        asked.append(num_tokens)
        return SimpleNamespace(fits=num_tokens <= fitting)

    planner: Any = SimpleNamespace(predict=predict)
    config = oomb.Config(chunk_size=1024)
    longest = recommendation._longest_context(planner, config, 2**31 - 1, {"image_tokens": 0})
    assert 0 <= fitting - longest < max(1024, 1e-4 * fitting)
    assert len(asked) <= 24


def test_what_stays_on_the_device_alone_is_too_much() -> None:
    result = recommend(
        "qwen2.5-0.5b", 4096, device_bytes=2**20, host_bytes=2**20, gpu="h200", timed=False
    )
    assert not result.fits and " -" not in result.prediction.shortage
    assert "more than there is: the device is out of memory" in result.prediction.shortage
    assert "recompute=" not in result.prediction.shortage


def test_an_optimizer_that_would_fit() -> None:
    """Adam's two states in the parameters' dtype do not fit beside a 14B model; 8-bit ones do."""
    result = recommend("qwen2.5-14b", 2**15, timed=False, **H200)
    assert not result.fits
    assert any("it fits with" in sentence for sentence in result.advice)
    assert "optimizer=adamw_bnb_8bit" in [str(one) for one in result.remedies if one.fits]


def test_says_where_ordinary_training_needs_less() -> None:
    """Many key/value heads for the hidden size, few layers."""
    shape: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "head_dim": 64,
        "vocab_size": 1000,
    }
    from transformers import Qwen3Config

    many = Qwen3Config(num_key_value_heads=16, **shape)
    few = Qwen3Config(num_key_value_heads=1, **shape)
    asked: dict[str, Any] = {"gpu": "h200", "host_bytes": 1000 * GIB, "timed": False}
    assert any("ordinary" in text for text in recommend(many, 2**20, **asked).advice)
    assert not any("ordinary" in text for text in recommend(few, 2**20, **asked).advice)


def test_what_fits_runs_and_what_does_not_is_refused() -> None:
    model = make("llama", torch.float32, max_position_embeddings=2048)
    ids = torch.randint(97, (1, 700))
    machine = Machine.here("cpu")
    slot = 2 * 2 * 16 * 8 * 4
    for host, fits in ((90 * slot, False), (800 * slot, True)):
        config = oomb.Config(device_memory=30 * slot, host_memory=host, **PAGED)
        prediction = Planner(model, machine).predict(700, config, timed=False)
        assert prediction.fits == fits, prediction.shortage
        with oomb.Engine(model, config) as engine:
            if fits:
                engine.forward_backward(ids, ids)
            else:
                with pytest.raises(oomb.OutOfMemoryError):
                    engine.forward_backward(ids, ids)


def test_engine_plan_counts_a_chunk_exactly() -> None:
    model = make("llama", torch.float32, max_position_embeddings=2048)
    config = oomb.Config(recompute="none", **PAGED)
    prediction = Planner(model, Machine.here("cpu")).predict(700, config, timed=False)
    with oomb.Engine(model, config) as engine:
        plan = engine.plan(700)
    pages = prediction.device_pool_bytes
    assert plan.device_bytes == pytest.approx(prediction.call_bytes + pages, rel=0.1)


def test_a_gpu_of_which_only_the_memory_is_known() -> None:
    machine = Machine.described(device_memory="24GB", host_memory="64GiB")
    assert machine.device_type == "cuda"
    assert 22e9 < machine.device_bytes < 24e9
    if not torch.cuda.is_available():
        assert predict("qwen2.5-0.5b", 2**14, machine=machine).seconds is None


def test_accumulation_keeps_gradients() -> None:
    planner = Planner("qwen2.5-0.5b", Machine.described(gpu="h100"))
    once, often = (planner.predict(2**14, accumulates=a, timed=False) for a in (False, True))
    assert often.held_bytes - once.held_bytes == planner.tracer.gradient_bytes
    assert often.device_bytes - once.device_bytes == planner.tracer.gradient_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "no/such-model"}, "model: expected a folder"),
        ({"context": 0}, "num_tokens: expected an int in 1 ..."),
        ({"gpu": "h20"}, "gpu: expected one of h200"),
        ({"optimizer": "adam"}, "optimizer: expected one of"),
        ({"device_bytes": -1}, "device_memory: expected bytes"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = {"model": "qwen2.5-0.5b", "context": 4096, "timed": False, **arguments}
    with pytest.raises(ValueError, match=message):
        recommend(asked.pop("model"), asked.pop("context"), **asked)


def test_rates_are_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is measured is run; seconds are made up, each twice as many as those before."""
    seconds = (0.001 * 2**n for n in count())

    def measure(_: torch.device, work: Callable[[], object], budget: float = 0.0) -> float:
        work()
        return next(seconds)

    monkeypatch.setattr(rates, "_measured", {})
    monkeypatch.setattr(rates, "_seconds", measure)
    model = make("llama", torch.float32)
    state = torch.get_rng_state()
    prediction = predict(model, 500, oomb.Config(**PAGED), machine=Machine.here("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    duration = prediction.duration
    assert duration is not None
    assert duration.basis == "measured"
    parts = ("matrix", "elementwise", "attention", "starting")
    assert all(getattr(duration, part) > 0 for part in parts)
    assert 0 < duration.fill < duration.total
    longer = predict(model, 2000, oomb.Config(**PAGED), machine=Machine.here("cpu"))
    assert longer.duration is not None
    assert longer.duration.matrix / duration.matrix == pytest.approx(2000 / 500, rel=0.1)
    assert longer.duration.attention / duration.attention > 4.5  # more than the text does


@pytest.mark.parametrize(
    "attention", [oomb.Dense(), oomb.TopKPages(budget=16)], ids=["dense", "pages"]
)
@pytest.mark.sampled(1)
def test_ranks_take_the_fastest_of_chunks(attention: Any) -> None:
    """None of up to 4,096 tokens a rank is faster; one GPU, and a chunk that was said, stay."""
    model, machine = bare_model(_TWO_LAYERS), Machine.described(gpu="h200")
    config, tokens = oomb.Config(attention=attention), 2**18

    def chosen(ranks: int, **said: Any) -> Prediction:
        machine_of = machine.of_rank(ranks) if ranks > 1 else machine
        return recommend(model, tokens, machine=machine_of, config=config, **said).prediction

    planner = Planner(model, machine.of_rank(4))
    seconds = {
        size: planner.predict(tokens, replace(config, chunk_size=size)).seconds
        for size in (4096, 8192, 16384)
    }
    found = chosen(4)
    assert found.seconds == min(x for x in seconds.values() if x is not None)
    assert found.config.chunk_size > 4096
    assert chosen(4, keep=frozenset({"chunk_size"})).config.chunk_size == 4096
    assert chosen(1).config.chunk_size == 4096


_TWO_LAYERS = Qwen2Config(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=2**18,
    dtype="bfloat16",
)


def test_record_of_a_run(tmp_path: Path) -> None:
    result = recommend("qwen2.5-0.5b", 2**15, **H200)
    path = write_plan(tmp_path / "run", result)
    record = json.loads(path.read_text())
    assert path.name == "plan.json"
    assert record["predicted"]["device_bytes"] == result.prediction.device_bytes
    assert record["predicted"]["config"]["chunk_size"] == result.config.chunk_size
    assert record["measured"] is None
    write_measured(tmp_path / "run", seconds=2.0, device_pool_bytes=1, host_pool_bytes=0)
    record = json.loads(path.read_text())
    assert record["predicted"]["device_bytes"] == result.prediction.device_bytes
    assert record["measured"]["seconds"] == 2.0
    assert list((tmp_path / "run").iterdir()) == [path]
    write_plan(tmp_path / "other", replace(result.prediction, duration=None))
    assert (
        json.loads((tmp_path / "other" / "plan.json").read_text())["predicted"]["seconds"] is None
    )
