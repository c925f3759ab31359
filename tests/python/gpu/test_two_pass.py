"""Two passes on a GPU: the kernel of the loss, and slices with entropies."""

from __future__ import annotations

import pytest
import torch
from engine_case import make_pair
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM

import oomb

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropies", [False, True])
def test_gradients_are_as_near_to_fp32_as_those_of_autograd(
    entropies: bool, temperature: float
) -> None:
    model, exact = make_pair()
    ids = torch.randint(5000, (2, 2500), device="cuda")

    def loss(logprobs: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
        """Of token weights with both signs, and a sigmoid of a difference of rows."""
        places = torch.arange(2500, device="cuda")
        chosen, rejected = (logprobs * torch.sin(places)).sum(1)
        bonus = 0.0 if found is None else 0.3 * found.mean()
        return -F.logsigmoid(0.05 * (chosen - rejected)) - bonus

    def ordinary(of: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
        of.zero_grad()
        logits = of(input_ids=ids, use_cache=False).logits.float() / temperature
        logp = logits[:, :-1].log_softmax(-1)
        at_target = logp.gather(2, ids[:, 1:, None])[:, :, 0]
        found = F.pad(-(logp.exp() * logp).sum(-1), (1, 0)) if entropies else None
        loss(F.pad(at_target, (1, 0)), found).backward()
        return {name: p.grad for name, p in of.named_parameters() if p.grad is not None}

    reference, usual = ordinary(exact), ordinary(model)
    model.zero_grad()
    settings = oomb.Config(chunk_size=1024, page_size=128)
    with oomb.Engine(model, settings) as engine:
        arguments = {"temperature": temperature, "entropies": entropies}
        with engine.two_pass(ids, **arguments) as call:  # type: ignore[arg-type]
            loss(call.logprobs, call.entropies).backward()
            call.sweep()
    for name, parameter in model.named_parameters():
        value = reference[name]
        assert parameter.grad is not None
        errors = [(g - value).norm() / value.norm() for g in (parameter.grad, usual[name])]
        assert errors[0] <= 1.5 * errors[1] + 1e-3, (name, *map(float, errors))


@pytest.mark.parametrize("memory", [None, "4MiB"])
def test_rows_that_share_a_prefix_are_as_near_as_rows(memory: str | None) -> None:
    """Three completions of a prompt that ends inside a page; again, bit by bit."""
    model, exact = make_pair()
    ids = torch.randint(5000, (3, 2500), device="cuda")
    ids[:, :1900] = ids[0, :1900]
    labels = ids.clone()
    labels[:, :1900] = -100
    weights = torch.tensor([1.0, -0.6, 0.3], device="cuda")[:, None] / 600

    def gradients(of: Qwen2ForCausalLM, share: bool) -> dict[str, torch.Tensor]:
        of.zero_grad()
        settings = oomb.Config(
            chunk_size=512, page_size=128, device_memory=memory, host_memory="1GiB"
        )
        with (
            oomb.Engine(of, settings) as engine,
            engine.two_pass(ids, labels, share_prefixes=share) as call,
        ):
            (call.logprobs * weights).sum().backward()
            call.sweep()
        return {name: p.grad for name, p in of.named_parameters() if p.grad is not None}

    exact.zero_grad()
    logits = exact(input_ids=ids, use_cache=False).logits[:, 1899:-1]
    at_target = logits.log_softmax(-1).gather(2, ids[:, 1900:, None])[:, :, 0]
    (at_target * weights).sum().backward()
    reference = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    tree, again, rows = gradients(model, True), gradients(model, True), gradients(model, False)
    for name, value in reference.items():
        errors = [(g[name] - value).norm() / value.norm() for g in (tree, rows)]
        assert errors[0] <= 1.5 * errors[1] + 1e-3, (name, *map(float, errors))
        assert torch.equal(tree[name], again[name]), name
