"""What a class does for one rank or on a CPU, its subclasses do in their own way."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from oomb.core.host_sums import SumCopies, SumCopiesBeside
from oomb.model.host_weights import Copies, CopiesBeside
from oomb.optim.lanes import Lanes, LanesBeside
from oomb.parallel.heads_over_ranks import HeadsOverRanks
from oomb.parallel.placement import Placement


@pytest.mark.parametrize(
    ("base", "other"),
    [
        (Placement, HeadsOverRanks),
        (SumCopies, SumCopiesBeside),
        (Copies, CopiesBeside),
        (Lanes, LanesBeside),
    ],
)
def test_nothing_is_taken_over(base: type, other: type) -> None:
    own = {*vars(other), *(field.name for field in (fields(other) if is_dataclass(other) else ()))}
    assert {name for name in vars(base) if not name.startswith("_")} <= own
