"""The gradient of logits in their place, and the loss with it, on a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import oomb
from oomb.engine.loss import ChunkLoss
from oomb.hf.cross_entropy import softmax_gradient_

pytestmark = pytest.mark.gpu

# Error of one rounding to nearest, relative.
_HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-25}


@pytest.mark.parametrize("vocabulary", [97, 8192, 50257, 152064])
@pytest.mark.parametrize("dtype", _HALF_ULP)
def test_gradient_in_place_is_rounded_once(vocabulary: int, dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(33, vocabulary, device="cuda")).to(dtype)
    targets = torch.randint(vocabulary, (33,), device="cuda")
    targets[0] = vocabulary - 1
    leaf = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    (expected.sum() * 0.37).backward()
    assert leaf.grad is not None
    terms = softmax_gradient_(logits, targets, 0.37)
    assert torch.allclose(terms.double(), expected, rtol=1e-5, atol=1e-5)
    # Exponentials in fp32 are right to 2^-21 or so; fp16 has steps of 2^-24 at its low end.
    limit = (_HALF_ULP[dtype] + 2.0**-19) * leaf.grad.abs()
    limit += 2.0**-25 if dtype == torch.float16 else 1e-12
    assert bool(((logits.double() - leaf.grad).abs() <= limit).all())


def test_the_kernel_changes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients with it are as near to fp32 as without, and the same in every run."""
    config = Qwen2Config(
        vocab_size=5000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
    exact = Qwen2ForCausalLM(config).to("cuda", torch.float32)
    exact.load_state_dict(model.state_dict())
    ids = torch.randint(5000, (1, 3000), device="cuda")

    def gradients(of: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
        of.zero_grad()
        with oomb.Engine(of, oomb.Config(chunk_size=1024, page_size=128)) as engine:
            engine.forward_backward(ids, ids)
        return {name: p.grad for name, p in of.named_parameters()}

    found, again = gradients(model), gradients(model)
    monkeypatch.setattr(ChunkLoss, "_has_kernel", lambda _: False)
    plain, reference = gradients(model), gradients(exact)
    for name, value in reference.items():
        assert torch.equal(found[name], again[name])
        error, usual = ((g[name] - value).norm() / value.norm() for g in (found, plain))
        assert error <= 1.05 * usual, (name, float(error), float(usual))
