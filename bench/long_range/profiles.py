"""What is trained, from what, and what it is asked: the pieces of a run, most telling first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .tasks import TASKS
from .training import Stage


@dataclass(frozen=True, kw_only=True)
class Level:
    """A length to train at, with each of several methods, beginning from the level before.

    Attributes:
        theta: base of RoPE's angles from here on.
        asked: lengths of evaluation.
        methods: names of ``training.methods``. Each goes on from its own
            model of the level before, where there is one, or else from that of its first method.
        tried: page budgets under which models are evaluated, beside dense attention.
    """

    stage: Stage
    theta: float
    asked: tuple[int, ...]
    methods: tuple[str, ...] = ("ordinary",)
    tried: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A run.

    Attributes:
        number: sequences of each task and length.
        tasks: that are asked.
        asked_tokens: that are asked at once.
        probe_seconds: of training between two looks at the share of needles found.
    """

    size: str
    page_size: int
    levels: tuple[Level, ...]
    number: int
    asked_tokens: int
    tasks: tuple[str, ...] = tuple(TASKS)
    probe_seconds: float = 5.0


def _stage(length: int, batch: int, rate: float, seconds: float, share: float = 0.6) -> Stage:
    return Stage(length=length, batch=batch, rate=rate, share=share, seconds=seconds)


_SPARSE = ("16 pages", "SpaCO 1/2", "32 pages")
_ALL = (
    *("exact", "64 pages", "32 pages", "16 pages", "SpaCO 1/2", "SpaCO 1/4", "bf16 gradients"),
    *("1 back", "2 back", "4 back", "ordinary"),
    *("64 pages, softmax", "32 pages, softmax", "16 pages, softmax"),
    *("64 pages, sink, recent", "32 pages, sink, recent", "16 pages, sink, recent"),
)

PROFILES = {
    # A CPU, seconds: that all of it runs.
    "smoke": Profile(
        size="tiny",
        page_size=16,
        levels=(
            Level(stage=Stage(length=128, batch=4, rate=4e-3, share=0.6, seconds=60, steps=2),
                  theta=1e4, asked=(128,)),
            Level(stage=Stage(length=512, batch=1, rate=1e-3, share=0.3, seconds=60, steps=1),
                  theta=4e4, asked=(1024,), methods=("exact", "16 pages", "1 back"),
                  tried=(2,)),
        ),
        number=2,
        asked_tokens=2048,
        tasks=("needle",),
    ),
    # A CPU, minutes: that a model learns at all.
    "cpu": Profile(
        size="tiny",
        page_size=16,
        levels=(
            Level(stage=_stage(64, 32, 1e-2, 180, 0.8), theta=1e4, asked=(64, 128)),
            Level(stage=_stage(512, 4, 3e-3, 60), theta=4e4, asked=(512,),
                  methods=("exact", "16 pages"), tried=(16,)),
        ),
        number=32,
        asked_tokens=4096,
        tasks=("needle", "needle, 8 keys"),
        probe_seconds=30.0,
    ),
    # One H200, four minutes: the shape of the answer.
    "quick": Profile(
        size="small",
        page_size=64,
        levels=(
            Level(stage=_stage(128, 64, 3e-3, 50, 0.8), theta=1e4, asked=()),
            Level(stage=_stage(2048, 16, 1e-3, 20), theta=1e4, asked=(2048, 4096)),
            Level(stage=_stage(16_384, 4, 5e-4, 20), theta=2e5, asked=(16_384, 65_536),
                  methods=("exact", *_SPARSE), tried=(16, 32)),
        ),
        number=24,
        asked_tokens=2**19,
        tasks=("needle", "needle, 8 keys", "two facts"),
    ),
    # One H200, an hour in pieces.
    "full": Profile(
        size="base",
        page_size=128,
        levels=(
            Level(stage=_stage(128, 256, 1e-3, 90, 0.8), theta=1e4, asked=()),
            Level(stage=_stage(2048, 16, 6e-4, 120), theta=1e4, asked=(2048, 4096)),
            Level(stage=_stage(16_384, 4, 3e-4, 60), theta=2e5, asked=(16_384, 65_536),
                  methods=_ALL, tried=(16, 32, 64)),
            Level(stage=_stage(65_536, 1, 2e-4, 90), theta=1e6, asked=(65_536, 131_072, 262_144),
                  methods=("exact", "64 pages", "16 pages", "SpaCO 1/2", "2 back"),
                  tried=(16, 32, 64)),
            Level(stage=_stage(131_072, 1, 1e-4, 120), theta=2e6, asked=(131_072, 262_144),
                  methods=("exact", "64 pages"), tried=(64,)),
        ),
        number=50,
        asked_tokens=2**19,
        probe_seconds=15.0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """One training, with the checkpoint that it begins from (None: an untrained model)."""

    level: Level
    method: str
    begins_from: str | None

    @property
    def name(self) -> str:
        return named(self.level, self.method)


def named(level: Level, method: str) -> str:
    return f"{level.stage.length} {method}"


def pieces(profile: Profile) -> Iterator[Piece]:
    """All of a run, in order."""
    before: Level | None = None
    for level in profile.levels:
        for method in level.methods:
            start = None
            if before is not None:
                start = named(before, method if method in before.methods else before.methods[0])
            yield Piece(level, method, start)
        before = level
