"""Arguments of a call, checked before anything is allocated, in the form the chunk loop uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
) -> CallInputs:
    """Check a call's arguments and derive targets, visibility and positions from them.

    Args:
        every_token: all tokens up to the longest sequence's padding are needed, and none has to be
            a target.

    Raises:
        ValueError: an argument does not fit; the text names it, what was expected and what came.
    """
    _check_tokens("input_ids", input_ids, device)
    batch, tokens = input_ids.shape
    _expect(tokens >= 1 and batch >= 1, "input_ids", "at least one token", tuple(input_ids.shape))
    _check_tokens("labels", labels, device, shape=(batch, tokens))
    _check_range("input_ids", input_ids, 0, vocab_size)
    lengths = None if attention_mask is None else _lengths(attention_mask, batch, tokens, device)
    positions = _positions("position_ids", position_ids, batch, tokens, device)
    documents = _positions("document_ids", document_ids, batch, tokens, device)
    starts = _document_starts(positions, documents, attention_mask is None, batch, tokens)
    if positions is None:
        positions = _default_positions(starts, batch, tokens, device)
    _check_range("position_ids", positions, 0, 2**31 - 1)

    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    if starts is not None:
        targets[:, :-1].masked_fill_(starts[:, 1:], IGNORED)
    counted = targets != IGNORED
    _check_range("labels", targets[counted], 0, vocab_size)
    num_valid = int(counted.sum())
    some = num_valid > 0 or every_token
    _expect(some, "labels", "at least one token to predict", "none (all -100)")

    if every_token:
        needed = tokens if lengths is None else int(lengths.max())
    else:
        needed = int(counted.any(dim=0).nonzero().max()) + 1
    first_key = None if starts is None else _document_start_of(starts)[:, :needed].contiguous()
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


def _expect(ok: bool, argument: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def _check_tokens(
    argument: str, value: object, device: torch.device, shape: tuple[int, int] | None = None
) -> None:
    _check_tensor(argument, value, device)
    assert isinstance(value, torch.Tensor)
    _expect(value.dtype == torch.int64, argument, "dtype torch.int64", value.dtype)
    _expect(value.ndim == 2, argument, "shape [batch, tokens]", tuple(value.shape))
    if shape is not None:
        _expect(tuple(value.shape) == shape, argument, f"shape {shape}", tuple(value.shape))


def _check_tensor(argument: str, value: object, device: torch.device) -> None:
    _expect(isinstance(value, torch.Tensor), argument, "a tensor", type(value).__name__)
    assert isinstance(value, torch.Tensor)
    fits = value.device == device
    _expect(fits, argument, f"the model's device {device}", value.device)


def _check_range(argument: str, values: torch.Tensor, low: int, high: int) -> None:
    if values.numel():
        least, most = (int(x) for x in torch.aminmax(values))
        _expect(
            low <= least and most < high,
            argument,
            f"values in [{low}, {high})",
            f"{least} … {most}",
        )


def _lengths(mask: torch.Tensor, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Tokens before each sequence's right padding."""
    _check_tensor("attention_mask", mask, device)
    _expect(mask.ndim == 2, "attention_mask", "shape [batch, tokens]", tuple(mask.shape))
    _expect(
        tuple(mask.shape) == (batch, tokens),
        "attention_mask",
        f"shape {(batch, tokens)}",
        tuple(mask.shape),
    )
    kept = mask != 0
    _expect(
        bool(((mask == 0) | (mask == 1)).all()), "attention_mask", "zeros and ones", "other values"
    )
    lengths = kept.sum(dim=1)
    right_padded = bool((kept.long().cummin(dim=1).values == kept.long()).all())
    _expect(right_padded, "attention_mask", "right padding only", "left padding or holes")
    _expect(
        int(lengths.min()) > 0, "attention_mask", "a token in every sequence", "an empty sequence"
    )
    return lengths


def _positions(
    argument: str, value: torch.Tensor | None, batch: int, tokens: int, device: torch.device
) -> torch.Tensor | None:
    if value is None:
        return None
    _check_tokens(argument, value, device)
    fits = value.shape[1] == tokens and value.shape[0] in (1, batch)
    _expect(fits, argument, f"shape [{batch} or 1, {tokens}]", tuple(value.shape))
    return value.expand(batch, tokens)


def _document_starts(
    positions: torch.Tensor | None,
    documents: torch.Tensor | None,
    positions_tell: bool,
    batch: int,
    tokens: int,
) -> torch.Tensor | None:
    """[B, T] bool: a document starts here; None where each sequence is one document.

    Positions tell documents apart as Hugging Face reads them: where they do not go up by one, and
    there is no attention mask.
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
            _expect(
                runs.unique().numel() == runs.numel(),
                "document_ids",
                "contiguous documents",
                "a document in pieces",
            )
        if restarts is not None:
            same = bool((restarts == starts).all())
            _expect(
                same,
                "document_ids",
                "documents that start where position_ids restart",
                "other borders",
            )
    elif positions_tell and restarts is not None:
        starts = restarts
    else:
        return None
    return starts if bool(starts[:, 1:].any()) else None


def _document_start_of(starts: torch.Tensor) -> torch.Tensor:
    """[B, T] int32: index of the first token of each token's document."""
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return torch.where(starts, index, 0).cummax(dim=1).values.to(torch.int32)


def _default_positions(
    starts: torch.Tensor | None, batch: int, tokens: int, device: torch.device
) -> torch.Tensor:
    positions = torch.arange(tokens, device=device).expand(batch, tokens)
    return positions if starts is None else positions - _document_start_of(starts)


def _target_weights(
    weights: torch.Tensor | None, batch: int, tokens: int, needed: int, device: torch.device
) -> torch.Tensor | None:
    """Weights belong to labels; a target's weight is its label's, one to the right."""
    if weights is None:
        return None
    _check_tensor("loss_weights", weights, device)
    shape = (batch, tokens)
    _expect(tuple(weights.shape) == shape, "loss_weights", f"shape {shape}", tuple(weights.shape))
    _expect(weights.is_floating_point(), "loss_weights", "a floating-point dtype", weights.dtype)
    _expect(bool(weights.isfinite().all()), "loss_weights", "finite values", "NaN or Inf")
    shifted = torch.zeros(shape, dtype=torch.float64, device=device)
    shifted[:, :-1] = weights[:, 1:]
    return shifted[:, :needed]


def _divisor(num_items: int | torch.Tensor | None, num_valid: int) -> float:
    if num_items is None:
        return float(num_valid)
    single = not isinstance(num_items, torch.Tensor) or num_items.numel() == 1
    _expect(single, "num_items_in_batch", "one number", "a tensor of several")
    divisor = float(num_items)
    _expect(divisor > 0, "num_items_in_batch", "a number > 0", num_items)
    return divisor
