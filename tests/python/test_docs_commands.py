"""Every command, option, script, make target and name that the documents mention is there."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from oomb.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/*.py")) + sorted(ROOT.glob("examples/*.yaml"))
SCRIPTS = [*EXAMPLES, *sorted(ROOT.glob("bench/*.py")), *sorted(ROOT.glob("scripts/*.py"))]


@cache
def commands() -> dict[str, click.Command]:
    """``"bench step"``: its command."""
    found: dict[str, click.Command] = {}

    def walk(command: Any, name: str) -> None:
        found[name] = command
        for child, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {child}".strip())

    walk(typer.main.get_command(app), "")
    return found


def code_lines(page: Path) -> list[str]:
    """Lines of fenced and indented blocks, continued lines joined, comments cut off."""
    text = page.read_text().replace("\\\n", " ")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    indented = re.findall(
        r"^    (\S.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M
    )
    lines = [line for block in fenced for line in block.splitlines()] + indented
    if page.suffix != ".md":
        lines = re.findall(r"^#?\s*((?:oomb|python) .*)$", text, re.M)
    return [re.sub(r"\s+#.*|&& ", lambda m: "\n" if "&" in m[0] else "", line) for line in lines]


def shell_lines(page: Path, program: str) -> list[list[str]]:
    """Words of the calls of a program, without alternatives' brackets."""
    calls = []
    for line in "\n".join(code_lines(page)).splitlines():
        if line.strip().startswith(f"{program} "):
            calls.append(shlex.split(re.sub(r"[\[\]]|\|\w+", " ", line))[1:])
    return calls


def test_the_blocks_are_found() -> None:
    assert ["train", "run.yaml", "--dry-run"] in shell_lines(ROOT / "docs" / "train.md", "oomb")
    assert ["demo", "--quick"] in shell_lines(EXAMPLES[-1], "oomb")
    step = shell_lines(ROOT / "docs" / "performance.md", "oomb")[-1]
    assert step[:2] == ["bench", "step"] and "--against" in step


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda page: page.name)
def test_commands_of_oomb_exist(page: Path) -> None:
    for words in shell_lines(page, "oomb"):
        name = max((n for n in commands() if " ".join(words).startswith(n)), key=len)
        assert name, words
        known = {option for parameter in commands()[name].params for option in parameter.opts}
        for word in words:
            assert not word.startswith("--") or word.split("=")[0] in known, (name, word)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_exist(page: Path) -> None:
    for words in re.findall(r"`oomb ([a-z]+(?: step)?)", page.read_text()):
        assert words in commands(), words


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda page: page.name)
def test_scripts_take_their_options(page: Path) -> None:
    for words in shell_lines(page, "python"):
        if words[0].startswith("-"):
            continue
        script = ROOT / words[0]
        assert script.exists(), script
        text = script.read_text()
        for line in re.findall(r"^from support\b.*", text, re.M):
            for name in re.findall(r"\w+", line):
                shared = script.parent / "support" / f"{name}.py"
                text += shared.read_text() if shared.exists() else ""
        for word in words[1:]:
            if word.startswith("--"):
                option = word.split("=")[0]
                named = re.search(rf'"(--)?{option[2:]}"', text)
                assert named, (words[0], option)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {words[0] for words in shell_lines(page, "make")}
    named |= set(re.findall(r"`(?:\w+=\w+ )*make ([a-z-]+)", page.read_text()))
    assert named <= targets


def test_options_of_the_plan_are_all_told() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    for parameter in commands()["plan"].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            assert f"`{parameter.opts[0]}`" in page, parameter.opts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_docs_names_what_exists(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oomb"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), block
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "oomb":
                module = importlib.import_module("oomb")
                has = hasattr(module, node.attr)
                assert has or importlib.util.find_spec(f"oomb.{node.attr}"), node.attr


def test_settings_in_the_docs_are_valid(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    from oomb.train.reading import read_settings

    least = {"output_dir": "x", "model": {"name": "x"}, "data": {"train": "x"}, "context": 2}
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.S | re.M)
    ]
    assert len(blocks) >= 3
    for block in blocks:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(least | yaml.safe_load(block)))
        read_settings(tmp_path / "run.yaml")
