"""``oomb plan`` on what somebody else has made: one line, exit 2, and none of their code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from engine.models import make
from oomb.cli import app

GEMMA4: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}


def folder(path: Path, config: dict[str, Any] | str) -> str:
    """A model's folder with parts of its config changed, or with another file in its place."""
    make("qwen2").config.save_pretrained(path)
    file = path / "config.json"
    if isinstance(config, dict):
        config = json.dumps(json.loads(file.read_text()) | config)
    file.write_text(config)
    return str(path)


CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ({"hidden_size": 2**40}, "hidden_size: expected an int in 1 ... 262,144, got more"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_attention_heads": 0}, "num_attention_heads: expected an int"),
    ({"num_hidden_layers": -1}, "num_hidden_layers: expected an int in 1 ... 2,048, got -1"),
    ({"num_hidden_layers": 2**30}, "num_hidden_layers: expected an int in 1 ... 2,048, got more"),
    ({"vocab_size": None}, "vocab_size"),
    ({"output_hidden_states": "x"}, "output_hidden_states: expected true or false, got 'x'"),
    ({"use_cache": [1]}, "use_cache: expected true or false, got [1]"),
    ({"tie_word_embeddings": {}}, "tie_word_embeddings: expected true or false, got {}"),
    ({"num_attention_heads": "six"}, "num_attention_heads"),
    ({"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of 6 heads, got 5"),
    ({"hidden_act": "none"}, "expected a config that a model can be made from"),
    ({"rope_parameters": {"rope_theta": None}}, "model: "),
    ({"model_type": ["qwen2"]}, "expected a config that a model can be made from"),
    ({"model_type": "nonsense"}, "nonsense"),
    ('{"a":' * 50_000 + "1" + "}" * 50_000, "RecursionError"),
    ('{"model_type": "qwen2", "vocab_size": ' + "1" * 5000 + "}", "5000 digits"),
    ("[]", "expected a config that a model can be made from"),
    ("{", "expected a config that a model can be made from"),
    ("", "expected a config that a model can be made from"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_a_broken_config_is_one_line(
    tmp_path: Path, config: dict[str, Any] | str, message: str
) -> None:
    name = folder(tmp_path, config)
    done = CliRunner().invoke(app, ["plan", name, "--context", "2K", "--gpu", "h100"])
    assert done.exit_code == 2, done.output
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("oomb plan: ")
    assert message in lines[0]
    assert len(lines[0]) < 800


def test_sizes_of_layers_that_differ(tmp_path: Path) -> None:
    """Gemma 4's head dims stand in the config of each layer alone."""
    config = transformers.Gemma4TextConfig(**GEMMA4)
    config.save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--context", "2K", "--gpu", "h100"]
    assert CliRunner().invoke(app, command).exit_code == 0
    file = tmp_path / "config.json"
    of_global_layers = '"head_dim": 16'
    assert of_global_layers in file.read_text()
    file.write_text(file.read_text().replace(of_global_layers, f'"head_dim": {2**30}'))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "head_dim: expected an int in 1 ... 16,384, got more" in done.stderr


@pytest.mark.parametrize("kind", ["own", "qwen2"])
def test_code_of_its_own_is_neither_run_nor_asked_about(tmp_path: Path, kind: str) -> None:
    """A terminal would be asked, for 15 seconds; here a person would have said yes."""
    places = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    name = folder(tmp_path, {"auto_map": places, "model_type": kind})
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    script = "import sys; from oomb.cli import app; app(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", name, "--context", "2K", "--gpu", "h100"],
        input="y\ny\n",
        capture_output=True,
        text=True,
    )
    assert not ran.exists()
    assert "y/N" not in done.stdout + done.stderr
    if kind == "qwen2":  # transformers has code for it
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "it brings code of its own, which is not run here" in done.stderr


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, command: str) -> None:
    """The hub's client would tell of six tries; this port refuses each."""
    run = {"output_dir": "run", "model": {"name": "some/model"}, "context": 64}
    (tmp_path / "text.txt").write_text("Some text. " * 100)
    (tmp_path / "run.yaml").write_text(json.dumps(run | {"data": {"train": "text.txt"}}))
    words = {"plan": ["plan", "some/model", "--gpu", "h100"], "train": ["train", "run.yaml"]}
    script = "import sys; from oomb.cli import app; app(sys.argv[1:])"
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script, *words[command]],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | hub,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "some/model" in done.stderr
