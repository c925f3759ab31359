"""Cross-entropy of a chunk, and other figures of its logits, in slices.

A chunk's logits never exist together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from oomb.core.inputs import IGNORED, CallInputs
from oomb.model.cross_entropy import has_kernel, softmax_gradient_
from oomb.model.head import Head
from oomb.model.linear import WeightSums

# Logits of one slice: small beside a chunk's activations, large enough for a fast product.
_SLICE_BYTES = {"cpu": 128 * 2**20, "cuda": 1280 * 2**20}


@dataclass(frozen=True)
class TokenRows:
    """Rows of logits, and what they predict; n rows, all tensors [n] int64.

    Attributes:
        targets: the tokens that are predicted, at places that are no padding and no -100.
        sequences: of the batch, to which they belong.
        positions: of the predicted tokens in their sequence; the logits are of the one before.
    """

    targets: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor


TokenLoss = Callable[[torch.Tensor, TokenRows], torch.Tensor]
OnLogits = Callable[[int, torch.Tensor], None]  # first token, logits [batch, tokens, vocabulary]


def slice_rows(device_type: str, vocab_size: int, logit_bytes: int = 4) -> int:
    """Tokens whose logits, of so many bytes each, exist together."""
    return max(1, _SLICE_BYTES[device_type] // (logit_bytes * vocab_size))


@dataclass
class ChunkLoss:
    """Loss of chunks of one call through the model's own head.

    Where the head is known to be a plain product, and torch runs on a GPU, one kernel makes the
    gradient of the logits in their place; autograd goes through the model's own code elsewhere.

    Convention of Hugging Face: sum of the counted tokens' terms over their number (or
    ``num_items_in_batch``).
    """

    head: Head
    inputs: CallInputs
    vocab_size: int
    total: torch.Tensor  # 0-d fp64: the call's loss so far
    logprobs: torch.Tensor | None  # [B, tokens given], filled where wanted
    counted: dict[int, int]  # counted targets of the chunk that begins at a token
    weight: nn.Parameter | None = None  # of a head that is a plain product
    sums: WeightSums | None = None  # where its gradient goes
    token_loss: TokenLoss | None = None  # in place of the cross-entropy
    metrics: TokenMetrics | None = None  # of the counted tokens, where wanted

    @staticmethod
    def of_call(
        head: Head,
        inputs: CallInputs,
        spans: Iterable[tuple[int, int]],
        vocab_size: int,
        return_logprobs: bool,
        sums: WeightSums | None,
        token_loss: TokenLoss | None = None,
        token_metrics: bool = False,
    ) -> ChunkLoss:
        """
        Args:
            spans: tokens [begin, end) of each chunk, or of the part of it that is run here.
        """
        device = inputs.input_ids.device
        logprobs = None
        if return_logprobs:
            dtype = torch.float64 if head.dtype == torch.float64 else torch.float32
            logprobs = torch.zeros(inputs.batch, inputs.num_given, dtype=dtype, device=device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        counted = count_by_span(inputs.targets != IGNORED, spans)
        weight = head.plain_weight()
        metrics = TokenMetrics.none_yet(device) if token_metrics else None
        return ChunkLoss(
            head, inputs, vocab_size, total, logprobs, counted, weight, sums, token_loss, metrics
        )

    def of_chunk(self, hidden: torch.Tensor, begin: int, factor: float) -> torch.Tensor | None:
        """Add a chunk's loss times ``factor`` to the total.

        Args:
            hidden: [B, C, hidden_size]; where it carries a graph, parameters of the head receive
                their gradient here.
            begin: first token of the chunk.

        Returns:
            The gradient of hidden, or None without a graph or without a counted token.
        """
        end = begin + hidden.shape[1]
        targets = self.inputs.targets[:, begin:end].reshape(-1).long()
        count = self.counted[begin]
        if count == 0:
            return None
        rows = None if count == targets.numel() else first_true(targets != IGNORED, count)
        needs_grad = torch.is_grad_enabled() and hidden.requires_grad
        if needs_grad and self.inputs.weights is None and self._is_fused(hidden):
            return self._fused(hidden.detach(), targets, rows, count, factor)
        leaf = hidden.detach().requires_grad_(needs_grad)
        flat = leaf.reshape(-1, hidden.shape[-1])
        weights = self.inputs.weights
        if weights is not None:
            weights = weights[:, begin:end].reshape(-1)
        for part in self._slices(count, rows):
            logits = self.head.logits(flat[part])
            if self.metrics is not None:
                self.metrics.add(logits.detach(), targets[part])
            if self.token_loss is None:
                terms = _terms(logits, targets[part])
            else:
                terms = self._own_terms(logits, targets[part], begin, hidden.shape[1], part)
            del logits
            if self.logprobs is not None:
                self._store(self.logprobs, begin, hidden.shape[1], part, -terms.detach())
            if weights is not None:
                terms = terms * weights[part].to(terms.dtype)
            loss = terms.sum() * (factor / self.inputs.divisor)
            self.total += loss.detach()
            if torch.is_grad_enabled() and loss.requires_grad:
                loss.backward()
        return leaf.grad

    def of_chunk_with_logits(self, hidden: torch.Tensor, begin: int, consume: OnLogits) -> None:
        """As :meth:`of_chunk` without gradients, and hands on the logits of every token."""
        batch, tokens, hidden_size = hidden.shape
        step = max(1, self._slice_rows() // batch)
        for first in range(0, tokens, step):
            rows = hidden[:, first : first + step]
            part = slice(begin + first, begin + first + rows.shape[1])
            targets = self.inputs.targets[:, part].long()
            logits = self.head.logits(rows.reshape(-1, hidden_size))
            terms = _terms(logits, targets.reshape(-1)).view_as(targets)
            if self.logprobs is not None:  # a target's stands at its own token, one to the right
                room = self.logprobs[:, part.start + 1 : part.stop + 1]
                room.copy_(-terms[:, : room.shape[1]])
            if self.metrics is not None:
                counted = targets.reshape(-1) != IGNORED
                self.metrics.add(logits[counted], targets.reshape(-1)[counted])
            if self.inputs.weights is not None:
                terms = terms * self.inputs.weights[:, part].to(terms.dtype)
            self.total += terms.sum() / self.inputs.divisor
            consume(part.start, logits.view(batch, -1, logits.shape[-1]))

    def _is_fused(self, hidden: torch.Tensor) -> bool:
        """Whether gradients can be had without autograd."""
        weight, sums = self.weight, self.sums
        if weight is None or sums is None or not self._has_kernel():
            return False
        if weight.requires_grad and (weight._backward_hooks or not sums.takes(weight)):
            return False
        fits = hidden.dtype == weight.dtype and hidden.dtype != torch.float64
        plain = self.logprobs is None and self.token_loss is None
        return plain and fits and not torch.is_autocast_enabled(hidden.device.type)

    @torch.no_grad()
    def _fused(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        rows: torch.Tensor | None,
        count: int,
        factor: float,
    ) -> torch.Tensor:
        """Gradient of hidden, as :meth:`of_chunk`; that of the weight goes to its sum."""
        weight, sums = self.weight, self.sums
        assert weight is not None and sums is not None
        flat = hidden.reshape(-1, hidden.shape[-1])
        grad = torch.zeros_like(flat) if rows is not None else torch.empty_like(flat)
        scale = factor / self.inputs.divisor
        for part in self._slices(count, rows, weight.element_size()):
            x = flat[part]
            logits = x @ weight.t()
            if self.metrics is not None:
                self.metrics.add(logits, targets[part])
            terms = self._softmax_gradient(logits, targets[part], scale)
            self.total += terms.sum(dtype=torch.float64) * scale
            grad[part] = logits @ weight
            if weight.requires_grad:
                sums.add_product(weight, logits, x)
            del logits  # before the next ones
        return grad.view_as(hidden)

    def _has_kernel(self) -> bool:
        return has_kernel(self.inputs.input_ids.device)

    def _softmax_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return softmax_gradient_(logits, targets, scale)

    def _slices(
        self, count: int, rows: torch.Tensor | None, logit_bytes: int = 4
    ) -> Iterator[slice | torch.Tensor]:
        """The counted rows of a chunk (None: all rows), in equal parts."""
        parts = -(-count // self._slice_rows(logit_bytes))
        step = -(-count // parts)
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            yield part if rows is None else rows[part]

    def _slice_rows(self, logit_bytes: int = 4) -> int:
        return slice_rows(self.inputs.input_ids.device.type, self.vocab_size, logit_bytes)

    def _store(
        self,
        room: torch.Tensor,
        begin: int,
        tokens: int,
        part: slice | torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """What belongs to a target stands at the token it is, one to the right."""
        room[self._places(begin, tokens, part)] = values.to(room.dtype)

    def _places(
        self, begin: int, tokens: int, part: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences, and positions of the tokens that rows of a chunk predict."""
        rows = part
        if isinstance(rows, slice):
            device = self.inputs.input_ids.device
            rows = torch.arange(rows.start, rows.stop, device=device)
        return rows // tokens, rows % tokens + begin + 1

    def _own_terms(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        begin: int,
        tokens: int,
        part: slice | torch.Tensor,
    ) -> torch.Tensor:
        """Of the caller's loss."""
        assert self.token_loss is not None
        wide = logits if logits.dtype == torch.float64 else logits.float()
        rows = TokenRows(targets, *self._places(begin, tokens, part))
        terms = self.token_loss(wide, rows)
        fits = isinstance(terms, torch.Tensor) and terms.shape == targets.shape
        if not fits or not terms.is_floating_point():
            got = tuple(terms.shape) if isinstance(terms, torch.Tensor) else type(terms).__name__
            raise ValueError(
                f"token_loss: expected a floating-point tensor of shape {tuple(targets.shape)}, "
                f"a term for each row of logits, got {got}"
            )
        return terms


