"""Conversations with images as sequences: tokens, labels, and a step's loss and gradients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from images_for_tests import (
    FAMILIES,
    IM_END,
    IM_START,
    IMAGE,
    conversations,
    gemma_processor,
    picture,
    qwen_processor,
    write_chats,
)

import oomb
from oomb.trace.trace import Tracer
from oomb.train import image_examples
from oomb.train.data import Data, find_data, prepare_data, tokenising_rule
from oomb.train.errors import BadInput
from oomb.train.image_examples import ImageRule, grown
from oomb.train.image_files import decoded, measured
from oomb.train.image_sequences import ImageSequences, collate_images
from oomb.train.processor import Processing
from oomb.train.reading import read_settings
from oomb.train.sources import find_sources

IGNORED = -100


def data_of(folder: Path, processor: Any, chats: list[Any], *overrides: str) -> Data:
    file = write_chats(folder / "chats.jsonl", chats)
    (folder / "settings.yaml").write_text(
        f"output_dir: {folder}/run\nmodel: {{name: m}}\ncontext: 4096\n"
        f"data: {{train: {file}, cache_dir: {folder}/cache}}\n"
    )
    settings = read_settings(folder / "settings.yaml", overrides)
    rule = tokenising_rule(settings.data, processor.tokenizer)
    return prepare_data(
        settings, find_data(settings.data), ImageRule(rule.rows, Processing(processor))
    )


def ordinary(folder: Path, processor: Any, turns: list[Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """What transformers makes of a conversation, and labels by a naive reading of its tokens."""
    placed = []
    for turn in turns:
        content = turn["content"]
        if not isinstance(content, str):
            content = [
                part
                if part["type"] == "text"
                else {"type": "image", "path": str(folder / next(reversed(part.values())))}
                for part in content
            ]
        placed.append({**turn, "content": content})
    made = dict(
        processor.apply_chat_template(placed, tokenize=True, return_dict=True, return_tensors="pt")
    )
    ids = made["input_ids"][0].tolist()
    labels, header = [IGNORED] * len(ids), [IM_START, *byte_ids(processor, "assistant\n")]
    for begin in range(len(ids)):
        if ids[begin : begin + len(header)] == header:
            first = begin + len(header)
            behind = ids.index(IM_END, first) + 2  # and the end of the line
            labels[first:behind] = ids[first:behind]
    return made, torch.tensor([labels])


def byte_ids(processor: Any, text: str) -> list[int]:
    ids: list[int] = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_labels_and_pixels_are_those_of_the_processor(tmp_path: Path, family: str) -> None:
    processor, chats = FAMILIES[family][1](), conversations(tmp_path, 6)
    data = data_of(tmp_path, processor, chats)
    assert len(data.train) == len(chats)
    total = 0
    for turns, index in zip(chats, range(len(chats)), strict=True):
        item, (made, labels) = data.train[index], ordinary(tmp_path, processor, turns)
        made.pop("attention_mask")
        shows = isinstance(turns[0]["content"], list)
        assert torch.equal(item["labels"], labels[0])
        assert torch.equal(item["input_ids"], made.pop("input_ids")[0])
        assert not item["document_ids"].any()
        assert not (item["labels"] == IMAGE).any()
        assert ("pixel_values" in item) == shows
        for name, value in made.items() if shows else ():
            assert torch.equal(item[name], value[0] if name.endswith("type_ids") else value)
        total += int((labels != IGNORED).sum())
    assert data.train.num_targets == total
    assert isinstance(data.train, ImageSequences) and data.train.num_images == 6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arrange", ["windows", "packed"])
def test_a_step_is_that_of_transformers(
    tmp_path: Path, family: str, arrange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of conversations: loss and gradients of each by itself, over all targets."""
    make_model, make_processor = FAMILIES[family]
    processor, chats = make_processor(), conversations(tmp_path, 6, seed=1)
    data = data_of(tmp_path, processor, chats, f"data.arrange={arrange}", "context=300")
    assert (len(data.train) < len(chats)) == (arrange == "packed")
    batch = collate_images([data.train[index] for index in range(len(data.train))])
    model = make_model().double().eval()
    model.set_attn_implementation("sdpa")
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # norms would round in fp32
    known = [ordinary(tmp_path, processor, turns) for turns in chats]
    targets = sum(int((labels[:, 1:] != IGNORED).sum()) for _, labels in known)
    total = 0.0
    for made, labels in known:
        logits = model(**made).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits, labels[0, 1:], reduction="sum", ignore_index=IGNORED
        )
        (loss / targets).backward()
        total += loss.item() / targets
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with oomb.Engine(model, oomb.Config(chunk_size=64, page_size=16)) as engine:
        step = engine.forward_backward(**batch)
    assert step.num_valid_tokens == targets
    assert float(step.loss) == pytest.approx(total, rel=1e-12)
    assert sum("vis" in name for name in wanted) > 10
    for name, p in model.named_parameters():
        if name in wanted:
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_take_what_is_foretold(tmp_path: Path, family: str, frozen: bool) -> None:
    make_model, make_processor = FAMILIES[family]
    data = data_of(tmp_path, make_processor(), conversations(tmp_path, 3), "data.arrange=packed")
    model = make_model()
    if frozen:
        model.requires_grad_(False)
        model.model.language_model.requires_grad_(True)
    batch = collate_images([data.train[0]])
    shown = int((batch["input_ids"] == IMAGE).sum())
    with oomb.Engine(model, oomb.Config(chunk_size=64, page_size=16)) as engine:
        taken = engine.forward_backward(**batch).stats.image_feature_bytes
    foretold = Tracer(model, "cpu", False).tower.use(shown, 2 * shown, "float32")
    assert taken == foretold.feature_bytes * (1 if frozen else 2) > 0
    assert isinstance(data.train, ImageSequences) and shown <= data.train.most_shown


