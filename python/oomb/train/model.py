"""The ``model`` section carried out."""

from __future__ import annotations

import copy
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TorchAoConfig,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from oomb.hub import hub_arguments
from oomb.model.quantized import keep_training_layout
from oomb.model.sizes import check_sizes, check_values
from oomb.nearest import nearest
from oomb.parallel.job import Job, expect_gpu_for_each, ranks_in_job
from oomb.trace.bare import bare_model
from oomb.train.adapters import with_adapters
from oomb.train.errors import BadInput
from oomb.train.float8 import with_float8
from oomb.train.rope import extend_positions
from oomb.train.settings import LoraSettings, ModelSettings

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_AS_SAVED = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_config(settings: ModelSettings) -> PreTrainedConfig:
    """The model's config with the run's rope settings in it. Reads no weights.

    Raises:
        BadInput: no such model, code of its own that was not asked for, weights only as pickle, or
            sizes that no model has.
    """
    _check_folder("model.name", settings.name)
    try:
        values, _ = PreTrainedConfig.get_config_dict(settings.name, **_hub(settings))
        check_values(values)
        config: PreTrainedConfig = AutoConfig.from_pretrained(settings.name, **_hub(settings))
        check_sizes(config)
    except Exception as error:  # whatever a config's class makes of values that it did not expect
        raise BadInput(
            _unloadable("model.name", "a transformers model", settings, error)
        ) from error
    extend_positions(config, settings)
    return config


def load_tokenizer(settings: ModelSettings, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, as it was saved.

    Raises:
        BadInput: there is none, or it has ids that the model has no embedding for.
    """
    name, field = settings.tokenizer or settings.name, "model.tokenizer"
    _check_folder(field, name)
    hub = _hub(settings)
    if settings.tokenizer is not None:
        del hub["revision"]  # the model's
    try:
        # AutoTokenizer makes some tokenizers anew by the model's type; one that says it is complete
        # in its tokenizer.json is taken from there.
        declared = get_tokenizer_config(name, **hub).get("tokenizer_class")
        kind: Any = PreTrainedTokenizerFast if declared in _AS_SAVED else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(name, **hub)
    except Exception as error:  # the Rust readers raise bare Exceptions
        raise BadInput(_unloadable(field, "a tokenizer", settings, error)) from error
    _check_vocabulary(tokenizer, name, config)
    return tokenizer


def _check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, name: str, config: PreTrainedConfig
) -> None:
    field, vocabulary = "model.tokenizer", tokenizer.get_vocab()
    if not vocabulary.keys() - set(tokenizer.all_special_tokens):
        # What transformers makes of a folder that has no tokenizer.
        raise BadInput(f"{field}: expected a tokenizer, got none in {name}")
    largest = max(vocabulary.values())
    embeddings = config.get_text_config().vocab_size
    if largest >= embeddings:
        raise BadInput(
            f"{field}: expected ids below the model's {embeddings:,} embeddings, got ids up to "
            f"{largest:,} in {name}: not this model's tokenizer"
        )


def sees_images(settings: ModelSettings, config: PreTrainedConfig) -> bool:
    """Whether there is a class that takes text and images for a config."""
    own = settings.trust_remote_code and getattr(config, "auto_map", None)
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or (
        "AutoModelForImageTextToText" in (own or {})
    )


def load_processor(settings: ModelSettings, config: PreTrainedConfig) -> Any:
    """The processor of text and images; its tokenizer has its chat template.

    Raises:
        BadInput: the model does not see images, there is no processor or one without images, or
            its tokenizer has ids that the model has no embedding for.
    """
    from transformers import AutoProcessor  # heavy; runs on text do without

    if not sees_images(settings, config):
        raise BadInput(
            "model.name: expected a model that sees images, since the data has some, got "
            f"{config.model_type!r} in {settings.name}"
        )
    name = settings.tokenizer or settings.name
    field = "model.name" if settings.tokenizer is None else "model.tokenizer"
    _check_folder(field, name)
    hub = _hub(settings)
    if settings.tokenizer is not None:
        del hub["revision"]  # the model's
    try:
        processor: Any = AutoProcessor.from_pretrained(name, **hub)
    except Exception as error:  # of transformers, and of what it finds missing
        raise BadInput(_unloadable(field, "a processor", settings, error)) from error
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise BadInput(
            f"{field}: expected a processor of text and images, got {type(processor).__name__} in "
            f"{name}"
        )
    tokenizer = processor.tokenizer
    _check_vocabulary(tokenizer, name, config)
    if processor.chat_template is not None:
        tokenizer.chat_template = processor.chat_template
    return processor


def load_model(
    settings: ModelSettings,
    lora: LoraSettings | None,
    config: PreTrainedConfig,
    weights: str = "device",
    *,
    scores: bool = False,
    images: bool = False,
) -> PreTrainedModel:
    """Weights from safetensors, on the run's device; with adapters where asked for.

    Args:
        scores: with a head that gives a sequence one number, drawn anew where none is saved.
        images: with the tower that sees them.
        weights: as in :class:`oomb.Config`; with ``"host"`` all are left on the CPU, from where
            the engine takes them.

    Raises:
        BadInput: weights that are missing, damaged, or not the config's.
    """
    device = device_of(settings) if weights == "device" else torch.device("cpu")
    kind: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    if scores:
        kind, config = AutoModelForSequenceClassification, with_one_label(config)
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    try:
        found: Any = kind.from_pretrained(
            settings.name,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **_placement(settings, config, device),
            **_hub(settings),
        )
    except Exception as error:  # safetensors raises an Exception of its own
        raise BadInput(_unloadable("model.name", "weights", settings, error)) from error
    model, loaded = found
    missing = sorted(
        name
        for name in loaded["missing_keys"]
        if not (scores and "." in name and name.split(".")[0] == "score")
    )
    if missing:
        raise BadInput(
            f"model.name: expected weights for every parameter, got none for {len(missing)} of "
            f"them, {missing[0]} for one, in {settings.name}"
        )
    keep_training_layout(model)
    if settings.float8 is not None:
        with_float8(model, settings.float8, device_of(settings))
    return model if lora is None else with_adapters(model, lora, scores=scores)


def load_by_first(
    settings: ModelSettings,
    lora: LoraSettings | None,
    config: PreTrainedConfig,
    job: Job,
    *,
    copied: bool = False,
    scores: bool = False,
    images: bool = False,
) -> PreTrainedModel:
    """A model that the ranks of a job will shard: rank 0 has its weights, on the CPU.

    The others have the same model on the meta device; all read it where code of its own or float8
    makes it.

    Args:
        copied: values of the model will be copied before, so all read it.
        scores, images: as of :func:`load_model`.

    Raises:
        BadInput: as :func:`load_model`, on all ranks.
    """

    def own() -> PreTrainedModel:
        if job.is_first or copied or settings.trust_remote_code or settings.float8 is not None:
            return load_model(settings, lora, config, "host", scores=scores, images=images)
        dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
        if scores:  # rank 0 says which dtype its file has
            with torch.device("meta"):
                bare: Any = AutoModelForSequenceClassification.from_config(with_one_label(config))
        else:
            bare = bare_model(config, dtype=dtype, images=images)
        bare.eval()  # as from_pretrained leaves it
        return bare if lora is None else with_adapters(bare, lora, scores=scores)

    return job.together(own)


def with_one_label(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a config for a head that gives a sequence one number."""
    copied = copy.deepcopy(config)
    copied.num_labels = 1
    return copied


def _placement(
    settings: ModelSettings, config: PreTrainedConfig, device: torch.device
) -> dict[str, Any]:
    """What transformers is told of the device, and of weights in 4 or 8 bits."""
    if settings.quantization is None:
        return {"device_map": {"": device}} if device.type == "cuda" else {}
    library, extra = "bitsandbytes", "quantized"
    if settings.quantization == "int8":
        library = extra = "torchao"
    if find_spec(library) is None:
        raise BadInput(
            f"model.quantization: expected {library} to be installed; pip install 'oomb[{extra}]'"
        )
    if settings.quantization == "int8":
        own_config: Any = import_module("torchao.quantization").Int8WeightOnlyConfig  # optional
        eight_bits = TorchAoConfig(own_config())
        return {"device_map": {"": device}, "quantization_config": eight_bits}
    own = getattr(config, "dtype", None)
    compute = own if isinstance(own, torch.dtype) else torch.bfloat16
    if settings.dtype != "auto":
        compute = getattr(torch, settings.dtype)
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"device_map": {"": device}, "quantization_config": four_bits}


