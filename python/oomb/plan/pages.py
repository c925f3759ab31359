"""The pages of one call that is planned."""

from __future__ import annotations

from dataclasses import dataclass

from oomb.core.layout import GradientReach
from oomb.core.page_demand import PageDemand


@dataclass(frozen=True, kw_only=True)
class PageCall(PageDemand):
    """Pages of one ``forward_backward``."""

    reach: GradientReach
