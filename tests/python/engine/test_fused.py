"""Which norms and gates run as single kernels: those whose instructions are of a known form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from oomb.model.fused import _norm_of, fusible_modules

from . import layer_classes
from .models import of

SIZE = 24
NORMS = [
    ("llama", "LlamaRMSNorm"),
    ("qwen3_moe", "Qwen3MoeRMSNorm"),
    ("deepseek_v3", "DeepseekV3RMSNorm"),
    ("gpt_oss", "GptOssRMSNorm"),
    ("olmo3", "Olmo3RMSNorm"),
    ("gemma2", "Gemma2RMSNorm"),
    ("gemma3", "Gemma3RMSNorm"),
    ("qwen3_next", "Qwen3NextRMSNorm"),
    ("gemma3n", "Gemma3nRMSNorm"),
    ("gemma4", "Gemma4RMSNorm"),
]


def norm(family: str, name: str) -> Any:
    file = getattr(getattr(transformers.models, family), f"modeling_{family}")
    made = getattr(file, name)(SIZE)
    nn.init.normal_(made.weight)
    return made


@pytest.mark.parametrize(("family", "name"), NORMS)
def test_a_norms_form_is_what_it_computes(family: str, name: str) -> None:
    """Beside the formula in fp64; in bf16 the weight comes before or after the rounding."""
    module = norm(family, name)
    form = _norm_of(type(module))
    assert form is not None
    x = torch.randn(50, SIZE, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16()
    wide = x.double()
    epsilon = getattr(module, form.epsilon)
    rms = (wide.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    weight = module.weight.detach().double() + form.offset
    torch.testing.assert_close(
        module(x.float()).double(), weight * wide / rms, rtol=1e-5, atol=1e-6
    )
    module = module.bfloat16()
    weight = module.weight.detach() + form.offset if form.offset == 0 else None
    if weight is None:  # 1 + w is in fp32
        weight = module.weight.detach().float() + form.offset
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    early = (weight * normed.bfloat16()).bfloat16()
    late = (weight.float() * normed).bfloat16()
    assert not torch.equal(early, late)
    expected = {"llama": early, "gemma": late}[form.casting]
    # gemma4 takes a power of -1/2 in place of rsqrt: now and then the last bit differs
    assert (module(x) != expected).float().mean() < 0.01


def test_a_norm_that_does_something_else_is_left_alone() -> None:
    kind = type(norm("llama", "LlamaRMSNorm"))

    class OtherRMSNorm(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 2

    class OtherGemmaRMSNorm(type(norm("gemma3", "Gemma3RMSNorm"))):  # type: ignore[misc]
        def _norm(self, x: torch.Tensor) -> torch.Tensor:
            return x

    patched = norm("llama", "LlamaRMSNorm")
    patched.forward = lambda x: x
    modules = nn.ModuleList([OtherRMSNorm(8), OtherGemmaRMSNorm(8), patched])
    assert list(fusible_modules(modules)) == []


def test_norms_without_a_weight_and_other_activations_are_left_alone() -> None:
    model = layer_classes.make("gemma4-31b", torch.float32)
    for module in model.modules():  # whose norms the tests' models have patched
        vars(module).pop("forward", None)
    kinds = {(type(m).__name__, kind) for m, kind in fusible_modules(model)}
    assert kinds == {("Gemma4RMSNorm", "norm"), ("Gemma4TextMLP", "gate")}
    bare = [m for m in model.modules() if not getattr(m, "with_scale", True)]
    assert bare and not {id(m) for m in bare} & {id(m) for m, _ in fusible_modules(model)}
    exact_gelu = of("Gemma3", config="Gemma3TextConfig", hidden_activation="gelu")
    assert {kind for _, kind in fusible_modules(exact_gelu)} == {"norm"}
