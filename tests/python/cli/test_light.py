"""Help, versions and refusals do not wait for torch and transformers, which take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import typer

import oomb
from oomb.cli import app

HEAVY = {"torch", "transformers", "peft", "numpy", "datasets", "accelerate", "matplotlib"}


def python(script: str) -> dict[str, Any]:
    """What a script leaves in ``result``, and the heavy packages that a fresh process then has."""
    told = f"print(); print(json.dumps([result, sorted({HEAVY!r} & set(sys.modules))]))"
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{script}\n{told}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result, loaded = json.loads(done.stdout.splitlines()[-1])
    return {"result": result, "loaded": loaded, "output": done.stdout + done.stderr}


def command(*words: str) -> dict[str, Any]:
    """The exit code of ``oomb …`` as result."""
    return python(
        "from oomb.cli import app\n"
        f"try: app({list(words)!r}, prog_name='oomb')\n"
        "except SystemExit as end: result = end.code"
    )


COMMANDS = ["bench step", *typer.main.get_command(app).commands]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_heavy(name: str) -> None:
    done = command(*name.split(), "--help")
    assert f"Usage: oomb {name}" in done["output"]
    assert (done["result"], done["loaded"]) == (0, [])


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--help"], 0, "Usage: oomb"),
        (["--version"], 0, f"oomb {oomb.__version__}"),
        (["trian"], 2, "No such command 'trian'"),
        (["plan", "qwen2.5-7b", "--contxt", "1M"], 2, "No such option: --contxt"),
        (["plan", "qwen2.5-7b", "--context", "much"], 2, "context: expected tokens"),
        (["plan", "qwen2.5-7b", "--optimizer", "adam"], 2, "optimizer: expected one of"),
        (["audit", "model", "text", "--budget", "x"], 2, "--budget: expected numbers"),
        (["bench", "step", "--model", "gpt"], 2, "model: expected one of"),
        (["report", "no-such-run"], 2, "run: expected a folder with metrics.jsonl"),
        (["train", "no-such.yaml"], 2, "no-such.yaml: expected a YAML file"),
    ],
)
def test_nothing_heavy_is_imported(words: list[str], code: int, text: str) -> None:
    done = command(*words)
    assert text in done["output"]
    assert done["result"] == code
    assert done["loaded"] == []


def test_the_package_alone_imports_nothing_heavy() -> None:
    done = python("import oomb; result = oomb.Config(chunk_size=256).chunk_size")
    assert (done["result"], done["loaded"]) == (256, [])


def test_modules_are_there_without_an_import_of_their_own() -> None:
    done = python("import oomb; result = [oomb.errors.Error.__name__, oomb.config.Config.__name__]")
    assert done["result"] == ["Error", "Config"] and "transformers" not in done["loaded"]


def test_operations_need_torch_and_not_transformers() -> None:
    done = python("import oomb; result = oomb.ops.paged_attention.__name__")
    assert done["result"] == "paged_attention"
    assert "torch" in done["loaded"] and "transformers" not in done["loaded"]


def test_an_engine_needs_both() -> None:
    done = python("import oomb; result = oomb.Engine.__name__")
    assert done["result"] == "Engine"
    assert {"torch", "transformers"} <= set(done["loaded"])


def test_a_core_that_is_not_built_is_named() -> None:
    absent = "import sys; sys.modules['oomb._C'] = None\n"
    done = python(
        f"{absent}import oomb\n"
        "try: oomb.ops\n"
        "except ModuleNotFoundError as error: result = str(error)"
    )
    assert done["result"].startswith("oomb._C, the native core, is not built for this Python")
    done = python(
        f"{absent}from oomb.cli import app\n"
        "try: app(['--version'])\n"
        "except SystemExit as end: result = end.code"
    )
    assert done["result"] == 1 and "oomb --version: oomb._C, the native core" in done["output"]
    assert "Traceback" not in done["output"]


def test_every_public_name_is_there() -> None:
    for name in oomb.__all__:
        assert getattr(oomb, name) is getattr(oomb, name)
        assert name in dir(oomb)
    with pytest.raises(AttributeError, match="module 'oomb' has no attribute 'Engines'"):
        _ = oomb.Engines  # type: ignore[attr-defined]
