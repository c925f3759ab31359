"""Every example runs, offline, and does what it says."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from typer.testing import CliRunner

from oomb.cli import app
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
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    for one in seen:  # a newcomer takes them for the example's
        assert not issubclass(one.category, (FutureWarning, UserWarning)), one
    return capsys.readouterr().out


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def test_every_example_is_tested() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {
        "quickstart.py",
        "lora.py",
        "page_rule.py",
        "paged_attention.py",
        "rewards.py",
        "trainer.py",
        "trl_sft.py",
    }


def test_rewards() -> None:
    short_words = runpy.run_path(str(EXAMPLES / "rewards.py"))["short_words"]
    told = [[{"role": "assistant", "content": text}] for text in ("a word", "an afternoon", "")]
    assert short_words(completions=["a word", "an afternoon", ""], prompt=[]) == [1.0, 0.5, 0.0]
    assert short_words(completions=told) == [1.0, 0.5, 0.0]


def test_page_rule(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = losses(output_of("page_rule.py", capsys, monkeypatch))
    dense, ruled = found[:3], found[3:]
    assert dense[0] == pytest.approx(ruled[0], abs=0.05) and dense != ruled
    assert dense[-1] < dense[0] and ruled[-1] < ruled[0]


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


def test_any_model_gets_its_own_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not bytes: here no id is below 256, and the tokenizer lies in a folder of its own."""
    tokenizer = byte_tokenizer()
    vocabulary = {token: 256 + byte for token, byte in tokenizer.get_vocab().items()}
    Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=None, eos_token=None, pad_token=None
    ).save_pretrained(tmp_path / "tokenizer")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=512, **sizes, **heads)).save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "text").write_text("näherungsweise 1500 bytes. " * 60, encoding="utf-8")
    # The 256th token predicts nothing, so the model never reads it.
    expected = [256 + byte for byte in (tmp_path / "text").read_bytes()[:255]]
    options = ["--model", str(tmp_path / "model"), "--tokenizer", str(tmp_path / "tokenizer")]
    options += ["--text", str(tmp_path / "text"), "--tokens", "256", "--steps", "1"]
    for name in ("quickstart.py", "lora.py", "trainer.py"):
        seen: list[list[int]] = []

        def watch(module: torch.nn.Module, inputs: Any, seen: Any = seen) -> None:
            if isinstance(module, torch.nn.Embedding):
                seen += inputs[0].tolist()

        hook = register_module_forward_pre_hook(watch)
        out = [] if name == "quickstart.py" else ["--out", str(tmp_path / name)]
        output_of(name, capsys, monkeypatch, *options, *out)
        hook.remove()
        assert expected in seen, name


# Examples from YAML -------------------------------------------------------------------------------


@pytest.fixture
def demo_folder(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder such as `oomb demo` leaves behind in a clone, with little text."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "oomb-demo/model")
    byte_tokenizer().save_pretrained("oomb-demo/model")
    text = "".join(f"{n} times {n} is {n * n}.\n" for n in range(400))
    for name in ("train", "held_out"):
        (tmp_path / "oomb-demo" / "text").mkdir(exist_ok=True)
        (tmp_path / "oomb-demo" / "text" / f"{name}.txt").write_text(text)
    (tmp_path / "examples").mkdir()
    for name in ("chat.jsonl", "chat.jinja", "pairs.jsonl", "judged.jsonl", "rewards.py"):
        shutil.copy(EXAMPLES / name, tmp_path / "examples" / name)
    (tmp_path / "python" / "oomb").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "python" / "oomb" / f"{number}.py").write_text(text[: 100 * number + 50])
    return tmp_path


OF_TRL = ["train_dpo", "train_kto", "train_reward", "train_grpo", "train_rloo"]
YAML = ["train_full", "train_lora", "train_chat", *OF_TRL]


@pytest.mark.parametrize("name", YAML)
def test_yaml(name: str, demo_folder: Path) -> None:
    pytest.importorskip("datasets")
    if name in OF_TRL:
        pytest.importorskip("trl")
    if name != "train_full":
        pytest.importorskip("peft")
    shorter = ["context=1024", "training.steps=2", "engine.chunk_size=256", "data.num_proc=1"]
    cache = f"data.cache_dir={demo_folder / 'cache'}"
    command = ["train", str(EXAMPLES / f"{name}.yaml"), *shorter, cache]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    folder = demo_folder / "oomb-demo" / name.removeprefix("train_")
    assert (folder / "report.html").exists()
    adapters = (folder / "model" / "adapter_config.json").exists()
    assert adapters == (name != "train_full")
    assert (folder / "samples.jsonl").exists() == (name == "train_chat")


def test_every_yaml_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(YAML)
