"""The check of layers finds what it forbids."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from check_layers import PythonTree  # noqa: E402

# file that gets a line, the line, what the check says of it
PLANTED = [
    ("core/loop.py", "from oomb.engine.engine import Engine", "core may not import engine"),
    ("model/head.py", "import oomb.core.loss", "model may not import core"),
    ("monitor/run.py", "from oomb import plan", "monitor may not import plan"),
    ("report/page.py", "from oomb.train import run", "report may not import train"),
    ("core/layout.py", "from oomb.core import loop", "files import in a circle"),
    ("errors.py", "from oomb import config\nfrom oomb.core import tiers", "may not import core"),
    ("core/loop.py", "def late():\n    import torchvision", "needs its reason on its line"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package without its native core."""
    copy = tmp_path / "oomb"
    shutil.copytree(ROOT / "python" / "oomb", copy, ignore=shutil.ignore_patterns("*.so", "__py*"))
    return copy


def test_the_tree_is_clean(tree: Path) -> None:
    assert list(PythonTree(tree).violations()) == []


@pytest.mark.parametrize(("file", "line", "found"), PLANTED, ids=[x[0] for x in PLANTED])
def test_planted_imports_are_found(tree: Path, file: str, line: str, found: str) -> None:
    path = tree / file
    text = path.read_text()
    first = "from __future__ import annotations\n"
    assert first in text or file == "core/layout.py"
    path.write_text(text.replace(first, f"{first}\n{line}\n", 1))
    problems = [x for x in PythonTree(tree).violations() if found in x]
    module = file.removesuffix(".py").replace("/", ".")  # a circle is told by its modules
    assert any(file in problem or module in problem for problem in problems)


def test_what_only_types_need_is_no_import(tree: Path) -> None:
    path = tree / "core" / "layout.py"
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from oomb.cli import app\n"
    path.write_text(path.read_text() + hidden)
    assert list(PythonTree(tree).violations()) == []


def test_a_new_package_needs_a_row(tree: Path) -> None:
    (tree / "extra").mkdir()
    (tree / "extra" / "thing.py").write_text("import torch\n")
    assert any("extra has no row" in problem for problem in PythonTree(tree).violations())
