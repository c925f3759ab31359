"""Tables: JSON as it is written, tables without rows, rows that lack something, by name."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from rows_for_tests import PLAIN, TURNS, chat_tokenizer, data_of, items, write
from test_tasks import CHAT, pairs, prepare
from transformers import AutoTokenizer

from oomb.train import generated
from oomb.train.errors import BadInput
from oomb.train.examples import ExampleRule, examples_of
from oomb.train.image_examples import ImageRule, image_examples
from oomb.train.reading import read_settings
from oomb.train.sources import Source, find_sources, rows
from oomb.train.tasks import TASKS

LATER = 10 << 20  # bytes of a file that other readers take the types of its columns from


def read(file: Path | str, format: str = "auto") -> list[dict[str, Any]]:
    sources = find_sources("data.train", [str(file)], format)
    return [row for source in sources for row in rows(source)]


# JSON ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["2024-01-01", "2024-01-01T12:00:00", "12:30", "1e5", "true", "null", "line\u2028 \x85 end"],
)
def test_text_stays_text(tmp_path: Path, text: str) -> None:
    wanted = [{"text": text, "more": {"when": text, "list": [text]}}] * 2
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in wanted), "utf-8")
    assert read(file) == wanted


def test_columns_that_come_late_and_types_that_widen(tmp_path: Path) -> None:
    early = [{"text": "x" * 1000, "n": 1, "m": []}] * (LATER // 1000 + 100)
    late: list[dict[str, Any]] = [
        {"text": "y", "n": 1.5, "new": {"a": 1}, "m": [{"role": "user"}]},
        {"text": "z", "n": "one", "m": None},
    ]
    file = write(tmp_path / "a.jsonl", [*early, *late])
    found = read(file)
    assert len(found) == len(early) + 2 and found[0] == early[0] and found[-2:] == late


def test_values_that_are_not_one_a_line(tmp_path: Path) -> None:
    wanted: list[dict[str, Any]] = [{"text": "a"}, {"text": "b", "n": [1]}]
    objects = [json.dumps(row) for row in wanted]
    contents = {
        "array.json": json.dumps(wanted),
        "lines.json": json.dumps(wanted, indent=1),
        "arrays.jsonl": "".join(f"[{line}]\n" for line in objects),
        "pretty.json": "\n".join(json.dumps(row, indent=1) for row in wanted),
        "blank.jsonl": "\n  \n{}\n\n{}".format(*objects),
        "one.jsonl": " ".join(objects),
        "ends.jsonl": "\r\n".join(objects),
        "mark.jsonl": "\ufeff" + "\n".join(objects),
        "mark.json": "\ufeff" + json.dumps(wanted, indent=1),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, "utf-8", newline="")
        assert read(tmp_path / name) == wanted, name
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(objects).encode()))
    assert read(tmp_path / "a.jsonl.gz", "jsonl") == wanted
    (tmp_path / "pair.jsonl").write_text('{"text": "\\ud83d\\ude42"}')
    assert read(tmp_path / "pair.jsonl") == [{"text": "🙂"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "line 3: Expecting value, at character 9"),
        (b'{"text": "a"} b', "line 3: Expecting value, at character 15"),
        (b'{"text": "a\xff"}', "line 3: no UTF-8, invalid start byte"),
        (b'{"text": "a\\ud800b"}', "line 3: half of a surrogate pair"),
        (b'"text"', "line 3: expected an object, got str"),
        (b"null", "line 3: expected an object, got null"),
        (b"[1]", "line 3: expected an object, got int"),
        (b'{\n"text": "a",\n}', "line 5: "),
        (b'{"a": ' * 100_000, "line 3: "),
        (b'{"n": ' + b"9" * 10_000 + b"}", "line 3: "),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(BadInput, match=f"data: expected JSONL, got .*a.jsonl: {message}") as caught:
        read(tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:40])
    with pytest.raises(BadInput, match=r"data: expected JSONL, got .*a\.jsonl\.gz: "):
        read(tmp_path / "a.jsonl.gz", "jsonl")


# Tables without rows ------------------------------------------------------------------------------


def empty_tables(folder: Path) -> dict[str, Path]:
    contents = {"a.jsonl": "", "b.jsonl": "\n\n", "c.json": "[]", "d.csv": "", "e.csv": "text,n\n"}
    for name, content in contents.items():
        (folder / name).write_text(content)
    (folder / "f.parquet").touch()
    table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, folder / "g.parquet")
    with pyarrow.ipc.new_stream(str(folder / "h.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "i.arrow").touch()
    names = [*contents, "f.parquet", "g.parquet", "h.arrow", "i.arrow"]
    return {name: folder / name for name in names}


def test_tables_without_rows_are_left_out(tmp_path: Path) -> None:
    for file in empty_tables(tmp_path).values():
        good = write(tmp_path / "good.jsonl", [{"text": "good"}])
        for names in ([file, good], [good, file]):
            with pytest.warns(
                UserWarning,
                match=f"data.train: expected rows in each table, got none in .*{file.name}",
            ):
                assert [each.path for each in find_sources("data.train", map(str, names))] == [
                    str(good)
                ]
    (tmp_path / "empty.txt").touch()  # of which a repository has many
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = find_sources("data.train", [str(good), str(tmp_path / "empty.txt")])
    assert len(found) == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_data_with_empty_tables_among_it(tmp_path: Path, processes: int) -> None:
    empty_tables(tmp_path)
    write(tmp_path / "j.jsonl", [{"text": ""}])
    write(tmp_path / "k.jsonl", [{"text": "good words"}])
    (tmp_path / "l.txt").touch()
    tokenizer = chat_tokenizer()
    files = f"{tmp_path}/[a-l].*"
    with pytest.warns(UserWarning, match="data.train: expected rows"):
        data = data_of(tmp_path, tokenizer, repr(files), f"data.num_proc={processes}")
    [(ids, _)] = items(data)
    assert ids == [*tokenizer.encode("good words"), tokenizer.eos_token_id]


def test_data_without_any_row(tmp_path: Path) -> None:
    for name, file in empty_tables(tmp_path).items():
        wanted = f"data.train: expected at least one row, got none in .*{name}$"
        with pytest.raises(BadInput, match=wanted):
            data_of(tmp_path, chat_tokenizer(), file)
    for name, row in (("text", {"text": ""}), ("tokens", {"input_ids": []})):
        file = write(tmp_path / f"{name}.jsonl", [row] * 3)
        with pytest.raises(BadInput, match="data.train: expected at least two tokens .* got 0$"):
            data_of(tmp_path, chat_tokenizer(), file)


def test_groups_without_rows_in_a_parquet_file(tmp_path: Path) -> None:
    none = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    some = pyarrow.table({"text": ["a", "b"]})
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", some.schema) as writer:
        for table in (none, some, none, some):
            writer.write_table(table)
    assert [row["text"] for row in read(tmp_path / "a.parquet")] == ["a", "b"] * 2


# Examples of TRL's tasks --------------------------------------------------------------------------


def examples(folder: Path, found: list[dict[str, Any]], task: str = "dpo") -> Any:
    file = prepare(folder, task)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = CHAT
    rule = ExampleRule(TASKS[task], read_settings(file), tokenizer)
    written = write(folder / "own.jsonl", found)
    source = Source(str(written), "jsonl", (written.stat().st_size, 1))
    return examples_of("data.train", [source], rule, str(folder / "cache")).dataset


def test_examples_without_rows(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="data.train: expected at least one row, got none$"):
        examples(tmp_path, [])


def test_examples_whose_columns_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "_BATCH", 3)
    row = pairs(1)[0]
    found = examples(tmp_path, [row] * 2000 + [{**row, "chat_template_kwargs": {"more": True}}])
    assert found[0]["chat_template_kwargs"] is None
    assert found[2000]["chat_template_kwargs"] == {"more": True}
    assert found[0]["chosen"] == found[2000]["chosen"] == row["chosen"]


def test_examples_that_do_not_go_together(tmp_path: Path) -> None:
    texts = {name: pairs(1)[0][name] for name in ("chosen", "rejected")}
    with pytest.raises(BadInput, match=r"a prompt in every row or in none, got one in row 1 .*own"):
        examples(tmp_path, [texts, pairs(1)[0]])
    some = {"prompt": pairs(1)[0]["prompt"]}
    with pytest.raises(BadInput, match="data.train: expected values of one type in column 'n'"):
        examples(tmp_path, [{**some, "n": 1}, {**some, "n": "a"}], "grpo")


def test_images_without_rows(tmp_path: Path) -> None:
    class Rule(ImageRule):
        def __init__(self) -> None:
            pass

        def __reduce__(self) -> tuple[Any, ...]:
            return str, ("rule",)

    source = Source(str(write(tmp_path / "a.jsonl", [])), "jsonl", (0, 0))
    with pytest.raises(BadInput, match="data.train: expected at least one row, got none$"):
        image_examples("data.train", [source], Rule(), str(tmp_path / "cache"))


# Kinds and rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["messages", "completion", "tokens"])
def test_a_text_file_is_of_no_other_kind(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.txt").write_text("some words")
    for fitting in ("auto", "text"):
        data_of(tmp_path, chat_tokenizer(), tmp_path / "a.txt", f"data.kind={fitting}")
    message = f"data.kind: expected 'auto' or 'text' for the text file .*a.txt, got '{kind}'"
    with pytest.raises(BadInput, match=message):
        data_of(tmp_path, chat_tokenizer(), tmp_path / "a.txt", f"data.kind={kind}")


NULL_PROMPT = "data.prompt_field: expected text or messages in column 'prompt', got null in row 1 "
NO_COMPLETION = "data.completion_field: expected text in column 'completion', got no such column "


@pytest.mark.parametrize(
    ("template", "good", "bad", "message"),
    [
        (None, ["a", "b"], {"prompt": None, "completion": "b"}, NULL_PROMPT),
        (PLAIN, ["a", "b"], {"prompt": None, "completion": "b"}, NULL_PROMPT),
        (PLAIN, ["a", "b"], {"completion": "b"}, NULL_PROMPT.replace("null", "no such column")),
        (PLAIN, ["a", "b"], {"prompt": "a"}, NO_COMPLETION + "in row 1 of"),
        (
            PLAIN,
            [TURNS[:1], TURNS[1:]],
            {"prompt": TURNS[:1], "completion": []},
            "data.completion_field: expected a list of messages, got an empty one in column "
            "'completion' of row 1 of",
        ),
        (
            PLAIN,
            [TURNS[:1], TURNS[1:]],
            {"prompt": TURNS[:1], "completion": None},
            "data.completion_field: expected a list of messages, got null in column 'completion' ",
        ),
        (
            None,
            TURNS,
            {"messages": []},
            "data.messages_field: expected a list of messages, got an empty one in column "
            "'messages' of row",
        ),
        (
            PLAIN,
            TURNS,
            {"messages": None},
            "data.messages_field: expected a list of messages, got null in column 'messages' of "
            "row 1 of",
        ),
        (PLAIN, "words", {"txt": "a"}, "expected text in column 'text', got no such column in row"),
        (PLAIN, "words", {"text": None}, "expected text in column 'text', got null in row 1"),
    ],
)
def test_rows_that_lack_something_are_named(
    tmp_path: Path, template: str | None, good: Any, bad: dict[str, Any], message: str
) -> None:
    if isinstance(good, str):
        first: dict[str, Any] = {"text": good}
    elif "messages" in bad:
        first = {"messages": good}
    else:
        first = dict(zip(("prompt", "completion"), good, strict=True))
    found = [first, bad] if template is not None or "messages" not in bad else [bad]
    with pytest.raises(BadInput, match=message):
        data_of(tmp_path, chat_tokenizer(template), write(tmp_path / "r.jsonl", found))


def test_masks_that_come_late(tmp_path: Path) -> None:
    known = [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5], "loss_mask": [1, 0, 1]}]
    found = items(data_of(tmp_path, chat_tokenizer(), write(tmp_path / "r.jsonl", known)))
    assert [labels for _, labels in found] == [[-100, 2], [-100, -100, 5]]