def _terms(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each row, in fp32 at least; 0 where the target is ignored."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits, targets, reduction="none")


def count_by_span(mask: torch.Tensor, spans: Iterable[tuple[int, int]]) -> dict[int, int]:
    """How many of [B, T] are true in each of the spans [begin, end), by where it begins.

    Read once: a question to the device in every chunk would let it run dry.
    """
    before = F.pad(mask.sum(0).cumsum(0), (1, 0))
    bounds = torch.tensor(list(spans), device=mask.device).view(-1, 2)
    counts = before[bounds[:, 1]] - before[bounds[:, 0]]
    return dict(zip(bounds[:, 0].tolist(), counts.tolist(), strict=True))


def first_true(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Where a mask of ``count`` ones is true, ascending; does not ask the device for the number."""
    return mask.to(torch.uint8).sort(descending=True, stable=True).indices[:count]


_VALUES = 2**25  # of logits that are widened at a time


@dataclass
class TokenMetrics:
    """Sums over the tokens of a call.

    Attributes:
        entropy: 0-d fp64, of their distributions, in nats.
        right: 0-d int64, tokens that are the most likely one.
        count: tokens.
    """

    entropy: torch.Tensor
    right: torch.Tensor
    count: int = 0

    @staticmethod
    def none_yet(device: torch.device) -> TokenMetrics:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return TokenMetrics(zero, torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def add(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits [rows, vocabulary], and the token that each row predicts."""
        self.count += len(targets)
        rows = max(1, _VALUES // logits.shape[1])
        for part, target in zip(logits.split(rows), targets.split(rows), strict=True):
            wide = torch.float64 if part.dtype == torch.float64 else torch.float32
            logp = part.log_softmax(-1, dtype=wide)
            self.right += (logp.argmax(-1) == target).sum()
            logp.clamp_(min=torch.finfo(wide).min)  # times a probability of 0 it is 0
            self.entropy -= torch.linalg.vecdot(logp.exp(), logp).sum(dtype=torch.float64)
