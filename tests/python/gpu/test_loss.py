"""The gradient of logits in their place, and the loss with it, on a GPU."""

from __future__ import annotations

import pytest
import torch
from engine_case import make_pair
from transformers import Qwen2ForCausalLM

import oomb
from oomb.core.loss import ChunkLoss
from oomb.model.cross_entropy import softmax_gradient_

pytestmark = pytest.mark.gpu

SCALE = 0.37


def half_gap(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest error of one rounding of fp64 values to a dtype."""
    kind = torch.finfo(dtype)
    exponent = torch.frexp(values.abs())[1] - 1
    smallest = torch.frexp(torch.tensor(kind.tiny, dtype=torch.float64))[1] - 1
    gaps = torch.full_like(values, kind.eps / 2)
    return torch.ldexp(gaps, exponent.clamp(min=int(smallest)))


def error_of_fp32(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What arithmetic in fp32 may cost each element of the gradient, absolute.

    An error in the exponent, x less the highest, is a relative one of the exponential; it is
    rounded, scaled by log2(e) and rounded. Sums and the exponentials themselves are right to 2^-20
    at worst. At the target 1 is taken away. What is below 2^-126 may vanish.
    """
    x = logits.double()
    exponent = 2 * 2.0**-24 * (x.amax(1, keepdim=True) - x)
    taken = torch.zeros_like(x).scatter_(1, targets[:, None], 2.0**-24)
    return SCALE * (x.softmax(1) * (exponent + 2.0**-20) + taken) + 2.0**-126


@pytest.mark.parametrize("vocabulary", [97, 8192, 50257, 152064])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradient_in_place_is_rounded_once(vocabulary: int, dtype: torch.dtype) -> None:
    """Against fp64; rounded to a half precision no farther from it all in all than torch's own."""
    logits = (4 * torch.randn(33, vocabulary, device="cuda")).to(dtype)
    targets = torch.randint(vocabulary, (33,), device="cuda")
    targets[0] = vocabulary - 1
    exact, usual = logits.double().requires_grad_(), logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction="none")
    (expected.sum() * SCALE).backward()
    torch.nn.functional.cross_entropy(usual.float(), targets, reduction="sum").mul(SCALE).backward()
    assert exact.grad is not None and usual.grad is not None
    arithmetic = error_of_fp32(logits, targets)
    terms = softmax_gradient_(logits, targets, SCALE)
    assert torch.allclose(terms.double(), expected, rtol=1e-5, atol=1e-5)
    error = (logits.double() - exact.grad).abs()
    limit = arithmetic + half_gap(exact.grad.abs() + arithmetic, dtype)
    print(f"\nlargest error / limit {float((error / limit).max()):.4f}", end="")
    assert bool((error <= limit).all())
    usual_error = (usual.grad.double() - exact.grad).norm()
    print(f", all / torch's {float(error.norm() / usual_error):.4f}")
    assert error.norm() <= 1.05 * usual_error or dtype == torch.float32


def test_the_kernel_changes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients with it are as near to fp32 as without, and the same in every run."""
    model, exact = make_pair()
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
