"""Models without weights: from a config, or the shapes of one that has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from oomb.hub import hub_arguments
from oomb.model.float8 import RECIPE, convert_linears
from oomb.model.sizes import check_sizes, check_values
from oomb.nearest import nearest
from oomb.trace.copied import copied_model
from oomb.trace.published import PUBLISHED, model_name, published_config
from oomb.trace.quantized import FORMATS, pack_linears
from oomb.trace.shapes import SHAPES, random_model


def bare_model(
    model: nn.Module | PretrainedConfig | Path | str,
    *,
    dtype: torch.dtype | None = None,
    adapter: Any = None,
    quantization: str | None = None,
    float8: bool = False,
    images: bool = False,
) -> nn.Module:
    """A causal language model on the meta device: parameters have shape and dtype, no memory.

    Args:
        model: a model (returned as it is), a transformers config, a folder or hub name that
            transformers finds, or a name of ``oomb.trace.shapes.SHAPES`` or, as ``qwen3.5-9b``, of
            ``oomb.trace.published.PUBLISHED``.
        dtype: of the parameters; None: what the config says, else bf16.
        adapter: a ``peft.PeftConfig`` (LoRA and the like) to put on top, or None.
        quantization: ``"nf4"`` or ``"fp4"``: linear layers but the head in 4 bits with double
            quantisation; ``"int8"``: in 8 bits with a scale a row. Frozen under the adapter; not of
            a model that is given as a module.
        float8: linear layers but the head of torchao's recipe ``rowwise_with_gw_hp``, without an
            adapter; not of a model that is given as a module.
        images: with the tower that sees them.

    Raises:
        ValueError: no model of that name, code of its own, a config that no model can be made
            from, a quantised model without an adapter, or float8 with one or without torchao.
    """
    _check_quantization(quantization, adapter)
    if isinstance(model, nn.Module):
        return model
    bare: PreTrainedModel
    if isinstance(model, PretrainedConfig):
        bare = _without_weights(model, dtype, type(model).__name__, images=images)
    elif str(model).lower() in SHAPES:
        shape, kind = SHAPES[str(model).lower()], dtype or torch.bfloat16
        bare = random_model(shape, device="meta", dtype=kind, positions=2**17)
    else:
        bare = _without_weights(config_of(str(model)), dtype, str(model), images=images)
    if quantization is not None:
        pack_linears(bare, quantization)
    if adapter is None:
        return _in_float8(bare) if float8 else bare
    if float8:
        raise ValueError("float8: expected all weights to train, got adapters beside it")
    from peft import get_peft_model  # optional

    adapted: nn.Module = get_peft_model(bare, adapter)
    return adapted


def _in_float8(bare: PreTrainedModel) -> PreTrainedModel:
    try:
        convert_linears(bare, RECIPE)
    except ImportError as error:
        raise ValueError(f"float8: {error}") from error
    return bare


def _check_quantization(quantization: str | None, adapter: Any) -> None:
    if quantization is None:
        return
    if quantization not in FORMATS:
        raise ValueError(
            f"quantization: expected one of {', '.join(FORMATS)}, got {quantization!r}"
            f"{nearest(quantization, FORMATS)}"
        )
    if adapter is None:
        raise ValueError(
            "quantization: expected adapters beside it (LoRA), got none; quantised weights cannot "
            "be trained themselves"
        )


def config_of(name: str) -> PretrainedConfig:
    """The config of a folder, a published model or a hub name.

    Runs no code but transformers', and asks nobody.
    """
    published = None if os.path.isdir(name) else published_config(name)
    if published is not None:
        return published
    try:
        offline = {} if os.path.isdir(name) else hub_arguments()
        values, _ = PretrainedConfig.get_config_dict(name, **offline)
        kind = values.get("model_type")
        if values.get("auto_map") and kind not in CONFIG_MAPPING:
            raise ValueError("it brings code of its own, which is not run here")
        check_values(values)
        config: PretrainedConfig = AutoConfig.from_pretrained(
            name, trust_remote_code=False, **offline
        )
    except OSError as error:
        if os.path.isfile(os.path.join(name, "config.json")):  # a Path's raises for odd names
            raise _unusable(name, error) from error
        raise ValueError(
            "model: expected a folder with a config.json, a name on the hub that is in the cache "
            f"or can be fetched, or one of {', '.join(SHAPES)} or of docs/models.md, got {name!r}"
            f"{nearest(name, [*SHAPES, *map(model_name, PUBLISHED)])}"
        ) from error
    except Exception as error:  # whatever a config's class makes of values it did not expect
        raise _unusable(name, error) from error
    return config


def _without_weights(
    config: PretrainedConfig, dtype: torch.dtype | None, name: str, *, images: bool
) -> PreTrainedModel:
    kinds: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    try:
        check_sizes(config)
        own = getattr(config, "dtype", None)
        kind = dtype or (own if isinstance(own, torch.dtype) else torch.bfloat16)
        with torch.device("meta"):
            bare: PreTrainedModel = kinds.from_config(config, dtype=kind, trust_remote_code=False)
    except Exception as error:  # whatever modules make of a config that fits no model
        raise _unusable(name, error) from error
    return bare


def _unusable(name: str, error: Exception) -> ValueError:
    """One line of what somebody else's code has to say."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A complaint about a field has its name in the first line and what is wrong in the second.
    reason = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:300]
    if not isinstance(error, (ValueError, OSError)):
        reason = f"{type(error).__name__} {reason}".strip()
    return ValueError(
        f"model: expected a config that a model can be made from, got {name!r}: {reason}"
    )


def shapes_only(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are fake CPU tensors of the same shapes.

    The copy takes no memory for tensors; its modules and adapters are those of the model, and so
    are functions that were put on modules, but they run the copy.
    """
    memo: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            fake = _empty_like(parameter)
            bare_parameter = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            bare_parameter.is_plain = type(parameter) is nn.Parameter  # type: ignore[attr-defined]
            memo[id(parameter)] = bare_parameter
        for buffer in model.buffers():
            memo[id(buffer)] = _empty_like(buffer)
    for parameter in model.parameters():
        if parameter.grad is not None:
            memo[id(parameter.grad)] = None
    bare = copied_model(model, memo)
    for module in bare.modules():  # somebody's hooks want values
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
        # A compiler that fails on a shape without memory never tries that class of layer again.
        vars(module).pop("_compiled_call_impl", None)
    return bare


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
