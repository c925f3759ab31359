"""Sums of gradients in bf16 on a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import oomb
from oomb.core.rounded_sums import add_rounded, product

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("elements", [1, 7, 4096, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_addition_has_the_bits_of_the_cpu(elements: int, dtype: torch.dtype) -> None:
    """The noise is a function of seed and element; the sum in fp32 rounds alike everywhere."""
    generator = torch.Generator().manual_seed(elements)
    total = torch.randn(elements, generator=generator).bfloat16()
    addend = (torch.randn(elements, generator=generator) / 100).to(dtype)
    for special in (float("inf"), float("nan"), 0.0):
        addend[elements // 2] = special
        here, there = total.clone(), total.cuda()
        add_rounded(here, addend, 2**63 + 5)
        add_rounded(there, addend.cuda(), 2**63 + 5)
        assert torch.equal(here.view(torch.int16), there.cpu().view(torch.int16)) or bool(
            here.isnan().any()
        )
        whole = ~here.isnan()
        assert torch.equal(here[whole], there.cpu()[whole])
        assert torch.equal(here.isnan(), there.cpu().isnan())


def test_a_part_of_a_sum_is_added_to_in_its_place() -> None:
    total = torch.zeros(64, 33, device="cuda", dtype=torch.bfloat16)
    add_rounded(total[5:9], torch.ones(4, 33, device="cuda"), 3)
    assert bool((total[5:9] == 1).all()) and float(total.sum()) == 4 * 33


def test_a_product_is_not_rounded_in_between() -> None:
    left = torch.randn(512, 96, device="cuda").bfloat16()
    right = torch.randn(512, 64, device="cuda").bfloat16()
    found = product(left[:, 16:48], right)
    exact = left[:, 16:48].double().t() @ right.double()
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 1e-5


def gradients(model: Qwen2ForCausalLM, **settings: object) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 512, (1, 1500), generator=torch.Generator().manual_seed(2)).cuda()
    model.zero_grad(set_to_none=True)
    chosen = oomb.Config(chunk_size=256, page_size=128, keep_main_grad=True, **settings)  # type: ignore[arg-type]
    with oomb.Engine(model, chosen) as engine:
        engine.forward_backward(ids, ids)
        return {n: engine.main_grad(p).clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_a_call(tied: bool) -> None:
    """Near the sums in fp32 by the rounding of its additions; the same bits in small tiers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=tied)
    model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
    exact = gradients(model)
    found = gradients(model, main_grad_dtype="bfloat16")
    for name, value in found.items():
        assert value.dtype == torch.bfloat16
        error = (value.double() - exact[name].double()).norm() / exact[name].double().norm()
        # 6 chunks and the head's slices, each at most a step of 2^-8 of the largest sum so far.
        assert float(error) < 2**-6, name
    again = gradients(model, main_grad_dtype="bfloat16", recompute="layer")
    assert all(torch.equal(again[name], value) for name, value in found.items())
