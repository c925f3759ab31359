"""What is trained, from what, and what it is asked: the pieces of a run, most telling first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .model import Rope
from .tasks import TASKS
from .training import UNTRAINED, Stage


@dataclass(frozen=True, kw_only=True)
class Level:
    """A length to train at, with each of several methods, beginning from the level before.

    Attributes:
        asked: lengths of evaluation; none at a level that is only on the way.
        methods: names of ``training.methods``. Each goes on from its own
            model of the level before, where there is one, or else from that of its first method.
        tried: methods under whose attention models are evaluated, beside dense attention
            and a model's own.
        audited: methods that ``oomb audit`` is asked about, on the model that all begin from
            (``UNTRAINED``) and on the one trained exactly, at the length of training; none
            named: those tried, on the latter, at every length.
        rope: angles from here on; None: those of the level before.
    """

    stage: Stage
    asked: tuple[int, ...] = ()
    methods: tuple[str, ...] = ("ordinary",)
    tried: tuple[str, ...] = ()
    audited: tuple[str, ...] = ()
    rope: Rope | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A run.

    Attributes:
        number: sequences of each task and length.
        tasks: that are asked.
        far_tasks: those asked beyond a level's own length too; none named: all of them.
        asked_tokens: that are asked at once.
        probe_seconds: of training between two looks at the share of needles found.
        probe_steps: in place of seconds, where methods get equal steps; 0: seconds count.
        audited_draws: of sampled chunks in an audit; 256 are all subsets of eight chunks.
    """

    size: str
    rope: Rope
    page_size: int
    levels: tuple[Level, ...]
    number: int
    asked_tokens: int
    tasks: tuple[str, ...] = tuple(TASKS)
    far_tasks: tuple[str, ...] = ()
    probe_seconds: float = 5.0
    probe_steps: int = 0
    audited_draws: int = 16


def _stage(length: int, batch: int, rate: float, seconds: float, share: float = 0.6) -> Stage:
    return Stage(length=length, batch=batch, rate=rate, share=share, seconds=seconds)


def _steps(length: int, batch: int, rate: float, steps: int, others: int) -> Stage:
    """As many steps for every method, however long they take."""
    return Stage(
        length=length,
        batch=batch,
        rate=rate,
        share=0.6,
        seconds=math.inf,
        steps=steps,
        others=others,
    )


