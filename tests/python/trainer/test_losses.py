"""Our trainers' losses are the stock ones'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl

import oomb
from oomb.hf import SFTTrainer, Trainer

from .runs import (
    CONFIG,
    Example,
    arguments,
    logged,
    masked,
    model,
    packed,
    prompts,
    sft_arguments,
    tokenizer,
)


def run(kind: Any, folder: Path, data: list[Example], **settings: Any) -> Any:
    own: dict[str, Any] = {"data_collator": settings.pop("data_collator", None)}
    if issubclass(kind, Trainer):
        own["oomb_config"] = CONFIG
    trainer = kind(
        model(),
        arguments(folder, **settings),
        train_dataset=data,
        eval_dataset=data[:5],
        **own,
    )
    trainer.train()
    return trainer


def assert_same_run(ours: Any, stock: Any, steps: int) -> None:
    # Optimizers divide by a gradient's size, so that rounding grows in what follows a step.
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 0.0)):
        expected = logged(stock, name)
        assert len(expected) == steps
        assert logged(ours, name) == pytest.approx(expected, rel=tolerance), name
    for name in ("eval_loss", "train_loss"):
        assert logged(ours, name) == pytest.approx(logged(stock, name), rel=1e-5), name
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5)


SETTINGS: dict[str, dict[str, Any]] = {
    # 13 sequences make 7 micro-batches: the last step of an epoch has one, of one sequence
    "adamw": {"eval_strategy": "steps", "eval_steps": 2},
    "adafactor": {"optim": "adafactor", "gradient_accumulation_steps": 1, "max_grad_norm": 0.5},
    "sgd": {"optim": "sgd", "gradient_checkpointing": True, "lr_scheduler_type": "cosine"},
    "rmsprop": {
        "optim": "rmsprop",
        "learning_rate": 1e-4,
        "max_grad_norm": 0.0,
        "dataloader_drop_last": True,
    },
}
QUICK = {("adamw", packed), ("adamw", masked), ("adafactor", packed), ("sgd", masked)}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param(name, data, marks=() if (name, data) in QUICK else pytest.mark.slow)
        for name in SETTINGS
        for data in (packed, masked)
    ],
)
@pytest.mark.sampled(2)
def test_trainer(name: str, data: Callable[[], list[Example]], tmp_path: Path) -> None:
    settings = SETTINGS[name]
    stock = run(transformers.Trainer, tmp_path / "stock", data(), **settings)
    ours = run(Trainer, tmp_path / "ours", data(), **settings)
    assert_same_run(ours, stock, 6)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.sampled(2)
def test_sft_trainer(packing: bool, adapters: bool, tmp_path: Path) -> None:
    def run(kind: Any, **own: Any) -> Any:
        settings = sft_arguments(
            tmp_path / kind.__module__,
            packing=packing,
            max_length=96,
            eval_strategy="steps",
            eval_steps=3,
        )
        if adapters:
            from peft import LoraConfig

            own["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        trainer = kind(
            model(),
            args=settings,
            train_dataset=prompts(),
            eval_dataset=prompts(5),
            processing_class=tokenizer(),
            **own,
        )
        trainer.train()
        return trainer

    stock = run(trl.SFTTrainer)
    ours = run(SFTTrainer, oomb_config=CONFIG)
    assert_same_run(ours, stock, 6)
    assert logged(ours, "num_tokens") == logged(stock, "num_tokens")
    first = next(iter(ours.get_train_dataloader()))
    assert ("position_ids" in first) == packing  # documents really are packed
    assert bool((first["labels"][:, 1:] == -100).any())  # and prompts masked


def test_flattened_batches(tmp_path: Path) -> None:
    """Packing by transformers' own collator: a micro-batch is one row of several documents."""
    rows = [{"input_ids": row["input_ids"]} for row in packed()]
    collator = transformers.DataCollatorWithFlattening()
    stock = run(transformers.Trainer, tmp_path / "stock", rows, data_collator=collator)
    ours = run(Trainer, tmp_path / "ours", rows, data_collator=collator)
    assert_same_run(ours, stock, 6)


def test_documents_packed_with_their_first_tokens_as_labels(tmp_path: Path) -> None:
    """Nothing predicts a document's first token; the stock trainer would predict it from another
    document unless the collator masks it."""
    unmasked = [{**row, "labels": row["input_ids"]} for row in packed()]
    border = [
        {
            **row,
            "labels": [
                -100 if position == 0 else token
                for token, position in zip(row["input_ids"], row["position_ids"], strict=True)
            ],
        }
        for row in packed()
    ]
    stock = run(transformers.Trainer, tmp_path / "stock", border)
    ours = run(Trainer, tmp_path / "ours", unmasked)
    assert_same_run(ours, stock, 6)


def test_autocast(tmp_path: Path) -> None:
    """bf16 autocast: the layers run in bf16, and the losses are as far from fp32 as the stock
    trainer's own."""

    def run(kind: Any, **settings: Any) -> tuple[list[float], set[torch.dtype]]:
        network, seen = model(), set()
        own = {"oomb_config": CONFIG} if kind is Trainer else {}
        settings = arguments(tmp_path / f"{kind.__module__}{len(settings)}", **settings)
        trainer = kind(network, settings, train_dataset=packed(), **own)
        for layer in network.model.layers:
            layer.mlp.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
        trainer.train()
        return logged(trainer, "loss"), seen

    exact, _ = run(transformers.Trainer)
    stock, dtypes = run(transformers.Trainer, bf16=True)
    ours, own_dtypes = run(Trainer, bf16=True)
    assert own_dtypes == dtypes == {torch.bfloat16}
    error = max(abs(x - y) for x, y in zip(stock, exact, strict=True))
    for mine, theirs in zip(ours, exact, strict=True):
        assert abs(mine - theirs) <= 2 * error


