"""Each family under each condition equals one ordinary backward, in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from .conditions import CONDITIONS, FAMILIES, arguments, expected_of, make_family, settings_of
from .latent_models import LATENT
from .own_code_models import OWN_CODE
from .recurrent_models import RECURRENT, nothing_rounds_to_float32
from .reference import assert_equal, assert_identical, chunked
from .window_models import WINDOWED


@pytest.fixture(autouse=True)
def all_in_float64() -> Iterator[None]:
    with nothing_rounds_to_float32():
        yield


# Quick, where no other file has a family's like: one way of each kind of condition.
_OF_EACH = [("documents", "layer"), ("padding", "none"), ("tiers", "none"), ("adapters", "layer")]
QUICK = {
    *((name, *way) for name in RECURRENT for way in _OF_EACH[1:]),
    *((name, *way) for name in LATENT if name != "small" for way in _OF_EACH),
    *((name, "tail of 1", "layer") for name in LATENT if name != "small"),
    *((name, *way) for name in ("gemma4-26b-a4b", "gemma3n") for way in _OF_EACH),
    *((name, *way) for name in OWN_CODE for way in _OF_EACH),
    *((name, f"tail of {n}", "none") for name in OWN_CODE for n in (1, 2, 3)),
    *((name, *way) for name in WINDOWED for way in _OF_EACH if way[0] != "tiers"),
    *((name, "tail of 2", "layer") for name in WINDOWED),
    ("mimo-v2", "tiers", "none"),
    *((name, *_OF_EACH[-1]) for name in ("gemma2", "vaultgemma")),
}
WHERE = [
    pytest.param(*way, marks=[] if way in QUICK else [pytest.mark.slow, pytest.mark.release])
    for way in itertools.product(FAMILIES, CONDITIONS, ("none", "layer"))
]


@pytest.mark.parametrize(("name", "condition", "recompute"), WHERE)
@pytest.mark.sampled(45)
def test_equals_one_backward(name: str, condition: str, recompute: str) -> None:
    case = CONDITIONS[condition]
    model, given = make_family(name, case), arguments(case)
    config = settings_of(model, case, recompute=recompute)
    found = chunked(model, config, **given)
    assert_equal(found, expected_of(model, given))
    assert found.gradients
    if case.few_pages:
        assert found.step is not None
        assert found.step.stats.h2d_bytes > 0
        roomy = replace(config, device_memory=None, host_memory=None)
        assert_identical(found, chunked(model, roomy, **given))
