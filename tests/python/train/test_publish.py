"""The model on the hub: asked before the run, uploaded as it was saved after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from tiny_runs import prepare, run

NAME = "saving.push_to_hub=me/my-model"


class Hub:
    """Takes the place of the hub's client."""

    asked: list[str]
    refuses = ""

    def whoami(self) -> dict[str, str]:
        self._call("whoami")
        return {"name": "me"}

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> Any:
        assert exist_ok
        self._call(f"create {name} private={private}")
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
        files = " ".join(sorted(path.name for path in folder_path.iterdir()))
        self._call(f"upload {repo_id} {files}")

    def _call(self, call: str) -> None:
        self.asked.append(call)
        if self.refuses and call.startswith(self.refuses):
            raise OSError("no hub today\nand more")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    return Hub


def test_the_final_model_is_uploaded(tmp_path: Path, hub: type[Hub]) -> None:
    result = run(prepare(tmp_path, training={"steps": 1}), NAME)
    assert result.exit_code == 0, result.output
    asked, created, uploaded = hub.asked
    assert asked == "whoami" and created == "create me/my-model private=True"
    assert uploaded.startswith("upload me/my-model")
    names = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert set(uploaded.split()[2:]) == names and "model.safetensors" in names


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_a_hub_that_does_not_answer_is_known_before(
    tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(hub, "refuses", "whoami")
    result = run(prepare(tmp_path), NAME, *arguments)
    assert result.exit_code == 2 and "got 'me/my-model': no hub today; hf auth" in result.output
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_none(tmp_path: Path, hub: type[Hub]) -> None:
    result = run(prepare(tmp_path), "saving.push_to_hub=a/b/c")
    assert result.exit_code == 2 and "saving.push_to_hub: expected a name" in result.output
    assert hub.asked == []


def test_an_upload_that_fails_leaves_the_model(
    tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "refuses", "upload")
    result = run(prepare(tmp_path, training={"steps": 1}), NAME)
    assert result.exit_code == 1
    assert "the hub did not take the model: no hub today; it is in" in result.output
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_no_librarys_warnings_are_shown(tmp_path: Path) -> None:
    """peft asks transformers for a name that will go, on every run with adapters."""
    file = prepare(tmp_path, training={"steps": 1})
    command = [sys.executable, "-m", "oomb.cli", "train", str(file), "lora.r=2", "--dry-run"]
    # Warnings of libraries are hidden at times by PYTHONWARNINGS; here they are as for everyone.
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1
