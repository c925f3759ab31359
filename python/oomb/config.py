"""What a user chooses: chunking, attention, the sweep, memory and numerics."""

from __future__ import annotations

import functools
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from oomb.nearest import nearest
from oomb.units import parse_size

if TYPE_CHECKING:
    import torch

Score = Literal["block_mean", "token_softmax"]  # csrc/attention/params.h defines them
Summary = Literal["mean", "bounds"]


def _expect(ok: bool, argument: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{argument}: expected {expected}, got {got!r}")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


Settings = TypeVar("Settings")


def _named_settings(kind: type[Settings]) -> type[Settings]:
    """A dataclass of keywords that answers a misspelt one with the nearest there is."""
    create: Any = kind.__init__
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(create)
    def checked(self: Any, *positional: Any, **settings: Any) -> None:
        if positional:
            got = f"{positional[0]!r} alone"
            raise TypeError(f"{kind.__name__}: expected keywords such as {names[0]}=…, got {got}")
        for name in settings:
            if name not in names:
                near = nearest(name, names) or f"; known are {', '.join(names)}"
                raise TypeError(
                    f"{name}: expected a setting of {kind.__name__}, got an unknown name{near}"
                )
        create(self, **settings)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Exact attention: every query sees its whole past."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """What one layer of a chunk can look back on when its past pages are chosen.

    Attributes:
        layer, chunk: which, from 0.
        page_size: tokens of a page, and queries of a block.
        num_tokens: tokens before the chunk; they lie in the first ``num_pages`` pages.
        first_key: [batch, tokens of the chunk] int32, the first token that each query may see
            (packed documents); None: all. A page that no query of a block may see is masked.
        num_keys: [batch] int32, tokens of each sequence without its padding; None: no padding.
            Pages behind them do not exist; the engine drops them from a list.
    """

    layer: int
    chunk: int
    page_size: int
    num_tokens: int
    first_key: torch.Tensor | None = None
    num_keys: torch.Tensor | None = None

    @property
    def num_pages(self) -> int:
        """Pages of the past; a rule chooses among them by number, from 0."""
        return -(-self.num_tokens // self.page_size)


class PageRule(ABC):
    """Which past pages each block of ``page_size`` queries sees; subclass it to define one.

    A rule is a value of ``Config(attention=…)``. Make it a frozen dataclass: it is compared and
    hashed. A choice is made once per layer and chunk, the first time that the queries exist, and
    every later pass uses it, so the gradient is exact for what was chosen. No gradient flows
    through the choice. Layers with a sliding window see all of their window and choose nothing.
    """

    share: Literal["all_heads", "kv_head"] = "all_heads"
    """One list for all heads, or one for each key/value head."""

    summary: Summary = "mean"
    """What is known of a page: the mean of its keys, or bounds (:mod:`oomb.ops.page_bounds`)."""

    @property
    @abstractmethod
    def max_pages(self) -> int:
        """Past pages that a block sees at most; a past of no more pages is seen whole."""

    @abstractmethod
    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: Past) -> torch.Tensor:
        """Lists of the past pages that each block of a chunk's queries sees.

        Called without autograd, on the current stream, where the past holds more than
        ``max_pages`` pages.

        Args:
            q: [batch, query heads, tokens, head_dim], after RoPE. On a GPU heads of other sizes
                than its kernels take have zeros behind them, and so have summaries.
            summaries: [batch, pages, key/value heads, head_dim], the mean key of every page after
                RoPE; where ``summary`` is ``"bounds"`` [..., 2 * head_dim], the highest of each
                number of its keys and then the lowest with its sign turned. Rows from
                ``past.num_pages`` on are not written yet.
            past: where the chunk stands.

        Returns:
            int32 [batch, blocks, lists, max_pages] on the queries' device: numbers of past pages,
            ascending without repetition, then -1. ``blocks`` is ceil(tokens / page_size); ``lists``
            is 1, or the number of key/value heads where ``share`` is ``"kv_head"``.
        """

    def expected_share(self, past_pages: int, query_blocks: int) -> float | None:
        """Part of ``past_pages`` that ``query_blocks`` blocks together choose, for ``oomb plan``.

        None: as if half of a block's pages were those of the block before it.
        """
        return None


@_named_settings
@dataclass(frozen=True, kw_only=True)
class TopKPages(PageRule):
    """Page-sparse attention: each block of ``page_size`` queries sees ``budget`` earlier pages.

    Attributes:
        budget: past pages per query block. A past of no more pages is seen whole.
        share: one list for all heads (``"all_heads"``) or one per key/value head (``"kv_head"``).
        score: ``"block_mean"`` (mean query of the block · summary of the page) or
            ``"token_softmax"`` (the rule of the OOMB paper: per token a softmax over pages).
        summary: what a page is scored by: ``"mean"`` (the mean of its keys) or ``"bounds"`` (the
            most that q · k can be for any of them, as in Quest): twice the work, and one key that
            matters is not lost among the others.
        sink_pages: first pages that are always chosen, within the budget.
        recent_pages: latest pages that are always chosen, within the budget.
        chunk_budget: bound on the distinct past pages that one layer of a chunk may use; None: no
            bound. Bounds host traffic where selection would outrun the link.
    """

    budget: int = 64
    share: Literal["all_heads", "kv_head"] = "all_heads"
    score: Score = "block_mean"
    summary: Summary = "mean"
    sink_pages: int = 0
    recent_pages: int = 0
    chunk_budget: int | None = None

    def __post_init__(self) -> None:
        _expect(_is_count(self.budget, 1), "budget", "an int >= 1", self.budget)
        _expect_one_of("share", self.share, ("all_heads", "kv_head"))
        _expect_one_of("score", self.score, get_args(Score))
        _expect_one_of("summary", self.summary, get_args(Summary))
        _expect(_is_count(self.sink_pages, 0), "sink_pages", "an int >= 0", self.sink_pages)
        _expect(_is_count(self.recent_pages, 0), "recent_pages", "an int >= 0", self.recent_pages)
        forced = self.sink_pages + self.recent_pages
        _expect(
            forced <= self.budget, "sink_pages + recent_pages", f"<= budget {self.budget}", forced
        )
        bound = self.chunk_budget
        fits = bound is None or _is_count(bound, self.budget)
        _expect(fits, "chunk_budget", f"None or >= budget {self.budget}", bound)

    @property
    def max_pages(self) -> int:
        """The budget."""
        return self.budget

    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: Past) -> torch.Tensor:
        """The ``budget`` pages of the highest score; ties go to the lower page."""
        from oomb.ops.selection import top_k_lists  # heavy: settings alone need no torch

        return top_k_lists(self, q, summaries, past)


@dataclass(frozen=True, kw_only=True)
class AllChunks:
    """Exact backward: every chunk is swept."""

    def draw(self, num_chunks: int, step: int) -> list[int]:
        """All chunks, ascending."""
        return list(range(num_chunks))


@_named_settings
@dataclass(frozen=True, kw_only=True)
class SampledChunks:
    """SpaCO with a Bernoulli draw: sweep a random subset of the chunks, unbiased.

    A kept chunk's loss is scaled by 1 / keep and the gradient that later chunks left on its keys
    and values by min(1 / keep, cap). Uncapped, the expectation of the gradient is exact; single
    draws are heavy-tailed. A cap trades variance for bias.

    Attributes:
        keep: probability that a chunk is swept, in (0, 1].
        seed: of the draw; the draw depends on (seed, step) alone.
        cap: bound on the factor on the keys' and values' gradient; None: unbounded.
    """

    keep: float = 0.25
    seed: int = 0
    cap: float | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.keep, (int, float)) and not isinstance(self.keep, bool)
        _expect(number and 0 < self.keep <= 1, "keep", "a number in (0, 1]", self.keep)
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        _expect(whole, "seed", "an int", self.seed)
        cap = self.cap
        bound = isinstance(cap, (int, float)) and not isinstance(cap, bool) and cap >= 1
        _expect(cap is None or bound, "cap", "None or a number >= 1", cap)

    def draw(self, num_chunks: int, step: int) -> list[int]:
        """Chunks to sweep, ascending; ``step`` counts the engine's forward_backward calls."""
        key = hashlib.sha256(f"oomb.SampledChunks {self.seed} {step}".encode()).digest()
        generator = random.Random(int.from_bytes(key[:8], "little"))
        return [chunk for chunk in range(num_chunks) if generator.random() < self.keep]

    @property
    def loss_factor(self) -> float:
        """Factor on a kept chunk's loss."""
        return 1.0 / self.keep

    @property
    def dkv_factor(self) -> float:
        """Factor on the gradient that later chunks left on a kept chunk's keys and values."""
        return self.loss_factor if self.cap is None else min(self.loss_factor, self.cap)


@_named_settings
@dataclass(frozen=True, kw_only=True)
class TruncatedChunks:
    """Truncated back-propagation through time: gradient reaches back ``window`` chunks.

    Every chunk is swept, and its queries see their whole past. The keys and values of chunks more
    than ``window`` before it are constants to its loss. So at most ``window`` chunks have gradient
    pages at a time. The gradient is exact for this definition and biased against the whole one. A
    window of all chunks is exact training; 0 leaves each chunk to itself.

    Attributes:
        window: earlier chunks that a chunk's gradient reaches, >= 0.
    """

    window: int

    def __post_init__(self) -> None:
        _expect(_is_count(self.window, 0), "window", "an int >= 0", self.window)

    def draw(self, num_chunks: int, step: int) -> list[int]:
        """All chunks, ascending."""
        return list(range(num_chunks))


BackwardRule = AllChunks | SampledChunks | TruncatedChunks


@_named_settings
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of an engine; validated and frozen.

    Attributes:
        chunk_size: tokens per chunk, a multiple of ``page_size``.
        page_size: tokens per page.
        attention: :class:`Dense`, :class:`TopKPages`, or a :class:`PageRule` of your own.
        backward: :class:`AllChunks`, :class:`SampledChunks` or :class:`TruncatedChunks`.
        device_memory: hard cap of the device tier, the pages of KV and its gradients, with outputs
            that are kept on the device: bytes or ``"40GiB"``. None: what is free, less a margin.
        host_memory: cap of the host tier, likewise.
        kv_grad_dtype: ``"float32"``, or ``"bfloat16"`` with stochastic rounding: half the memory.
            Where keys are in fp32 or fp64, gradient pages are too.
        main_grad_dtype: of the sums of parameter gradients over chunks: ``"float32"``, or
            ``"bfloat16"`` with stochastic rounding: half the memory. For bf16 parameters; others
            keep sums in fp32 (fp64).
        main_grad_device: ``"device"``, or ``"host"``: sums of decoder layers stay in host memory,
            and come to the device for their layer's backward. Changes no bit.
        recompute: ``"none"`` keeps a chunk's activations, ``"pointwise"`` computes outputs of norms
            and products of gates again (of Liger's kernels on a GPU; a third of the activations),
            ``"layer"`` each layer but its attention, ``"auto"`` decides once for each size of a
            chunk by what fits. As kept outputs go, less is computed again in their room, where all
            pages stay on the device. Changes no bit of the result.
        keep_outputs: attention's outputs of filled chunks that are kept for the sweep, which does
            not compute them again then: ``"auto"``, those that save more time than their copies
            take, as far as pages leave room, and likewise outputs of MLPs; ``"all"``, ``"none"``,
            or a share in [0, 1] of attention's (the most worthwhile first). Changes no bit of the
            result.
        weights: ``"device"``, or ``"host"``: frozen weights of decoder layers stay in host memory,
            and come to the device a layer ahead of use; all else moves there. Changes no bit.
        sharded_weights: of a model sharded by FSDP2: ``"zero1"`` gathers weights for a call,
            ``"zero2"`` also shards gradient sums after each chunk, ``"zero3"`` gathers by layer.
        divide_pages: ranks that would hold copies of a key/value head, where they are more than the
            heads, hold a part of its pages each: less memory, and more exchanges.
        head_groups: number of groups in which ranks exchange a layer's heads, one after another, in
            buffers of an n-th of the size: a divisor of a rank's key/value heads. Dense attention
            alone may have several. Changes no bit, but for gradient pages in bf16.
        rope_angles: ``"model"`` as the model computes them, or ``"float64"`` for positions past 1M.
        deterministic: False allows faster kernels whose sums have no fixed order.
        keep_main_grad: keep the sum of each gradient over chunks for ``engine.main_grad``.
        check_finite: raise at the first chunk and layer where a loss or gradient is not finite.
        record_selection: keep which pages each query block read in ``step.selection``.
    """

    chunk_size: int = 4096
    page_size: int = 128
    attention: Dense | PageRule = field(default_factory=Dense)
    backward: BackwardRule = field(default_factory=AllChunks)
    device_memory: int | str | None = None
    host_memory: int | str | None = None
    kv_grad_dtype: Literal["float32", "bfloat16"] = "float32"
    main_grad_dtype: Literal["float32", "bfloat16"] = "float32"
    main_grad_device: Literal["device", "host"] = "device"
    recompute: Literal["auto", "none", "pointwise", "layer"] = "auto"
    keep_outputs: Literal["auto", "none", "all"] | float = "auto"
    weights: Literal["device", "host"] = "device"
    sharded_weights: Literal["zero1", "zero2", "zero3"] = "zero3"
    divide_pages: bool = False
    head_groups: int = 1
    rope_angles: Literal["model", "float64"] = "model"
    deterministic: bool = True
    keep_main_grad: bool = False
    check_finite: bool = False
    record_selection: bool = False

    def __post_init__(self) -> None:
        _expect(_is_count(self.page_size, 1), "page_size", "an int >= 1", self.page_size)
        _expect(_is_count(self.chunk_size, 1), "chunk_size", "an int >= 1", self.chunk_size)
        multiple = f"a multiple of page_size {self.page_size}"
        _expect(self.chunk_size % self.page_size == 0, "chunk_size", multiple, self.chunk_size)
        attention, backward = self.attention, self.backward
        _expect(
            isinstance(attention, (Dense, PageRule)),
            "attention",
            "oomb.Dense(), oomb.TopKPages(…) or another oomb.PageRule",
            attention,
        )
        if isinstance(attention, PageRule):
            _expect_rule(attention)
        _expect(
            isinstance(backward, BackwardRule),
            "backward",
            "oomb.AllChunks(), oomb.SampledChunks(…) or oomb.TruncatedChunks(…)",
            backward,
        )
        groups = self.head_groups
        _expect(_is_count(groups, 1), "head_groups", "an int >= 1", groups)
        if isinstance(attention, PageRule):
            _expect(groups == 1, "head_groups", "1, as page rules see all heads at once", groups)
        object.__setattr__(self, "device_memory", parse_size("device_memory", self.device_memory))
        object.__setattr__(self, "host_memory", parse_size("host_memory", self.host_memory))
        keep = self.keep_outputs
        share = isinstance(keep, (int, float)) and not isinstance(keep, bool) and 0 <= keep <= 1
        known = share or (isinstance(keep, str) and keep in ("auto", "none", "all"))
        _expect(known, "keep_outputs", "'auto', 'none', 'all' or a share in [0, 1]", keep)
        for name, kind in get_type_hints(Config).items():
            if get_origin(kind) is Literal:
                _expect_one_of(name, getattr(self, name), get_args(kind))
        for name, kind in get_type_hints(Config).items():
            if kind is bool:
                _expect(isinstance(getattr(self, name), bool), name, "a bool", getattr(self, name))


def _expect_rule(rule: PageRule) -> None:
    most = rule.max_pages
    _expect(_is_count(most, 1), "attention.max_pages", "an int >= 1", most)
    _expect_one_of("attention.share", rule.share, ("all_heads", "kv_head"))
    _expect_one_of("attention.summary", rule.summary, get_args(Summary))
    _expect(type(rule).__hash__ is not None, "attention", "a frozen dataclass", rule)


def _expect_one_of(argument: str, value: object, choices: Sequence[str]) -> None:
    known = isinstance(value, str) and value in choices
    _expect(known, argument, " or ".join(map(repr, choices)), value)
