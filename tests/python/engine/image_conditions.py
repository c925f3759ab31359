"""Families that see images under the conditions of text: tails, documents, padding, tiers, LoRA."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F

import oomb

from . import conditions
from .conditions import CHUNK, Condition, with_adapters
from .image_models import FAMILIES, OTHERS, batch_of, make_with_images
from .reference import Result, ordinary, take_gradients

ALL = (*FAMILIES, *OTHERS)
CONDITIONS = {
    **{f"tail of {n}": Condition(tokens=n) for n in (1, 2, 3)},  # of the last chunk
    "documents": Condition(tokens=53, batch=2, call="documents"),
    "padding": Condition(tokens=53, batch=3, call="padded"),
    "tiers": Condition(tokens=60, batch=2, few_pages=True),
    "adapters": Condition(tokens=60, batch=2, adapters=True),
    "upper layers": Condition(tokens=60, batch=2),
}
# Where images begin in each row. The first lies across a border of chunks; where no chunk may end
# inside an image, one ends before it.
_ACROSS = 14
_IMAGES = [[_ACROSS, 40], [3, 26, 52]]
_PADDED = {53: [_ACROSS, 40], 33: [3, 26], 7: [0]}  # by the tokens of a row
# Documents of each row: their tokens, and where their image begins in them, if there is one. They
# begin at borders of chunks and beside them, and images at their first tokens and across a border.
_DOCUMENTS = [[(16, 3), (16, 0), (21, 13)], [(15, 9), (1, None), (1, None), (14, 8), (22, 2)]]


def sees_both_ways(family: str) -> bool:
    """The tokens of an image see one another, so no chunk ends inside it."""
    return family.startswith("gemma")


def make_family(family: str, condition: str) -> Any:
    """A tiny model in fp64; where only a part of it trains, that is a part of its upper layers."""
    model = make_with_images(family)
    if condition == "adapters":
        return with_adapters(model)
    if condition == "upper layers":
        layers = model.get_decoder().layers
        model.requires_grad_(False)
        layers[len(layers) // 2 :].requires_grad_(True)
    return model


def settings_of(
    model: Any, family: str, condition: str, mesh: Any = None, **more: Any
) -> oomb.Config:
    """``mesh``: the ranks that share sequences, whose pages have other sizes."""
    page = 2 if sees_both_ways(family) else 4
    config = conditions.settings_of(model, CONDITIONS[condition], mesh, page_size=page, **more)
    if family == "gemma4" and config.device_memory is not None:
        # Where chunks are of several lengths, its layers have pages of as many tokens, and the
        # wider heads of the global ones need slots twice as large.
        config = replace(config, device_memory=2 * int(config.device_memory))
    return config


def arguments(family: str, condition: str) -> dict[str, Any]:
    """Of the engine's call."""
    case = CONDITIONS[condition]
    height, width = _size(family)
    tokens, rows = case.tokens, _IMAGES
    if condition.startswith("tail"):
        # A chunk that ends in the image or before it, another, the tail, and a token that is not
        # run. Where it may, the second image lies across the second border, to the end of the text.
        both_ways = sees_both_ways(family)
        tokens = (_ACROSS if both_ways else CHUNK) + CHUNK + case.tokens + 1
        rows = [[_ACROSS, 22 if both_ways else tokens - height * width]]
    elif case.call == "documents":
        rows = [
            [first + image for first, (_, image) in _placed(row) if image is not None]
            for row in _DOCUMENTS
        ]
    elif case.call == "padded":
        rows = list(_PADDED.values())
    batch = batch_of(family, [[(begin, height, width) for begin in row] for row in rows], tokens)
    ids = batch.input_ids
    given = {"input_ids": ids, "labels": ids, **batch.arguments}
    if case.call == "documents":
        lengths = [torch.tensor([length for length, _ in row]) for row in _DOCUMENTS]
        numbers = [torch.arange(len(x)).repeat_interleave(x) for x in lengths]
        given["document_ids"] = torch.stack(numbers)
    if case.call == "padded":
        mask = (torch.arange(tokens) < torch.tensor(list(_PADDED))[:, None]).long()
        given |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return given


def expected_of(model: Any, family: str, given: dict[str, Any]) -> Result:
    """One ordinary forward and backward; documents each by themselves, with one mean over all."""
    if "document_ids" not in given:
        return ordinary(model, **given)
    model.zero_grad()
    height, width = _size(family)
    # Of Qwen's batches each patch is a row of the pixels, and there are four to a placeholder.
    rows_of = 4 * height * width if "image_grid_thw" in given else 1
    terms, image = [], 0
    for row, documents in enumerate(_DOCUMENTS):
        for begin, (length, place) in _placed(documents):
            ids = given["input_ids"][row : row + 1, begin : begin + length]
            number = int(place is not None)
            own: dict[str, Any] = {}
            for name, value in given.items() if number else ():
                if name.endswith("token_type_ids"):
                    own[name] = value[row : row + 1, begin : begin + length]
                elif name.startswith(("pixel", "image")):
                    each = rows_of if name == "pixel_values" else 1
                    own[name] = value[image * each : (image + 1) * each]
            image += number
            if length > 1:
                logits = model(input_ids=ids, use_cache=False, **own).logits
                terms.append(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none"))
    loss = torch.cat(terms).mean()
    loss.backward()
    return Result(loss.detach(), take_gradients(model))


def _placed(documents: list[Any]) -> list[tuple[int, Any]]:
    """The first token of each, and the document."""
    firsts = accumulate((length for length, _ in documents), initial=0)
    return list(zip(firsts, documents, strict=False))


def _size(family: str) -> tuple[int, int]:
    """Of an image, in placeholders."""
    return (2, 2) if family == "gemma3" else (3, 2)