def device_of(settings: ModelSettings) -> torch.device:
    """Where this process trains the model.

    Raises:
        BadInput: a GPU is asked for and there is none, or more processes than GPUs.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("model.device: expected a GPU for 'cuda', got none; see oomb doctor")
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    if not on_gpu:
        return torch.device("cpu")
    try:
        own = expect_gpu_for_each() if ranks_in_job() > 1 else None
    except ValueError as error:
        raise BadInput(str(error)) from error
    return torch.device("cuda" if own is None else f"cuda:{own}")


def _hub(settings: ModelSettings) -> dict[str, Any]:
    names = {settings.name, settings.tokenizer or settings.name}
    return {
        "revision": settings.revision or "main",
        "trust_remote_code": settings.trust_remote_code,
        **({} if all(os.path.isdir(name) for name in names) else hub_arguments()),
    }


def _check_folder(field: str, name: str) -> None:
    """Refuse, before anything is read, what is meant as a folder and is not a usable one."""
    place = Path(name)
    if os.path.isdir(name):  # a Path's raises for odd names
        pickles = [file.name for pattern in _PICKLES for file in sorted(place.glob(pattern))]
        if field == "model.name" and pickles and not any(place.glob("*.safetensors")):
            raise BadInput(
                f"{field}: expected weights as safetensors, got {pickles[0]}, a pickle, which can "
                "run any code when it is loaded; convert it where you trust it: "
                "model.save_pretrained(folder)"
            )
        return
    if os.path.exists(name):
        raise BadInput(f"{field}: expected a folder, got the file {name}")
    in_folder = "/" in name and os.path.isdir(place.parent)
    if in_folder or name.startswith((".", "/", "~")) or name.count("/") > 1:
        siblings = [file.name for file in place.parent.glob("*")]
        near = nearest(place.name, siblings)
        raise BadInput(f"{field}: expected a folder, got {name}, which does not exist{near}")


def _unloadable(field: str, expected: str, settings: ModelSettings, error: Exception) -> str:
    name = (
        settings.tokenizer if field == "model.tokenizer" and settings.tokenizer else settings.name
    )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A complaint about a field has its name in the first line and what is wrong in the second.
    reason = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:400]
    if not reason or isinstance(error, (KeyError, RecursionError)):
        reason = f"{type(error).__name__} {reason}".strip()
    if "trust_remote_code" in str(error):
        reason = "it brings code of its own, which runs only with model.trust_remote_code=true"
    place = "" if os.path.isdir(name) else ", no folder here and not read from the hub"
    return f"{field}: expected {expected}, got {name!r}{place}: {reason}"
