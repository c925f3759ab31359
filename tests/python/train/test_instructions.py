"""Conversations, completions and tokens with masks: each label is what a naive reading gives."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tiny_runs import prepare, run, tiny_model
from tokenizers import AddedToken
from tokenizers_for_tests import KINDS
from transformers import PreTrainedTokenizerFast

import oomb
from oomb.train import documents
from oomb.train.chat import ChatTemplate, chat_template
from oomb.train.data import Data, find_data, prepare_data, tokenising_rule
from oomb.train.errors import BadInput
from oomb.train.reading import read_settings
from oomb.train.sequences import collate

IGNORED = -100
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As templates of models that think: what an earlier turn thought is left out.
FORGETFUL = PLAIN.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>",
)
WORDS = ["The", "quick", "brown", "fox", "—", "naïve", "coöperation,", "3.14159;", "it's"]
WORDS += ["they've", "日本語", "🙂", "\n", "\t", "", ""]


def chat_tokenizer(template: str | None = PLAIN, kind: str = "qwen") -> PreTrainedTokenizerFast:
    backend = KINDS[kind]()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def conversations(number: int, seed: int = 0) -> list[list[dict[str, str]]]:
    draw, found = random.Random(seed), []
    for _ in range(number):
        turns = [{"role": "system", "content": sentence(draw, 5)}] * draw.randint(0, 1)
        for _ in range(draw.randint(1, 3)):
            turns.append({"role": "user", "content": sentence(draw, draw.randint(1, 30))})
            turns.append({"role": "assistant", "content": sentence(draw, draw.randint(1, 30))})
        found.append(turns)
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data_of(
    folder: Path, tokenizer: PreTrainedTokenizerFast, file: Path | str, *overrides: str
) -> Data:
    settings_file = folder / "settings.yaml"
    settings_file.write_text(
        f"output_dir: {folder}/run\nmodel: {{name: m}}\ncontext: 4096\n"
        f"data: {{train: {file}, num_proc: 1, cache_dir: {folder}/cache}}\n"
    )
    settings = read_settings(settings_file, overrides)
    rule = tokenising_rule(settings.data, tokenizer, len(tokenizer))
    return prepare_data(settings, find_data(settings.data), rule)


def items(data: Data) -> list[tuple[list[int], list[int]]]:
    every = [data.train[index] for index in range(len(data.train))]
    return [(item["input_ids"].tolist(), item["labels"].tolist()) for item in every]


# A turn ends at <|im_end|> by its marks, and with the line by what it adds to the text.
def expected(
    tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, str]], template: str
) -> tuple[list[int], list[int]]:
    """By the tokens alone: from behind an assistant's header until its end."""
    text = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    counts, place = [False] * len(text), 0
    for turn in turns:
        header, rest = f"<|im_start|>{turn['role']}\n", f"{turn['content']}<|im_end|>"
        place += len(header)
        if turn["role"] == "assistant":
            behind = place + len(rest) + (template != MARKED)
            counts[place:behind] = [True] * (behind - place)
        place += len(rest) + 1
    labels = [
        token if any(counts[begin:end]) else IGNORED
        for token, (begin, end) in zip(ids, offsets, strict=True)
    ]
    return ids, [IGNORED, *labels[1:]]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("kind", ["qwen", "gpt2", "llama2"])
def test_the_assistants_turns_are_predicted(tmp_path: Path, template: str, kind: str) -> None:
    tokenizer, chats = chat_tokenizer(template, kind), conversations(12)
    file = write(tmp_path / "chats.jsonl", [{"messages": turns, "id": 1} for turns in chats])
    found = items(data_of(tmp_path, tokenizer, file))
    assert found == [expected(tokenizer, turns, template) for turns in chats]
    for turns, (ids, _) in zip(chats, found, strict=True):
        assert ids == tokenizer.apply_chat_template(turns, return_dict=False)


def test_marks_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer, chats = chat_tokenizer(MARKED), conversations(8, seed=3)
    file = write(tmp_path / "chats.jsonl", [{"messages": turns} for turns in chats])
    for turns, (ids, labels) in zip(chats, items(data_of(tmp_path, tokenizer, file)), strict=True):
        stock = tokenizer.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == stock["input_ids"]
        assert [int(label != IGNORED) for label in labels] == stock["assistant_masks"]


def test_borders_of_segments_do_not_move_a_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, chats = chat_tokenizer(), conversations(4, seed=7)
    file = write(tmp_path / "chats.jsonl", [{"messages": turns} for turns in chats])
    whole = items(data_of(tmp_path, tokenizer, file))
    monkeypatch.setattr(documents, "SEGMENT", 90)
    monkeypatch.setattr(documents.cut, "__defaults__", (90, 40))
    cache = f"data.cache_dir={tmp_path / 'other'}"
    assert items(data_of(tmp_path, tokenizer, file, cache)) == whole


