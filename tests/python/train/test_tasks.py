"""``oomb train`` with a task of TRL: each beside TRL's own trainer on the same rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from tiny_runs import run, save_model, settings_of, tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)

from oomb.train.errors import BadInput
from oomb.train.examples import ExampleRule
from oomb.train.reading import read_settings
from oomb.train.settings import RunSettings
from oomb.train.sources import Source
from oomb.train.tasks import TASKS, checked_options

trl = pytest.importorskip("trl")

CHAT = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
STEPS = 2


def answers(number: int) -> tuple[str, str, str]:
    """What is asked, a right answer, and a wrong one of another length."""
    return f"{number} squared is ", f"{number * number}.", f"{number * 7}, or so."


def spoken(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def pairs(number: int = 8) -> list[dict[str, Any]]:
    found = []
    for index in range(3, 3 + number):
        asked, right, wrong = answers(index)
        prompt = spoken("user", asked)
        found.append(
            {
                "prompt": prompt,
                "chosen": spoken("assistant", right),
                "rejected": spoken("assistant", wrong),
            }
        )
    return found


def judged(number: int = 8) -> list[dict[str, Any]]:
    found = []
    for index, pair in enumerate(pairs(number)):
        kind = "chosen" if index % 3 else "rejected"
        found.append(
            {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
        )
    return found


def asked(number: int = 8) -> list[dict[str, Any]]:
    return [{"prompt": pair["prompt"], "number": index} for index, pair in enumerate(pairs(number))]


def by_place(completions: list[Any], number: list[int], **_: Any) -> list[float]:
    """Of the row's own column and of a completion's place in the batch."""
    return [float((index * index + n) % 7) for index, n in enumerate(number)]


def by_text(completions: list[Any], **_: Any) -> list[float]:
    """Of what is written alone."""
    return [float(zlib.crc32(repr(one).encode()) % 7) for one in completions]


@dataclass(frozen=True)
class Case:
    trainer: str
    arguments: str
    rows: Callable[[], list[dict[str, Any]]]
    options: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    batch: int = 2
    others: dict[str, Any] = field(default_factory=dict)


GENERATED: dict[str, Any] = {"num_generations": 2, "max_completion_length": 4}
CASES = {
    "dpo": Case("DPOTrainer", "DPOConfig", pairs, {"beta": 0.3, "loss_type": ["ipo"]}),
    "kto": Case("KTOTrainer", "KTOConfig", judged, {"beta": 0.2}),
    "grpo": Case(
        "GRPOTrainer", "GRPOConfig", asked, {**GENERATED, "beta": 0.1},
        {"rewards": ["test_tasks.by_place"]}, others={"reward_funcs": by_place},
    ),
    "rloo": Case(
        "RLOOTrainer", "RLOOConfig", asked, {**GENERATED, "beta": 0.0},
        {"rewards": ["test_tasks:by_place"]}, others={"reward_funcs": by_place},
    ),
    "reward": Case(
        "RewardTrainer", "RewardConfig", pairs, {"center_rewards_coefficient": 0.1}
    ),
}  # fmt: skip


def prepare(folder: Path, task: str, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_model(folder / "model")
    (folder / "chat.jinja").write_text(CHAT)
    case = CASES[task]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows()))
    settings: dict[str, Any] = {
        "task": task,
        "trl": case.options,
        "data": {
            "train": str(folder / "rows.jsonl"),
            "eval_fraction": 0.0,
            "chat_template": str(folder / "chat.jinja"),
        },
        "training": {"steps": STEPS, "batch_size": case.batch, "accumulation_steps": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        **case.changes,
    }
    for section, values in changes.items():
        old = settings.get(section)
        settings[section] = old | values if isinstance(old, dict) else values
    settings = settings_of(folder, **settings)
    del settings["data"]["add_eos"]
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["event"] == "step"]


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logs.append(logs)


def stock(folder: Path, task: str) -> list[dict[str, float]]:
    """What TRL's own trainer logs, from the same files with its own settings."""
    case = CASES[task]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = CHAT
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    if "reward_funcs" in case.others:
        tokenizer.eos_token = tokenizer.pad_token
    arguments = getattr(trl, case.arguments)(
        output_dir=str(folder / "stock"), max_steps=STEPS, per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=2, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, seed=0,
        gradient_checkpointing=False, disable_tqdm=True, **case.options,
    )  # fmt: skip
    model: Any = tiny_model()
    others = dict(case.others)
    if task == "reward":
        set_seed(0)  # the head is drawn anew
        kind = AutoModelForSequenceClassification
        model = kind.from_pretrained(folder / "model", num_labels=1)
    elif task in ("dpo", "kto"):
        others["ref_model"] = tiny_model()
    else:
        model.config._name_or_path = str(folder / "model")
    seen = Logs()
    trainer = getattr(trl, case.trainer)(
        model=model, args=arguments, train_dataset=Dataset.from_list(case.rows()),
        processing_class=tokenizer, callbacks=[seen], **others,
    )  # fmt: skip
    trainer.train()
    return [log for log in seen.logs if "grad_norm" in log]


