"""docs/models.md says what the plan says of published models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
sizes: Any = __import__("published_sizes")
PAGE = (ROOT / "docs" / "models.md").read_text()


@pytest.mark.parametrize(
    "name", ["Qwen2.5 7B", "Gemma 4 E2B", "Nemotron 3 Nano 30B", "MiniCPM3 4B"]
)
def test_a_row_is_what_the_plan_gives(name: str) -> None:
    """Layers that are alike, of two classes that share keys and values, with states and latents."""
    assert sizes.line_of(name, sizes.row_of(name)) in PAGE.splitlines()


def test_every_model_has_a_row() -> None:
    part = PAGE.split(f"## {sizes.TITLE}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in part.splitlines() if line.startswith("| ")]
    assert rows[1:] == [f"| {name}" for name in sizes.PUBLISHED]


def test_keys_and_values_as_counted_by_hand() -> None:
    """28 layers of 4 heads of 128, two bytes each, K and V; gradients in fp32 take twice that."""
    row = sizes.row_of("Qwen2.5 7B")
    assert (row.kv, row.gradients, row.states) == (28 * 4 * 128 * 2 * 2 / 1024, 112, 0)


def test_only_the_table_is_replaced() -> None:
    assert sizes.with_section("# A\n\n## KiB per token\n\nold\n\n## B\n\nb\n", "new") == (
        "# A\n\nnew\n\n## B\n\nb\n"
    )