def test_an_image_that_the_assistant_shows_is_no_target(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 20, 20)
    turns = [
        {"role": "user", "content": "draw"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "so"},
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "it is"},
            ],
        },
    ]
    processor = qwen_processor()
    item = data_of(tmp_path, processor, [turns]).train[0]
    said = item["labels"][item["labels"] != IGNORED].tolist()
    # The markers around an image are the template's, and so the assistant's.
    assert said == byte_ids(processor, "so<boi><eoi>it is<|im_end|>\n")
    assert (item["input_ids"] == IMAGE).sum() > 1


def test_a_completion_is_predicted_and_its_prompts_images_are_read(tmp_path: Path) -> None:
    turns = conversations(tmp_path, 3)[2]
    rows = [{"prompt": turns[:3], "completion": turns[3:]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    processor = gemma_processor()
    item = data_of(tmp_path, processor, [], f"data.train={tmp_path / 'rows.jsonl'}").train[0]
    made, labels = ordinary(tmp_path, processor, turns)
    last = len(byte_ids(processor, "then 3<|im_end|>\n"))
    labels[0, :-last] = IGNORED
    assert torch.equal(item["input_ids"], made["input_ids"][0])
    assert torch.equal(item["labels"], labels[0])
    assert torch.equal(item["pixel_values"], made["pixel_values"])


def test_tables_fill_in_fields_that_say_nothing(tmp_path: Path) -> None:
    """In Parquet a part of text has an image that is null, and templates look for the field."""
    import datasets

    picture(tmp_path / "a.png", 16, 16)
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]
    turns = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "so"}]},
    ]
    datasets.Dataset.from_list([{"messages": turns}]).to_parquet(tmp_path / "rows.parquet")
    processor = gemma_processor()
    table, lines = (
        data_of(tmp_path, processor, [turns], *overrides).train[0]
        for overrides in ([f"data.train={tmp_path / 'rows.parquet'}"], [])
    )
    assert len(table["pixel_values"]) == 1
    assert table.keys() == lines.keys()
    assert all(torch.equal(table[name], lines[name]) for name in table)


def test_a_shape_that_the_processor_refuses_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "line.png", 1500, 2)
    turns = [
        {"role": "user", "content": [{"type": "image", "path": "line.png"}]},
        {"role": "assistant", "content": "yes"},
    ]
    with pytest.raises(BadInput, match=r"that the processor takes, got others in row 0 .*ratio"):
        data_of(tmp_path, qwen_processor(), [turns])


def test_what_is_longer_than_the_context_is_left_out_whole(tmp_path: Path) -> None:
    chats = conversations(tmp_path, 9)
    whole = data_of(tmp_path, gemma_processor(), chats).train
    lengths = sorted(len(whole[index]["input_ids"]) for index in range(9))
    context = lengths[5]
    for arrange in ("windows", "packed"):
        data = data_of(
            tmp_path, gemma_processor(), chats, f"context={context}", f"data.arrange={arrange}"
        ).train
        assert isinstance(data, ImageSequences)
        assert data.left_out == sum(length > context for length in lengths) > 0
        assert data.num_tokens == sum(length for length in lengths if length <= context)
        assert data.longest <= context


def test_images_are_decoded_when_their_sequence_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    real = image_examples.decoded

    def watched(file: Path) -> Any:
        opened.append(file)
        return real(file)

    monkeypatch.setattr(image_examples, "decoded", watched)
    data = data_of(tmp_path, gemma_processor(), conversations(tmp_path, 3))
    assert data.train.identity() and not opened
    assert "pixel_values" not in data.train[0] and not opened
    assert len(data.train[2]["pixel_values"]) == len(opened) == 2


