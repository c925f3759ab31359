"""What the engine cannot do is refused by name, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from torch import nn

import oomb
from oomb.hf import EngineTrainerMixin, SFTTrainer, Trainer
from oomb.hf.refusals import refuse_generation

from .runs import (
    CONFIG,
    arguments,
    model,
    packed,
    prompts,
    sft_arguments,
    tokenizer,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("torch_compile", True),
        ("use_liger_kernel", True),
        ("bf16_full_eval", True),
        ("enable_jit_checkpoint", True),
        ("optim", "adalomo"),
        ("optim", "galore_adamw_layerwise"),
    ],
)
def test_settings(field: str, value: Any, tmp_path: Path) -> None:
    settings = arguments(tmp_path / "run")
    setattr(settings, field, value)
    with pytest.raises(ValueError, match=f"^{field}: expected .*, got "):
        Trainer(model(), settings, train_dataset=packed(), oomb_config=CONFIG)
    assert not (tmp_path / "run").exists()


def test_a_function_for_the_loss(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^compute_loss_func: expected None, got one: the engine"):
        Trainer(model(), arguments(tmp_path), oomb_config=CONFIG, compute_loss_func=lambda *_: None)


def test_of_several_gpus_one_trains(tmp_path: Path) -> None:
    """Transformers would wrap the model, and multiply the batch by their number."""
    settings = arguments(tmp_path)
    expected = settings.train_batch_size
    settings._n_gpu = 4
    assert settings.train_batch_size == 4 * expected
    with pytest.warns(RuntimeWarning, match="^4 GPUs are visible .* torchrun --nproc-per-node 4 "):
        trainer = Trainer(model(), settings, train_dataset=packed(), oomb_config=CONFIG)
    assert trainer.args.n_gpu == 1
    assert trainer.args.train_batch_size == trainer._train_batch_size == expected
    assert trainer._wrap_model(trainer.model) is trainer.model


def test_processes_that_have_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train on its own, and write over what the other writes."""
    settings = arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="^world_size: expected the 2 processes .*got 1.*use_cpu"):
        Trainer(model(), settings, oomb_config=CONFIG)


def test_a_number_of_processes_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="^WORLD_SIZE: expected a number of processes, got 'two'"):
        Trainer(model(), settings, oomb_config=CONFIG)
    monkeypatch.setenv("WORLD_SIZE", "")
    Trainer(model(), settings, oomb_config=CONFIG)


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            return 2 * super().compute_loss(*args, **keywords)

    class Theirs(transformers.Trainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            return 2 * super().compute_loss(*args, **keywords)

    class Mixed(EngineTrainerMixin, Theirs):
        pass

    for kind, name in ((Weighted, "Weighted"), (Mixed, "Theirs")):
        with pytest.raises(ValueError, match=f"^{name}.compute_loss: expected "):
            kind(model(), arguments(tmp_path), oomb_config=CONFIG)


def test_sft_settings(tmp_path: Path) -> None:
    settings = sft_arguments(tmp_path, activation_offloading=True)
    with pytest.raises(ValueError, match="^activation_offloading: expected "):
        SFTTrainer(
            model(),
            args=settings,
            train_dataset=prompts(4),
            processing_class=tokenizer(),
            oomb_config=CONFIG,
        )


def test_config_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^oomb_config: expected an oomb.Config, got {"):
        Trainer(model(), arguments(tmp_path), oomb_config={"chunk_size": 32})  # type: ignore[arg-type]


def test_a_config_where_settings_belong() -> None:
    with pytest.raises(
        ValueError, match="^args: expected TrainingArguments, got Config; give it a"
    ):
        Trainer(model(), CONFIG, train_dataset=packed())


def test_an_observer_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="^observer: expected an oomb.monitor.RunObserver, got 'x'"
    ):
        Trainer(model(), arguments(tmp_path), train_dataset=packed(), observer="x")  # type: ignore[arg-type]


def test_a_model_that_the_engine_refuses(tmp_path: Path) -> None:
    with pytest.raises((oomb.UnsupportedModelError, AttributeError)):
        Trainer(nn.Linear(2, 2), arguments(tmp_path), oomb_config=CONFIG)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("inputs_embeds", "^batch: expected .*, got inputs_embeds, which the engine cannot"),
        ("labels", "^batch: expected labels, got "),
    ],
)
def test_batches(column: str, message: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = packed(2)
    for row in rows:
        if column == "labels":
            del row["labels"]
        else:
            row[column] = torch.zeros(70, 48)
    trainer = Trainer(model(), arguments(tmp_path), train_dataset=rows, oomb_config=CONFIG)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_left_padding(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {**row, "attention_mask": [0] * 5 + [1] * 65, "position_ids": None} for row in packed(2)
    ]
    rows = [{k: v for k, v in row.items() if v is not None} for row in rows]
    trainer = Trainer(model(), arguments(tmp_path), train_dataset=rows, oomb_config=CONFIG)
    with pytest.raises(ValueError, match="^attention_mask: expected right padding only"):
        trainer.train()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_vllm": True}, "use_vllm: expected False in 4 processes, got True"),
        (
            {"use_transformers_continuous_batching": True},
            "use_transformers_continuous_batching: expected False in 4 processes",
        ),
        (
            {"per_device_train_batch_size": 3},
            "per_device_train_batch_size: expected, times steps_per_generation=2, a multiple of 4 "
            "completions of a prompt, got 3: 4 processes share each completion",
        ),
        (
            {"per_device_eval_batch_size": 6, "do_eval": True, "eval_strategy": "steps"},
            "per_device_eval_batch_size: expected a multiple of 4 completions of a prompt, got 6",
        ),
    ],
)
def test_generation_of_several_processes(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's own arguments would take these: to it each process has completions of its own."""
    settings = trl.GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        num_generations=4,
        steps_per_generation=2,
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    refuse_generation({"args": settings})
    for name, value in given.items():
        setattr(settings, name, value)
    with pytest.raises(ValueError, match=f"^{message}"):
        refuse_generation({"args": settings})


def test_environments_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_generation({"environment_factory": object})
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="^environment_factory: expected None in 4 processes"):
        refuse_generation({"environment_factory": object})
