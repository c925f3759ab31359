"""Models without weights: from a config, or the shapes of one that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from oomb.nearest import nearest
from oomb.trace.copied import copied_model
from oomb.trace.shapes import SHAPES, random_model


def bare_model(
    model: nn.Module | PretrainedConfig | Path | str,
    *,
    dtype: torch.dtype | None = None,
    adapter: Any = None,
) -> nn.Module:
    """A causal language model on the meta device: parameters have shape and dtype, no memory.

    Args:
        model: a model (returned as it is), a transformers config, a folder or hub name that
            transformers finds, or a name of ``oomb.trace.shapes.SHAPES``.
        dtype: of the parameters; None: what the config says, else bf16.
        adapter: a ``peft.PeftConfig`` (LoRA and the like) to put on top, or None.

    Raises:
        ValueError: no model of that name.
    """
    if isinstance(model, nn.Module):
        return model
    name = str(model).lower()
    bare: PreTrainedModel
    if not isinstance(model, PretrainedConfig) and name in SHAPES:
        kind = dtype or torch.bfloat16
        bare = random_model(SHAPES[name], device="meta", dtype=kind, positions=2**17)
    else:
        config = model if isinstance(model, PretrainedConfig) else _config_of(str(model))
        own = getattr(config, "dtype", None)
        kind = dtype or (own if isinstance(own, torch.dtype) else torch.bfloat16)
        with torch.device("meta"):
            bare = AutoModelForCausalLM.from_config(config, dtype=kind)
    if adapter is None:
        return bare
    from peft import get_peft_model  # optional

    adapted: nn.Module = get_peft_model(bare, adapter)
    return adapted


def _config_of(name: str) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            "model: expected a folder with a config.json, a name on the hub that is in the cache "
            f"or can be fetched, or one of {', '.join(SHAPES)}, got {name!r}"
            f"{nearest(name, SHAPES)}"
        ) from error
    return config


def shapes_only(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are fake CPU tensors of the same shapes.

    The copy takes no memory for tensors; its modules and adapters are those of the model, and so
    are functions that were put on modules, but they run the copy.
    """
    memo: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            fake = _empty_like(parameter)
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = _empty_like(buffer)
    for parameter in model.parameters():
        if parameter.grad is not None:
            memo[id(parameter.grad)] = None
    bare = copied_model(model, memo)
    for module in bare.modules():  # somebody's hooks want values
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    return bare


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
