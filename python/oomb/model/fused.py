"""Norms and gated activations of a layer as single kernels, where Liger is installed and fits.

A module is run this way only if its forward is, instruction for instruction, that of a class of
transformers that does what the kernel does; the check at construction compares the result with the
stock forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from oomb.model.remade import remakable
from oomb.model.swap import Swaps, swapping


@dataclass(frozen=True)
class _Norm:
    """(offset + weight) * x / rms(x), as Liger is told it.

    Attributes:
        casting: ``"llama"`` rounds to the input's dtype before the weight, ``"gemma"`` after it.
        epsilon: the module's attribute of that name.
    """

    casting: Literal["llama", "gemma"]
    offset: float
    epsilon: str


# A class of transformers' modeling file `models.<family>` for each form of norm that exists there.
_NORMS = {
    ("llama", "LlamaRMSNorm"): _Norm("llama", 0.0, "variance_epsilon"),
    ("gpt_oss", "GptOssRMSNorm"): _Norm("gemma", 0.0, "variance_epsilon"),
    ("gemma3", "Gemma3RMSNorm"): _Norm("gemma", 1.0, "eps"),
    ("gemma4", "Gemma4RMSNorm"): _Norm("gemma", 0.0, "eps"),
}
_GATED = ("llama", "LlamaMLP")  # down_proj(act(gate_proj(x)) * up_proj(x))
_SILU = ("SiLU", "SiLUActivation")
_GELU_TANH = ("GELUTanh", "PytorchGELUTanh")


def fused_forwards(decoder: nn.Module, device: torch.device) -> dict[nn.Module, Callable[..., Any]]:
    """A faster forward for each module that has one; none on the CPU, in fp64 or without Liger."""
    if device.type != "cuda" or find_spec("liger_kernel") is None:
        return {}
    if any(p.dtype == torch.float64 for p in decoder.parameters()):
        return {}  # Liger's kernels have no fp64
    from liger_kernel.ops.geglu import LigerGELUMulFunction  # optional
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # optional
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # optional

    def norm(module: Any, form: _Norm) -> Callable[[torch.Tensor], torch.Tensor]:
        def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            epsilon = getattr(module, form.epsilon)
            y: torch.Tensor = LigerRMSNormFunction.apply(
                x, weight, epsilon, form.offset, form.casting, False
            )
            return y

        def forward(x: torch.Tensor) -> torch.Tensor:
            return remakable(normed, x, module.weight)

        return forward

    def gated(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        kernel = LigerSiLUMulFunction if _is_silu(module.act_fn) else LigerGELUMulFunction
        product: Callable[..., torch.Tensor] = kernel.apply

        def forward(x: torch.Tensor) -> torch.Tensor:
            gate, up = module.gate_proj(x), module.up_proj(x)
            y: torch.Tensor = module.down_proj(remakable(product, gate, up))
            return y

        return forward

    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for module, kind in fusible_modules(decoder):
        form = _norm_of(type(module))
        forwards[module] = gated(module) if kind == "gate" or form is None else norm(module, form)
    return forwards


def fusible_modules(decoder: nn.Module) -> Iterator[tuple[nn.Module, Literal["norm", "gate"]]]:
    """Modules that the kernels can run."""
    for module in decoder.modules():
        if "forward" in vars(module):
            continue
        if _norm_of(type(module)) is not None:
            if isinstance(getattr(module, "weight", None), nn.Parameter):  # some norms have none
                yield module, "norm"
        elif _is_gated(type(module)) and (_is_silu(module.act_fn) or _is_gelu(module.act_fn)):
            yield module, "gate"


def _is_silu(activation: Any) -> bool:
    return activation is F.silu or type(activation).__name__ in _SILU


def _is_gelu(activation: Any) -> bool:
    return type(activation).__name__ in _GELU_TANH


def _norm_of(kind: type) -> _Norm | None:
    if "Norm" not in kind.__name__:
        return None
    return next((form for place, form in _NORMS.items() if _like(kind, place)), None)


def _is_gated(kind: type) -> bool:
    return "MLP" in kind.__name__ and _like(kind, _GATED)


def _like(kind: type, place: tuple[str, str]) -> bool:
    """Whether a class runs the very instructions of one of transformers'."""
    family, name = place
    try:
        file = import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:  # of a later transformers
        return False
    model = getattr(file, name)
    return all(
        _instructions(getattr(kind, method, None)) == _instructions(getattr(model, method, None))
        for method in ("forward", "_norm")
    )


def _instructions(function: Any) -> object:
    """What a function does, without its names of variables and its text of help."""
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    numbers = tuple(c for c in code.co_consts if not isinstance(c, str))
    return code.co_code, code.co_names, code.co_freevars, numbers


@swapping
def replaced_forwards(swaps: Swaps, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Run modules through the given forwards; afterwards all is as before."""
    for module, forward in forwards.items():
        swaps.replace(module, "forward", forward)
