"""What one rank does of a placement, several do in their own way."""

from __future__ import annotations

from dataclasses import fields

from oomb.parallel.heads_over_ranks import HeadsOverRanks
from oomb.parallel.placement import Placement


def test_several_ranks_take_nothing_over_from_one() -> None:
    own = {*vars(HeadsOverRanks), *(field.name for field in fields(HeadsOverRanks))}
    assert {name for name in vars(Placement) if not name.startswith("_")} <= own