def test_a_model_that_takes_no_number_of_items(tmp_path: Path) -> None:
    """Then a step's loss is the mean of its micro-batches' means."""
    losses = []
    for kind, own in ((transformers.Trainer, {}), (Trainer, {"oomb_config": CONFIG})):
        settings = arguments(tmp_path / kind.__module__)
        trainer = kind(model(), settings, train_dataset=masked(), **own)
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
        losses.append(logged(trainer, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_gradient_scaler_changes_nothing(tmp_path: Path) -> None:
    """fp16's loss scale, a power of two, reaches the gradients and is divided out again."""

    def run(scaled: bool) -> Trainer:
        settings = arguments(tmp_path / str(scaled), max_grad_norm=0.0)
        trainer = Trainer(model(), settings, train_dataset=packed(), oomb_config=CONFIG)
        if scaled:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        trainer.train()
        return trainer

    plain, scaled = run(False), run(True)
    assert logged(scaled, "loss") == logged(plain, "loss")
    norms = zip(logged(scaled, "grad_norm"), logged(plain, "grad_norm"), strict=True)
    assert all(large == pytest.approx(1024 * small, rel=1e-6) for large, small in norms)


def test_micro_batches_without_a_target(tmp_path: Path) -> None:
    """As the stock trainer: no loss, no gradient, and the others' mean is over their own tokens."""
    data = packed(12)
    for row in data[:4]:
        row["labels"] = [-100] * len(row["labels"])
    settings = {"train_sampling_strategy": "sequential"}
    stock = run(transformers.Trainer, tmp_path / "stock", data, **settings)
    ours = run(Trainer, tmp_path / "ours", data, **settings)
    assert_same_run(ours, stock, 6)


def test_batches_without_a_target_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("oomb.hf.trainer._log.warning", told.append)
    data = packed(12)
    for row in data[6:]:
        row["labels"] = [-100] * len(row["labels"])
    run(Trainer, tmp_path, data, train_sampling_strategy="sequential")
    assert len(told) == 1 and told[0].startswith("step 2: a batch has no token to predict")


@pytest.mark.slow
def test_model_init_and_a_second_train(tmp_path: Path) -> None:
    """Not packed: the stock trainer leaves a model made anew with its cache on, and packed
    documents then see each other."""
    trainers = []
    for kind, own in ((transformers.Trainer, {}), (Trainer, {"oomb_config": CONFIG})):
        trainer = kind(
            args=arguments(tmp_path / kind.__module__),
            train_dataset=masked(),
            eval_dataset=masked(3),
            model_init=lambda: model(),
            **own,
        )
        trainer.train()
        trainer.train()
        trainer.evaluate()
        trainers.append(trainer)
    assert_same_run(trainers[1], trainers[0], 6)


def test_predict_gives_log_probabilities(tmp_path: Path) -> None:
    trainer = Trainer(model(), arguments(tmp_path), oomb_config=CONFIG)
    rows = packed(4)
    output = trainer.predict(rows)
    with torch.no_grad():
        for row, found in zip(rows, output.predictions, strict=True):
            ids = torch.tensor([row["input_ids"]])
            logits = trainer.model(ids, position_ids=torch.tensor([row["position_ids"]])).logits[0]
            labels = torch.tensor(row["labels"])
            expected = torch.zeros(len(labels))
            every = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
            expected[1:] = torch.where(labels[1:] == -100, 0.0, every)
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)


def test_log_probabilities_of_batches_of_other_lengths(tmp_path: Path) -> None:
    """The stock trainer fills up what it joins, with -100."""
    settings = arguments(tmp_path, per_device_eval_batch_size=1)
    trainer = Trainer(model(), settings, oomb_config=CONFIG)
    [row] = packed(1)
    short = {name: values[:11] for name, values in row.items()}
    output = trainer.predict([row, short])
    labels = output.label_ids
    assert (labels[1, 11:] == -100).all()
    assert (output.predictions[labels == -100] == 0).all()
    assert (output.predictions[:, 1:][labels[:, 1:] != -100] < 0).all()


def test_evaluation_does_not_disturb_training(tmp_path: Path) -> None:
    """Dropout of adapters draws the same numbers whether or not an evaluation came between."""
    from peft import LoraConfig, get_peft_model

    def run(**settings: Any) -> list[float]:
        torch.manual_seed(1)
        adapted = get_peft_model(
            model(), LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "v_proj"])
        )
        trainer = Trainer(
            adapted,
            arguments(tmp_path, **settings),
            train_dataset=packed(),
            eval_dataset=packed(3),
            oomb_config=CONFIG,
        )
        trainer.train()
        return logged(trainer, "loss")

    assert run() == run(eval_strategy="steps", eval_steps=1)


def test_sampled_chunks(tmp_path: Path) -> None:
    """Settings of the engine reach it."""
    config = oomb.Config(chunk_size=32, page_size=16, backward=oomb.SampledChunks(keep=0.5))
    settings = arguments(tmp_path, max_steps=2)
    trainer = Trainer(model(), settings, train_dataset=packed(), oomb_config=config)
    trainer.train()
    assert trainer.engine.state_dict() == {"step": 6, "sampling_seed": 0}
