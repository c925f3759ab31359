"""What a teacher says of the tokens of a batch, as the loss of a student's engine.

Nothing of size [tokens, vocabulary] exists, neither of the teacher nor of the student:

    teacher   chunk 0 ▶ chunk 1 ▶ …        of each token, to host memory: the last hidden state,
                                           or the k most likely tokens
    student   fill, then in the sweep      a slice's logits, and beside it the teacher's: by its
                                           head from the hidden states, or those k
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from oomb.core.divergence import blocks, completed, divergence, others_than
from oomb.core.inputs import IGNORED, check_tokens, expect
from oomb.core.loss import TokenRows
from oomb.engine.engine import Engine
from oomb.errors import Error

# What is known of rows: from where they predict, log p of a slice of them, as divergence asks it.
_Known = Callable[[tuple[torch.Tensor, torch.Tensor], slice, torch.Tensor], torch.Tensor]


class TeacherTargets:
    """A teacher's distributions of the tokens of a batch; see :meth:`of`.

    :meth:`kl` and :meth:`reverse_kl` are losses for ``forward_backward(…, token_loss=…)``.

    Attributes:
        temperature: T; divides the teacher's logits, and the student's.
        token_ids: [batch, tokens, k] int32 on the host: the teacher's most likely tokens, at the
            token that is predicted; None where the teacher is known whole.
        logprobs: [batch, tokens, k + 1], theirs at T, and last that of all others together; fp32
            (fp64 of a fp64 teacher); or None.
    """

    token_ids: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None

    def __init__(
        self, known: _Known, shape: torch.Size, vocabulary: range, temperature: float
    ) -> None:
        """From :meth:`of` or :meth:`stored`.

        Args:
            shape: [batch, tokens].
            vocabulary: sizes that a student's may have.
        """
        self._known, self._shape, self._vocabulary = known, shape, vocabulary
        self.temperature = temperature

    @staticmethod
    def of(
        engine: Engine,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        best: int | None = None,
        temperature: float = 1.0,
        vocab_size: int | None = None,
    ) -> TeacherTargets:
        """Evaluate a teacher, chunk by chunk. Its parameters get no gradient.

        Args:
            engine: of the teacher. It may be the student's, its adapter disabled for this call.
            input_ids, attention_mask, position_ids, document_ids: as the student's call has them,
                on the teacher's device.
            best: k tokens of each place are kept, in 8 k + 4 bytes, and all others are one outcome.
                None: the hidden states are kept, in the model's dtype, which makes the divergence
                exact; the student's loss then runs the teacher's head, which has to stay as it is.
            temperature: T, above 0.
            vocab_size: cuts the teacher's logits, whose vocabulary may be padded to more than the
                student's. None: as they are.

        Raises:
            ValueError: an argument does not fit.
            UnsupportedModelError, OutOfMemoryError, Error: as of ``engine.evaluate``.
        """
        model = engine._model
        check_tokens("input_ids", input_ids, model.device)
        width = model.vocab_size if vocab_size is None else vocab_size
        whole = f"None or an int in 1 … {model.vocab_size}, the teacher's own"
        expect(_is_size(width, model.vocab_size), "vocab_size", whole, repr(vocab_size))
        fits = best is None or _is_size(best, width - 1)
        expect(fits, "best", f"None or an int in 1 … {width - 1}", repr(best))
        _expect_temperature(temperature)
        ranks = engine._placement.ranks
        expect(ranks == 1, "engine", "one whose ranks share no sequence", f"{ranks} ranks")
        places = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }
        if best is not None:
            return _best_of(engine, input_ids, places, best, width, float(temperature))
        known = _states_of(engine, input_ids, places, width, float(temperature))
        return TeacherTargets(known, input_ids.shape, range(width, width + 1), float(temperature))

    @staticmethod
    def stored(
        token_ids: torch.Tensor, logprobs: torch.Tensor, temperature: float = 1.0
    ) -> TeacherTargets:
        """What was kept of a teacher before, as :attr:`token_ids` and :attr:`logprobs`.

        Args:
            token_ids: [batch, tokens, k] integers, unlike each other at a place.
            logprobs: [batch, tokens, k + 1], the last of all others together; or [batch, tokens, k]
                of probabilities whose sum is at most 1, and the others have the rest.
            temperature: T at which they were computed.

        Raises:
            ValueError: an argument does not fit.
        """
        tensor = isinstance(token_ids, torch.Tensor) and token_ids.ndim == 3
        tensor = tensor and token_ids.numel() > 0
        integral = tensor and not token_ids.is_floating_point()
        expect(integral, "token_ids", "integers [batch, tokens, k], k > 0", _what(token_ids))
        shape = token_ids.shape
        sizes = [(*shape[:2], shape[2] + 1), tuple(shape)]
        fits = isinstance(logprobs, torch.Tensor) and tuple(logprobs.shape) in sizes
        numbers = f"floating-point numbers {sizes[0]} or {sizes[1]}"
        expect(fits and logprobs.is_floating_point(), "logprobs", numbers, _what(logprobs))
        _expect_temperature(temperature)
        ids, kept = token_ids.cpu(), logprobs.cpu()
        if kept.shape == shape:
            rest = torch.log1p(-kept.exp().sum(-1, keepdim=True).clamp(max=1))
            kept = torch.cat([kept, rest], -1)

        def known(
            at: tuple[torch.Tensor, torch.Tensor], part: slice, log_q: torch.Tensor
        ) -> torch.Tensor:
            place = at[0][part], at[1][part]
            of_best = ids[place].to(log_q.device).long()
            return completed(of_best, kept[place].to(log_q.device, log_q.dtype), log_q)

        sizes_of_all = range(int(ids.max()) + 1, 2**31)
        targets = TeacherTargets(known, shape[:2], sizes_of_all, float(temperature))
        targets.token_ids, targets.logprobs = ids, kept
        return targets

    def kl(self, logits: torch.Tensor, rows: TokenRows) -> torch.Tensor:
        """Σ p log(p / q) of the teacher's p and the student's q, both at T; [n].

        Without Hinton's factor T² (Hinton et al., 2015), which a loss of your own may multiply.
        """
        return self._divergence(logits, rows, reverse=False)

    def reverse_kl(self, logits: torch.Tensor, rows: TokenRows) -> torch.Tensor:
        """Σ q log(q / p), which seeks a mode of p (Gu et al., MiniLLM); [n]."""
        return self._divergence(logits, rows, reverse=True)

    def _divergence(self, logits: torch.Tensor, rows: TokenRows, reverse: bool) -> torch.Tensor:
        width, known = logits.shape[1], self._vocabulary
        of_teacher = f"at least {known[0]}" if len(known) > 1 else f"{known[0]}"
        expected = f"a student's vocabulary of {of_teacher} (vocab_size cuts the teacher's)"
        expect(width in known, "token_loss", expected, f"{width}")
        at = rows.sequences.cpu(), rows.positions.cpu()
        for index, size, of in zip(at, self._shape, ("sequences", "tokens"), strict=True):
            last = int(index.max())
            expect(last < size, "token_loss", f"{size} {of}, as the teacher saw", f"{last + 1}")
        return divergence(
            logits, lambda part, log_q: self._known(at, part, log_q), self.temperature, reverse
        )


def _best_of(
    engine: Engine,
    input_ids: torch.Tensor,
    places: dict[str, Any],
    best: int,
    width: int,
    temperature: float,
) -> TeacherTargets:
    """The k most likely tokens of each place."""
    batch, tokens = input_ids.shape
    dtype = torch.float64 if engine._model.dtype == torch.float64 else torch.float32
    ids = torch.zeros(batch, tokens, best, dtype=torch.int32)
    kept = torch.zeros(batch, tokens, best + 1, dtype=dtype)

    def keep(first: int, logits: torch.Tensor) -> None:
        """At the token that is predicted, one to the right; the last one predicts nothing."""
        few = min(logits.shape[1], tokens - 1 - first)
        rows = logits[:, :few, :width].flatten(0, 1)
        for part in blocks(*rows.shape):
            wide = rows[part].to(dtype) / temperature
            values, indices = wide.topk(best)
            values = torch.cat([values, others_than(indices, wide)], 1)
            place = torch.arange(len(rows))[part]
            at = place // few, place % few + first + 1
            ids[at] = indices.int().cpu()
            kept[at] = (values - wide.logsumexp(1, keepdim=True)).cpu()

    nothing = torch.full_like(input_ids, IGNORED)
    engine.evaluate(input_ids, nothing, **places, on_logits=keep)
    return TeacherTargets.stored(ids, kept, temperature)


def _states_of(
    engine: Engine,
    input_ids: torch.Tensor,
    places: dict[str, Any],
    width: int,
    temperature: float,
) -> _Known:
    """Hidden states, and the head that makes logits of them later."""
    model = engine._model
    linear: Any = model.causal.get_output_embeddings()
    parameters = [] if linear is None else list(linear.parameters())
    reason = "the teacher's head has an adapter, which may be another one in the student's call"
    expect(not hasattr(linear, "disable_adapters"), "best", "a number of tokens", f"None: {reason}")
    with torch.no_grad(), engine.two_pass(input_ids, **places, logprobs=False, hidden=True) as call:
        hidden: torch.Tensor = call.hidden
    versions = [p._version for p in parameters]

    def known(
        at: tuple[torch.Tensor, torch.Tensor], part: slice, log_q: torch.Tensor
    ) -> torch.Tensor:
        if [p._version for p in parameters] != versions:
            raise Error(
                "token_loss: expected the teacher's head as it was in TeacherTargets.of, got one "
                "that was changed since; with best=k the head is not needed"
            )
        rows = hidden[at[0][part], at[1][part] - 1].to(model.device)
        with torch.no_grad(), model.head.attached():
            logits = model.head.logits(rows)[:, :width].to(log_q.device, log_q.dtype)
        return (logits / temperature).log_softmax(-1)

    return known


def _is_size(value: Any, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest


def _expect_temperature(value: Any) -> None:
    positive = isinstance(value, int | float) and 0 < value < float("inf")
    expect(positive, "temperature", "a number above 0", repr(value))


def _what(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
