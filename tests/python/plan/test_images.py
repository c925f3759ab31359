"""What images take, in a plan: torch's own allocations of calls, block by block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import oomb
from engine.image_models import make_with_images
from engine.models import make
from oomb.cli import app
from oomb.engine import calls
from oomb.model.causal import CausalModel
from oomb.plan import Machine, Planner, Prediction, recommend
from oomb.trace.image_sizes import tokens_of_image
from oomb.trace.meter import tensors_of
from oomb.trace.tower import _ATTENTION_OF_CPU, ShownImages
from oomb.trace.trace import Tracer

from .allocations import peak_allocated

TOKENS = 1024
CONFIG = oomb.Config(chunk_size=128, page_size=4, recompute="none")


def model_of(family: str, *, trained: bool) -> Any:
    model = make_with_images(family, max_position_embeddings=4096).float()
    if not trained:
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
    return model


def planned(model: Any, image_tokens: int, config: oomb.Config = CONFIG) -> Prediction:
    planner = Planner(model, Machine.here("cpu"))
    return planner.predict(TOKENS, config, optimizer=None, timed=False, image_tokens=image_tokens)


def batch_of(model: Any, image_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    images = ShownImages.on(CausalModel(model), image_tokens, TOKENS)
    return images.ids, {"pixel_values": torch.randn(images.pixels), **images.beside}


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
@pytest.mark.sampled(2)
def test_memory_of_a_call(family: str, trained: bool) -> None:
    """The tower's outweighs that of the chunks: before them, and after them where it trains."""
    model, shown = model_of(family, trained=trained), 800
    ids, given = batch_of(model, shown)
    found, text = planned(model, shown), planned(model, 0)
    before, during = found.image_bytes, found.call_bytes + found.image_host_bytes
    assert trained == (during > before)
    assert before > text.call_bytes and text.image_bytes == 0
    assert found.torch_peak_bytes == found.held_bytes + max(before, found.call_bytes)
    with oomb.Engine(model, CONFIG) as engine:
        measured = peak_allocated(lambda: engine.forward_backward(ids, ids.clone(), **given))
    # What the call is given is no memory of its own; kinds of tokens are not counted at all.
    arguments = sum(x.nbytes for x in given.values() if x.shape != ids.shape)
    arguments += (TOKENS - 1) * 3 * 8
    assert max(before, during) - arguments == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_an_engine_plans_it_too(trained: bool) -> None:
    """In its plans numbers of tokens are rounded up, by an eighth at most."""
    model, shown = model_of("gemma3", trained=trained), 800
    tower = Tracer(model, "cpu", False).tower.use(832, 1024, "float32")
    with oomb.Engine(model, CONFIG) as engine:
        text, found = engine.plan(TOKENS), engine.plan(TOKENS, image_tokens=shown)
        assert found.fits
        assert found.host_bytes - text.host_bytes == tower.host_bytes()
        if trained:  # behind the chunks, beside pages
            assert found.device_bytes > max(text.device_bytes, tower.after_bytes)
        else:
            assert found.device_bytes == max(text.device_bytes, tower.before_bytes)


