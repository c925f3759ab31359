"""The blocks of docs/recipes.md run one after the other, and do what the text says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from oomb.cli.demo_model import small_model
from oomb.cli.demo_tokenizer import byte_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
OPTIONAL = {"QLoRA": "bitsandbytes"}  # packages that only some of us have
BLOCKS = re.findall(r"^## ([^\n]+)\n|^```python\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is defined at the end, and by heading what was then."""
    folder = tmp_path_factory.mktemp("recipes")
    torch.manual_seed(0)
    small_model().save_pretrained(folder / "oomb-demo" / "model")
    byte_tokenizer().save_pretrained(folder / "oomb-demo" / "model")
    now: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        heading = "start"
        for title, block in BLOCKS:
            heading = title or heading
            needed = OPTIONAL.get(heading)
            if block and (needed is None or find_spec(needed) is not None):
                exec(compile(block, f"recipes.md, {heading}", "exec"), now)
                now[heading] = {n: v for n, v in now.items() if n.islower()}
    return now


def test_every_recipe_ran(names: dict[str, Any]) -> None:
    headings = [title for title, _ in BLOCKS if title]
    assert len(headings) >= 8
    absent = {heading for heading, package in OPTIONAL.items() if find_spec(package) is None}
    assert all(heading in names for heading in headings if heading not in absent)


def test_a_step_learns_from_every_token_but_the_first(names: dict[str, Any]) -> None:
    step = names["One document per step"]["step"]
    assert step.num_valid_tokens == 2999
    assert step.loss == pytest.approx(torch.tensor(256.0).log().item(), abs=0.3)


def test_packed_documents_have_the_loss_of_each(names: dict[str, Any]) -> None:
    """On the model as the recipe's was then; the divisor is that of accumulation."""
    from oomb import Config, Engine

    now = names["Packed documents"]
    torch.manual_seed(0)
    model = small_model()
    with Engine(model, Config(chunk_size=1024)) as engine:
        alone = sum(
            engine.evaluate(one, one, num_items_in_batch=now["total"]).loss
            for one in now["documents"]
        )
        packed = engine.evaluate(now["packed"], now["packed"], document_ids=now["document_ids"])
    assert packed.num_valid_tokens == now["total"]
    torch.testing.assert_close(packed.loss, torch.as_tensor(alone))


def test_resuming_gives_the_states_back(names: dict[str, Any]) -> None:
    now = names["Saving and resuming"]
    assert now["newest"].step == 1
    assert now["state"]["engine"] == now["engine"].state_dict()
    assert now["state"]["optimizer"]["state"]


def test_evaluation_and_plan(names: dict[str, Any]) -> None:
    assert names["plan"].device_bytes > 0
    assert 100 < names["perplexity"] < 600
    assert names["worst"].shape == (1,)


def test_policy_gradients_are_those_of_plain_autograd(names: dict[str, Any]) -> None:
    """Of a clipped objective with a KL term, through the recipe's own function."""
    from oomb import Config, Engine

    torch.manual_seed(1)
    ids = torch.randint(256, (2, 500))
    labels = ids.clone()
    labels[:, :100] = -100
    counted = labels != -100
    advantages, noise = torch.randn(2, 1), 0.4 * torch.randn(2, 500)
    model = small_model()
    shifted = model(ids).logits[:, :-1].log_softmax(-1)
    ours = shifted.gather(-1, ids[:, 1:, None]).squeeze(-1)
    plain = torch.nn.functional.pad(ours, (1, 0)).masked_fill(~counted, 0.0)
    old = plain.detach() + noise  # so that ratios lie on both sides of both bounds

    def loss_of(logprobs: torch.Tensor) -> torch.Tensor:
        ratio = (logprobs - old).exp()
        assert (ratio > 1.2).any() and (ratio < 0.8).any()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        away = (old - logprobs).exp() - (old - logprobs) - 1
        return (0.1 * away - gain)[counted].mean()

    expected = loss_of(plain)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    with Engine(model, Config(chunk_size=128)) as engine:
        found = names["Policy gradients"]["add_gradient"](engine, ids, labels, loss_of)
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        assert gradient is not None and parameter.grad is not None
        error = float((parameter.grad - gradient).norm() / gradient.norm())
        assert error < 5e-6, name


