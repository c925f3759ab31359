"""What a model's own forward makes of images: rows of embeddings, positions, tokens seen both ways.

Towers, projectors and placeholders differ from family to family. So the model's own forward is run
on the whole sequence, up to its decoder, which only takes what it is given. The embedding stands
still meanwhile: it gives each token a mark, and where the mark is gone an image's feature stands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.generators import draw_from, generator_states, kept_generators
from oomb.model.interface import named_attention, probed_masks
from oomb.model.modes import kept_modes
from oomb.model.swap import Swaps, swapping

# Keywords of a model's forward that belong to images and videos.
IMAGE_ARGUMENTS = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "image_sizes",
    "image_position_ids",
    "video_position_ids",
    "num_frames_per_video",
    "second_per_grid_ts",
    "mm_token_type_ids",
    "token_type_ids",
)
_TO_DECODER = {"inputs_embeds", "position_ids", "attention_mask"}
_DEEPSTACK = {"visual_pos_masks", "deepstack_visual_embeds"}
# Follows from the tokens and their embeddings: the decoder makes it chunk by chunk.
_MADE_AGAIN = {"per_layer_inputs"}
_INERT = {"logits_to_keep"}  # for the head


@dataclass(frozen=True, kw_only=True)
class Images:
    """What a call's images give the decoder. T tokens, B sequences, n rows of features.

    Attributes:
        input_ids: [B, T] as the embedding gets them: some models put padding at placeholders.
        rows: [n, 2] int64 on the host: sequence and token of each row, in this order.
        features: [n, hidden_size] each, on the host: embeddings, then what is added behind the
            first layers (deepstack).
        position_ids: [3 or 4, B, T] where the model counts time, height and width; else None.
        masks: what the decoder gets in place of its masks; None where these are causal.
        seen_both_ways: those of ``masks`` whose layers see an image's tokens both ways.
        blocks: [m, 3] int64 on the host: sequence, first token and last + 1 of tokens that see one
            another.
        propagate: from gradients of ``features`` to tower and projector; None: they are frozen.
    """

    input_ids: torch.Tensor
    rows: torch.Tensor
    features: list[torch.Tensor]
    position_ids: torch.Tensor | None
    masks: Any = None
    seen_both_ways: list[torch.Tensor] = field(default_factory=list)
    blocks: torch.Tensor
    propagate: Callable[[list[torch.Tensor]], None] | None


def check_image_arguments(model: CausalModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are given, of keywords that belong to images.

    Raises:
        TypeError: a keyword is none of these.
        ValueError: the model's forward does not take it.
    """
    taken = inspect.signature(type(model.causal).forward).parameters
    for name, value in arguments.items():
        if name not in IMAGE_ARGUMENTS:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        if value is not None and name not in taken:
            kind = type(model.causal).__name__
            raise ValueError(f"{name}: expected a model whose forward takes it, got {kind}")
    return {name: value for name, value in arguments.items() if value is not None}


def images_of(
    model: CausalModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    arguments: Mapping[str, Any],
) -> Images:
    """What the model's own forward gives its decoder, without a graph.

    Raises:
        UnsupportedModelError: it gives something that chunks do not know, or tokens see later ones
            in another way than all of a block together.
        ValueError: of the model's own: features and placeholders do not match.
    """
    given = dict(arguments, attention_mask=attention_mask, position_ids=position_ids)
    states = generator_states(model.rng_devices()) if any(model.modes) else None
    with torch.no_grad():
        taken = taken_by_decoder(model, input_ids, given)
    embeds, of_decoder = taken.embeds, taken.keywords
    shown = embeds[..., 0] != _mark(embeds.dtype)
    features = features_of(taken, shown)
    if len(features) > 1 and not torch.equal(of_decoder["visual_pos_masks"], shown):
        raise UnsupportedModelError(
            f"{type(model.causal).__name__}: adds features behind its first layers at tokens that "
            "are not those of its images"
        )
    positions = of_decoder.get("position_ids")
    blocks = torch.cat([m.blocks for m in taken.masks] or [torch.zeros(0, 3, dtype=torch.int64)])
    masks = of_decoder.get("attention_mask")
    images = Images(
        input_ids=taken.input_ids,
        rows=shown.nonzero().cpu(),
        features=[x.to("cpu") for x in features],
        position_ids=positions if positions is not None and positions.ndim == 3 else None,
        masks=masks if isinstance(masks, dict) else None,
        seen_both_ways=[m.stand_in for m in taken.masks if len(m.blocks)],
        blocks=blocks.unique(dim=0),
        propagate=None,
    )
    if not len(images.rows) or not trains_images(model):
        return images
    del embeds, features, taken, of_decoder

    def propagate(gradients: list[torch.Tensor]) -> None:
        with Swaps() as swaps:
            if states is not None:
                swaps.also(kept_generators(model.rng_devices()))
                draw_from(states, model.rng_devices())  # a tower's dropout, as of the features
            propagate_features(model, input_ids, given, shown, gradients)

    return Images(**{**vars(images), "propagate": propagate})


def features_of(taken: Taken, shown: torch.Tensor) -> list[torch.Tensor]:
    """Embeddings where ``shown`` [B, T] says so, then what first layers add there (deepstack)."""
    return [taken.embeds[shown], *(taken.keywords.get("deepstack_visual_embeds") or [])]


