"""Arguments of a call, checked before anything is allocated, in the form the chunk loop uses.

Where the documents of packed sequences begin is one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch

from oomb.config import Config
from oomb.core.layout import Chunks
from oomb.model.images import IMAGE_ARGUMENTS as IMAGE_ARGUMENTS
from oomb.model.images import Images
from oomb.ops.arguments import check_range


def expect(ok: bool, argument: str, expected: str, got: object) -> None:
    """Refuse an argument unless ``ok``."""
    if not ok:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def kind_of(value: object) -> str:
    """``"str"``, or ``"the class Config"`` where an instance was meant."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_callable(argument: str, value: object) -> None:
    """A function, or None."""
    expect(value is None or callable(value), argument, "a function or None", repr(value))


def check_tokens(
    argument: str, value: object, device: torch.device, shape: tuple[int, int] | None = None
) -> None:
    """[batch, tokens] int64 on ``device``."""
    check_tensor(argument, value, device)
    assert isinstance(value, torch.Tensor)
    expect(value.dtype == torch.int64, argument, "dtype torch.int64", value.dtype)
    expect(value.ndim == 2, argument, "shape [batch, tokens]", tuple(value.shape))
    if shape is not None:
        expect(tuple(value.shape) == shape, argument, f"shape {shape}", tuple(value.shape))


def check_tensor(argument: str, value: object, device: torch.device) -> None:
    """A tensor on the model's device."""
    expect(isinstance(value, torch.Tensor), argument, "a tensor", type(value).__name__)
    assert isinstance(value, torch.Tensor)
    fits = value.device == device
    expect(fits, argument, f"the model's device {device}", value.device)


def document_starts(
    positions: torch.Tensor | None,
    documents: torch.Tensor | None,
    positions_tell: bool,
) -> torch.Tensor | None:
    """[B, T] bool: a document starts here; None where each sequence is one document.

    Positions tell documents apart as Hugging Face reads them: where they do not go up by one, and
    there is no attention mask. Where documents are told by number, positions may skip some inside.
    """
    restarts = None
    if positions is not None:
        restarts = torch.ones_like(positions, dtype=torch.bool)
        restarts[:, 1:] = positions[:, 1:] - positions[:, :-1] != 1
    if documents is not None:
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        for row in documents[:, 1:][starts[:, 1:].any(dim=1)]:
            runs = torch.unique_consecutive(row)
            expect(
                runs.unique().numel() == runs.numel(),
                "document_ids",
                "contiguous documents",
                "a document in pieces",
            )
        if positions is not None and restarts is not None:
            falls = positions[:, 1:] <= positions[:, :-1]
            agree = bool((~falls | starts[:, 1:]).all()) and bool((~starts | restarts).all())
            expect(
                agree,
                "document_ids",
                "documents that start where position_ids restart",
                "other borders",
            )
    elif positions_tell and restarts is not None:
        starts = restarts
    else:
        return None
    return starts if bool(starts[:, 1:].any()) else None


