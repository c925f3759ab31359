"""Conversations: each label is what a naive reading gives."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from rows_for_tests import (
    IGNORED,
    MARKED,
    PLAIN,
    chat_tokenizer,
    conversations,
    data_of,
    expected,
    items,
    write,
)
from tiny_runs import prepare, run, tiny_model
from tokenizers_for_tests import KINDS

import oomb
from oomb.train import documents
from oomb.train.sequences import collate


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("kind", ["qwen", "gpt2", "llama2"])
def test_the_assistants_turns_are_predicted(tmp_path: Path, template: str, kind: str) -> None:
    tokenizer, chats = chat_tokenizer(template, kind), conversations(12)
    file = write(tmp_path / "chats.jsonl", [{"messages": turns, "id": 1} for turns in chats])
    found = items(data_of(tmp_path, tokenizer, file))
    assert found == [expected(tokenizer, turns, template) for turns in chats]
    for turns, (ids, _) in zip(chats, found, strict=True):
        assert ids == tokenizer.apply_chat_template(turns, return_dict=False)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_spaces_of_an_answer_are_predicted(tmp_path: Path, kind: str) -> None:
    """Code, say, where lines begin with spaces and some tokens are nothing but spaces."""
    prompt, completion = "def f(x):\n", "    return x\n        y  = 2\n\n    "
    tokenizer = chat_tokenizer(None, kind)
    file = write(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": completion}])
    [(ids, labels)] = items(data_of(tmp_path, tokenizer, file, "data.add_eos=false"))
    begin = next(place for place, label in enumerate(labels) if label != IGNORED)
    assert labels[begin:] == ids[begin:]
    assert 0 < begin <= len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


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