def propagate_features(
    model: CausalModel,
    input_ids: torch.Tensor,
    arguments: Mapping[str, Any],
    shown: torch.Tensor,
    gradients: list[torch.Tensor],
) -> None:
    """From gradients of :func:`features_of`, to what trains before the decoder."""
    with torch.enable_grad():
        made = features_of(taken_by_decoder(model, input_ids, arguments), shown)
    reached = [
        (x, grad.to(device=x.device, dtype=x.dtype))
        for x, grad in zip(made, gradients, strict=True)
        if x.requires_grad
    ]
    del made
    torch.autograd.backward([x for x, _ in reached], [grad for _, grad in reached])


# The model's own forward, up to its decoder -------------------------------------------------------


@dataclass
class _Mask:
    """A mask that the model asked for."""

    stand_in: torch.Tensor
    blocks: torch.Tensor


@dataclass(eq=False)
class Taken(Exception):  # no error
    """The decoder was called."""

    keywords: dict[str, Any]
    embeds: torch.Tensor
    input_ids: torch.Tensor
    masks: list[_Mask]


def taken_by_decoder(
    model: CausalModel, input_ids: torch.Tensor, arguments: Mapping[str, Any]
) -> Taken:
    """What the decoder gets, where the embedding gives marks."""
    seen: list[torch.Tensor] = []
    masks: list[_Mask] = []
    name = type(model.causal).__name__

    def embed(ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        mark = torch.tensor(_mark(model.dtype), dtype=model.dtype, device=ids.device)
        return mark.expand(*ids.shape, _width(model))

    def decoder(*args: Any, **keywords: Any) -> None:
        known = _TO_DECODER | _DEEPSTACK | _MADE_AGAIN | _INERT
        for argument, value in keywords.items():
            if argument not in known and value is not None and not isinstance(value, bool):
                raise UnsupportedModelError(
                    f"{name}: gives its decoder {argument}, which chunks do not know"
                )
        if args or keywords.get("inputs_embeds") is None:
            raise UnsupportedModelError(f"{name}: does not give its decoder embeddings of tokens")
        raise Taken(keywords, keywords["inputs_embeds"], seen[0], masks)

    def mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> torch.Tensor:
        stand_in = torch.zeros(1, 1, 1, 1, device=model.device)
        masks.append(_Mask(stand_in, _blocks(name, mask_function, input_ids)))
        return stand_in

    with _standing_still(model, embed, decoder, mask):
        try:
            model.causal(input_ids=input_ids, use_cache=False, **arguments)
        except Taken as taken:
            return taken.with_traceback(None)  # whose frames hold a tower's activations
    raise UnsupportedModelError(f"{name}: does not call its decoder on images and tokens")


@swapping
def _standing_still(
    swaps: Swaps,
    model: CausalModel,
    embed: Callable[..., Any],
    decoder: Callable[..., Any],
    mask: Callable[..., Any],
) -> None:
    swaps.afterwards(kept_modes())
    for module in model.causal.modules():
        if "rope_deltas" in vars(module):  # what generation goes on from
            swaps.keep_item(vars(module), "rope_deltas")
    swaps.replace(model.causal.get_input_embeddings(), "forward", embed)
    swaps.replace(model.decoder, "forward", decoder)
    swaps.also(named_attention(model.decoder, model.causal.config.get_text_config()))
    swaps.also(probed_masks(mask))


def _mark(dtype: torch.dtype) -> float:
    """No feature has it."""
    return torch.finfo(dtype).max


def _width(model: CausalModel) -> int:
    width: int = model.decoder.config.hidden_size
    return width


def _blocks(name: str, mask_function: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
    """[m, 3]: sequence, first token and last + 1 where a mask lets tokens see later ones.

    Raises:
        UnsupportedModelError: not all of a block's tokens see one another.
    """

    def visible(rows: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        index = (x.to(ids.device) for x in (rows, torch.zeros_like(rows), queries, keys))
        found: torch.Tensor = mask_function(*index)
        return found.cpu().expand(torch.broadcast_shapes(rows.shape, queries.shape))

    batch, tokens = ids.shape
    if tokens < 2:
        return torch.zeros(0, 3, dtype=torch.int64)
    rows, queries = torch.arange(batch)[:, None], torch.arange(tokens - 1)[None]
    ahead = torch.zeros(batch, tokens + 1, dtype=torch.int8)
    ahead[:, 1:-1] = visible(rows, queries, queries + 1)
    edges = ahead.diff(dim=1)
    begins, ends = (edges == 1).nonzero(), (edges == -1).nonzero()
    blocks = torch.stack((begins[:, 0], begins[:, 1], ends[:, 1] + 1), dim=1)
    sequence, begin, last = blocks[:, 0], blocks[:, 1], blocks[:, 2] - 1
    whole = visible(sequence, begin, last)
    beyond = visible(sequence, begin, (last + 1).clamp(max=tokens - 1)) & (last + 1 < tokens)
    if not bool(whole.all()) or bool(beyond.any()):
        raise UnsupportedModelError(
            f"{name}: its mask lets tokens see some later ones, but not all of a block together"
        )
    return blocks


def trains_images(model: CausalModel) -> bool:
    """Something between images and decoder is trained."""
    apart = {id(p) for p in model.decoder.parameters()}
    head = model.causal.get_output_embeddings()
    apart |= set() if head is None else {id(p) for p in head.parameters()}
    return any(p.requires_grad and id(p) not in apart for p in model.causal.parameters())
