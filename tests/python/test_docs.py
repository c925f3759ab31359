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


def test_usage_lists_every_setting() -> None:
    usage = (ROOT / "docs" / "usage.md").read_text()
    for settings in (oomb.Config, oomb.TopKPages, oomb.SampledChunks):
        for field in fields(settings):
            assert re.search(rf"`{field.name}|[( ]{field.name}=", usage), field.name


def test_files_named_in_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`((?:csrc|python|scripts)/[\w/]+\.(?:py|h))`", text):
        assert (ROOT / name).exists(), name
