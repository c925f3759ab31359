"""What a run's observer is told, and which columns of the data reach the engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

import oomb
from oomb.core.inputs import check_inputs
from oomb.hf import Trainer
from oomb.hf.batch import counted_labels, engine_arguments, num_targets
from oomb.monitor import METRICS_FILE, RunMonitor, read_metrics

from .runs import CONFIG, arguments, logged, model, packed


class Recorder:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *told: self.events.append((name, told))

    def of(self, name: str) -> list[Any]:
        return [told for event, told in self.events if event == name]


def test_a_metric_of_ones_own_is_not_the_evaluations_loss(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = Trainer(
        model(),
        arguments(tmp_path),
        eval_dataset=packed(3),
        compute_metrics=lambda _: {"contrast_loss": 123.0, "a_runtime": -1.0},
        oomb_config=CONFIG,
        observer=recorder,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_contrast_loss"] == 123.0
    (evaluated,) = recorder.of("on_eval")[0]
    assert evaluated["loss"] == metrics["eval_loss"]
    assert evaluated["seconds"] == metrics["eval_runtime"]


def targets(rows: list[dict[str, list[int]]]) -> int:
    return sum(num_targets({k: torch.tensor([v]) for k, v in row.items()}) for row in rows)


def test_several_evaluation_sets_are_named(tmp_path: Path) -> None:
    monitor = RunMonitor(tmp_path / "run", display=False)
    trainer = Trainer(
        model(),
        arguments(
            tmp_path,
            max_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            metric_for_best_model="eval_b_loss",
        ),
        train_dataset=packed(),
        eval_dataset={"a": packed(3), "b": packed(2, seed=4)},
        oomb_config=CONFIG,
        observer=monitor,
    )
    trainer.train()
    last = trainer.evaluate(packed(4, seed=5))
    tested = trainer.evaluate(packed(4, seed=6), metric_key_prefix="test")
    metrics = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert metrics.start["metric_for_best_model"] == "eval_b_loss"
    expected = []
    for step, losses in enumerate(
        zip(logged(trainer, "eval_a_loss"), logged(trainer, "eval_b_loss"), strict=True), start=1
    ):
        expected.append((step, "eval_a", losses[0], targets(packed(3))))
        expected.append((step, "eval_b", losses[1], targets(packed(2, seed=4))))
    expected.append((2, None, last["eval_loss"], targets(packed(4, seed=5))))
    expected.append((2, "test", tested["test_loss"], targets(packed(4, seed=6))))
    assert [(r["step"], r.get("name"), r["loss"], r["tokens"]) for r in metrics.evals] == expected


def test_tokens_of_an_evaluation_are_its_own(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = Trainer(
        model(),
        arguments(tmp_path),
        eval_dataset=packed(3),
        oomb_config=CONFIG,
        observer=recorder,
    )
    trainer.predict(packed(5))
    trainer.evaluate()
    (evaluated,) = recorder.of("on_eval")[0]
    assert evaluated["tokens"] == targets(packed(3))


def test_a_run_is_told_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    settings = arguments(
        tmp_path, max_steps=3, eval_strategy="steps", eval_steps=3, save_strategy="epoch"
    )
    trainer = Trainer(
        model(),
        settings,
        train_dataset=packed(),
        eval_dataset=packed(3),
        oomb_config=CONFIG,
        observer=recorder,
    )
    trainer.train()
    names = [name for name, _ in recorder.events if name != "on_progress"]
    assert names == ["on_start", *["on_step"] * 3, "on_eval", "on_save", "on_end"]

    (info,) = recorder.of("on_start")[0]
    assert info["num_parameters"] == sum(p.numel() for p in trainer.model.parameters())
    assert info["context"] is None
    assert info["max_steps"] == 3 and info["resumed_from_step"] is None
    assert info["config"]["chunk_size"] == 32
    assert info["config"]["attention"]["type"] == "Dense"

    steps = [record for (record,) in recorder.of("on_step")]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert [record["tokens"] for record in steps] == [6 * 70, 6 * 70, 1 * 70]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [record[name] for record in steps] == pytest.approx(logged(trainer, name)), name
    assert all(0 < r["fill_seconds"] + r["sweep_seconds"] < r["seconds"] for r in steps)
    assert all(r["device_peak_bytes"] > 0 for r in steps)
    # 3 chunks of 6, 6 and 1 rows; two rows a micro-batch
    assert [sum(r["recomputed"].values()) for r in steps] == [9, 9, 3]
    assert all(r["loose_output_bytes"] == 0 for r in steps)

    progress = recorder.of("on_progress")
    # 70 tokens, 3 chunks: 2 filled and 3 swept, in three micro-batches of a step
    assert [step for step, _ in progress] == [1] * 15 + [2] * 15 + [3] * 5

    (evaluated,) = recorder.of("on_eval")[0]
    assert evaluated["loss"] == logged(trainer, "eval_loss")[0]
    assert evaluated["tokens"] == targets(packed(3))
    (saved,) = recorder.of("on_save")[0]
    assert saved["step"] == 3 and Path(saved["path"]).is_dir()
    files = [f for f in Path(saved["path"]).rglob("*") if f.is_file()]
    assert saved["bytes"] == sum(f.stat().st_size for f in files)
    (end,) = recorder.of("on_end")[0]
    assert end["reason"] == "done"
    json.dumps([info, *steps, evaluated, saved, end])


class Slow(torch.utils.data.Dataset[Any]):
    """Rows that take their time to come."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rows = seconds, packed()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        time.sleep(self.seconds)
        return self.rows[place]