def test_a_policy_step_raises_what_was_rewarded(names: dict[str, Any]) -> None:
    now = names["Policy gradients"]
    assert float(now["policy_loss"]) < -1.5  # the ratio of the second step is above 1


def test_a_preference_step_has_a_loss_near_that_of_no_preference(names: dict[str, Any]) -> None:
    loss = names["Preference pairs"]["preference_loss"]
    assert loss.item() == pytest.approx(0.693, abs=0.2)


def test_heads_of_ones_own(names: dict[str, Any]) -> None:
    now = names["Rewards and embeddings"]
    assert now["reward_loss"].item() == pytest.approx(0.69, abs=0.5)
    assert 0 < now["contrastive_loss"].item() < 5
    assert now["call"].logprobs is None


def test_completions_of_one_prompt(names: dict[str, Any]) -> None:
    """At ratios of one, the loss is that of the gains, whose mean is zero, and of entropies."""
    assert names["Completions of one prompt"]["group_loss"].item() < 0
    assert names["Completions of one prompt"]["call"].num_valid_tokens == 4 * 60


def test_a_teachers_distribution(names: dict[str, Any]) -> None:
    now = names["A teacher's distribution"]
    ids = now["input_ids"]
    with torch.no_grad():
        student, teacher = (
            now[name](ids).logits[0, :-1].double() for name in ("adapted", "teacher")
        )
    p, q = ((logits / 2).log_softmax(-1) for logits in (teacher, student))
    plain = torch.nn.functional.cross_entropy(student, ids[0, 1:])
    expected = 0.5 * plain + 0.5 * 4 * (p.exp() * (p - q)).sum(-1).mean()
    assert float(now["distilled"].loss) == pytest.approx(float(expected), rel=1e-5)
    p, q = (logits.softmax(-1) for logits in (teacher, student))
    best = p.topk(16).indices
    p, q = (
        torch.cat([x.gather(1, best), x.scatter(1, best, 0).sum(1)[:, None]], 1) for x in (p, q)
    )
    expected = (p * (p / q).log()).sum(-1).mean()
    assert float(now["from_likely"].loss) == pytest.approx(float(expected), rel=1e-4)


def test_trls_other_trainers_train(names: dict[str, Any]) -> None:
    now = names["Preference and policy trainers of TRL"]
    for trainer in (now["preferring"], now["judging"], now["policy"]):
        (log,) = (log for log in trainer.state.log_history if "train_loss" in log)
        assert abs(log["train_loss"]) < 10
    assert now["preferring"].state.global_step == 2


def test_adapters_over_four_bits_get_the_models_own_gradients(names: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    now = names["QLoRA"]
    model, ids = now["quantized"], now["input_ids"]
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours and all("lora_" in name for name in ours)
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert float(now["quantized_step"].loss) == pytest.approx(loss.item(), rel=1e-5)
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 0:
            error = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
            assert float(error) < 1e-5, name
            compared += 1
    assert compared == len(ours) / 2  # A has no gradient while B is zero


def test_trl_trains_and_refuses_losses_of_its_own(names: dict[str, Any], tmp_path: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    from oomb.hf import EngineTrainerMixin

    now = names["TRL"]
    (log,) = (log for log in now["trainer"].state.log_history if "train_loss" in log)
    assert 0 < log["train_loss"] < 10

    class Preferences(EngineTrainerMixin, DPOTrainer):  # type: ignore[misc]
        pass

    with pytest.raises(ValueError, match=r"^DPOTrainer.compute_loss: expected the one of"):
        Preferences(
            small_model(),
            args=DPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none"),
            train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}),
            processing_class=now["tokenizer"],
            peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        )
