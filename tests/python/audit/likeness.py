"""How alike two vectors are, by arithmetic of its own; the call that audits are tried on."""

from __future__ import annotations

import torch

import oomb
from oomb.audit import Likeness

CHUNK, PAGE, TOKENS = 16, 4, 75
CONFIG = oomb.Config(chunk_size=CHUNK, page_size=PAGE)
CLOSE = 1e-10


def likeness(found: torch.Tensor, exact: torch.Tensor) -> Likeness:
    cosine = torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0)
    return Likeness(float(cosine), float((found - exact).norm() / exact.norm()))


def assert_close(found: Likeness | None, expected: Likeness) -> None:
    assert found is not None
    assert abs(found.cosine - expected.cosine) < CLOSE
    assert abs(found.error - expected.error) < CLOSE
