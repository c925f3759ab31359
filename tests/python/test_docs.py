"""Documents point at files that exist and list every setting."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import oomb

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_have_at_most_100_columns(page: Path) -> None:
    wide = [line for line in page.read_text().splitlines() if len(line) > 100]
    assert not wide


def test_usage_lists_every_setting() -> None:
    usage = (ROOT / "docs" / "usage.md").read_text()
    for settings in (oomb.Config, oomb.TopKPages, oomb.SampledChunks, oomb.TruncatedChunks):
        for field in fields(settings):
            assert re.search(rf"`{field.name}|[( ]{field.name}=", usage), field.name


@pytest.mark.parametrize("page", ["architecture.md", "extending.md"])
def test_files_named_by_their_path_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`((?:bench|cmake|csrc|python|scripts|tests)/[\w/.]+)`", text)
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name
