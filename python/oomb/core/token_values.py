"""Per-token values that a fill takes from logits and hidden states, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from oomb.core.inputs import IGNORED
from oomb.core.loss import ChunkLoss, count_by_span, first_true

STATISTICS = ("mean_logits", "is_top1", "log_sum_sq_probs")
_LOWEST = -1e30  # a log-probability whose product with its probability, 0, is 0 and not NaN


@dataclass(kw_only=True)
class TokenValues(ChunkLoss):
    """Values a_t of each token in the fill; in the sweep the loss Σ g_t a_t for given g.

    g = dL/da at these very values, so the sweep's gradient is that of L. With log-probability a and
    entropy H of a row p = softmax(z / T):

        dz = (g_a (onehot − p) − g_H p (log p + H)) / T

    Logits exist in slices, as those of the plain loss. Without graph (fill) values are taken, with
    one (sweep) gradients are sent back.

    Attributes:
        temperature: T.
        values: by name ("logprobs", "entropies": [B, tokens given], at the token that is predicted,
            0 where none is; "hidden": [B, tokens given, hidden_size] on the host).
        statistics: constants by name, as "logprobs" are: "mean_logits", of z / T; "is_top1",
            whether the token is the most likely one; "log_sum_sq_probs", log Σ p².
        gradients: dL/d of each value that reaches the loss, set before the sweep.
    """

    temperature: float
    values: dict[str, torch.Tensor]
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    _reached: torch.Tensor | None = None  # [B, T]: rows whose logits reach the loss
    _num_reached: dict[int, int] = field(default_factory=dict)  # by first token of the chunk

    def sweep_with(
        self, gradients: dict[str, torch.Tensor], spans: Iterable[tuple[int, int]]
    ) -> None:
        """Begin the sweep; rows that no gradient reaches need no logits then.

        Args:
            spans: as of :meth:`ChunkLoss.of_call`.
        """
        self.gradients = gradients
        rows = [
            _to_predecessors(gradients[name], self.inputs.tokens) != 0
            for name in ("logprobs", "entropies")
            if name in gradients
        ]
        if rows:
            reached = rows[0] if len(rows) == 1 else rows[0] | rows[1]
            counted = self.inputs.targets != IGNORED
            # Dropout draws for as many rows as in the fill.
            self._reached = counted if self.head.dropouts() else reached & counted
            self._num_reached = count_by_span(self._reached, spans)

    def of_chunk(self, hidden: torch.Tensor, begin: int, factor: float) -> torch.Tensor | None:
        """Take a chunk's values; or, with a graph, the gradient of hidden, times ``factor``."""
        if torch.is_grad_enabled():
            return self._back(hidden, begin, factor)
        if "hidden" in self.values:
            _part(self.values["hidden"], hidden, begin).copy_(hidden)
        if self._has_rows:
            self._take(hidden, begin)
        return None

    @property
    def _has_rows(self) -> bool:
        return bool(self.statistics) or "logprobs" in self.values or "entropies" in self.values

    def _take(self, hidden: torch.Tensor, begin: int) -> None:
        tokens = hidden.shape[1]
        targets = self._targets(begin, tokens)
        flat = hidden.reshape(-1, hidden.shape[-1])
        counted = targets != IGNORED
        for part in self._parts(counted, self.counted[begin]):
            logits = self.head.logits(flat[part])
            logp = self._log_softmax(logits)
            found = {}
            if "logprobs" in self.values:
                found["logprobs"] = logp.gather(1, targets[part, None])[:, 0]
            if "is_top1" in self.statistics:
                found["is_top1"] = logp.argmax(1) == targets[part]
            if "mean_logits" in self.statistics:
                found["mean_logits"] = logits.mean(1, dtype=logp.dtype) / self.temperature
            del logits
            if "entropies" in self.values:
                found["entropies"] = _entropy(logp, logp.exp())
            if "log_sum_sq_probs" in self.statistics:
                found["log_sum_sq_probs"] = logp.mul_(2).logsumexp(1)
            for name, rows in found.items():
                room = (self.values if name in self.values else self.statistics)[name]
                self._store(room, begin, tokens, part, rows)

    def _back(self, hidden: torch.Tensor, begin: int, factor: float) -> torch.Tensor | None:
        of_logits = self._back_through_head(hidden, begin, factor) if self._has_rows else None
        own = self.gradients.get("hidden")
        if own is None or not hidden.requires_grad:
            return of_logits
        grad = _part(own, hidden, begin).to(hidden.device, hidden.dtype) * factor
        return grad if of_logits is None else of_logits + grad

    def _back_through_head(
        self, hidden: torch.Tensor, begin: int, factor: float
    ) -> torch.Tensor | None:
        tokens = hidden.shape[1]
        targets = self._targets(begin, tokens)
        of_logprob = self._gradient("logprobs", begin, tokens)
        of_entropy = self._gradient("entropies", begin, tokens)
        if self._reached is None:
            return None
        reached = self._reached[:, begin : begin + tokens].reshape(-1)
        parts = self._parts(reached, self._num_reached[begin])
        plain = hidden.requires_grad and of_entropy is None
        if plain and of_logprob is not None and self._is_fused(hidden):
            scale = of_logprob * (-factor / self.temperature)
            return self._fused_back(hidden.detach(), targets, parts, scale)
        leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        flat = leaf.reshape(-1, hidden.shape[-1])
        for part in parts:
            logits = self.head.logits(flat[part])
            if logits.requires_grad:
                d_logits = self._gradient_of_logits(
                    logits.detach(),
                    targets[part],
                    None if of_logprob is None else of_logprob[part],
                    None if of_entropy is None else of_entropy[part],
                )
                logits.backward(d_logits.mul_(factor / self.temperature).to(logits.dtype))
        return leaf.grad

    @torch.no_grad()
    def _gradient_of_logits(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        of_logprob: torch.Tensor | None,
        of_entropy: torch.Tensor | None,
    ) -> torch.Tensor:
        """dz times the temperature [rows, vocabulary], in fp32 at least."""
        logp = self._log_softmax(logits)
        p = logp.exp()
        if of_entropy is None:
            assert of_logprob is not None
            d = p.mul_(-of_logprob[:, None])
        else:
            d = logp.add_(_entropy(logp, p)[:, None]).mul_(-of_entropy[:, None])
            if of_logprob is not None:
                d.sub_(of_logprob[:, None])
            d.mul_(p)
        if of_logprob is not None:
            d.scatter_add_(1, targets[:, None], of_logprob[:, None])
        return d

    @torch.no_grad()
    def _fused_back(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        parts: list[slice | torch.Tensor],
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """As autograd through a head that is a plain product; ``scale`` of each row's p − onehot.

        Rows are scaled behind the products: the kernel has one scale for all of them.
        """
        weight, sums = self.weight, self.sums
        assert weight is not None and sums is not None
        flat = hidden.reshape(-1, hidden.shape[-1])
        grad = torch.zeros_like(flat)
        for part in parts:
            x, of_row = flat[part], scale[part, None]
            logits = x @ weight.t()
            if self.temperature != 1.0:
                logits.div_(self.temperature)
            self._softmax_gradient(logits, targets[part], 1.0)
            grad[part] = (logits @ weight).mul_(of_row)
            if weight.requires_grad:
                sums.add_product(weight, logits, (x * of_row).to(x.dtype))
            del logits  # before the next ones
        return grad.view_as(hidden)

    def _log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Of logits over the temperature, in fp32 at least; memory of its own."""
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if self.temperature != 1.0:
            logits = logits.to(wide) / self.temperature
        return F.log_softmax(logits, dim=-1, dtype=wide).clamp_(min=_LOWEST)

    def _targets(self, begin: int, tokens: int) -> torch.Tensor:
        return self.inputs.targets[:, begin : begin + tokens].reshape(-1).long()

    def _parts(self, rows: torch.Tensor, count: int) -> list[slice | torch.Tensor]:
        """Slices of the rows that are true, of which there are ``count``."""
        if count == 0:
            return []
        chosen = None if count == rows.numel() else first_true(rows, count)
        return list(self._slices(count, chosen, 4))

    def _gradient(self, name: str, begin: int, tokens: int) -> torch.Tensor | None:
        """Of the chunk's rows [B * C]: those of the tokens that they predict."""
        grad = self.gradients.get(name)
        if grad is None:
            return None
        return _to_predecessors(grad[:, begin:], tokens).reshape(-1)


def _entropy(logp: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """[rows]; a product of vectors, which needs no memory of the size of p."""
    entropy: torch.Tensor = torch.linalg.vecdot(p, logp).neg_()
    return entropy


def _to_predecessors(of_tokens: torch.Tensor, tokens: int) -> torch.Tensor:
    """[B, tokens]: at each token what belongs to its successor."""
    rows = of_tokens[:, 1 : 1 + tokens]
    return F.pad(rows, (0, tokens - rows.shape[1]))


def _part(host: torch.Tensor, hidden: torch.Tensor, begin: int) -> torch.Tensor:
    return host[:, begin : begin + hidden.shape[1]]
