"""Quantised layers of bitsandbytes and torchao: which compute a chunk as they do the whole."""

from __future__ import annotations

from typing import Any

from torch import nn

from oomb.errors import UnsupportedModelError
from oomb.model.weight_only import is_of_torchao, is_weight_only


def check_quantized(model: nn.Module) -> None:
    """Refuse quantised layers that depend on what else is in the batch, or that should train.

    Layers are told apart by the name of their class; nothing is imported for it.

    Raises:
        UnsupportedModelError: the text names the layer and the nearest thing that works.
    """
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "Linear8bitLt" in kinds and _threshold(module) > 0:
            raise UnsupportedModelError(
                f"{name}: LLM.int8 chooses its outlier columns from all tokens that it is given, "
                "so a chunk would get others than the whole sequence; load the model with "
                "llm_int8_threshold=0.0, or in 4 bits (load_in_4bit=True)"
            )
        if "Float8Linear" in kinds and _scales_of_all(module):
            raise UnsupportedModelError(
                f"{name}: torchao's tensorwise float8 makes one scale of all tokens that a layer "
                "is given, so a chunk would get another than the whole sequence; convert it by "
                "the recipe 'rowwise' (Float8LinearConfig.from_recipe_name)"
            )
        weight = getattr(module, "weight", None)
        _check_of_torchao(name, module)
        quantized = kinds & {"Linear4bit", "Linear8bitLt"} and hasattr(weight, "requires_grad")
        if (quantized or is_of_torchao(weight)) and weight.requires_grad:  # type: ignore[union-attr]
            raise UnsupportedModelError(
                f"{name}: a quantised weight gets no gradient, but it requires one; freeze it "
                "(requires_grad_(False)) and train adapters of peft, or load the model unquantised"
            )


def _check_of_torchao(name: str, module: nn.Module) -> None:
    for own, weight in module._parameters.items():
        if not is_of_torchao(weight):
            continue
        if not isinstance(module, nn.Linear):
            raise UnsupportedModelError(
                f"{name}.{own}: expected torchao to quantise linear layers alone, got a "
                f"{type(module).__name__}; leave it as it is (quantize_'s filter_fn, "
                "TorchAoConfig's modules_to_not_convert)"
            )
        if not is_weight_only(weight):
            raise UnsupportedModelError(
                f"{name}.{own}: torchao's {type(weight).__name__} passes no gradient to the "
                "layer's input as it is quantised here, or none that is known to be right, so what "
                "is below could train on a wrong one; quantise by Int8WeightOnlyConfig() or "
                "Float8WeightOnlyConfig(), or load the model in 4 bits of bitsandbytes "
                "(load_in_4bit=True)"
            )


def _scales_of_all(module: Any) -> bool:
    """Whether a layer in float8 casts tokens or their gradients with one scale for all of them."""
    casts = (module.config.cast_config_input, module.config.cast_config_grad_output)
    return any(
        cast.scaling_type.name == "DYNAMIC" and cast.scaling_granularity.name == "TENSORWISE"
        for cast in casts
    )


def keep_training_layout(model: nn.Module) -> None:
    """Keep weights in 4 bits as they are on a CPU with bf16 products.

    bitsandbytes would pack them anew in the first forward in eval mode, and round differently from
    then on.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _threshold(module: Any) -> float:
    return float(getattr(getattr(module, "state", None), "threshold", 0.0) or 0.0)
