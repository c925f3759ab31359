"""TRL's preference and policy trainers, stock and through the engine, on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import Trainer

import oomb
import oomb.hf
from oomb.engine.two_pass import TwoPass
from oomb.hf import fused_head
from oomb.hf.generation import GeneratesOnce
from oomb.hf.left_padding import left_padding

from .runs import CONFIG, prompts, tokenizer
from .two_pass_runs import classifier, compare, judged, model, preferences, reward, settings
from .two_pass_runs import plain_log_softmax as plain_log_softmax

pytestmark = pytest.mark.filterwarnings("error:two_pass. another call")


DPO_LOSSES = ["sigmoid", "hinge", "ipo", "apo_zero", "robust", "sigmoid_norm"]


@pytest.mark.parametrize(
    ("loss_type", "adapted"), [*((loss, True) for loss in DPO_LOSSES), ("sigmoid", False)]
)
def test_dpo(loss_type: str, adapted: bool, tmp_path: Path) -> None:
    def args() -> Any:
        smoothing = 0.1 if loss_type == "robust" else 0.0
        return trl.DPOConfig(
            **settings(tmp_path, per_device_train_batch_size=2),
            loss_type=[loss_type],
            label_smoothing=smoothing,
            max_length=64,
            use_weighting=loss_type == "ipo",
            ld_alpha=0.5 if loss_type == "sigmoid" else None,
        )

    stock, ours = trl.DPOTrainer, oomb.hf.DPOTrainer
    compare(stock, ours, args, preferences(), adapted, with_reference=not adapted)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.sampled(2)
def test_kto(loss_type: str, adapted: bool, tmp_path: Path) -> None:
    def args() -> Any:
        size = settings(tmp_path, per_device_train_batch_size=4)
        return trl.KTOConfig(**size, loss_type=loss_type, max_length=64)

    stock, ours = trl.KTOTrainer, oomb.hf.KTOTrainer
    compare(stock, ours, args, judged(16), adapted, with_reference=not adapted)


# Two prompts of unlike length in a batch: the shorter one is padded on the left.
GENERATION: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 9,
    "temperature": 0.9,
    "num_iterations": 2,  # so that ratios are not 1
    "learning_rate": 0.3,
}
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dapo": {"loss_type": "dapo", "epsilon": 0.02, "epsilon_high": 0.03},
    "dr_grpo": {"loss_type": "dr_grpo", "entropy_coef": 0.1},
    "gspo": {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
    "top entropies": {"loss_type": "grpo", "top_entropy_quantile": 0.5},
}


@pytest.fixture
def same_completions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And batches: for dropout the engine draws from the generator that sampling and shuffling
    draw from. Some of them are padded on the left."""
    padding: list[int] = []

    def seen(mask: torch.Tensor) -> torch.Tensor:
        found = left_padding(mask)
        padding.append(int(found.max()))
        return found

    monkeypatch.setattr(fused_head, "left_padding", seen)
    for kind in (trl.GRPOTrainer, trl.RLOOTrainer):
        generate = kind._generate_and_score_completions

        def seeded(self: Any, inputs: Any, generate: Callable[..., Any] = generate) -> Any:
            torch.manual_seed(self._step)
            generated = generate(self, inputs)
            torch.manual_seed(self._step)
            return generated

        monkeypatch.setattr(kind, "_generate_and_score_completions", seeded)
    yield
    assert max(padding) > 0


@pytest.mark.usefixtures("same_completions")
@pytest.mark.parametrize("variant", GRPO)
def test_grpo(variant: str, tmp_path: Path) -> None:
    """A penalty on what departs from the reference needs adapters here."""

    def args() -> Any:
        return trl.GRPOConfig(**settings(tmp_path, **GENERATION, **GRPO[variant]))

    data = prompts(2).select_columns(["prompt"])
    adapted = "beta" in GRPO[variant]
    compare(trl.GRPOTrainer, oomb.hf.GRPOTrainer, args, data, adapted, reward_funcs=reward)


LONG = {
    "prompt": [
        " ".join(f"w{3 + i * k % 90}" for i in range(n))
        for k, n in ((1, 70), (7, 49), (11, 70), (13, 64))
    ]
}