@pytest.fixture
def same_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine draws from the generator that sampling draws from; here both begin alike."""
    for kind in (trl.GRPOTrainer, trl.RLOOTrainer):
        generate = kind._generate_and_score_completions

        def seeded(self: Any, inputs: Any, generate: Callable[..., Any] = generate) -> Any:
            torch.manual_seed(self._step)
            return generate(self, inputs)

        monkeypatch.setattr(kind, "_generate_and_score_completions", seeded)


@pytest.mark.usefixtures("same_completions")
@pytest.mark.parametrize("task", CASES)
def test_steps_are_those_of_trl(task: str, tmp_path: Path) -> None:
    result = run(prepare(tmp_path, task))
    assert result.exit_code == 0, result.output
    found, expected = steps(tmp_path / "run"), stock(tmp_path, task)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["grad_norm"] > 1e-3
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert read_settings(tmp_path / "run" / "run.yaml").task == task
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """The second step of a run that is resumed is that of a run without a break."""
    whole, parted = prepare(tmp_path / "whole", "dpo"), prepare(tmp_path / "parted", "dpo")
    assert run(whole).exit_code == 0
    assert run(parted, "training.steps=1").exit_code == 0
    result = run(parted, "--resume")
    assert result.exit_code == 0, result.output
    found, expected = steps(tmp_path / "parted" / "run"), steps(tmp_path / "whole" / "run")
    assert [record["loss"] for record in found] == [record["loss"] for record in expected]
    result = run(parted, "--resume", "trl.beta=0.1")
    assert result.exit_code == 2 and "trl: expected" in result.output


MISTAKES: list[tuple[str, list[str], str]] = [
    ("dpo", ["trl.bta=0.1"], "trl.bta: expected an option of DPOConfig"),
    ("dpo", ["trl.beta=high"], "trl.beta: expected a valid number, got 'high'"),
    ("dpo", ["trl.max_length=5"], "trl.max_length: expected the field context"),
    ("dpo", ["trl.use_liger_kernel=true"], "trl.use_liger_kernel: expected"),
    ("dpo", ["trl.activation_offloading=true"], "trl.activation_offloading: expected False"),
    ("dpo", ["data.arrange=packed"], "data.arrange: expected 'windows' for task dpo"),
    ("dpo", ["task=kto", "trl={}"], "expected a column 'completion'"),
    ("dpo", ["task=sft"], "trl: expected a task of TRL beside it"),
    ("dpo", ["context=20"], "expected examples of at most 20 tokens"),
    ("grpo", ["rewards=[]"], "rewards: expected functions for task grpo"),
    ("grpo", ["rewards=nowhere.at_all"], "rewards: expected functions of trl.rewards"),
    (
        "grpo",
        ["trl.beta=0.1", "model.revision=main"],
        "model.revision: expected null for task grpo",
    ),
    ("grpo", ["trl.num_generations=5"], "training: expected settings that TRL takes"),
]


def test_mistakes_are_named(tmp_path: Path) -> None:
    files = {task: prepare(tmp_path / task, task) for task in ("dpo", "grpo")}
    for task, changes, message in MISTAKES:
        result = run(files[task], *changes)
        assert result.exit_code == 2, (changes, result.output)
        assert message in " ".join(result.output.split()), (changes, result.output)
        assert not (tmp_path / task / "run").exists(), changes


@pytest.mark.parametrize(
    ("task", "options", "accepted"),
    [
        ("grpo", {}, True),  # TRL's own beta is 0: no reference
        ("grpo", {"beta": 0.1}, False),
        ("rloo", {}, False),  # and here 0.05
        ("rloo", {"beta": 0.0}, True),
    ],
)
def test_longer_positions_beside_a_reference_of_trl(
    task: str, options: dict[str, Any], accepted: bool, tmp_path: Path
) -> None:
    settings = RunSettings.model_validate(
        {
            "output_dir": str(tmp_path),
            "task": task,
            "trl": options,
            "context": 64,
            "data": {"train": "x"},
            "rewards": ["x"],
            "model": {"name": "x", "rope": {"rope_type": "linear", "factor": 2.0}},
        }
    )
    with nullcontext() if accepted else pytest.raises(BadInput, match="model.rope: expected null"):
        checked_options(settings, TASKS[task])


def test_heads_that_peft_trains_may_be_named(tmp_path: Path) -> None:
    """Those of a model that scores: peft adds their names to whatever list it is given."""
    lora = {"r": 2, "modules_to_save": ["norm", "score"]}
    file = prepare(tmp_path, "reward", lora=lora, training={"steps": 1})
    result = run(file)
    assert result.exit_code == 0, result.output
    written = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert written["lora"]["modules_to_save"] == lora["modules_to_save"]
    for names in ("[norm, score]", "[norm, score, classifier, score]"):  # an older run's file
        (tmp_path / "run" / "run.yaml").write_text(
            yaml.safe_dump(written | {"lora": lora | {"modules_to_save": yaml.safe_load(names)}})
        )
        result = run(file, "--resume", f"lora.modules_to_save={names}")
        assert result.exit_code == 0, result.output


def test_a_dry_run_reads_the_rows(tmp_path: Path) -> None:
    file = prepare(tmp_path, "kto")
    result = run(file, "--dry-run")
    assert result.exit_code == 0 and "Plan: " in result.output, result.output
    with (tmp_path / "rows.jsonl").open("w") as stream:
        stream.write(json.dumps({**judged(1)[0], "label": "good"}) + "\n")
    result = run(file, "--dry-run")
    assert result.exit_code == 2 and "expected true or false in column 'label'" in " ".join(
        result.output.split()
    )


def read(tmp_path: Path, task: str, row: dict[str, Any], **data: Any) -> tuple[Any, int]:
    """What a task makes of a row, and the tokens it counts."""
    settings = read_settings(prepare(tmp_path, task, data=data))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = CHAT + "{{ 'more' if more }}"
    rule = ExampleRule(TASKS[task], settings, tokenizer)
    example = rule.example(row, 0, Source("rows.jsonl", "jsonl", "1"))
    return example, rule.tokens(example)


def test_columns_that_settings_name_come_first(tmp_path: Path) -> None:
    row = {"question": "a", "prompt": "of no interest", "number": 1}
    found, _ = read(tmp_path, "grpo", row, prompt_field="question")
    assert found == {"prompt": "a", "number": 1}
    with pytest.raises(BadInput, match="data.prompt_field: expected a column of rows.jsonl"):
        read(tmp_path, "dpo", pairs(1)[0], prompt_field="question")


def test_tokens_of_what_the_template_is_told(tmp_path: Path) -> None:
    """Otherwise an example could be longer than the context, and TRL would cut it."""
    row = pairs(1)[0]
    plain = read(tmp_path, "dpo", row)[1]
    assert read(tmp_path, "dpo", {**row, "chat_template_kwargs": {"more": True}})[1] == plain + 4