def test_a_turned_image_is_seen_upright(tmp_path: Path) -> None:
    """What a camera held sideways writes: more tokens in width than in height, or the reverse."""
    from PIL import Image

    picture(tmp_path / "plain.png", 40, 8)
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(tmp_path / "plain.png") as image:
        image.save(tmp_path / "turned.png", exif=exif)
    for name, size in (("plain.png", (40, 8)), ("turned.png", (8, 40))):
        assert measured(tmp_path / name)[:2] == decoded(tmp_path / name).size == size
    chats = [
        [
            {"role": "user", "content": [{"type": "image", "path": name}]},
            {"role": "assistant", "content": "yes"},
        ]
        for name in ("plain.png", "turned.png")
    ]
    data = data_of(tmp_path, qwen_processor(), chats)
    [plain], [turned] = (data.train[index]["image_grid_thw"].tolist() for index in range(2))
    assert plain[1:] == turned[:0:-1] and plain != turned


@pytest.mark.parametrize("ending", ["png", "tiff", "pgm"])
def test_gray_of_16_bits_keeps_its_shades(tmp_path: Path, ending: str) -> None:
    import numpy as np
    from PIL import Image

    gray = np.arange(0, 2**16, 64, dtype=np.uint16).reshape(32, 32)
    Image.fromarray(gray).save(tmp_path / f"gray.{ending}")
    seen = np.asarray(decoded(tmp_path / f"gray.{ending}"))
    assert np.array_equal(seen, np.repeat(gray[..., None] // 256, 3, axis=2))


def test_the_size_of_an_image_is_read_without_its_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image, ImageFile

    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.new("RGB", (40, 8)) as image:
        for ending in ("png", "jpeg", "webp"):
            image.save(tmp_path / f"plain.{ending}")
            image.save(tmp_path / f"turned.{ending}", exif=exif)

    def load(*_: object) -> None:
        raise AssertionError("pixels were decoded")

    for kind in (ImageFile.ImageFile, Image.Image):
        monkeypatch.setattr(kind, "load", load)
    for ending in ("png", "jpeg", "webp"):
        assert measured(tmp_path / f"plain.{ending}")[:2] == (40, 8)
        assert measured(tmp_path / f"turned.{ending}")[:2] == (8, 40)


def test_a_changed_image_is_measured_anew(tmp_path: Path) -> None:
    chats = conversations(tmp_path, 2)
    name = tmp_path / "0-1-0.png"
    picture(name, 16, 16)
    before = data_of(tmp_path, qwen_processor(), chats).train
    item = before[1]
    picture(name, 64, 64)
    after = data_of(tmp_path, qwen_processor(), chats).train
    assert len(after[1]["input_ids"]) > len(item["input_ids"])
    assert after.identity() != before.identity()
    with pytest.raises(BadInput, match=r"data: expected images of the sizes they had .* row 1"):
        before[1]


@pytest.mark.parametrize("written", [["<>"], ["<--->"], [""]])
def test_spans_move_with_what_grows(written: list[str]) -> None:
    text, spans = "ab#cd", [(0, 1), (0, 2), (1, 4), (2, 3), (3, 5)]
    whole, moved, shown = grown(["ab", "cd"], written, 1, spans)
    assert whole == text.replace("#", written[0])
    for (begin, end), (first, behind) in zip(spans, moved, strict=True):
        assert whole[first:behind] == text[begin:end].replace("#", written[0])
    assert [whole[a:b] for a, b in shown] == written


def test_a_copy_of_a_folder_has_images_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths, and files of the same size and time: only the folder differs."""
    processor = gemma_processor()
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    part = {"type": "image", "image": picture(first / "one.png", 8, 8)}
    turns = [
        {"role": "user", "content": [part, {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": "yes"},
    ]
    write_chats(first / "chats.jsonl", [turns])
    shutil.copytree(first, second)
    (tmp_path / "settings.yaml").write_text(
        "output_dir: run\nmodel: {name: m}\ncontext: 4096\ndata: {train: chats.jsonl}\n"
    )
    read = tokenising_rule(read_settings(tmp_path / "settings.yaml").data, processor.tokenizer)
    rule = ImageRule(read.rows, Processing(processor))
    found = []
    for folder in (first, second):
        monkeypatch.chdir(folder)
        sources = find_sources("data.train", ["chats.jsonl"])
        made = image_examples.image_examples("data.train", sources, rule, str(tmp_path / "cache"))
        found.append(made[0]["files"])
    assert found == [[str(folder / "one.png")] for folder in (first, second)]
