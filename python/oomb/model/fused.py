"""Norms and gated activations of a layer as single kernels, where Liger is installed and fits.

A module is run this way only if its class does what the kernel does and nothing more; the check at
construction compares the result with the stock forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from oomb.model.swap import Swaps, swapping

# Classes whose forward is weight * x / rms(x), cast to the input's dtype before the weight.
_NORMS = frozenset(
    [
        "LlamaRMSNorm",
        "Qwen2RMSNorm",
        "Qwen3RMSNorm",
        "MistralRMSNorm",
        "Phi3RMSNorm",
        "GraniteRMSNorm",
    ]
)
# Classes whose forward is down_proj(act(gate_proj(x)) * up_proj(x)).
_GATED = frozenset(["LlamaMLP", "Qwen2MLP", "Qwen3MLP", "MistralMLP", "GraniteMLP"])


def fused_forwards(decoder: nn.Module, device: torch.device) -> dict[nn.Module, Callable[..., Any]]:
    """A faster forward for each module that has one; none on the CPU or without Liger."""
    if device.type != "cuda" or find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # optional
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # optional

    def norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = LigerRMSNormFunction.apply(
                x, module.weight, module.variance_epsilon, 0.0, "llama", False
            )
            return y

        return forward

    def gated(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            product = LigerSiLUMulFunction.apply(module.gate_proj(x), module.up_proj(x))
            y: torch.Tensor = module.down_proj(product)
            return y

        return forward

    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for module, kind in fusible_modules(decoder):
        forwards[module] = norm(module) if kind == "norm" else gated(module)
    return forwards


def fusible_modules(decoder: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules that the kernels can run, each a ``"norm"`` or a ``"gate"``."""
    for module in decoder.modules():
        if type(module).__name__ in _NORMS and "forward" not in module.__dict__:
            yield module, "norm"
        elif _is_silu_gate(module):
            yield module, "gate"


def _is_silu_gate(module: Any) -> bool:
    if type(module).__name__ not in _GATED or "forward" in module.__dict__:
        return False
    return module.act_fn is F.silu or type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


@swapping
def replaced_forwards(swaps: Swaps, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Run modules through the given forwards; afterwards all is as before."""
    for module, forward in forwards.items():
        swaps.replace(module, "forward", forward)
