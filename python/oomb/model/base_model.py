"""The transformers model inside what an engine is given, or why it is not all of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oomb.errors import UnsupportedModelError
from oomb.model.head import is_classifier


def base_model(model: nn.Module) -> PreTrainedModel:
    """A causal language model of transformers without the wrapper of peft.

    Raises:
        ValueError: it is no module.
        UnsupportedModelError: it is no such model, or a wrapper does more than the model in it.
    """
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ValueError(
            f"model: expected a transformers causal language model, got {got}; load one with "
            "AutoModelForCausalLM.from_pretrained(…)"
        )
    _refuse_distributed(model)
    base = model
    if hasattr(model, "peft_config"):
        _refuse_acting_wrapper(model)
        if hasattr(model, "get_base_model"):
            base = getattr(model, "get_base_model")()  # noqa: B009  # peft's, not typed
    if hasattr(base, "_orig_mod"):
        raise UnsupportedModelError(
            "model: expected a transformers causal language model, got one wrapped by "
            "torch.compile; give the engine the model itself"
        )
    if not isinstance(base, PreTrainedModel):
        raise UnsupportedModelError(
            f"model: expected a transformers causal language model, got {type(model).__name__}"
        )
    if getattr(base.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(base).__name__}: encoder-decoder models are not supported"
        )
    if base.get_output_embeddings() is None and not is_classifier(base):
        raise UnsupportedModelError(f"{type(base).__name__}: has no language-model head")
    embedding = base.get_input_embeddings()
    if not isinstance(getattr(embedding, "weight", None), torch.Tensor):
        raise UnsupportedModelError(
            f"{type(base).__name__}: expected one embedding of tokens, got "
            f"{type(embedding).__name__}: several streams of tokens are not supported"
        )
    return base


def _refuse_acting_wrapper(model: Any) -> None:
    """Refuse adapters that act in the forward of peft's wrapper, which chunks do not run."""
    for name, config in model.peft_config.items():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        if getattr(config, "is_prompt_learning", False):
            reason = "prompt learning is not supported"
        elif kind == "ADALORA":
            reason = "the loss of its orthogonality is not supported; use LoRA"
        elif kind == "XLORA":
            reason = "its classifier, which sees the whole sequence first, is not supported"
        elif getattr(config, "alora_invocation_tokens", None):
            reason = "activation by tokens (alora_invocation_tokens) is not supported; use LoRA"
        else:
            continue
        raise UnsupportedModelError(f"peft adapter {name!r} ({type(config).__name__}): {reason}")


def _refuse_distributed(model: nn.Module) -> None:
    wrappers = (
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "DataParallel",
        "DeepSpeedEngine",
    )
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            raise UnsupportedModelError(
                f"{name}: sharded weights (DTensor) need mesh=… of the several ranks that hold "
                "them, which then share each sequence; for one process load the whole model"
            )
    for module in model.modules():
        name = type(module).__name__
        if name in wrappers or name.startswith("FSDP"):
            raise UnsupportedModelError(
                f"{name}: models wrapped for distributed training are not supported; give the "
                "engine the model itself, and mesh=… where ranks shall share each sequence"
            )
