"""What benches of TRL's trainers share: a tokenizer, a clock of steps, what a run took."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, TrainerCallback

WORDS = 1000


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def in_own_process(*arguments: str) -> dict[str, Any]:
    """This program once more with arguments added, ``--json`` among them; what it wrote.

    Memory of one run is none of the next one's.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, *sys.argv, *arguments, "--json", str(out)]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of each step."""

    def __init__(self, device: str) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._synchronize()
        self.seconds.append(time.perf_counter() - self._began)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


class Observed:
    """What trainers of OOMB tell of their steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.steps.append(record)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_: None
        raise AttributeError(name)

    def memory(self, device: str) -> dict[str, int]:
        """Peaks of torch, of pages on the device and of the host, in bytes."""
        return {
            "torch_peak_bytes": 0 if device == "cpu" else torch.cuda.max_memory_allocated(),
            "page_bytes": max((s["device_peak_bytes"] for s in self.steps), default=0),
            "host_bytes": max((s["host_peak_bytes"] for s in self.steps), default=0),
        }