def _all_tasks(longest: int) -> tuple[Level, ...]:
    """Ordinary training at growing lengths that teaches every task, most of it at 256 tokens."""
    lengths = [256 * 2**i for i in range((longest // 256).bit_length())]
    return tuple(
        Level(
            stage=_steps(length, 32_768 // length, 2e-4, 2000 if length == 256 else 200, 3),
            asked=(longest,) if length == longest else (),
        )
        for length in lengths
    )


def _way(
    tokens: int, rates: dict[int, float], seconds: dict[int, float], most: int = 64
) -> tuple[Level, ...]:
    """Ordinary training at growing lengths, ``tokens`` a step in at most ``most`` sequences.

    A length doubles from level to level: a model that finds needles at one finds most at its
    double before it has trained there.
    """
    return tuple(
        Level(stage=_stage(length, min(most, tokens // length), rate, seconds[length]))
        for length, rate in rates.items()
    )


_WAY = (128, 256, 512, 1024, 2048, 4096, 8192)
_SHORT_WAY = _way(32_768, dict.fromkeys(_WAY, 2e-4), {**dict.fromkeys(_WAY, 8.0), 128: 40.0})
_PARTS = ("SpaCO 1/2", "SpaCO 1/4", "1 back", "2 back", "4 back")
_PAGES = tuple(
    f"{budget} pages{score}"
    for score in (", bounds", ", softmax", "", ", sink, recent", ", bounds, sink, recent")
    for budget in (16, 32, 64)
)
_AUDITED = (
    *_PARTS,
    "64 pages, bounds",
    "16 pages, bounds",
    "64 pages, softmax",
    "64 pages",
    "bf16 gradients",
)
_NEEDLES = ("needle, 8 keys", "needle, 4 queries", "two facts")

PROFILES = {
    # A CPU, seconds: that all of it runs.
    "smoke": Profile(
        size="tiny",
        rope=Rope(1e8, 1024),
        page_size=16,
        levels=(
            Level(stage=Stage(length=128, batch=4, rate=4e-3, share=0.6, seconds=60, steps=2),
                  asked=(128,)),
            Level(stage=Stage(length=512, batch=1, rate=1e-3, share=0.3, seconds=60, steps=1),
                  asked=(512, 1024), methods=("exact", "16 pages", "1 back"), tried=("16 pages",),
                  audited=("16 pages", "SpaCO 1/2", "1 back", "bf16 gradients")),
        ),
        number=2,
        asked_tokens=2048,
        tasks=("needle",),
    ),
    # A CPU, a quarter of an hour: what each method does to a tiny model.
    "cpu": Profile(
        size="tiny",
        rope=Rope(1e8, 4096),
        page_size=16,
        levels=(
            *_way(2048, {64: 2e-3, 128: 2e-3, 256: 2e-3}, {64: 30, 128: 20, 256: 20}, most=32),
            Level(stage=_stage(512, 4, 1e-3, 30), asked=(512, 4096),
                  methods=("ordinary", "exact", "16 pages, bounds", "16 pages, softmax",
                           "16 pages", "16 pages, sink, recent", "SpaCO 1/2", "SpaCO 1/4",
                           "bf16 gradients", "1 back", "4 back"),
                  tried=("16 pages, bounds", "16 pages, softmax", "16 pages")),
        ),
        number=32,
        asked_tokens=8192,
        probe_seconds=10.0,
    ),
    # A CPU, an hour a seed: how fast each method learns what the start cannot do. Its
    # angles of 128 tokens, hardly stretched, tell names apart that are up to some 512 tokens away.
    "learn-cpu": Profile(
        size="tiny",
        rope=Rope(1e3, 128),
        page_size=16,
        levels=(
            *_way(2048, {64: 2e-3, 128: 2e-3}, {64: 20, 128: 20}, most=32),
            Level(stage=_steps(2048, 2, 1e-3, 96, 1), asked=(2048,), rope=Rope(4e3, 4096),
                  methods=(UNTRAINED, "exact", "ordinary", *_PARTS, *_PAGES),
                  audited=(*_PARTS, *_PAGES)),
        ),
        number=32,
        asked_tokens=8192,
        tasks=_NEEDLES,
        probe_steps=8,
        audited_draws=256,
    ),
    # One H200, an hour for two seeds: how fast each method learns 16K tokens, of which a model of
    # 1K finds a quarter of the needles. Angles stretch by less than the length does, so that it
    # does not find them before it has trained there.
    "learn": Profile(
        size="base",
        rope=Rope(1e4, 1024),
        page_size=128,
        levels=(
            *_all_tasks(1024),
            Level(stage=_steps(16_384, 4, 2e-4, 96, 2), asked=(16_384, 65_536),
                  rope=Rope(4e4, 65_536),
                  methods=(UNTRAINED, "exact", "ordinary", "bf16 gradients", *_PARTS, *_PAGES),
                  tried=("64 pages, bounds",), audited=_AUDITED),
        ),
        number=32,
        asked_tokens=2**19,
        far_tasks=("needle, 8 keys",),
        probe_steps=8,
    ),
    # One H200, an hour a seed: the same from 4K to 64K.
    "learn-64k": Profile(
        size="base",
        rope=Rope(6.4e4, 4096),
        page_size=128,
        levels=(
            *_all_tasks(4096),
            Level(stage=_steps(65_536, 1, 2e-4, 64, 2), asked=(65_536,),
                  rope=Rope(2.56e5, 262_144),
                  methods=(UNTRAINED, "exact", "SpaCO 1/2", "64 pages, bounds", "ordinary",
                           "SpaCO 1/4", "32 pages, bounds", "16 pages, bounds", "bf16 gradients",
                           "1 back", "4 back", "64 pages, softmax", "64 pages",
                           "64 pages, bounds, sink, recent", "32 pages", "16 pages"),
                  tried=("64 pages, bounds",), audited=_AUDITED),
        ),
        number=32,
        asked_tokens=2**19,
        far_tasks=("needle, 8 keys",),
        probe_steps=8,
    ),
    # One H200: the same from 8K to 128K. The first four methods take some 13 minutes a seed.
    "learn-128k": Profile(
        size="base",
        rope=Rope(1.6e5, 8192),
        page_size=128,
        levels=(
            *_all_tasks(8192),
            Level(stage=_steps(131_072, 1, 2e-4, 48, 2), asked=(131_072,),
                  rope=Rope(6.4e5, 262_144),
                  methods=(UNTRAINED, "exact", "ordinary", "64 pages, bounds", "SpaCO 1/2",
                           "bf16 gradients")),
        ),
        number=32,
        asked_tokens=2**19,
        probe_steps=8,
    ),
    # One H200, ten minutes: the shape of the answer.
    "quick": Profile(
        size="base",
        rope=Rope(1e12, 131_072),
        page_size=128,
        levels=(
            *_SHORT_WAY,
            Level(stage=_stage(16_384, 4, 2e-4, 20), asked=(16_384, 65_536),
                  methods=("exact", "64 pages, bounds", "SpaCO 1/2", "ordinary"),
                  tried=("64 pages, bounds", "16 pages, bounds", "64 pages, softmax")),
            Level(stage=_stage(65_536, 1, 1e-4, 24), asked=(65_536, 131_072),
                  methods=("64 pages, bounds", "exact"),
                  tried=("64 pages, bounds", "16 pages, bounds", "64 pages, softmax")),
        ),
        number=32,
        asked_tokens=2**19,
        tasks=_NEEDLES,
    ),
    # One H200, two calls of ten minutes: every other method and task at one length.
    "methods": Profile(
        size="base",
        rope=Rope(1e12, 131_072),
        page_size=128,
        levels=(
            *_way(32_768, dict.fromkeys(_WAY, 2e-4), {**dict.fromkeys(_WAY, 12.0), 128: 60.0}),
            Level(stage=_stage(16_384, 4, 2e-4, 20), asked=(16_384, 65_536),
                  methods=("exact", "ordinary", "SpaCO 1/2", "SpaCO 1/4", "1 back",
                           "bf16 gradients", "32 pages, bounds", "64 pages, softmax", "64 pages",
                           "64 pages, sink, recent", "16 pages, bounds", "16 pages, softmax",
                           "4 back"),
                  tried=("64 pages, bounds",)),
        ),
        number=32,
        asked_tokens=2**19,
        far_tasks=_NEEDLES,
    ),
    # One H200, two calls of ten minutes: every other method at 64K.
    "methods-64k": Profile(
        size="base",
        rope=Rope(1e12, 131_072),
        page_size=128,
        levels=(
            *_SHORT_WAY,
            Level(stage=_stage(16_384, 4, 2e-4, 20)),
            Level(stage=_stage(65_536, 1, 1e-4, 24), asked=(65_536,),
                  methods=("exact", "ordinary", "SpaCO 1/2", "16 pages, bounds",
                           "bf16 gradients", "1 back", "64 pages, softmax", "SpaCO 1/4",
                           "32 pages, bounds", "4 back", "64 pages",
                           "64 pages, sink, recent"),
                  tried=("64 pages, bounds",)),
        ),
        number=32,
        asked_tokens=2**19,
        tasks=_NEEDLES,
    ),
    # One H200, two calls of ten minutes: training at 128K.
    "far": Profile(
        size="base",
        rope=Rope(1e12, 262_144),
        page_size=128,
        levels=(
            *_SHORT_WAY,
            Level(stage=_stage(16_384, 4, 2e-4, 20), methods=("exact", "64 pages, bounds")),
            Level(stage=_stage(65_536, 1, 1e-4, 24), asked=(262_144,),
                  methods=("exact", "64 pages, bounds"), tried=("64 pages, bounds",)),
            Level(stage=_stage(131_072, 1, 1e-4, 50), asked=(131_072, 262_144),
                  methods=("64 pages, bounds", "exact", "SpaCO 1/2"),
                  tried=("64 pages, bounds",)),
        ),
        number=32,
        asked_tokens=2**19,
        tasks=_NEEDLES,
        far_tasks=("needle, 8 keys",),
        probe_seconds=10.0,
    ),
    # One H200, three calls of ten minutes: every other method at 128K.
    "methods-128k": Profile(
        size="base",
        rope=Rope(1e12, 262_144),
        page_size=128,
        levels=(
            *_SHORT_WAY,
            Level(stage=_stage(16_384, 4, 2e-4, 20), methods=("exact", "64 pages, bounds")),
            Level(stage=_stage(65_536, 1, 1e-4, 24), methods=("exact", "64 pages, bounds")),
            Level(stage=_stage(131_072, 1, 1e-4, 40), asked=(131_072,),
                  methods=("exact", "64 pages, bounds", "ordinary", "SpaCO 1/4",
                           "32 pages, bounds", "bf16 gradients", "64 pages, softmax", "1 back",
                           "16 pages, bounds", "SpaCO 1/2", "4 back", "64 pages",
                           "64 pages, sink, recent"),
                  tried=("64 pages, bounds",)),
        ),
        number=32,
        asked_tokens=2**19,
        tasks=_NEEDLES,
        probe_seconds=20.0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """One training, with the checkpoint that it begins from (None: an untrained model).

    Attributes:
        rope: its angles.
    """

    level: Level
    method: str
    begins_from: str | None
    rope: Rope

    @property
    def name(self) -> str:
        return named(self.level, self.method)


def named(level: Level, method: str) -> str:
    return f"{level.stage.length} {method}"


def pieces(profile: Profile, last: Sequence[str] = ()) -> Iterator[Piece]:
    """All of a run, in order; of its last level the methods in ``last``, if any are named."""
    before: Level | None = None
    rope = profile.rope
    for level in profile.levels:
        rope = level.rope or rope
        chosen = last if last and level is profile.levels[-1] else level.methods
        for method in chosen:
            start = None
            if before is not None:
                start = named(before, method if method in before.methods else before.methods[0])
            yield Piece(level, method, start, rope)
        before = level
