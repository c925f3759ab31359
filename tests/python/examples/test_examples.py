"""Every example runs, offline, and does what it says."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from oomb.cli.demo_model import small_model
from oomb.cli.demo_tokenizer import byte_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model such as the demo's, its weights random."""
    folder = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def output_of(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> str:
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def test_every_example_is_tested() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {
        "quickstart.py",
        "lora.py",
        "paged_attention.py",
        "trainer.py",
        "trl_sft.py",
    }


def test_quickstart(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", model, "--tokens", "1500", "--steps", "3")
    found = losses(output_of("quickstart.py", capsys, monkeypatch, *options))
    assert len(found) == 4 and found[-1] < found[0]


def test_lora(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft")
    options = ("--model", model, "--tokens", "1500", "--steps", "3", "--out", str(tmp_path / "a"))
    found = losses(output_of("lora.py", capsys, monkeypatch, *options))
    assert len(found) == 4 and found[-1] < found[0]
    assert (tmp_path / "a" / "adapter_config.json").exists()


def test_paged_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = output_of("paged_attention.py", capsys, monkeypatch)
    differences = [float(number) for number in re.findall(r"\d\.\de-\d+", output)]
    assert len(differences) == 2 and max(differences) < 1e-4


def test_trainer(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def run(steps: int, *more: str) -> list[float]:
        options = ("--model", model, "--tokens", "1500", "--out", str(tmp_path))
        return losses(
            output_of("trainer.py", capsys, monkeypatch, *options, "--steps", str(steps), *more)
        )

    found = run(3)
    assert len(found) == 4 and found[2] < found[0]  # three steps and an evaluation
    assert (tmp_path / "model" / "model.safetensors").exists()
    again = run(5, "--resume")  # from the last checkpoint, of the third step
    assert again[:3] == found[:3] and len(again) == 7


def test_trl_sft(
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    options = ("--model", model, "--tokens", "1500", "--steps", "3", "--out", str(tmp_path))
    found = losses(output_of("trl_sft.py", capsys, monkeypatch, *options))
    assert len(found) == 3 and found[-1] < found[0]
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
