"""docs/train.md lists every setting as it is, and its YAML can be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from oomb.train.documents import OVERLAP, SEGMENT
from oomb.train.reading import read_settings
from oomb.train.reference import lists

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "train.md").read_text()
LEAST = {"output_dir": "x", "model": {"name": "x"}, "data": {"train": "x"}, "context": 8}


def test_lists_are_those_of_the_settings() -> None:
    """Otherwise: python -m oomb.train.reference, and paste it below "## Fields"."""
    assert PAGE.rstrip().endswith(lists().rstrip())


README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE + README, re.DOTALL))
def test_yaml_in_the_pages_is_valid(block: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(LEAST | yaml.safe_load(block)))
    read_settings(file)


def test_sizes_named_are_those_used() -> None:
    assert f"{SEGMENT:,} characters" in PAGE and f"{OVERLAP:,} characters" in PAGE


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")))
def test_examples_are_valid(example: Path) -> None:
    assert read_settings(example).output_dir.startswith("oomb-demo/")
