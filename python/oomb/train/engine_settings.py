"""The ``engine`` section: every field of :class:`oomb.Config`, with its defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from oomb.config import AllChunks, Config, Dense, SampledChunks, TopKPages
from oomb.train.section import Section


class DenseSettings(Section):
    type: Literal["dense"] = "dense"
    """Exact attention: every token sees its whole past."""

    def rule(self) -> Dense:
        return Dense()


class TopKSettings(Section):
    type: Literal["topk"]
    """Page-sparse attention: each block of queries sees its own chunk and a few earlier pages."""
    budget: int = TopKPages.budget
    """Earlier pages per block of queries."""
    share: Literal["all_heads", "kv_head"] = TopKPages.share
    """One choice of pages for all heads, or one per key/value head."""
    score: Literal["block_mean", "token_softmax"] = TopKPages.score
    """How pages are scored; `token_softmax` is the rule of the OOMB paper."""
    sink_pages: int = TopKPages.sink_pages
    """First pages that are always chosen, within the budget."""
    recent_pages: int = TopKPages.recent_pages
    """Latest pages that are always chosen, within the budget."""
    chunk_budget: int | None = TopKPages.chunk_budget
    """Bound on the distinct pages that one layer of a chunk may use."""

    @model_validator(mode="after")
    def _check(self) -> TopKSettings:
        self.rule()
        return self

    def rule(self) -> TopKPages:
        return TopKPages(**self.model_dump(exclude={"type"}))


class AllSettings(Section):
    type: Literal["all"] = "all"
    """Exact backward: every chunk is swept."""

    def rule(self) -> AllChunks:
        return AllChunks()


class SampledSettings(Section):
    type: Literal["sampled"]
    """SpaCO: a random subset of the chunks is swept."""
    keep: float = SampledChunks.keep
    """Probability that a chunk is swept."""
    seed: int = SampledChunks.seed
    """Of the draw."""
    cap: float | None = SampledChunks.cap
    """Bound on the factor on the gradient of keys and values: less variance, some bias."""

    @model_validator(mode="after")
    def _check(self) -> SampledSettings:
        self.rule()
        return self

    def rule(self) -> SampledChunks:
        return SampledChunks(**self.model_dump(exclude={"type"}))


def _type_alone(value: Any) -> Any:
    """``attention: topk`` is short for ``attention: {type: topk}``."""
    return {"type": value} if isinstance(value, str) else value


Attention = Annotated[
    Annotated[DenseSettings | TopKSettings, Field(discriminator="type")],
    BeforeValidator(_type_alone),
]
Backward = Annotated[
    Annotated[AllSettings | SampledSettings, Field(discriminator="type")],
    BeforeValidator(_type_alone),
]


class EngineSettings(Section):
    chunk_size: int = Config.chunk_size
    """Tokens per chunk, a multiple of `page_size`. Activation memory is proportional to it."""
    page_size: int = Config.page_size
    """Tokens per page, and queries per block."""
    attention: Attention = DenseSettings()
    """`dense`, or `topk` with the fields below."""
    backward: Backward = AllSettings()
    """`all`, or `sampled` with the fields below."""
    device_memory: int | str | None = Config.device_memory
    """Cap of the device tier: bytes or a size such as `40GiB`. null: what is free, less a \
margin."""
    host_memory: int | str | None = Config.host_memory
    """Cap of the host tier, likewise."""
    kv_grad_dtype: Literal["float32", "bfloat16"] = Config.kv_grad_dtype
    """Of the gradient pages; `bfloat16` (stochastic rounding) takes half."""
    recompute: Literal["auto", "none", "layer"] = Config.recompute
    """Inside a chunk: `none` keeps activations, `layer` recomputes them. Changes no bit."""
    rope_angles: Literal["model", "float64"] = Config.rope_angles
    """`float64` for positions past a million."""
    deterministic: bool = Config.deterministic
    """`false` permits faster kernels whose sums have no fixed order."""
    keep_main_grad: bool = Config.keep_main_grad
    """Keep the higher-precision sums of the gradients after a step."""
    check_finite: bool = Config.check_finite
    """Stop at the first chunk and layer whose loss or gradient is not finite."""
    record_selection: bool = Config.record_selection
    """Record which pages each block of queries read, for the report's map of pages."""

    @model_validator(mode="after")
    def _check(self) -> EngineSettings:
        self.config()
        return self

    def config(self) -> Config:
        """The engine's settings.

        Raises:
            ValueError: a value that :class:`oomb.Config` does not take.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return Config(
            **values | {"attention": self.attention.rule(), "backward": self.backward.rule()}
        )
