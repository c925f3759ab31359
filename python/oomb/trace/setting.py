"""How a chunk of a call is traced."""

from __future__ import annotations

from dataclasses import dataclass

from oomb.core.latent_groups import Expanded
from oomb.core.recompute import Recompute


@dataclass(frozen=True)
class Setting:
    """How a chunk runs.

    Attributes:
        tokens: that are run of the chunk, per sequence; ``batch`` sequences.
        recompute: what backward computes again.
        waves: attention runs in several launches and carries its state between them.
        main_grad_dtype: as in :class:`oomb.Config`.
        expanded: of the past, where pages hold latents; None: they hold keys and values.
        ranks: that run as many tokens each, and exchange them for heads.
        divides_pages: those that share a key/value head divide its pages.
        head_groups: of a layer, which they exchange one after another.
    """

    tokens: int
    batch: int
    recompute: Recompute
    waves: bool
    main_grad_dtype: str = "float32"
    expanded: Expanded | None = None
    ranks: int = 1
    divides_pages: bool = False
    head_groups: int = 1
