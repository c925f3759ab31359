"""Each part of the demo runs in a process of its own, so that one leaves no memory to the next.

``main`` is that process: a task's name and its arguments as JSON on the command line, lines of JSON
out: ``{"done": share}`` as often as there is news, ``{"result": ...}`` at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

OnShare = Callable[[float], None]  # gets the share of a task that is done

# What a failed allocation looks like in torch, in Python and in C++; the last is a thread's stack.
_OUT_OF_MEMORY = (
    "allocate memory",
    "MemoryError",
    "bad_alloc",
    "out of memory",
    "Resource temporarily unavailable",
)


class OutOfBudget(Exception):
    """The task ran into its memory limit."""


class TaskFailed(RuntimeError):
    """The task's process failed for another reason; the text has its output."""


def run_task(task: str, arguments: dict[str, Any], on_share: OnShare) -> dict[str, Any]:
    """Run a task in a fresh process.

    Raises:
        OutOfBudget: an allocation failed.
        TaskFailed: the process failed for another reason.
    """
    start = f"from {__name__} import main; main()"
    command = [sys.executable, "-c", start, task, json.dumps(arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            message: dict[str, Any] = {}
            for line in process.stdout:
                message = json.loads(line)
                on_share(message.get("done", 1.0))
        errors.seek(0)
        said = errors.read()
    if process.returncode == 0:
        result: dict[str, Any] = message["result"]
        return result
    if any(text in said for text in _OUT_OF_MEMORY):
        raise OutOfBudget(f"task {task!r} ran out of memory")
    told = said.strip() or f"exit status {process.returncode}"  # a killed process says nothing
    raise TaskFailed(f"task {task!r} failed:\n{told}")


def _report(share: float) -> None:
    print(json.dumps({"done": share}), flush=True)


def main() -> None:
    from oomb.cli import demo_gradients, demo_memory, demo_training

    tasks: dict[str, Callable[..., dict[str, Any]]] = {
        "gradients": demo_gradients.task,
        "memory": demo_memory.task,
        "training": demo_training.task,
    }
    name, arguments = sys.argv[1:]
    result = tasks[name](on_share=_report, **json.loads(arguments))
    print(json.dumps({"result": result}), flush=True)
