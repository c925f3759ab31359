"""What an audit finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from oomb.config import PageRule, SampledChunks, TopKPages, TruncatedChunks


@dataclass(frozen=True)
class Likeness:
    """An approximation x against the exact y, both taken as one long vector.

    Attributes:
        cosine: ⟨x, y⟩ / (‖x‖ ‖y‖).
        error: ‖x − y‖ / ‖y‖.
    """

    cosine: float
    error: float


@dataclass(frozen=True, kw_only=True)
class SparseLayer:
    """One decoder layer under a rule of page-sparse attention.

    Attributes:
        output: hidden states behind the layer, with what earlier layers got wrong, at the sampled
            query blocks.
        gradient: of the layer's parameters; None where none is trained.
        mass: share of the attention, had every page been seen, that falls on what the sampled
            blocks saw; mean over tokens and heads. None where the layer has a sliding window.
        past_mass: share of the attention to earlier chunks that falls on the chosen pages, over the
            sampled blocks that had to choose; None where none had to.
    """

    output: Likeness
    gradient: Likeness | None
    mass: float | None
    past_mass: float | None


@dataclass(frozen=True, kw_only=True)
class SparseAudit:
    """A rule of page-sparse attention. ``gradient``: of all trained parameters."""

    rule: PageRule
    loss: float
    gradient: Likeness
    layers: list[SparseLayer]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Estimates of a gradient, all relative to the norm of the exact one.

    Attributes:
        bias: of their mean. Of a few random draws it also holds their noise, about
            ``spread / sqrt(draws)``.
        spread: root mean squared distance from their mean.
        error: root mean squared distance from the exact gradient.
    """

    bias: float
    spread: float
    error: float


@dataclass(frozen=True, kw_only=True)
class SampledAudit:
    """A rule of sampled chunks.

    Attributes:
        exhaustive: every subset of the chunks was tried and weighted with its probability: the
            figures are expectations. Otherwise they are of ``draws`` random draws.
        gradient: of all trained parameters.
        layers: per decoder layer; None where none of its parameters is trained.
        losses: the estimated loss of each subset, as it was drawn.
        errors: relative error of each subset's gradient.
        weights: probability of each subset.
    """

    rule: SampledChunks
    draws: int
    exhaustive: bool
    gradient: Spread
    layers: list[Spread | None]
    losses: list[float]
    errors: list[float]
    weights: list[float]


@dataclass(frozen=True, kw_only=True)
class TruncatedAudit:
    """A rule of truncated chunks; every step has this error, which is bias and no noise.

    Attributes:
        gradient: of all trained parameters.
        layers: per decoder layer; None where none of its parameters is trained.
    """

    rule: TruncatedChunks
    gradient: Likeness
    layers: list[Likeness | None]


@dataclass(frozen=True, kw_only=True)
class RoundedAudit:
    """Gradient pages in another dtype; each rounding is random and without bias.

    Attributes:
        gradient: of all trained parameters.
        layers: per decoder layer; None where none of its parameters is trained.
    """

    kv_grad_dtype: str
    gradient: Likeness
    layers: list[Likeness | None]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Everything found on one model and text.

    Attributes:
        num_chunks: of the text.
        loss: exact.
        sampled_blocks: query blocks at which layer outputs and attention mass were taken, spread
            evenly over the text; ``num_blocks`` there are.
        rounded: gradient pages in bf16; None: not asked for.
        advice: what the figures recommend.
    """

    num_tokens: int
    num_chunks: int
    chunk_size: int
    page_size: int
    loss: float
    sampled_blocks: list[int]
    num_blocks: int
    sparse: list[SparseAudit]
    sampled: list[SampledAudit]
    truncated: list[TruncatedAudit]
    rounded: RoundedAudit | None
    advice: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a page rule of your own, which may hold anything, as its ``repr``."""
        return asdict(replace(self, sparse=[_for_json(one) for one in self.sparse]))


def budget_of(rule: PageRule) -> str:
    """Pages that a block sees at most, with the rule's class where it is one of your own."""
    pages = str(rule.max_pages)
    return pages if type(rule) is TopKPages else f"{pages} ({type(rule).__name__})"


def _for_json(one: SparseAudit) -> SparseAudit:
    if isinstance(one.rule, TopKPages):
        return one
    text: Any = repr(one.rule)
    return replace(one, rule=text)
