"""What ``oomb plan`` prints of what it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.models import make
from oomb.cli import app


@pytest.mark.parametrize("name", ["m[red]", "x[/b]", "y\\"])
def test_a_model_is_named_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are no markup."""
    monkeypatch.chdir(tmp_path)
    make("llama").config.save_pretrained(name)
    options = ["--context", "2K", "--chunk-size", "256", "--page-size", "32", "--gpu", "h100"]
    done = CliRunner().invoke(app, ["plan", name, *options])
    assert done.exit_code == 0, done.exception
    assert done.output.startswith(f"{name}, 2,048 tokens, on ")