def test_the_wait_for_data_is_part_of_a_step(tmp_path: Path) -> None:
    """An evaluation's is not."""
    recorder = Recorder()
    Trainer(
        model(),
        arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1),
        train_dataset=Slow(0.05),
        eval_dataset=Slow(0.05),
        oomb_config=CONFIG,
        observer=recorder,
    ).train()
    steps = [record for (record,) in recorder.of("on_step")]
    for record in steps:
        assert record["data_seconds"] >= 5 * 0.05  # a batch is fetched ahead, the last has one row
        busy = record["fill_seconds"] + record["sweep_seconds"]
        assert record["data_seconds"] + busy <= record["seconds"]
        assert record["tokens_per_second"] == record["tokens"] / record["seconds"]
    evaluated = sum(record["seconds"] for (record,) in recorder.of("on_eval"))
    (end,) = recorder.of("on_end")[0]
    assert evaluated > 2 * 13 * 0.05
    assert sum(record["seconds"] for record in steps) + evaluated < end["seconds"]


def test_the_end_says_why(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyError("a callback's own mistake")

    recorder = Recorder()
    trainer = Trainer(
        model(),
        arguments(tmp_path),
        train_dataset=packed(),
        oomb_config=CONFIG,
        observer=recorder,
        callbacks=[Fails()],
    )
    with pytest.raises(KeyError):
        trainer.train()
    assert recorder.of("on_end")[0][0]["reason"] == "error"


def test_selection_is_told(tmp_path: Path) -> None:
    recorder = Recorder()
    config = oomb.Config(
        chunk_size=32, page_size=16, attention=oomb.TopKPages(budget=1), record_selection=True
    )
    settings = arguments(tmp_path, max_steps=1)
    Trainer(
        model(), settings, train_dataset=packed(), oomb_config=config, observer=recorder
    ).train()
    assert len(recorder.of("on_selection")) == 3


def test_columns_that_only_the_engine_knows(tmp_path: Path) -> None:
    """remove_unused_columns keeps document_ids and loss_weights."""
    rows = [
        {
            "input_ids": row["input_ids"],
            "labels": row["input_ids"],
            "document_ids": [int(i >= row["position_ids"].index(0, 1)) for i in range(70)],
            "loss_weights": [0.5] * 70,
            "origin": "somewhere",
        }
        for row in packed()
    ]
    trainer = Trainer(
        model(), arguments(tmp_path), train_dataset=Dataset.from_list(rows), oomb_config=CONFIG
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "document_ids", "loss_weights"}
    trainer.train()
    assert len(logged(trainer, "loss")) == 6


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("told_by", ["position_ids", "document_ids", None])
def test_targets_are_counted_as_the_engine_does(told_by: str | None, mask: bool) -> None:
    rows = packed(4)
    batch: dict[str, Any] = {
        "input_ids": torch.tensor([row["input_ids"] for row in rows]),
        "labels": torch.tensor([row["input_ids"] for row in rows]),
    }
    positions = torch.tensor([row["position_ids"] for row in rows])
    if told_by == "position_ids":
        batch["position_ids"] = positions
    elif told_by == "document_ids":
        batch["document_ids"] = (positions == 0).cumsum(dim=1)
    if mask:
        batch["attention_mask"] = torch.ones_like(positions)
    given = {name: batch.get(name) for name in ("attention_mask", "position_ids", "document_ids")}
    inputs = check_inputs(
        batch["input_ids"],
        batch["labels"],
        **given,
        loss_weights=None,
        num_items_in_batch=None,
        vocab_size=97,
        device=torch.device("cpu"),
    )
    assert num_targets(batch) == inputs.num_valid
    assert torch.equal(batch["labels"], batch["input_ids"])  # left as it was
    kept = counted_labels(batch)[:, 1:] != -100
    assert torch.equal(kept, inputs.targets[:, : kept.shape[1]] != -100)


def test_padding_free_extras_are_accepted() -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    extras = {"cu_seq_lens_q": torch.tensor([0, 4]), "max_length_q": 4, "seq_idx": ids}
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids, "use_cache": False, **extras}
    assert set(engine_arguments(batch)) == {"input_ids", "labels", "position_ids"}
    del batch["position_ids"]
    with pytest.raises(ValueError, match="^batch: expected position_ids beside cu_seq_lens_q"):
        engine_arguments(batch)
