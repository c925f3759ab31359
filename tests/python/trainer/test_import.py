"""Trainers are imported where they are first used, and say which extra they need."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oomb.hf


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("SFTTrainer", "trl", "trl"), ("Trainer", "accelerate", "train")]
)
def test_a_missing_package(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.startswith(("oomb.hf.sft", "oomb.hf.trainer"))]:
        monkeypatch.delitem(sys.modules, module)
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"^oomb\.hf\.{name} needs {package}: pip install 'oomb\[{extra}\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        getattr(oomb.hf, name)


def test_another_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'oomb\.hf' has no attribute 'Trainers'"):
        _ = oomb.hf.Trainers


def test_oomb_alone_needs_neither() -> None:
    script = (
        "import sys; sys.modules.update(accelerate=None, trl=None, datasets=None);"
        "import oomb; print('oomb.hf.trainer' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