@pytest.mark.usefixtures("same_completions")
def test_completions_of_a_prompt_are_run_as_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four groups that TRL has shuffled into two micro-batches."""
    tokens: list[tuple[int, int]] = []
    fill = TwoPass._fill

    def seen(self: Any) -> None:
        assert self._tree is not None
        tokens.append((self._inputs.tokens, self._tree.rows.tokens * self._tree.rows.batch))
        fill(self)

    monkeypatch.setattr(TwoPass, "_fill", seen)

    def args() -> Any:
        of_groups = {**GENERATION, "per_device_train_batch_size": 8, "max_steps": 1}
        return trl.GRPOConfig(**settings(tmp_path, **of_groups, beta=0.04, entropy_coef=0.1))

    data = Dataset.from_dict(LONG)
    compare(trl.GRPOTrainer, oomb.hf.GRPOTrainer, args, data, True, reward_funcs=reward, steps=1)
    assert all(2 * run < padded for run, padded in tokens)


@pytest.mark.usefixtures("same_completions")
@pytest.mark.parametrize("adapted", [False, True])
def test_rloo(adapted: bool, tmp_path: Path) -> None:
    def args() -> Any:
        beta = 0.05 if adapted else 0.0
        return trl.RLOOConfig(**settings(tmp_path, **GENERATION, beta=beta))

    data = prompts(2).select_columns(["prompt"])
    compare(trl.RLOOTrainer, oomb.hf.RLOOTrainer, args, data, adapted, reward_funcs=reward)


def test_a_resumed_run_is_where_it_was_within_a_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TRL counts calls from the first one, and would begin a generation elsewhere in the data."""
    monkeypatch.setattr(Trainer, "training_step", lambda self, *_: self._step)
    trainer: Any = GeneratesOnce.__new__(GeneratesOnce)
    trainer.args = SimpleNamespace(gradient_accumulation_steps=2)
    trainer.state = SimpleNamespace(global_step=3)
    trainer._step, trainer._buffered_inputs = 0, None
    assert trainer.training_step(None, {}) == 6
    trainer._step, trainer._buffered_inputs = 7, [{}]
    assert trainer.training_step(None, {}) == 7


@pytest.mark.parametrize("adapted", [False, True])
def test_reward(adapted: bool, tmp_path: Path) -> None:
    """The head trains too: with adapters as one of PEFT's modules to save."""

    def args() -> Any:
        size = settings(tmp_path, per_device_train_batch_size=2, learning_rate=1e-3)
        return trl.RewardConfig(**size, center_rewards_coefficient=0.1, max_length=64)

    stock, ours = trl.RewardTrainer, oomb.hf.RewardTrainer
    compare(stock, ours, args, preferences(), adapted, make_model=classifier)


@pytest.mark.parametrize("adapted", [False, True])
def test_reward_with_margins(adapted: bool, tmp_path: Path) -> None:
    def args() -> Any:
        size = settings(tmp_path, per_device_train_batch_size=2, learning_rate=1e-3)
        return trl.RewardConfig(**size, max_length=64)

    data = preferences().add_column("margin", [0.5 * (row % 3) for row in range(8)])
    stock, ours = trl.RewardTrainer, oomb.hf.RewardTrainer
    compare(stock, ours, args, data, adapted, make_model=classifier)


def test_what_a_user_makes_of_logits(tmp_path: Path) -> None:
    """``preprocess_logits_for_metrics`` sees what TRL's trainer would show it, once."""

    def predictions(kind: Any, **others: Any) -> Any:
        trainer = kind(
            model=classifier(False),
            args=trl.RewardConfig(**settings(tmp_path)),
            train_dataset=preferences(),
            processing_class=tokenizer(),
            preprocess_logits_for_metrics=lambda logits, _: torch.sigmoid(logits),
            **others,
        )
        return trainer.predict(trainer.train_dataset).predictions

    expected = predictions(trl.RewardTrainer)
    found = predictions(oomb.hf.RewardTrainer, oomb_config=CONFIG)
    assert abs(found - expected).max() < 1e-6


def dpo(model: Any, folder: Path, **others: Any) -> oomb.hf.DPOTrainer:
    arguments = {**settings(folder, per_device_train_batch_size=2), "max_length": 64, **others}
    return oomb.hf.DPOTrainer(
        model=model,
        args=trl.DPOConfig(**arguments),
        train_dataset=preferences(),
        eval_dataset=preferences(4),
        processing_class=tokenizer(),
        oomb_config=CONFIG,
    )


def test_evaluates_as_the_stock_trainer_does(tmp_path: Path) -> None:
    data = {"train_dataset": preferences(), "eval_dataset": preferences(4)}
    args = trl.DPOConfig(**settings(tmp_path), max_length=64)
    stock = trl.DPOTrainer(model(True), args=args, processing_class=tokenizer(), **data)
    expected = stock.evaluate()
    trainer = dpo(model(True), tmp_path)
    found = trainer.evaluate()
    assert set(expected) <= set(found)
    for name, value in expected.items():
        if not name.endswith(("runtime", "per_second", "preparation_time")):
            assert found[name] == pytest.approx(value, rel=1e-9), name


def test_an_error_in_a_step_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = model(True)
    trainer = dpo(trained, tmp_path)
    before = dict(vars(trained.get_base_model()))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no backward")

    monkeypatch.setattr(trainer.accelerator, "backward", fail)
    with pytest.raises(RuntimeError, match="no backward"):
        trainer.train()
    assert vars(trained.get_base_model())["forward"] == before["forward"]
    assert all(p.grad is None for p in trained.parameters())
    assert not trainer._heads[0].pending
    ids = torch.ones(1, 5, dtype=torch.long)
    trainer.engine.forward_backward(ids, ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_offloading": True}, "activation_offloading: expected False"),
        ({"use_liger_kernel": True}, "use_liger_kernel: expected False"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        dpo(model(True), tmp_path, **settings)


def test_a_loss_of_which_nothing_is_known(tmp_path: Path) -> None:
    class Own(oomb.hf.DPOTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match="Own.compute_loss: expected that of TRL's DPOTrainer"):
        Own(
            model=model(True),
            args=trl.DPOConfig(**settings(tmp_path)),
            train_dataset=preferences(),
            processing_class=tokenizer(),
        )
