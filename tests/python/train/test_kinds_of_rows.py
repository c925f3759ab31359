"""Completions, tokens and data sets of the hub: labels as read naively, bad rows by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from rows_for_tests import (
    FORGETFUL,
    IGNORED,
    MARKED,
    PLAIN,
    TURNS,
    chat_tokenizer,
    conversations,
    data_of,
    expected,
    items,
    sentence,
    write,
)

from oomb.train import documents
from oomb.train.chat import ChatTemplate, chat_template
from oomb.train.errors import BadInput


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_completions_are_predicted_with_their_end(tmp_path: Path, suffix: str) -> None:
    tokenizer, draw = chat_tokenizer(None), random.Random(0)
    rows = [
        {"prompt": sentence(draw, 9) + " ->", "completion": " " + sentence(draw, 7)}
        for _ in range(9)
    ]
    if suffix == "jsonl":
        file = write(tmp_path / "rows.jsonl", rows)
    else:
        file = tmp_path / "rows.csv"
        datasets.Dataset.from_list(rows).to_csv(file)
    found = items(data_of(tmp_path, tokenizer, file))
    for row, (ids, labels) in zip(rows, found, strict=True):
        encode: Callable[[str], list[int]] = tokenizer.encode
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        assert ids == [*encode(row["prompt"] + row["completion"]), tokenizer.eos_token_id]
        # These words begin with a space, so no token lies across the border.
        assert ids[: len(prompt)] == prompt
        assert labels == [IGNORED] * len(prompt) + ids[len(prompt) :]


def test_completions_of_messages(tmp_path: Path) -> None:
    tokenizer, chats = chat_tokenizer(FORGETFUL), conversations(9)
    rows = [{"prompt": turns[:-1], "completion": turns[-1:]} for turns in chats]
    found = items(data_of(tmp_path, tokenizer, write(tmp_path / "rows.jsonl", rows)))
    for turns, (ids, labels) in zip(chats, found, strict=True):
        invited = tokenizer.apply_chat_template(
            turns[:-1], add_generation_prompt=True, return_dict=False
        )
        assert ids == tokenizer.apply_chat_template(turns, return_dict=False)
        # The invitation's last token may have merged with what follows; it counts then.
        same = [a == b for a, b in zip(ids, invited, strict=False)]
        begin = same.index(False) if False in same else len(invited)
        assert begin in (len(invited) - 1, len(invited))
        assert labels == [IGNORED] * begin + ids[begin:]


def test_messages_with_images_are_refused(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "what is it"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}]
    file = write(tmp_path / "rows.jsonl", [{"messages": turns}])
    with pytest.raises(BadInput, match="expected messages of text, got a part of type 'image'"):
        items(data_of(tmp_path, chat_tokenizer(MARKED), file))


def test_other_columns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    rows = [{"instruction": "a b", "output": " c d"}]
    names = "data.prompt_field=instruction", "data.completion_field=output"
    [(ids, labels)] = items(data_of(tmp_path, tokenizer, write(tmp_path / "r.jsonl", rows), *names))
    after = [*tokenizer.encode(" c d"), tokenizer.eos_token_id]
    assert ids == [*tokenizer.encode("a b"), *after]
    assert labels == [IGNORED] * (len(ids) - len(after)) + after


@pytest.mark.parametrize("format", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("column", [None, "labels", "loss_mask"])
def test_tokens_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, column: str | None
) -> None:
    monkeypatch.setattr(documents, "SEGMENT", 50)
    draw, rows, wanted = random.Random(0), [], []
    for length in (2, 49, 50, 51, 100, 133):
        ids = [draw.randrange(256) for _ in range(length)]
        marks = [draw.random() < 0.5 for _ in ids]
        marks[-1] = True
        row = {"input_ids": ids}
        if column == "labels":
            row["labels"] = [i if m else IGNORED for i, m in zip(ids, marks, strict=True)]
        elif column == "loss_mask":
            row["loss_mask"] = [int(m) for m in marks]
        else:
            marks = [True] * length
        rows.append(row)
        labels = [i if m else IGNORED for i, m in zip(ids, marks, strict=True)]
        wanted.append((ids, [IGNORED, *labels[1:]]))
    table = datasets.Dataset.from_list(rows)
    if format == "saved":
        table.save_to_disk(str(tmp_path / "rows"))
        file = tmp_path / "rows"
    else:
        file = tmp_path / f"rows.{format}"
        getattr(table, {"jsonl": "to_json"}.get(format, "to_parquet"))(file)
    assert items(data_of(tmp_path, chat_tokenizer(), file)) == wanted


def test_kinds_may_be_mixed(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    write(tmp_path / "a.jsonl", [{"messages": conversations(1)[0]}])
    write(tmp_path / "b.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}])
    write(tmp_path / "c.jsonl", [{"text": "some text"}])
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    chat, tokens, text = items(data_of(tmp_path, tokenizer, f"[{', '.join(map(str, files))}]"))
    assert chat == expected(tokenizer, conversations(1)[0], PLAIN)
    assert tokens == ([1, 2, 3], [IGNORED, IGNORED, 3])
    assert text[1][1:] == text[0][1:] and text[0][-1] == tokenizer.eos_token_id


def test_a_data_set_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "set").mkdir()
    chats = conversations(6)
    write(tmp_path / "set" / "train.jsonl", [{"messages": turns} for turns in chats])
    write(tmp_path / "set" / "test.jsonl", [{"messages": turns} for turns in chats[:2]])
    tokenizer = chat_tokenizer()
    wanted = [expected(tokenizer, turns, PLAIN) for turns in chats]
    name = f"{{dataset: {tmp_path / 'set'}}}"
    assert items(data_of(tmp_path, tokenizer, name)) == wanted
    some = f"{{dataset: {tmp_path / 'set'}, split: 'train[2:5]'}}"
    assert items(data_of(tmp_path, tokenizer, some)) == wanted[2:5]
    with pytest.raises(BadInput, match="no path here and was not read from the hub: .*tarin"):
        data_of(tmp_path, tokenizer, f"{{dataset: {tmp_path / 'set'}, split: tarin}}")


def test_a_name_without_a_network_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no-such-organisation/no-such-set", "{dataset: no-such-set}"):
        with pytest.raises(BadInput, match="data.train: expected a file, a folder") as caught:
            data_of(tmp_path, chat_tokenizer(), name)
        assert "\n" not in str(caught.value)
        assert "no path here and was not read from the hub" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (FORGETFUL, {"messages": TURNS * 2}, "turn 1 is written otherwise once another follows"),
        (PLAIN, {"messages": TURNS[::-1]}, "the conversation begins with the assistant"),
        (PLAIN, {"messages": TURNS[:1]}, "expected tokens to predict .*got none among"),
        (None, {"messages": TURNS}, "expected a tokenizer with a chat template"),
        (PLAIN, {"messages": []}, "data.messages_field: .*expected a list of messages"),
        (PLAIN, {"messages": "hi"}, "data.messages_field: .*expected a list of messages, got str"),
        (PLAIN, {"messages": [{"from": "human"}]}, "messages with role and content, got from"),
        ("{{ raise_exception('no!') }}", {"messages": TURNS}, "row 0 of .*r.jsonl: no!"),
        (PLAIN, {"messages": TURNS, "tools": "[1"}, "data.messages_field: .*row 0"),
        (PLAIN, {"messages": TURNS, "text": "a"}, "data.kind: expected one of messages, text"),
        (PLAIN, {"prompt": "a", "completion": 3}, "data.completion_field: expected text"),
        (PLAIN, {"prompt": "a", "completions": ""}, "data.text_field: expected a column"),
        (PLAIN, {"input_ids": [1, 10**6]}, "expected ids below the model's .* embeddings"),
        (PLAIN, {"input_ids": ["a"]}, "expected a list of ints in column 'input_ids', got row 0"),
        (PLAIN, {"input_ids": [1, 2], "labels": [2, 3]}, "each its own token or -100"),
        (PLAIN, {"input_ids": [1, 2], "labels": [2]}, "expected as many labels as input_ids, 2"),
        (PLAIN, {"input_ids": [1, 2], "loss_mask": [0, 2]}, "expected 0 and 1 in column"),
        (
            PLAIN,
            {"input_ids": [1, 2], "loss_mask": [0, 1], "labels": [1, 2]},
            "expected labels or loss_mask, got both",
        ),
    ],
)
def test_unusable_rows_are_named(
    tmp_path: Path, template: str | None, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        data_of(tmp_path, chat_tokenizer(template), write(tmp_path / "r.jsonl", [row]))


def test_a_kind_that_is_asked_for(tmp_path: Path) -> None:
    rows = [{"messages": TURNS, "text": "some words"}]
    file = write(tmp_path / "r.jsonl", rows)
    [(ids, labels)] = items(data_of(tmp_path, chat_tokenizer(), file, "data.kind=text"))
    assert labels[1:] == ids[1:]
    with pytest.raises(BadInput, match="data.prompt_field: expected a column .*got 'prompt'"):
        data_of(tmp_path, chat_tokenizer(), file, "data.kind=completion")


def test_another_template(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(MARKED)
    file = write(tmp_path / "r.jsonl", [{"messages": TURNS * 2}])
    tokenizer = chat_tokenizer(FORGETFUL)
    [found] = items(data_of(tmp_path, tokenizer, file, f"data.chat_template={tmp_path}/own.jinja"))
    assert found == expected(tokenizer, TURNS * 2, MARKED)
    with pytest.raises(BadInput, match="data.chat_template: expected a file of Jinja, or trl"):
        data_of(tmp_path, tokenizer, file, "data.chat_template=none.jinja")


def test_templates_of_trl() -> None:
    """Qwen3's leaves earlier thoughts out and has no marks; TRL's for it does neither."""
    templates = pytest.importorskip("trl.chat_template_utils")
    tokenizer = chat_tokenizer(templates.qwen3_chat_template)
    found = chat_template(tokenizer, "trl")
    assert isinstance(found, ChatTemplate) and found.marked
    text, spans = found.conversation(TURNS * 2)
    assert [text[begin:end] for begin, end in spans] == ["<think>\n\n</think>\n\nb<|im_end|>\n"] * 2
    with pytest.raises(BadInput, match="expected a template that TRL knows"):
        chat_template(chat_tokenizer(PLAIN), "trl")