def test_chunks_that_outweigh_the_tower() -> None:
    """Nothing is added up: beside the chunks there are features alone."""
    model, config = model_of("qwen3-vl", trained=True), replace(CONFIG, chunk_size=512)
    found, text = planned(model, 40, config), planned(model, 0, config)
    tower = Tracer(model, "cpu", False).tower.use(40, TOKENS, "float32")
    assert found.image_bytes < text.call_bytes
    assert tower.after_bytes + text.sum_bytes < text.call_bytes
    assert found.call_bytes == text.call_bytes + tower.pixel_bytes + 2 * tower.feature_bytes
    assert found.device_pool_bytes == text.device_pool_bytes


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_a_call_leaves_room_for_the_tower(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which runs after the sweep, when pages have taken what was free."""
    model, asked = model_of("gemma3", trained=trained), []
    made = calls.needs_of

    def needs_of(*given: Any, **named: Any) -> Any:
        asked.append(made(*given, **{**named, "exact": True}))
        return asked[-1]

    monkeypatch.setattr(calls, "needs_of", needs_of)
    others = []
    with oomb.Engine(model, CONFIG) as engine:
        for image_tokens in (4, 800):
            ids, given = batch_of(model, image_tokens)
            engine.forward_backward(ids, ids.clone(), **given)
            others.append(asked[-1].others)
    if not trained:
        assert others[1] < 1.01 * others[0]
        return
    tower = Tracer(model, "cpu", False).tower.use(832, 1024, "float32")  # rounded up
    sums = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    inputs = (ids.shape[1] - 1) * 2 * 8  # positions and targets
    after = inputs + sums - tower.sum_bytes + tower.after_bytes
    assert others[1] == pytest.approx(after, rel=0.01) and after > 2 * others[0]


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3", "qwen3.5"])
def test_products_of_the_tower(family: str, trained: bool) -> None:
    """Those of the model's own tower with pixels: once without a graph, and where something in it
    trains once more with one, and back."""
    model, shown = model_of(family, trained=trained), 60
    found = Tracer(model, "cpu", False).tower.use(shown, 256, "float32").work
    images = ShownImages.on(CausalModel(model), shown, 256)
    beside = {name: x for name, x in images.beside.items() if "token_type" not in name}
    pixels = torch.randn(images.pixels)

    def products(*, with_graph: bool) -> int:
        counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_OF_CPU)
        with counter, torch.set_grad_enabled(with_graph):
            features = tensors_of(vars(model.get_image_features(pixel_values=pixels, **beside)))
            if with_graph:
                last = [x for x in features if x.requires_grad]
                torch.autograd.backward(last, [torch.ones_like(x) for x in last])
        return int(counter.get_total_flops())

    expected = products(with_graph=False) + (products(with_graph=True) if trained else 0)
    assert found.flops == expected > 0
    assert found.moved_bytes > 0


def test_seconds_of_the_tower() -> None:
    """They come to those of the chunks, at the rates of the machine, on each rank."""
    model = model_of("gemma3", trained=True)
    machine = Machine.described(gpu="h200", host_memory="64GiB")
    seconds = []
    for ranks in (1, 2):
        planner = Planner(model, replace(machine, ranks=ranks, neighbours=ranks))
        with_images, text = (
            planner.predict(TOKENS, CONFIG, optimizer=None, image_tokens=n).duration
            for n in (800, 0)
        )
        assert with_images is not None and text is not None and text.images == 0
        assert with_images.total == pytest.approx(text.total + with_images.images)
        seconds.append(with_images.images)
    work = planner.tracer.tower.use(800, TOKENS, "float32").work
    assert machine.gpu is not None
    assert seconds[0] == seconds[1]
    assert seconds[0] > work.flops / machine.gpu.flops + work.moved_bytes / 4.8e12


def test_which_tokens_show_images() -> None:
    text = make("llama", torch.float32)
    with pytest.raises(
        ValueError, match=r"image_tokens: expected 0 for a model that sees no image"
    ):
        Planner(text, Machine.here("cpu")).predict(64, CONFIG, image_tokens=8)
    with oomb.Engine(text, CONFIG) as engine:
        with pytest.raises(ValueError, match="image_tokens: expected 0 for a model that sees no"):
            engine.plan(64, image_tokens=8)
        with pytest.raises(ValueError, match=r"image_tokens: expected an int in 0 .* got 65"):
            engine.plan(64, image_tokens=65)
    seeing = model_of("gemma3", trained=True)
    with pytest.raises(ValueError, match=r"image_tokens: expected 0 \.\.\. 64, .* got 65"):
        Planner(seeing, Machine.here("cpu")).predict(64, CONFIG, image_tokens=65)


@pytest.mark.parametrize(("device_bytes", "some"), [(32_000_000, True), (20_000_000, False)])
def test_the_longest_context_has_all_images(device_bytes: int, some: bool) -> None:
    """A text that is too long is halved, but not to fewer tokens than show images."""
    model, machine = model_of("qwen3-vl", trained=True), Machine.described(device_memory="48GiB")
    machine = replace(machine, device_bytes=device_bytes, host_bytes=0)
    config = oomb.Config(chunk_size=256, page_size=32, recompute="none", keep_outputs="none")
    asked: dict[str, Any] = {"optimizer": None, "image_tokens": 700, "timed": False}
    kept = frozenset({"chunk_size", "recompute", "kv_grad_dtype"})
    found = recommend(model, 2**15, machine=machine, config=config, keep=kept, **asked)
    longest = found.longest_context
    assert not found.fits and longest is not None and (longest >= 700) == some
    planner = Planner(model, machine, images=True)
    assert planner.predict(max(768, longest), config, **asked).fits == some
    assert not planner.predict(max(768, longest + 256), config, **asked).fits


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("qwen3-vl", 10 * 5),  # patches of 4 pixels, two by two
        ("gemma3", 4),
        ("gemma4", 23 * 11),  # as many as 280 tokens hold
    ],
)
def test_tokens_of_an_image(tmp_path: Path, family: str, tokens: int) -> None:
    make_with_images(family).config.save_pretrained(tmp_path)
    assert tokens_of_image(str(tmp_path), 80, 40) == tokens


def test_the_command(tmp_path: Path) -> None:
    make_with_images("qwen3-vl").config.save_pretrained(tmp_path)
    fixed = ["--page-size", "32", "--chunk-size", "256", "--recompute", "none", "--optimizer", ""]
    shown = ["--images", "3", "--image-size", "80x40", "--out", str(tmp_path / "plan.json")]
    name, gpu = str(tmp_path), ["--gpu-memory", "48GiB", "--dtype", "float32"]
    done = CliRunner().invoke(app, ["plan", name, "--context", "4K", *gpu, *fixed, *shown])
    assert done.exit_code == 0, done.output
    assert "images, before the chunks" in done.output and "features of images" in done.output
    machine = Machine.described(device_memory="48GiB")
    planner = Planner(name, machine, dtype=torch.float32, images=True)
    config = oomb.Config(chunk_size=256, page_size=32, recompute="none")
    expected = planner.predict(4096, config, optimizer=None, image_tokens=3 * 50, timed=False)
    record = json.loads((tmp_path / "plan.json").read_text())
    for key in ("image_bytes", "image_host_bytes", "call_bytes"):
        assert record[key] == getattr(expected, key) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "2"], "images: expected 0 for a model that sees none"),
        (["--images", "-1"], "images: expected an int >= 0, got -1"),
        (["--images", "2", "--image-size", "big"], "image_size: expected HEIGHTxWIDTH such as"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", "qwen2.5-0.5b", *arguments])
    assert done.exit_code == 2
    assert message in done.output.replace("\n", " ")
