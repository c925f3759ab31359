"""``oomb train`` as a whole, on a tiny model: what it writes, resumes and undoes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import SafetensorError
from tiny_runs import TEXT, prepare, run, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainingArguments

import oomb
from oomb.hf import Trainer
from oomb.train.arguments import training_arguments
from oomb.train.reading import read_settings


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == kind]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in events(folder, "step")]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a run of four steps printed, and its folder."""
    folder = tmp_path_factory.mktemp("done")
    result = run(prepare(folder, evaluation={"every_steps": 2, "at_start": True}))
    assert result.exit_code == 0, result.output
    return result.output, folder / "run"


def test_writes_what_the_docs_promise(done: tuple[str, Path]) -> None:
    names = {path.name for path in done[1].iterdir()}
    assert names == {
        "run.yaml", "data.sha256", "metrics.jsonl", "plan.json", "checkpoints", "model",
        "report.html",
    }  # fmt: skip


def test_of_several_gpus_one_trains(
    done: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = training_arguments

    def of_a_machine_with_two(*arguments: Any) -> TrainingArguments:
        settings = made(*arguments)
        settings._n_gpu = 2
        return settings

    monkeypatch.setattr("oomb.train.run.training_arguments", of_a_machine_with_two)
    file = prepare(tmp_path, evaluation={"every_steps": 2, "at_start": True})
    result = run(file, "training.steps=2")
    assert result.exit_code == 0, result.output
    assert "2 GPUs are visible and one process drives one" in result.output
    assert losses(tmp_path / "run") == losses(done[1])[:2]


def test_learns(done: tuple[str, Path]) -> None:
    evaluations = events(done[1], "eval")
    assert [record["step"] for record in evaluations] == [0, 2, 4]
    found = [record["loss"] for record in evaluations]
    assert found == sorted(found, reverse=True) and found[-1] < found[0] - 0.5


def test_prints_plan_before_and_measurement_after(done: tuple[str, Path]) -> None:
    output = done[0]
    places = [output.index(part) for part in ("Data: ", "Plan: ", "step 1/4", "measured")]
    assert places == sorted(places)
    plan = json.loads((done[1] / "plan.json").read_text())
    step = events(done[1], "step")[-1]
    assert plan["measured"]["device_pool_bytes"] == step["device_peak_bytes"]
    assert plan["predicted"]["num_tokens"] == 256


def test_settings_written_can_be_run_again(done: tuple[str, Path]) -> None:
    settings = read_settings(done[1] / "run.yaml")
    assert settings.output_dir == str(done[1]) and settings.training.steps == 4


def test_final_model_loads_and_is_the_trained_one(done: tuple[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(done[1] / "model", local_files_only=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(done[1] / "model")
    assert bytes(tokenizer(TEXT)["input_ids"]) == TEXT.encode()
    start = tiny_model().state_dict()
    assert all(not torch.equal(p, start[name]) for name, p in model.state_dict().items())
    checkpoint = AutoModelForCausalLM.from_pretrained(done[1] / "checkpoints" / "step-00000004")
    for name, value in checkpoint.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_losses_are_those_of_the_sequences_in_the_seeds_order(tmp_path: Path) -> None:
    """The first step's loss, by hand: windows of the text, drawn by the stock trainer's sampler."""
    changes = {"eval_fraction": 0.0}
    file = prepare(tmp_path, data=changes, training={"steps": 1, "seed": 5})
    assert run(file).exit_code == 0
    ids = torch.tensor(list(TEXT.encode()))
    windows = [w[None] for w in ids.split(256) if len(w) > 1]
    model = tiny_model()
    with torch.no_grad():
        each = [float(model(input_ids=w, labels=w).loss) for w in windows]
    assert min(abs(losses(tmp_path / "run")[0] - loss) for loss in each) < 1e-5


def test_accumulation_of_a_packed_batch_counts_tokens_once(tmp_path: Path) -> None:
    rows = [{"text": text} for text in TEXT.split("\n")[:64]]
    file = prepare(
        tmp_path,
        data={"train": str(tmp_path / "rows.jsonl"), "arrange": "packed", "eval_fraction": 0.0},
        training={"steps": 1, "batch_size": 2, "accumulation_steps": 100},
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(file)
    assert result.exit_code == 0, result.output
    model, total, counted = tiny_model(), 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([list(row["text"].encode())])
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
            counted += ids.shape[1] - 1
    assert losses(tmp_path / "run") == pytest.approx([total / counted], rel=1e-5)


def test_adapters_are_saved_as_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    file = prepare(tmp_path, lora={"r": 4, "target_modules": ["q_proj", "v_proj"]})
    result = run(file)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "run" / "model"
    assert not (folder / "model.safetensors").exists()
    model = peft.PeftModel.from_pretrained(tiny_model(), folder)
    trained = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(trained) == 4 and all(p.abs().max() > 0 for p in trained)
    before, after = losses(tmp_path / "run")[0], losses(tmp_path / "run")[-1]
    assert after < before
    [start] = events(tmp_path / "run", "start")
    assert start["trainable_parameters"] < start["num_parameters"]
    assert start["context"] == 256


def test_positions_are_extended_in_the_models_own_config(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    file = prepare(tmp_path, training={"steps": 1}, context=512)
    changes = ["model.max_position_embeddings=128", f"model.rope={json.dumps(rope)}"]
    result = run(file, *changes)
    assert result.exit_code == 0, result.output
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config
    assert saved.rope_parameters["rope_type"] == "yarn"
    assert saved.rope_parameters["factor"] == 4.0
    assert saved.max_position_embeddings == 128


def test_a_run_in_the_home_folder_is_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prepare(tmp_path, training={"steps": 1})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = ["output_dir=~/home", "model.name=~/model", "data.train=~/text.txt"]
    result = run(file, *changes)
    assert result.exit_code == 0, result.output
    assert not any((tmp_path / "elsewhere").iterdir())
    names = {path.name for path in (tmp_path / "home").iterdir()}
    assert {"run.yaml", "metrics.jsonl", "checkpoints", "model", "report.html"} <= names
    assert run(file, *changes, "--resume").exit_code == 0


def test_a_dry_run_plans_and_writes_nothing(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = run(file, "--dry-run")
    assert result.exit_code == 0 and "Plan: 256 tokens in chunks of 64" in result.output
    assert sorted(tmp_path.rglob("*")) == before


# Folders and resuming -----------------------------------------------------------------------------


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    result = run(file)
    assert result.exit_code == 2 and "--resume" in result.output
    assert "expected a run to resume" in run(file, "--resume").output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_resuming_where_nothing_began_begins(tmp_path: Path) -> None:
    result = run(prepare(tmp_path, training={"steps": 1}), "--resume")
    assert result.exit_code == 0 and len(losses(tmp_path / "run")) == 1


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    whole = prepare(tmp_path, training={"steps": 5}, saving={"every_steps": 2})
    assert run(whole).exit_code == 0
    parts = f"output_dir={tmp_path / 'parts'}"
    assert run(whole, parts, "training.steps=3").exit_code == 0
    result = run(whole, parts, "--resume")
    assert result.exit_code == 0, result.output
    assert losses(tmp_path / "parts") == losses(tmp_path / "run")
    starts = events(tmp_path / "parts", "start")
    assert [record["resumed_from_step"] for record in starts] == [None, 3]
    one, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()
        for name in ("run", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_other_text_is_not_gone_on_with(tmp_path: Path) -> None:
    file = prepare(tmp_path, training={"steps": 1})
    assert run(file).exit_code == 0
    (tmp_path / "text.txt").write_text(TEXT.replace("squared", "SQUARED"))
    result = run(file, "--resume", "training.steps=2")
    assert result.exit_code == 2
    assert "data.train: expected the text and tokenizer that the run began with" in result.output
    assert len(losses(tmp_path / "run")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("length", [{"steps": 3}, {"epochs": 0.1, "accumulation_steps": 2}])
@pytest.mark.sampled(1)
def test_a_finished_run_takes_no_further_step(tmp_path: Path, length: dict[str, float]) -> None:
    file = prepare(tmp_path, training={"steps": None, **length})
    assert run(file).exit_code == 0
    before = losses(tmp_path / "run")
    weights = tmp_path / "run" / "model" / "model.safetensors"
    trained = weights.read_bytes()
    shutil.rmtree(weights.parent)  # as if it had been killed before it was saved
    result = run(file, "--resume")
    assert result.exit_code == 0 and "done already" in result.output, result.output
    assert losses(tmp_path / "run") == before
    assert weights.read_bytes() == trained


@pytest.mark.parametrize(
    "change",
    [
        "context=128",
        "training.seed=3",
        "lora.r=4",
        "data.arrange=packed",
        "data.simulated_context=1K",
    ],
)
def test_another_run_is_not_resumed(done: tuple[str, Path], change: str) -> None:
    result = run(done[1] / "run.yaml", "--resume", change)
    field = change.partition("=")[0].replace("lora.r", "lora")
    assert result.exit_code == 2 and result.output.startswith(f"{field}: expected")
    assert "as the run began" in result.output


def test_other_pieces_are_another_run_where_positions_are_skipped(tmp_path: Path) -> None:
    file = prepare(tmp_path, data={"simulated_context": 1024}, training={"steps": 1})
    assert run(file).exit_code == 0
    result = run(file, "--resume", "data.simulated_pieces=4")
    assert result.exit_code == 2
    assert result.output.startswith("data.simulated_pieces: expected 8, as the run began, got 4")


def test_pieces_that_mean_nothing_may_change(done: tuple[str, Path], tmp_path: Path) -> None:
    shutil.copytree(done[1], tmp_path / "run")
    changes = ["data.simulated_pieces=4", f"output_dir={tmp_path / 'run'}"]
    result = run(done[1] / "run.yaml", "--resume", "--dry-run", *changes)
    assert result.exit_code == 0, result.output


def test_other_sequences_of_a_step_are_not_gone_on_with(done: tuple[str, Path]) -> None:
    result = run(done[1] / "run.yaml", "--resume", "training.accumulation_steps=2")
    assert result.exit_code == 2
    assert result.output.startswith("training.accumulation_steps: expected 1, so that an optimizer")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.sampled(1)
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    file = prepare(tmp_path, training={"steps": 100_000})
    command = [sys.executable, "-m", "oomb.cli", "train", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/"):
                os.kill(process.pid, getattr(signal, name))
                break
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 0, rest
    assert name in rest and "--resume" in rest
    [checkpoint] = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step == len(losses(tmp_path / "run"))
    assert not (tmp_path / "run" / "model").exists()
    result = run(file, "--resume", f"training.steps={step + 1}")
    assert result.exit_code == 0, result.output
    assert len(losses(tmp_path / "run")) == step + 1


# The cache ----------------------------------------------------------------------------------------


def test_text_is_tokenised_once_and_again_when_it_changes(tmp_path: Path) -> None:
    file = prepare(tmp_path, training={"steps": 1})

    def files() -> dict[str, float]:
        found = (tmp_path / "cache").rglob("*.arrow")
        return {str(path): path.stat().st_mtime for path in found}

    assert run(file, f"output_dir={tmp_path / 'a'}").exit_code == 0
    first = files()
    assert run(file, f"output_dir={tmp_path / 'b'}").exit_code == 0
    assert files() == first
    time.sleep(0.01)
    (tmp_path / "text.txt").write_text(TEXT[::-1])
    assert run(file, f"output_dir={tmp_path / 'c'}").exit_code == 0
    assert len(files()) == 2 * len(first)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


@pytest.mark.slow
def test_several_processes_give_the_same_tokens(tmp_path: Path) -> None:
    file = prepare(tmp_path, data={"train": str(tmp_path / "texts")}, training={"steps": 2})
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[number:])
    for processes in (1, 2):
        changes = f"data.num_proc={processes}", f"data.cache_dir={tmp_path / str(processes)}"
        result = run(file, f"output_dir={tmp_path / f'run{processes}'}", *changes)
        assert result.exit_code == 0, result.output
    assert losses(tmp_path / "run1") == losses(tmp_path / "run2")


def test_evaluates_on_as_many_sequences_as_asked(tmp_path: Path) -> None:
    file = prepare(tmp_path, evaluation={"max_sequences": 2}, training={"steps": 1})
    assert run(file).exit_code == 0
    [record] = events(tmp_path / "run", "eval")
    assert record["tokens"] == 2 * (256 - 1)


def test_settings_reach_the_engine(tmp_path: Path) -> None:
    engine = {"attention": {"type": "topk", "budget": 2}, "record_selection": True}
    assert run(prepare(tmp_path, engine=engine, training={"steps": 1})).exit_code == 0
    [start] = events(tmp_path / "run", "start")
    assert start["config"]["attention"]["budget"] == 2
    assert start["config"]["chunk_size"] == 64
    assert events(tmp_path / "run", "selection")
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["engine"]["page_size"] == 16
    assert oomb.Config().page_size != 16


def test_a_disk_that_is_full_at_the_end_leaves_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Trainer.save_model

    def full(self: Trainer, output_dir: str, **keywords: Any) -> None:
        saved(self, output_dir, **keywords)
        if Path(output_dir).name == ".model":
            raise SafetensorError("No space left on device")

    file = prepare(tmp_path)
    monkeypatch.setattr(Trainer, "save_model", full)
    result = run(file)
    assert result.exit_code == 1
    assert "the model was not saved" in result.output and "--resume" in result.output
    folders = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert folders == ["checkpoints"]
    monkeypatch.undo()
    assert run(file, "--resume").exit_code == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
