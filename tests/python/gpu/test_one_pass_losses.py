"""Losses in one pass on a GPU: a teacher's targets, and the loss of a mixture's routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_case import make_pair
from transformers import Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import oomb

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SETTINGS = oomb.Config(chunk_size=512, page_size=128)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reverse", [False, True], ids=["kl", "reverse"])
@pytest.mark.parametrize("best", [None, 32])
def test_a_teachers_gradients_are_as_near_to_fp32_as_those_of_autograd(
    best: int | None, reverse: bool
) -> None:
    """Of a teacher in fp32, whose own rounding says nothing of the student's gradient."""
    model, exact = make_pair()
    torch.manual_seed(5)
    teacher = Qwen2ForCausalLM(model.config).to(DEVICE, torch.float32)
    with torch.no_grad():  # so that some tokens are likely
        teacher.lm_head.weight.mul_(8)
    ids = torch.randint(5000, (2, 1500), device=DEVICE)

    def ordinary(of: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
        of.zero_grad()
        with torch.no_grad():
            p = (teacher(input_ids=ids, use_cache=False).logits.float() / 2).softmax(-1)[:, :-1]
        q = (of(input_ids=ids, use_cache=False).logits.float() / 2).softmax(-1)[:, :-1]
        if best is not None:
            likely = p.topk(best).indices
            p, q = (
                torch.cat([x.gather(2, likely), x.scatter(2, likely, 0).sum(-1, True)], -1)
                for x in (p, q)
            )
        if reverse:
            p, q = q, p
        (p * (p.log() - q.log())).sum(-1).mean().backward()
        return gradients(of)

    reference, usual = ordinary(exact), ordinary(model)
    model.zero_grad()
    with oomb.Engine(teacher, SETTINGS) as engine:
        targets = oomb.TeacherTargets.of(engine, ids, best=best, temperature=2.0)
    with oomb.Engine(model, SETTINGS) as engine:
        engine.forward_backward(ids, ids, token_loss=targets.reverse_kl if reverse else targets.kl)
    found = gradients(model)
    for name, value in reference.items():
        errors = [(g[name] - value).norm() / value.norm() for g in (found, usual)]
        assert errors[0] <= 1.5 * errors[1] + 1e-3, (name, *map(float, errors))


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_routers_get_the_models_own_gradients(recompute: Any) -> None:
    """In fp32, where no rounding of bf16 turns a choice; the coefficient lets an error show."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    model = Qwen3MoeForCausalLM(config).to(DEVICE).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(std=config.hidden_size**-0.5)
    ids = torch.randint(1000, (2, 1300), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[1, 700:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    own = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    own.loss.backward()
    reference = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    settings = oomb.Config(chunk_size=256, page_size=64, recompute=recompute)
    with oomb.Engine(model, settings) as engine:
        step = engine.forward_backward(ids, labels, attention_mask=mask)
    assert float(step.loss) == pytest.approx(float(own.loss), rel=1e-5)
    found = gradients(model)
    for name, value in reference.items():
        error = float((found[name] - value).norm() / value.norm())
        assert error <= 1e-3, (name, error)
