"""``oomb train`` on images: its steps, its resuming, what it leaves behind and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from images_for_tests import (
    FAMILIES,
    conversations,
    gemma_model,
    picture,
    prepare_images,
    qwen_model,
    write_chats,
)
from tiny_runs import TEXT, run, save_model
from transformers import AutoModelForImageTextToText, AutoProcessor

import oomb.train.arguments
import oomb.train.image_files
from oomb.train.model import load_by_first
from oomb.train.settings import ModelSettings


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["event"] == "step"]


def test_the_first_step_is_that_of_transformers(tmp_path: Path) -> None:
    """One batch of all conversations; loss over every target, by hand."""
    file = prepare_images(tmp_path, data={"eval_fraction": 0.0}, training={"steps": 1})
    result = run(file, "training.batch_size=9")
    assert result.exit_code == 0, result.output
    assert ", 9 images" in result.output and "Images: " in result.output
    folder = tmp_path / "model"
    processor, model = AutoProcessor.from_pretrained(folder), gemma_model().eval()
    total, targets = 0.0, 0
    for turns in conversations(tmp_path, 9):
        for turn in turns:
            for part in turn["content"] if isinstance(turn["content"], list) else []:
                for field in {"image", "path", "url"} & part.keys():
                    part["path"] = str(tmp_path / part.pop(field))
        said = dict(tokenize=True, return_dict=True, return_tensors="pt")
        batch = processor.apply_chat_template(turns, **said)
        with torch.no_grad():
            logits = model(**batch).logits[0]
        ids = batch["input_ids"][0]
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before = processor.apply_chat_template(
                    turns[:number], add_generation_prompt=True, **said
                )["input_ids"].shape[1]
                until = processor.apply_chat_template(turns[: number + 1], **said)
                behind = until["input_ids"].shape[1]
                terms = torch.nn.functional.cross_entropy(
                    logits[before - 1 : behind - 1], ids[before:behind], reduction="sum"
                )
                total, targets = total + float(terms), targets + behind - before
    assert losses(tmp_path / "run") == pytest.approx([total / targets], rel=1e-5)
    AutoProcessor.from_pretrained(tmp_path / "run" / "model").image_processor  # noqa: B018
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    begun = gemma_model().state_dict()
    trained = [name for name, p in saved.state_dict().items() if not torch.equal(p, begun[name])]
    assert any("vision_tower" in name for name in trained)


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    whole = prepare_images(
        tmp_path,
        data={"arrange": "packed", "eval_fraction": 0.0},
        training={"steps": 2},
        saving={"every_steps": None},
    )
    assert run(whole, "context=200").exit_code == 0
    parts = [f"output_dir={tmp_path / 'parts'}", "context=200"]
    assert run(whole, *parts, "training.steps=1").exit_code == 0
    result = run(whole, *parts, "--resume")
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "parts") == losses(tmp_path / "run")
    one, other = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name / "model").state_dict()
        for name in ("run", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    picture(tmp_path / "0-1-0.png", 80, 80)
    result = run(whole, *parts, "--resume", "training.steps=3")
    assert result.exit_code == 2 and "data.train: expected the text" in result.output


def test_adapters_train_beside_images(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    file = prepare_images(
        tmp_path, lora={"r": 4, "target_modules": ["q_proj", "v_proj"]}, training={"steps": 2}
    )
    result = run(file)
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


def test_a_run_on_text_asks_for_no_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a processor was loaded")

    file = prepare_images(tmp_path, training={"steps": 1})
    monkeypatch.setattr(AutoProcessor, "from_pretrained", refused)
    arguments = ["context=128", "data.eval_fraction=0", "saving.every_steps=null"]
    chats = [turns for turns in conversations(tmp_path, 9) if isinstance(turns[0]["content"], str)]
    write_chats(tmp_path / "plain.jsonl", chats)
    (tmp_path / "plain.txt").write_text(TEXT)
    for name in ("plain.jsonl", "plain.txt"):
        run_folder = f"output_dir={tmp_path / name}-run"
        result = run(file, run_folder, f"data.train={tmp_path / name}", *arguments)
        assert result.exit_code == 0, result.output
    assert "a processor was loaded" in run(file).output  # where there are images


def test_a_dry_run_reads_the_first_images_and_writes_nothing(tmp_path: Path) -> None:
    file = prepare_images(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = run(file, "--dry-run")
    assert result.exit_code == 0 and "Images: " in result.output, result.output
    assert sorted(tmp_path.rglob("*")) == before
    damaged = (tmp_path / "0-1-0.png").read_bytes()[:120]  # a header, and no pixels behind it
    (tmp_path / "0-1-0.png").write_bytes(damaged)
    for arguments in (["--dry-run"], []):  # a real run, too, before anything is made
        result = run(file, *arguments)
        assert result.exit_code == 2 and "expected an image, got" in result.output
        assert "row 1 of" in result.output
        assert sorted(tmp_path.rglob("*")) == before


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": "yes"}]


_WORDS = {"type": "text", "text": "look"}
ROWS = {
    "no such file": ({"type": "image", "image": "none.png"}, "expected an image, got"),
    "no image": ({"type": "image", "path": "chats.jsonl"}, "expected an image, got"),
    "far away": (
        {"type": "image", "url": "https://example.com/a.png"},
        "expected the path of a local file as 'url' of an image, got https://",
    ),
    "no name": ({"type": "image"}, "expected one of image, path, url in a part of type image"),
    "two names": (
        {"type": "image", "image": "a.png", "path": "a.png"},
        "expected one of image, path, url in a part of type image, got image, path",
    ),
    "bytes": ({"type": "image", "image": {"bytes": "AAAA"}}, "as 'image' of an image, got dict"),
    "a video": ({"type": "video", "path": "a.mp4"}, "got a part of type 'video'"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_part_is_named(tmp_path: Path, name: str) -> None:
    part, message = ROWS[name]
    file = prepare_images(tmp_path, chats=3)
    good = {"type": "image", "image": picture(tmp_path / "good.png", 8, 8)}
    write_chats(tmp_path / "chats.jsonl", [user(good, _WORDS), user(part, _WORDS)])
    for arguments in (["--dry-run"], []):
        result = run(file, "data.images=true", *arguments)
        assert result.exit_code == 2, result.output
        text = " ".join(result.output.split())
        assert message in text and "row 1 of" in text
    assert not (tmp_path / "run").exists()


def _without_processor(folder: Path) -> None:
    for name in ("processor_config.json", "preprocessor_config.json", "chat_template.jinja"):
        (folder / "model" / name).unlink(missing_ok=True)


def _text_model(folder: Path) -> None:
    save_model(folder / "text")


def _no_placeholder(folder: Path) -> None:
    (folder / "plain.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")


def _mistyped(folder: Path) -> None:
    write_chats(folder / "chats.jsonl", [user({"type": "text", "text": "<boi>"})] * 3)


REFUSALS: dict[str, tuple[Callable[[Path], None] | None, list[str], str]] = {
    "a task of TRL": (None, ["task=kto", "data.images=true"], "task: expected 'sft' beside images"),
    "skipped positions": (
        None,
        ["data.simulated_context=1024"],
        "data.simulated_context: expected null beside images, got 1024",
    ),
    "a model of text": (
        _text_model,
        ["model.name={folder}/text", "data.images=true"],
        "model.name: expected a model that sees images, since the data has some, got 'qwen2'",
    ),
    "a model of text, unasked": (
        _text_model,
        [
            "model.name={folder}/text",
            "data.chat_template={folder}/model/chat_template.jinja",
            "data.add_eos=false",
        ],
        "got a part of type 'image'; data.images=true reads it, for a model that sees",
    ),
    "no processor": (_without_processor, [], "model.name: expected a processor"),
    "text": (None, ["data.kind=text", "data.images=true"], "data.text_field: expected a column"),
    "a template of text": (
        _no_placeholder,
        ["data.chat_template={folder}/plain.jinja"],
        "data.chat_template: expected one that writes '<boi>' for each image",
    ),
    "a placeholder in text": (
        _mistyped,
        ["data.images=true"],
        "for each image and for nothing else, got 1 of them for 0 images in row 0",
    ),
    "nothing short enough": (
        None,
        ["context=32"],
        "data.train: expected examples of at most 32 tokens, the context, images included",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_go_with_images_is_named(tmp_path: Path, name: str) -> None:
    prepared, arguments, message = REFUSALS[name]
    file = prepare_images(tmp_path)
    if prepared is not None:
        prepared(tmp_path)
    result = run(file, *[text.format(folder=tmp_path) for text in arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


def test_angles_in_float64_are_refused_where_positions_count_height_and_width(
    tmp_path: Path,
) -> None:
    from oomb.train.errors import BadInput
    from oomb.train.image_runs import on_images
    from oomb.train.reading import read_settings
    from oomb.train.sources import find_sources

    settings = read_settings(prepare_images(tmp_path))
    sources = find_sources("data.train", settings.data.train)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert on_images(settings, config, sources)
    angles = settings.engine.model_copy(update={"rope_angles": "float64"})
    assert on_images(settings.model_copy(update={"engine": angles}), config, sources)
    with pytest.raises(BadInput, match=r"engine.rope_angles: expected 'model' beside images"):
        on_images(settings.model_copy(update={"engine": angles}), qwen_model().config, sources)


def test_without_pillow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prepare_images(tmp_path)
    monkeypatch.setattr(oomb.train.image_files, "find_spec", lambda _: None)
    result = run(file)
    assert result.exit_code == 2 and "pip install 'oomb[images]'" in result.output


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_shard_a_model_have_its_tower(
    tmp_path: Path, family: str, is_first: bool
) -> None:
    """transformers' class for text has none, or no such model."""
    whole = FAMILIES[family][0]()
    whole.save_pretrained(tmp_path)
    settings = ModelSettings(name=str(tmp_path), dtype="float32")
    job: Any = SimpleNamespace(is_first=is_first, together=lambda work: work())
    model = load_by_first(settings, None, whole.config, job, images=True)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert shapes == {name: p.shape for name, p in whole.named_parameters()}
    kinds = {p.device.type for p in model.parameters()}
    assert kinds == ({"cpu"} if is_first else {"meta"})