def text_positions(position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """[B, T] of what a model that sees images takes: of [4, B, T] the first, of [3, B, T] none."""
    if not isinstance(position_ids, torch.Tensor) or position_ids.ndim != 3:
        return position_ids
    return position_ids[0] if position_ids.shape[0] == 4 else None


def document_start_of(starts: torch.Tensor) -> torch.Tensor:
    """[B, T] int32: index of the first token of each token's document."""
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return torch.where(starts, index, 0).cummax(dim=1).values.to(torch.int32)


def document_places(
    first_key: torch.Tensor | None, chunks: Chunks, chunk: int, device: torch.device
) -> torch.Tensor:
    """int32 [B or 1, C]: places of a chunk's tokens in their documents, each from 0 on.

    Args:
        first_key: as of :class:`CallInputs`.
    """
    (begin, end), past = chunks.span(chunk), chunks.past_tokens(chunk)
    keys = torch.arange(past, past + end - begin, dtype=torch.int32, device=device)[None]
    return keys if first_key is None else keys - first_key[:, begin:end]


IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class CallInputs:
    """One call's tokens, cut behind the last token that is needed. T tokens, B sequences.

    Attributes:
        input_ids: [B, T] int64.
        position_ids: [B, T] int32, as targets: they stay on the device for the whole call.
        targets: [B, T] int32: the token that position t predicts, or -100.
        weights: [B, T] fp64 factor of each target's term, or None.
        first_key: [B, T] int32: first key that a row may see, or None.
        num_keys: int32 per sequence: keys before its padding, or None without padding.
        num_valid: counted targets.
        divisor: what the summed loss is divided by.
        largest_position: of the whole call, before cutting.
        num_given: tokens per sequence before cutting.
        own_chunks: where they are not those of a plain sequence.
        images: what stands in place of tokens, or None.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor | None
    first_key: torch.Tensor | None
    num_keys: torch.Tensor | None
    num_valid: int
    divisor: float
    largest_position: int
    num_given: int
    own_chunks: Chunks | None = None
    images: Images | None = None

    def chunks(self, config: Config) -> Chunks:
        """The call's chunks."""
        return self.own_chunks or Chunks.of(config, self.tokens)

    @property
    def batch(self) -> int:
        return self.input_ids.shape[0]

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def check_inputs(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    document_ids: torch.Tensor | None,
    loss_weights: torch.Tensor | None,
    num_items_in_batch: int | torch.Tensor | None,
    vocab_size: int,
    device: torch.device,
    every_token: bool = False,
    at_least: int = 0,
) -> CallInputs:
    """Check a call's arguments and derive targets, visibility and positions from them.

    Args:
        every_token: all tokens up to the longest sequence's padding are needed, and none has to be
            a target.
        at_least: tokens that are needed in any case.

    Raises:
        ValueError: an argument does not fit; the text names it, what was expected and what came.
    """
    check_tokens("input_ids", input_ids, device)
    batch, tokens = input_ids.shape
    expect(tokens >= 1 and batch >= 1, "input_ids", "at least one token", tuple(input_ids.shape))
    check_tokens("labels", labels, device, shape=(batch, tokens))
    check_range("input_ids", input_ids, 0, vocab_size)
    lengths = None if attention_mask is None else _lengths(attention_mask, batch, tokens, device)
    positions = _positions("position_ids", position_ids, batch, tokens, device)
    documents = _positions("document_ids", document_ids, batch, tokens, device)
    starts = document_starts(positions, documents, attention_mask is None)
    if positions is None:
        positions = _default_positions(starts, batch, tokens, device)
    check_range("position_ids", positions, 0, 2**31 - 1)

    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if starts is not None:
        targets[:, :-1].masked_fill_(starts[:, 1:], IGNORED)
    counted = targets != IGNORED
    check_range("labels", targets[counted], 0, vocab_size)
    num_valid = int(counted.sum())
    some = num_valid > 0 or every_token
    expect(some, "labels", "at least one token to predict", "none (all -100)")

    if every_token:
        needed = tokens if lengths is None else int(lengths.max())
    else:
        needed = int(counted.any(dim=0).nonzero().max()) + 1
    needed = max(needed, at_least)
    first_key = None if starts is None else document_start_of(starts)[:, :needed].contiguous()
    num_keys = None
    if lengths is not None and int(lengths.min()) < needed:
        num_keys = lengths.clamp(max=needed).to(torch.int32).contiguous()
    return CallInputs(
        input_ids=input_ids[:, :needed],
        position_ids=positions[:, :needed].to(torch.int32),
        targets=targets[:, :needed].to(torch.int32),
        weights=_target_weights(loss_weights, batch, tokens, needed, device),
        first_key=first_key,
        num_keys=num_keys,
        num_valid=num_valid,
        divisor=_divisor(num_items_in_batch, max(1, num_valid)),
        largest_position=int(positions.max()),
        num_given=tokens,
    )


def all_labels(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Every token but padding; what does not fit is left to :func:`check_inputs`."""
    fits = isinstance(attention_mask, torch.Tensor) and isinstance(input_ids, torch.Tensor)
    if not fits or attention_mask is None or attention_mask.shape != input_ids.shape:
        return input_ids
    return input_ids.masked_fill(attention_mask == 0, IGNORED)


def _lengths(mask: torch.Tensor, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Tokens before each sequence's right padding."""
    check_tensor("attention_mask", mask, device)
    expect(mask.ndim == 2, "attention_mask", "shape [batch, tokens]", tuple(mask.shape))
    expect(
        tuple(mask.shape) == (batch, tokens),
        "attention_mask",
        f"shape {(batch, tokens)}",
        tuple(mask.shape),
    )
    kept = mask != 0
    expect(
        bool(((mask == 0) | (mask == 1)).all()), "attention_mask", "zeros and ones", "other values"
    )
    lengths = kept.sum(dim=1)
    right_padded = bool((kept.long().cummin(dim=1).values == kept.long()).all())
    expect(right_padded, "attention_mask", "right padding only", "left padding or holes")
    expect(
        int(lengths.min()) > 0, "attention_mask", "a token in every sequence", "an empty sequence"
    )
    return lengths


def _positions(
    argument: str, value: torch.Tensor | None, batch: int, tokens: int, device: torch.device
) -> torch.Tensor | None:
    if value is None:
        return None
    check_tokens(argument, value, device)
    fits = value.shape[1] == tokens and value.shape[0] in (1, batch)
    expect(fits, argument, f"shape [{batch} or 1, {tokens}]", tuple(value.shape))
    return value.expand(batch, tokens)


def _default_positions(
    starts: torch.Tensor | None, batch: int, tokens: int, device: torch.device
) -> torch.Tensor:
    positions = torch.arange(tokens, device=device).expand(batch, tokens)
    return positions if starts is None else positions - document_start_of(starts)


def _target_weights(
    weights: torch.Tensor | None, batch: int, tokens: int, needed: int, device: torch.device
) -> torch.Tensor | None:
    """Weights belong to labels; a target's weight is its label's, one to the right."""
    if weights is None:
        return None
    check_tensor("loss_weights", weights, device)
    shape = (batch, tokens)
    expect(tuple(weights.shape) == shape, "loss_weights", f"shape {shape}", tuple(weights.shape))
    constant = not weights.requires_grad
    expect(constant, "loss_weights", "constants; detach them", "weights that require gradients")
    expect(weights.is_floating_point(), "loss_weights", "a floating-point dtype", weights.dtype)
    expect(bool(weights.isfinite().all()), "loss_weights", "finite values", "NaN or Inf")
    shifted = torch.zeros(shape, dtype=torch.float64, device=device)
    shifted[:, :-1] = weights[:, 1:]
    return shifted[:, :needed]


def _divisor(num_items: int | torch.Tensor | None, num_valid: int) -> float:
    if num_items is None:
        return float(num_valid)
    if isinstance(num_items, torch.Tensor):
        single = num_items.numel() == 1
        expect(single, "num_items_in_batch", "one number", f"a tensor of {num_items.numel()}")
    number = num_items.item() if isinstance(num_items, torch.Tensor) else num_items
    finite = isinstance(number, Real) and 0 < number < math.inf
    expect(finite, "num_items_in_batch", "a number > 0", repr(number))
    return float(number)