@pytest.mark.parametrize("arrange", ["windows", "packed"])
@pytest.mark.parametrize("context", [7, 33, 64, 150, 1000])
def test_masks_stay_with_their_tokens(tmp_path: Path, arrange: str, context: int) -> None:
    tokenizer, chats = chat_tokenizer(), conversations(20, seed=1)
    file = write(tmp_path / "chats.jsonl", [{"messages": turns} for turns in chats])
    data = data_of(tmp_path, tokenizer, file, f"data.arrange={arrange}", f"context={context}")
    wanted = []
    for turns in chats:
        ids, labels = expected(tokenizer, turns, PLAIN)
        for begin in range(0, len(ids), context):
            piece = ids[begin : begin + context], labels[begin : begin + context]
            piece[1][0] = IGNORED
            if any(label != IGNORED for label in piece[1]):
                wanted.append(piece)
    found = []
    for item in (data.train[index] for index in range(len(data.train))):
        assert len(item["input_ids"]) <= context
        starts = [*(item["position_ids"] == 0).nonzero().flatten().tolist(), len(item["labels"])]
        for begin, end in itertools.pairwise(starts):
            assert item["position_ids"][begin:end].tolist() == list(range(end - begin))
            found.append(
                (item["input_ids"][begin:end].tolist(), item["labels"][begin:end].tolist())
            )
    assert sorted(found) == sorted(wanted)
    total = sum(label != IGNORED for _, labels in wanted for label in labels)
    assert data.train.num_targets == total


def test_a_step_is_that_of_transformers(tmp_path: Path) -> None:
    """Packed and padded conversations: loss and gradients of each by itself, over all targets."""
    tokenizer, chats = chat_tokenizer(), conversations(9, seed=2)
    file = write(tmp_path / "chats.jsonl", [{"messages": turns} for turns in chats])
    data = data_of(tmp_path, tokenizer, file, "data.arrange=packed", "context=400")
    batch = collate([data.train[index] for index in range(len(data.train))])
    assert len(data.train) < len(chats)
    model = tiny_model(vocab_size=len(tokenizer)).double()
    reference = [expected(tokenizer, turns, PLAIN) for turns in chats]
    targets = sum(label != IGNORED for _, labels in reference for label in labels)
    total = 0.0
    for ids, labels in reference:
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        # Not by the model itself, which takes the loss in fp32.
        loss = torch.nn.functional.cross_entropy(
            logits, torch.tensor(labels[1:]), reduction="sum", ignore_index=IGNORED
        )
        loss = loss / targets
        loss.backward()
        total += loss.item()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with oomb.Engine(model, oomb.Config(chunk_size=64, page_size=16)) as engine:
        step = engine.forward_backward(**batch)
    assert step.num_valid_tokens == targets
    assert float(step.loss) == pytest.approx(total, rel=1e-12)
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-12)


# Prompts and completions --------------------------------------------------------------------------


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


def test_other_columns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    rows = [{"instruction": "a b", "output": " c d"}]
    names = "data.prompt_field=instruction", "data.completion_field=output"
    [(ids, labels)] = items(data_of(tmp_path, tokenizer, write(tmp_path / "r.jsonl", rows), *names))
    after = [*tokenizer.encode(" c d"), tokenizer.eos_token_id]
    assert ids == [*tokenizer.encode("a b"), *after]
    assert labels == [IGNORED] * (len(ids) - len(after)) + after


# Tokens -------------------------------------------------------------------------------------------


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


# The hub ------------------------------------------------------------------------------------------


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


# What is refused ----------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


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


# As a run -----------------------------------------------------------------------------------------


def test_a_run_on_conversations(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    file = prepare(tmp_path, context=512, training={"steps": 2})
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    chats = write(tmp_path / "c.jsonl", [{"messages": turns} for turns in conversations(12)])
    result = run(file, f"data.train={chats}", "data.arrange=packed")
    assert result.exit_code == 0, result.output
    assert " of them predicted" in result.output


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("bad", ["first", "last"])
def test_one_bad_file_of_several_is_one_line(tmp_path: Path, processes: int, bad: str) -> None:
    file = prepare(tmp_path)
    rows = ['{"text": "good"}'] * 20
    for number in range(3):
        write(tmp_path / f"{number}.jsonl", [{"text": "some text"}] * 20)
    rows[0 if bad == "first" else -1] = '{"text": 5}'
    (tmp_path / "1.jsonl").write_text("\n".join(rows) + "\n")
    train, number = f"data.train={tmp_path}/?.jsonl", f"data.num_proc={processes}"
    result = run(file, train, number)
    assert result.exit_code == 2, result.output
    lines = result.output.strip().splitlines()
    assert lines[-1].startswith("data") and "1.jsonl" in lines[-1]
    assert "Traceback" not in result.output and not (tmp_path / "run").exists()
    dry = run(file, train, "--dry-run")
    assert dry.exit_code == (2 if bad == "first" else 0), dry.output
