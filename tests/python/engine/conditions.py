"""Every family under the same conditions: tails, documents, padding, two tiers, adapters.

The tests of a family look at what is special about it; a product of all families and all conditions
leaves no pair out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import nn
from torch.nn import functional as F

import oomb

from . import layer_classes, models
from .latent_models import LATENT, make_latent
from .layer_classes import CLASSES
from .models import ARCHITECTURES
from .own_code_models import OWN_CODE, make_own_code
from .recurrent_models import RECURRENT, make_recurrent
from .reference import Result, ordinary, random_ids, take_gradients
from .tiers import smallest_slots
from .window_models import WINDOWED, make_windowed

CHUNK, PAGE = 16, 8
FAMILIES = [*RECURRENT, *LATENT, *CLASSES, *OWN_CODE, *WINDOWED, *ARCHITECTURES]
# First tokens of documents, a row each: at borders, a token before and one behind them, and
# documents of one token around a border.
DOCUMENTS = [[16, 32], [15, 33], [17, 31, 48], [15, 16, 17, 18, 40]]


@dataclass(frozen=True)
class Condition:
    """How a model is called.

    Args:
        tokens: of each of ``batch`` sequences; the last predicts nothing and is not run.
        call: ``plain``, ``documents`` or ``padded``.
        adapters: LoRA on the upper half of the layers; nothing else is trained.
        few_pages: the device tier has so few that others lie on the host.
    """

    tokens: int = 52
    batch: int = 1
    call: str = "plain"
    adapters: bool = False
    few_pages: bool = False


CONDITIONS = {
    **{f"tail of {n}": Condition(tokens=2 * CHUNK + 1 + n) for n in (1, 2, 3)},
    "documents": Condition(call="documents", batch=len(DOCUMENTS)),
    "padding": Condition(call="padded", batch=3),
    "tiers": Condition(tokens=60, batch=2, few_pages=True),
    "adapters": Condition(tokens=60, adapters=True),
}


def make_family(name: str, condition: Condition | None = None) -> Any:
    """A tiny model in fp64, with adapters where the condition has them."""
    if name in RECURRENT:
        model = make_recurrent(name)
    elif name in LATENT:
        model = make_latent(name)
    elif name in OWN_CODE:
        model = make_own_code(name)
    elif name in WINDOWED:
        model = make_windowed(name)
    else:
        model = (layer_classes if name in CLASSES else models).make(name)
    return with_adapters(model) if condition is not None and condition.adapters else model


def with_adapters(model: Any) -> Any:
    """LoRA off its neutral start, on every linear layer of the upper half of the decoder."""
    decoder = model.get_decoder()
    decoder = getattr(decoder, "model", decoder)  # Llama 4 gives its causal model
    layers = list(decoder.h if hasattr(decoder, "h") else decoder.layers)
    upper = layers[(len(layers) + 1) // 2 :]
    inside = {id(module) for layer in upper for module in layer.modules()}
    prefixes = [name for name, module in model.named_modules() if module in upper]
    names = [
        name
        for name, module in model.named_modules()
        # PEFT refuses out_proj of Falcon-H1, whose kernels read the weight without the layer, and
        # fails at routers that are linear and give several tensors.
        if id(module) in inside
        and isinstance(module, nn.Linear)
        and not name.endswith(("out_proj", "router"))
    ]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, 0.0, 0.2, generator=generator)
            # Where PEFT renames experts, it puts some on layers that were not named.
            parameter.requires_grad_(any(f".{prefix}." in name for prefix in prefixes))
    return adapted.to(torch.float64).eval()


def settings_of(model: Any, condition: Condition, mesh: Any = None, **more: Any) -> oomb.Config:
    """``mesh``: the ranks that share sequences, whose pages have other sizes."""
    config = {"chunk_size": CHUNK, "page_size": PAGE, **more}
    if condition.few_pages:
        with oomb.Engine(model, oomb.Config(**config), mesh=mesh) as engine:
            slot = engine._calls.layout(engine.config).slot_bytes
        slots = smallest_slots(condition.batch, 1) + 2
        config |= {"device_memory": slots * slot, "host_memory": "16MiB"}
    return oomb.Config(**config)


def arguments(condition: Condition) -> dict[str, Any]:
    """Of the engine's call."""
    ids = random_ids(condition.batch, condition.tokens)
    given = {"input_ids": ids, "labels": ids}
    if condition.call == "documents":
        first = torch.zeros_like(ids)
        for row, starts in enumerate(DOCUMENTS):
            first[row, starts] = 1
        given["document_ids"] = first.cumsum(1)
    if condition.call == "padded":  # to the middle of a chunk, and whole chunks
        mask = (torch.arange(condition.tokens) < torch.tensor([[52], [33], [7]])).long()
        given |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return given


def expected_of(model: Any, given: dict[str, Any]) -> Result:
    """One ordinary forward and backward; documents each by themselves, with one mean over all."""
    if "document_ids" not in given:
        return ordinary(model, **given)
    model.zero_grad()
    terms = []
    for row, of_row in zip(given["input_ids"], given["document_ids"], strict=True):
        for document in row.split(of_row.unique_consecutive(return_counts=True)[1].tolist()):
            if len(document) > 1:
                logits = model(input_ids=document[None], use_cache=False).logits
                terms.append(F.cross_entropy(logits[0, :-1], document[1:], reduction="none"))
    loss = torch.cat(terms).mean()
    loss.backward()
    return Result(loss.detach(), take_gradients(model))
