"""A call's arguments together with those that belong to images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oomb.config import Config
from oomb.core.image_blocks import chunks_between
from oomb.core.images import expect_images_fit
from oomb.core.inputs import CallInputs, check_inputs, text_positions
from oomb.model.causal import CausalModel
from oomb.model.images import Images, check_image_arguments, images_of
from oomb.model.swap import Swaps, as_before_afterwards
from oomb.parallel.weights import Weights


def inputs_with_images(
    model: CausalModel,
    config: Config,
    weights: Weights,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    arguments: Mapping[str, Any] | None,
    others: dict[str, Any],
) -> CallInputs:
    """Checked arguments; where there are images, their features are computed here.

    Raises:
        ValueError, UnsupportedModelError: of :meth:`oomb.Engine.forward_backward`.
    """
    check = partial(check_inputs, input_ids, labels, vocab_size=model.vocab_size)
    given = check_image_arguments(model, arguments or {})
    if not given:
        return check(device=model.device, **others)
    positions = others["position_ids"]
    of_text = others | {"position_ids": text_positions(positions)}
    inputs = check(device=model.device, **of_text)

    def run() -> Images:
        with Swaps() as swaps:
            weights.gather(swaps.afterwards)
            return images_of(model, input_ids, others["attention_mask"], positions, given)

    images = as_before_afterwards(run)
    cut = images.blocks[(images.blocks[:, 1] < inputs.tokens)]
    if len(cut) and int(cut[:, 2].max()) > inputs.tokens:  # a row sees keys behind the last target
        inputs = check(device=model.device, **of_text, at_least=int(cut[:, 2].max()))
    expect_images_fit(inputs, config, images)
    images = replace(images, position_ids=_by_document(images, inputs, positions))
    return replace(
        inputs,
        input_ids=images.input_ids[:, : inputs.tokens],
        images=images,
        own_chunks=chunks_between(config, inputs.tokens, images.blocks),
        largest_position=_largest(images, inputs),
    )


def _by_document(images: Images, inputs: CallInputs, given: Any) -> torch.Tensor | None:
    """Positions that start anew with each document, as text's do; those that were given stay."""
    found = images.position_ids
    if found is None or inputs.first_key is None or isinstance(given, torch.Tensor):
        return found
    found = found[..., : inputs.tokens]
    first = inputs.first_key.long().expand(found.shape)
    return found - found.gather(-1, first)


def _largest(images: Images, inputs: CallInputs) -> int:
    if images.position_ids is None:
        return inputs.largest_position
    return int(images.position_ids.max())
