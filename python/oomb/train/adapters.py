"""The ``lora`` section carried out."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from oomb.nearest import nearest
from oomb.train.errors import BadInput
from oomb.train.settings import LoraSettings

# peft adds these to the modules to save of a model that scores.
_HEADS = ("classifier", "score")
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)


def adapter_config(lora: LoraSettings, *, scores: bool = False) -> Any:
    """The ``lora`` section as peft's config, for a model that scores or for one that writes.

    Raises:
        BadInput: peft is not installed.
    """
    try:
        from peft import LoraConfig  # optional
    except ImportError as error:
        raise BadInput("lora: expected peft to be installed; pip install 'oomb[peft]'") from error
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        modules_to_save=None if lora.modules_to_save is None else [*lora.modules_to_save],
        use_rslora=lora.use_rslora,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
    )


def with_adapters(
    model: PreTrainedModel, lora: LoraSettings, *, scores: bool = False
) -> PreTrainedModel:
    """A model with the ``lora`` section's adapters.

    Raises:
        BadInput: peft is not installed, or the model has no such modules to save.
        ValueError: the model has no such layers; the text is peft's.
    """
    if scores:
        lora = without_heads(lora)
    config = adapter_config(lora, scores=scores)
    _expect_modules(model, lora.modules_to_save or [])
    from peft import get_peft_model  # optional

    adapted: Any = get_peft_model(model, config)
    return adapted  # type: ignore[no-any-return]


def without_heads(lora: LoraSettings) -> LoraSettings:
    """A ``lora`` section that does not name what peft saves of every model that scores."""
    names = [name for name in lora.modules_to_save or [] if name not in _HEADS]
    return lora.model_copy(update={"modules_to_save": names or None})


def _expect_modules(model: PreTrainedModel, names: list[str]) -> None:
    """Refuse a name that peft would pass over in silence, or end in a traceback for."""
    field = "lora.modules_to_save"
    modules = {key: m for key, m in model.named_modules(remove_duplicate=False) if key}
    for name in names:
        # As in peft, a name is the end of a module's.
        found = [module for key, module in modules.items() if name and key.endswith(name)]
        if not found:
            near = nearest(
                name, (key if "." in name else key.rpartition(".")[2] for key in modules)
            )
            raise BadInput(f"{field}: expected names of modules of the model, got {name!r}{near}")
        kinds = [type(module).__name__ for module in found if isinstance(module, _CONTAINERS)]
        if kinds:
            raise BadInput(f"{field}: expected modules that are called, got {name!r}, a {kinds[0]}")
