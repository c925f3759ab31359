"""``oomb plan`` on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.models import make
from oomb.cli import app

H200 = ["--gpu", "h200", "--host-memory", "125GiB"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_plan_that_fits(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = run("qwen2.5-0.5b", "--context", "64K", *H200, "--lora-rank", "8", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "fits" in done.output
    assert "chunk_size=" in done.output
    assert "tokens/s" in done.output
    record = json.loads(out.read_text())
    assert record["num_tokens"] == 65536
    assert record["fits"] is True


def test_a_plan_that_does_not_fit() -> None:
    done = run("qwen2.5-7b", "--context", "4M", *H200)
    assert done.exit_code == 1
    assert "does not fit" in done.output
    assert "longest context" in done.output


def test_a_folder_is_planned_from_its_config_alone(tmp_path: Path) -> None:
    make("llama").config.save_pretrained(tmp_path)
    arguments = ["--context", "2K", "--chunk-size", "256", "--page-size", "32"]
    done = run(str(tmp_path), *arguments, "--dtype", "float32")
    assert done.exit_code == 0, done.output
    assert "chunk_size=256" in done.output


@pytest.mark.parametrize(("page_size", "chunk_size"), [(8192, 8192), (100, 4100), (64, 2048)])
def test_a_chunk_that_is_chosen_has_whole_pages(
    tmp_path: Path, page_size: int, chunk_size: int
) -> None:
    """Of the sizes that there are, or the least of at least 4,096 tokens."""
    make("llama").config.save_pretrained(tmp_path)
    arguments = ["--context", "2K", "--page-size", str(page_size), "--dtype", "float32"]
    done = run(str(tmp_path), *arguments)
    assert done.exit_code == 0, done.output
    assert f"chunk_size={chunk_size}," in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen2.5-1.5b", "--page-size", "0"], "page_size: expected an int >= 1, got 0"),
        (["qwen2.5-1.5b", "--page-size", "-8"], "page_size: expected an int >= 1, got -8"),
        (
            ["qwen2.5-1.5b", "--main-grad-dtype", "bfloat16", "--dtype", "float32"],
            "main_grad_dtype: expected 'float32' for a model that trains no parameter in bfloat16",
        ),
        (["qwen2.5-1.5b", "--context", "long"], "context: expected tokens"),
        (["qwen2.5-1.5b", "--context", "4K", "--host-memory", "much"], "host_memory: expected"),
        (["qwen2.5-1.5b", "--chunk-size", "100"], "chunk_size: expected a multiple"),
        (["qwen2.5-1.5b", "--dtype", "int8"], "dtype: expected one of"),
        (["no-such-folder"], "model: expected a folder"),
        (["qwen2.5-7"], "got 'qwen2.5-7'; did you mean 'qwen2.5-7b'?"),
        (["qwen2.5-1.5b", "--context", "1.5"], "context: expected tokens"),
        (["qwen2.5-1.5b", "--context", "9999M"], "context: expected tokens"),
        (
            ["qwen2.5-1.5b", "--device-memory", "141"],
            "device_memory: expected a size with its unit",
        ),
        (["qwen2.5-1.5b", "--device-memory", "141G"], "device_memory: expected bytes or a size"),
        (["qwen2.5-1.5b", "--gpu", "b300"], "gpu: expected one of h200, h100"),
        (["qwen2.5-1.5b", "--gpu", "rtx409"], "did you mean 'rtx4090'"),
        (["qwen2.5-1.5b", "--gpu-tflops", "100"], "gpu_memory: expected a figure"),
        (["qwen2.5-1.5b", "--optimizer", "adamw"], "did you mean 'adamw_torch'?"),
        (["qwen2.5-1.5b", "--lora-rank", "-1"], "lora_rank: expected an int >= 1, got -1"),
        (["qwen2.5-1.5b", "--batch-size", "0"], "batch_size: expected an int >= 1, got 0"),
        (["qwen2.5-1.5b", "--batch-size", "9" * 400], "batch_size: expected an int in 1 ..."),
        (["qwen2.5-1.5b", "--context", "9" * 400], "context: expected tokens such as"),
        (["qwen2.5-1.5b", "--host-memory", "9" * 400 + "GB"], "host_memory: expected bytes or"),
        (["9" * 400], "model: expected a folder with a config.json"),
        (["qwen2.5-1.5b", "--keep", "0"], "keep: expected a number in (0, 1], got 0.0"),
        (["qwen2.5-1.5b", "--out", "."], "--out: expected a file to write, got the folder ."),
        (["qwen2.5-1.5b", "--out", "/proc/x/y"], "--out: expected a file to write, got /proc/x/y"),
    ],
)
def test_bad_input(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output.replace("\n", "")
    assert "Traceback" not in done.output


def test_another_gpu_is_not_in_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = ["qwen2.5-0.5b", "--context", "16K", "--gpu-memory", "48GiB", "--gpu-tflops", "150"]
    done = run(*arguments, "--gpu-link", "25", "--lora-rank", "8", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "from the figures given" in done.output.replace("\n", " ")
    assert "64.00 GiB is assumed" in done.output
    assert json.loads(out.read_text())["host_assumed"] is True
    assert "assumed" not in run("qwen2.5-0.5b", "--context", "4K", *H200).output


def test_sizes_are_for_people() -> None:
    """A size in bytes has more digits than tokens and seconds have."""
    done = run("qwen2.5-7b", "--context", "1M", "--gpu", "rtx3090", "--host-memory", "20GiB")
    assert done.exit_code == 1
    assert not re.search(r"\d{8}", done.output.replace(",", "")), done.output
    assert not re.search(r"\d bytes", done.output), done.output


def test_no_warning_of_other_libraries() -> None:
    """transformers has some for whoever puts adapters on a model."""
    script = "import sys; from oomb.cli import app; app(sys.argv[1:])"
    arguments = ["plan", "qwen2.5-0.5b", "--context", "4K", "--lora-rank", "8", *H200]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    assert "fits" in done.stdout
    assert done.stderr == ""


def test_groups_of_heads_are_planned(tmp_path: Path) -> None:
    make("llama", num_key_value_heads=4, num_attention_heads=8).config.save_pretrained(tmp_path)
    arguments = [str(tmp_path), "--context", "2K", *H200, "--gpus", "2", "--page-size", "64"]
    done = run(*arguments, "--head-groups", "2")
    assert done.exit_code == 0, done.output
    assert "head_groups=2" in done.output
    assert "head_groups" not in run(*arguments).output
    refused = run(*arguments, "--head-groups", "3")
    assert refused.exit_code == 2
    assert "head_groups: expected a divisor of the 2 key/value heads" in refused.output
