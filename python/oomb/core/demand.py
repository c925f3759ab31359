"""What one call asks of the page pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oomb.config import Config, PageRule
from oomb.core.gradient_reach import GradientReach
from oomb.core.inputs import CallInputs
from oomb.core.page_demand import PageDemand
from oomb.core.page_lists import PageLists
from oomb.core.tiers import PageLayout
from oomb.model.causal import LayerShape


@dataclass(frozen=True, kw_only=True)
class Demand(PageDemand):
    """Pages of one call on a batch that is there.

    Attributes:
        lists: that an earlier fill of the same call has chosen; None: none has.
        chained: a chunk needs states that the one before leaves.
        fills_all: the fill runs the attention of every layer: a mixer comes behind the last.
    """

    config: Config
    inputs: CallInputs
    lists: PageLists | None = None
    chained: bool = False
    fills_all: bool = False

    @staticmethod
    def of(
        config: Config,
        shapes: Sequence[LayerShape],
        layout: PageLayout,
        inputs: CallInputs,
        swept: list[int] | None,
        *,
        every_output: bool = False,
        lists: PageLists | None = None,
        border_bytes: int = 0,
        chained: bool = False,
        fills_all: bool = False,
    ) -> Demand:
        """
        Args:
            swept: chunks that receive gradient, ascending; None: evaluate.
            every_output, lists, border_bytes, chained, fills_all: as of the class.
        """
        num_keys = inputs.num_keys
        return Demand(
            chunks=inputs.chunks(config),
            reach=None if swept is None else GradientReach.of(config.backward, swept),
            shapes=shapes,
            layout=layout,
            batch=inputs.batch,
            device_type=inputs.input_ids.device.type,
            selection=rule_of(config),
            lengths=None if num_keys is None else tuple(int(x) for x in num_keys.tolist()),
            config=config,
            inputs=inputs,
            every_output=every_output,
            lists=lists,
            border_bytes=border_bytes,
            chained=chained,
            fills_all=fills_all,
        )

    @property
    def device(self) -> torch.device:
        return self.inputs.input_ids.device


def rule_of(config: Config) -> PageRule | None:
    """Of page-sparse attention; None: dense."""
    return config.attention if isinstance(config.attention, PageRule) else None
