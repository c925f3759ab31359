"""Files that are broken on purpose end ``oomb train`` with one line, soon, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import run, save_model

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(30)
)

FILES = {
    "aliases that explode": (ALIASES, "expected at most 20,000 values, got more; aliases"),
    "a list in itself": ("output_dir: &a [*a]", "got one inside itself, a list in line 1"),
    "fields in themselves": ("&a {output_dir: *a}", "got one inside itself, fields in line 1"),
    "deep lists": ("output_dir: " + "[" * 50_000, "expected at most 32 levels, got more in line 1"),
    "deep fields": (
        "".join(" " * n + "a:\n" for n in range(400)),
        "expected at most 32 levels, got more in line 32",
    ),
    "deep keys": ("? " * 500 + "a", "expected at most 32 levels"),
    "a list as a name": ("? [a]\n: b", "expected names of fields, got a list in line 1"),
    "fields as a name": ("{a: b}: c", "expected names of fields, got fields in line 1"),
    "no date": ("context: 2024-13-45", "context: expected integer, got '2024-13-45'"),
    "no timestamp": ("context: !!timestamp x", "expected a value of !!timestamp, got 'x'"),
    "no number": ("context: !!int x", "expected a value of !!int, got 'x' in line 1"),
    "no truth": ("context: !!bool x", "expected a value of !!bool, got 'x' in line 1"),
    "no bytes": ("context: !!binary é", "expected YAML, got failed to convert base64"),
    "no set": ("context: !!set [1]", "expected a value of !!set, got a list in line 1"),
    "no fields": ("context: !!map 3", "expected a value of !!map, got '3' in line 1"),
    "an unknown tag": ("context: !mine 3", "could not determine a constructor for the tag '!mine'"),
    "5,000 digits": ("context: " + "1" * 5000, "expected numbers of at most 100 digits"),
    "5,000 digits in base 16": ("context: 0x" + "f" * 5000, "numbers of at most 100 digits"),
    "digits in base 60": ("context: 1" + ":1" * 5000, "numbers of at most 100 digits"),
    "above 64 bits": ("context: 9223372036854775808", "expected numbers below 2**63"),
    "an infinite number": ("optimizer: {learning_rate: 1e999}", "learning_rate: expected a finite"),
    "no number at all": ("optimizer: {learning_rate: .nan}", "learning_rate: expected a finite"),
    "a NUL in a path": ('output_dir: "a\\0b"', "expected text without NUL"),
    "half a character": ('output_dir: "\\ud800"', "halves of characters"),
    "too much": ("# " + "x" * 2**18, "expected at most 262,144 bytes of YAML, got more"),
    "too many values": ("a: [" + "1," * 20_001 + "]", "expected at most 20,000 values"),
    "a merge key": (
        "model: &a {name: m}\ndata:\n  <<: *a",
        "run.yaml: expected fields written out, got the merge key '<<' in line 3; "
        "an alias stands for a whole value",
    ),
    "an unknown alias": ("context: *there", "found undefined alias 'there' in line 1"),
    "two documents": ("context: 1\n---\ncontext: 2", "but found another document in line 2"),
}
LEAST = "output_dir: run\nmodel: {name: m}\ndata: {train: a.txt}\ncontext: 8\n"


def refused(folder: Path, *arguments: str) -> str:
    result = run(folder / "run.yaml", *arguments)
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert all(len(line) < 600 for line in result.output.splitlines())
    return result.output


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_one_line(tmp_path: Path, name: str) -> None:
    text, message = FILES[name]
    (tmp_path / "run.yaml").write_text(text)
    assert message in refused(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("context=" + "1" * 5000, "context: expected numbers of at most 100 digits"),
        ("lora=" + "[" * 5000, "lora: expected at most 32 levels"),
        ("training.seed=-1", "training.seed: expected greater than or equal to 0, got -1"),
        ("training.seed=4294967296", "training.seed: expected less than 4294967296"),
        ("data.num_proc=1000000", "data.num_proc: expected less than or equal to 1024"),
        ("lora.r=10000000", "lora.r: expected less than or equal to 65536"),
        ("context=9999999M", "context: expected tokens such as 131072"),
        ("context=2147483648", "context: expected less than 2147483648"),
        (f"model.name={'x' * 5000}", "model.name: expected at most 4,000 characters, got 5,000"),
        (f"output_dir={'x' * 256}", "output_dir: expected names of at most 255 bytes in a path"),
        (f"data.train={'ü' * 150}", "data.train.0: expected names of at most 255 bytes"),
        (f"data.train=[{'x,' * 9000}]", "data.train: expected"),
        (f"model.dtype={'x' * 5000}", "model.dtype: expected"),
        (f"{'x' * 5000}=1", "expected a known field"),
    ],
)
def test_an_absurd_value_is_one_line(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(LEAST.replace("run\n", f"{tmp_path}/run\n", 1))
    assert message in refused(tmp_path, override)


def test_a_pipe_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").symlink_to("/dev/zero")
    assert "expected at most 262,144 bytes" in refused(tmp_path)


# Configs of models --------------------------------------------------------------------------------

CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ({"hidden_size": 2**40}, "hidden_size: expected an int in 1 ... 262,144, got more"),
    ({"hidden_size": 0}, "hidden_size: expected an int in 1 ... 262,144, got 0"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_attention_heads": 0}, "num_attention_heads: expected an int"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 2 heads, got 3"),
    ({"num_hidden_layers": -1}, "num_hidden_layers: expected an int in 1 ... 2,048, got -1"),
    ({"num_hidden_layers": 2**40}, "num_hidden_layers: expected an int in 1 ... 2,048, got more"),
    ({"vocab_size": None}, "vocab_size"),
    ({"num_labels": 2**40}, "num_labels: expected an int in 1 ... 1,048,576, got more"),
    ({"head_dim": None}, "expected a config that a model can be made from"),
    ({"hidden_act": "none"}, "expected a config that a model can be made from"),
    ({"rope_parameters": {"rope_theta": None}}, "expected a config that a model can be made from"),
    ({"pad_token_id": 10**9}, "expected a config that a model can be made from"),
    ({"text_config": {"hidden_size": 3}}, "text_config: expected a known model's, got dict"),
    ({"model_type": ["qwen2"]}, "expected a transformers model"),
    ('{"a":' * 50_000 + "1" + "}" * 50_000, "RecursionError"),
    ('{"model_type": "qwen2", "vocab_size": ' + "1" * 5000 + "}", "5000 digits"),
    ("[]", "expected a transformers model"),
    ("null", "expected a transformers model"),
]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_a_config_that_no_model_has(tmp_path: Path, number: int) -> None:
    change, message = CONFIGS[number]
    save_model(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    as_saved = json.loads(file.read_text())
    file.write_text(change if isinstance(change, str) else json.dumps(as_saved | change))
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "run.yaml").write_text(
        LEAST.replace("run\n", f"{tmp_path}/run\n", 1)
        .replace("name: m", f"name: {tmp_path}/model")
        .replace("train: a.txt", f"train: {tmp_path}/a.txt, add_eos: false")
    )
    found = refused(tmp_path, "--dry-run")
    assert found.startswith("model.name: ") and message in found and found.count("\n") == 1
