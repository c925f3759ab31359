"""Documents in segments: nothing lost, nothing twice, the tokens of the whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer
from tokenizers_for_tests import KINDS, WORDS

from oomb.train import documents
from oomb.train.documents import cut, segments
from oomb.train.errors import BadInput
from oomb.train.rows import RowRule
from oomb.train.sources import find_sources
from oomb.train.tokenise import Rule, tokens_of

SIZE, OVERLAP = 300, 60  # characters; words of the tests are shorter


def blocks(text: str, size: int) -> list[str]:
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


def random_text(seed: int, length: int) -> str:
    draw, parts = random.Random(seed), []
    words = " ".join(WORDS).split(" ")
    while sum(map(len, parts)) < length:
        parts.append(draw.choice(words) + draw.choice([" ", " ", " ", "\n", "  ", "\n\n", "\t"]))
    return "".join(parts)[:length]


@pytest.mark.parametrize("block", [1, 7, 100, 299, 300, 301, 5000])
@pytest.mark.parametrize("length", [0, 1, 299, 300, 359, 360, 361, 5000])
def test_segments_join_to_the_text(block: int, length: int) -> None:
    text = random_text(length, length)
    found = list(cut(blocks(text, block), SIZE, OVERLAP))
    assert "".join(part[start:end] for part, start, end, _ in found) == text
    assert [last for *_, last in found] == [False] * (len(found) - 1) + [True] * bool(found)
    assert all(end - start <= SIZE + OVERLAP for _, start, end, _ in found)
    for part, start, end, last in found:
        assert last or len(part) - end == OVERLAP
        assert start in (0, OVERLAP)


def test_borders_lie_before_words() -> None:
    text = random_text(1, 5000)
    for part, _, end, last in cut([text], SIZE, OVERLAP):
        assert last or (part[end - 1].isspace() and not part[end].isspace())


def test_a_text_without_words_is_cut_all_the_same() -> None:
    found = list(cut(["x" * 1000], SIZE, OVERLAP))
    assert [end - start for _, start, end, _ in found] == [300, 300, 300, 100]


def tokens_by_segments(
    tokenizer: Tokenizer, text: str, before: tuple[int, ...] = (), after: tuple[int, ...] = ()
) -> list[int]:
    found = list(cut(blocks(text, 64), SIZE, OVERLAP))
    assert len(found) > 5
    batch: dict[str, list[Any]] = {"document": [0] * len(found)}
    for number, name in enumerate(("text", "start", "end", "last")):
        batch[name] = [segment[number] for segment in found]
    batch |= {"spans": [None] * len(found), "complete": [False] * len(found)}
    batch |= {"input_ids": [[] for _ in found], "counted": [None] * len(found)}
    rows = tokens_of(batch, Rule(tokenizer.to_str(), before, after))["input_ids"]
    return [token for row in rows for token in row]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_the_whole(kind: str, seed: int) -> None:
    tokenizer, text = KINDS[kind](), random_text(seed, 4000)
    assert tokens_by_segments(tokenizer, text) == tokenizer.encode(text).ids


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama2"])
def test_tokens_across_borders_inside_long_words(kind: str) -> None:
    # No white space to cut at: each border falls into a number or a word.
    draw = random.Random(0)
    words = ["snake_case", "3141592653", "CamelCase", "::", "naïve", "日本語"]
    text = "".join(draw.choice(words) for _ in range(400))
    tokenizer = KINDS[kind]()
    assert tokens_by_segments(tokenizer, text) == tokenizer.encode(text).ids


def test_begin_and_end_tokens_stand_once() -> None:
    tokenizer, text = KINDS["gpt2"](), random_text(0, 2000)
    ids = tokens_by_segments(tokenizer, text, (1001,), (1002, 1003))
    assert ids == [1001, *tokenizer.encode(text).ids, 1002, 1003]


# Files --------------------------------------------------------------------------------------------


def read(path: Path | str, format: str = "auto", text_field: str = "text") -> list[str]:
    sources = find_sources("data.train", [str(path)], format)
    found: dict[int, str] = {}
    for segment in segments(list(enumerate(sources)), RowRule(text_field=text_field)):
        text = segment["text"][segment["start"] : segment["end"]]
        found[segment["document"]] = found.get(segment["document"], "") + text
    assert list(found) == sorted(found)
    return list(found.values())


def write_parquet(path: Path, rows: list[dict[str, object]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SEGMENT", SIZE)
    monkeypatch.setattr(documents.cut, "__defaults__", (SIZE, OVERLAP))


def test_names_that_look_like_patterns(tmp_path: Path) -> None:
    for name in ("part1.jsonl", "part[1].jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": f"I am {name}"}) + "\n")
    assert read(tmp_path / "part[1].jsonl") == ["I am part[1].jsonl"]
    assert read(tmp_path) == ["I am part1.jsonl", "I am part[1].jsonl"]


def test_tables_with_tabs_in_capital_letters(tmp_path: Path) -> None:
    (tmp_path / "a.TSV").write_text("text\tother\na, b, and c\t1\n")
    assert read(tmp_path / "a.TSV") == ["a, b, and c"]


@pytest.mark.usefixtures("small_segments")
def test_text_jsonl_and_parquet_hold_the_same_documents(tmp_path: Path) -> None:
    texts = [random_text(seed, 2000 * seed + 5) for seed in range(3)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    rows = [{"text": text, "id": number} for number, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_parquet(tmp_path / "a.parquet", rows)
    assert read(tmp_path / "*.txt") == texts
    assert read(tmp_path / "a.jsonl") == texts
    assert read(tmp_path / "a.parquet") == texts


def test_another_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    assert read(tmp_path / "a.jsonl", text_field="body") == ["one", "two"]


def test_folders_are_read_by_name_and_suffix(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b/2.txt", "a.md", ".hidden/x.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "c.jsonl").write_text('{"text": "row"}\n')
    (tmp_path / "d.csv").write_text('n,text\n1,"a ""row"", of\ntwo lines"\n2,003\n')
    (tmp_path / "e.tsv").write_text("text\tn\nb, c\t1\n")
    rows = ["row", 'a "row", of\ntwo lines', "003", "b, c"]
    assert read(tmp_path) == ["a.md", "b/2.txt", *rows]
    assert len(read(tmp_path, format="text")) == 5


def test_linked_folders_are_read_as_a_pattern_reads_them(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for place in (folder / "in", elsewhere / "deep"):
        place.mkdir(parents=True)
    for name in ("folder/1.txt", "folder/in/2.txt", "elsewhere/3.txt", "elsewhere/deep/4.txt"):
        (tmp_path / name).write_text(name)
    (folder / "linked").symlink_to(elsewhere)
    (folder / "again").symlink_to(elsewhere)  # its files come twice, as they do by a pattern
    found = read(folder)
    assert len(found) == 6 and found == read(folder / "**" / "*.txt")
    (elsewhere / "back").symlink_to(folder)  # round in a circle
    assert read(folder) == found


@pytest.mark.parametrize(("name", "kind"), [("b.txt", "UTF-8 text"), ("b.csv", "CSV")])
def test_a_file_that_is_gone_is_named(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("text\nrow\n")
    sources = find_sources("data.train", [str(tmp_path / name)])
    (tmp_path / name).unlink()
    with pytest.raises(BadInput, match=rf"^data: expected {kind}, got .*{name}: .*No such file"):
        list(segments(list(enumerate(sources)), RowRule()))


@pytest.mark.parametrize("inside", [False, True])
def test_files_of_unknown_suffixes_are_refused_by_name(tmp_path: Path, inside: bool) -> None:
    (tmp_path / "a.md").write_text("text")
    file = tmp_path / "picture.png"
    file.write_bytes(b"\x89PNG")
    with pytest.raises(BadInput, match=r"text by its suffix, got .*picture\.png; data.format=text"):
        read(tmp_path if inside else file)


def test_a_data_set_saved_by_datasets(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == ["a", "b"]


def test_line_ends_stay(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert read(tmp_path / "a.txt") == ["a\r\nb\rc\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "expected text, got empty files"),
        ("a.txt", b"good \xff\xfe bad", "expected UTF-8 text, got .*a.txt"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "expected JSONL, got .*a.jsonl"),
        ("a.jsonl", b'{"txt": "a"}\n', "data.text_field: .*got 'text'; did you mean 'txt'?"),
        ("a.jsonl", b'{"text": 3}\n', "expected text in column 'text', got int in row 0"),
        ("a.jsonl", b'{"text": null}\n', "expected text in column 'text', got null in row 0"),
        ("a.parquet", b"PAR1 no", "expected Parquet, got .*a.parquet"),
        ("a.arrow", b"ARROW no", "expected Arrow, got .*a.arrow"),
        ("a.csv", b"text,n\na,1,2\n", "expected CSV, got .*a.csv: row 0 has not as many columns"),
        ("a.csv", b"text,n\na\n", "expected CSV, got .*a.csv: row 0 has not as many columns"),
        ("a.csv", b'text\n"a', "expected CSV, got .*a.csv: unexpected end of data"),
        ("a.csv", b"text\n\xff\xfe\n", "expected CSV, got .*a.csv: invalid start byte"),
        ("a.csv", b"body,n\na,1\n", "data.text_field: .*got 'text' \\(columns: body, n\\)"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read(tmp_path / name)


def test_a_missing_file_has_a_nearest(tmp_path: Path) -> None:
    (tmp_path / "books.txt").write_text("x")
    with pytest.raises(BadInput, match=r"data.train: .*does not exist; did you mean 'books.txt'"):
        read(tmp_path / "boks.txt")
    with pytest.raises(BadInput, match="leads to none"):
        read(tmp_path / "*.md")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BadInput, match=r"a\.txt: Permission denied"):
        read(file)
