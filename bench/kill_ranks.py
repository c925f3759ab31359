"""Kill ranks of ``oomb train`` at random, go on, and compare with a run that nobody killed.

    python bench/kill_ranks.py --kills 20                     # on CPU ranks
    python bench/kill_ranks.py --kills 6 --device cuda --json kills.json

One run of a tiny model is killed again and again: a rank drawn at random gets SIGKILL after a
random number of steps, torchrun ends the others, and ``--resume`` goes on with two ranks, two, one,
two, two, one … With ``--weights zero3`` those that are two share weights. Told are the seconds from
each kill until every rank has ended, and the largest relative difference of a step's loss from the
run without a break: after each kill, so that a time limit leaves what came before it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from support.record import write_record
from transformers import Qwen2Config, Qwen2ForCausalLM

from oomb.cli.demo_tokenizer import byte_tokenizer

RANKS = (2, 2, 1)  # one after another
STEPS_A_KILL = 3
MOST_SECONDS = 300.0
POLL_SECONDS = 0.02


def prepare(folder: Path, device: str, weights: str, steps: int) -> Path:
    """Model, text and settings; the path of the settings."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    lines = (f"{n} squared is {n * n}, and cubed it is {n**3}.\n" for n in range(2000))
    (folder / "text.txt").write_text("".join(lines))
    settings = {
        "output_dir": str(folder / "run"),
        "model": {"name": str(folder / "model"), "device": device, "dtype": "float32"},
        "data": {
            "train": str(folder / "text.txt"),
            "add_eos": False,
            "num_proc": 1,
            "cache_dir": str(folder / "cache"),
        },
        "context": 256,
        "engine": {"chunk_size": 128, "page_size": 64},
        "parallel": {"weights": weights},
        "schedule": {"name": "constant"},
        "training": {"steps": steps},
        "saving": {"every_steps": 2},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def started(file: Path, ranks: int, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """``oomb train`` under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "oomb", "train", str(file), *arguments]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


def ranks_of(launcher: int) -> list[int]:
    """Process numbers of torchrun's children, in order."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == launcher and fields[0] != "Z":
            found.append(int(place.parent.name))
    return sorted(found)


def losses(run: Path) -> dict[int, float]:
    """Of the steps so far; the last record of each counts."""
    file = run / "metrics.jsonl"
    if not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # torn by a kill
            continue
        if record["event"] == "step":
            found[record["step"]] = record["loss"]
    return found


def kill_once(
    file: Path, run: Path, ranks: int, draw: random.Random, log: Path
) -> tuple[float, int] | None:
    """Seconds from the kill to the end of all ranks, and the step; None: the run came to its end.

    Raises:
        SystemExit: the run failed by itself, or ranks are still there long after the kill.
    """
    steps = len(losses(run))
    until = steps + draw.randint(1, 2 * STEPS_A_KILL - 1)
    arguments = ["--resume"] if run.exists() else []
    job = started(file, ranks, f"output_dir={run}", *arguments, log=log)
    while job.poll() is None and max(losses(run), default=0) < until:
        time.sleep(POLL_SECONDS)
    if job.poll():
        raise SystemExit(f"a run failed that nobody had killed:\n{log.read_text()[-8000:]}")
    if job.poll() == 0:
        return None
    time.sleep(draw.random() * 0.2)
    others = ranks_of(job.pid)
    if not others:
        return None
    os.kill(draw.choice(others), signal.SIGKILL)
    began = time.perf_counter()
    while any(Path(f"/proc/{one}").exists() for one in others):
        if time.perf_counter() - began > MOST_SECONDS:
            raise SystemExit(f"ranks {others} hang after a kill:\n{log.read_text()[-8000:]}")
        time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - began
    job.wait(MOST_SECONDS)
    return seconds, max(losses(run))


def measured(
    kills: int,
    device: str,
    seed: int,
    weights: str,
    folder: Path,
    log: Path,
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The kills of one run, and how far its losses are from those of another.

    Args:
        tell: gets what is known after each kill.
    """
    # A draw is at most 2 * STEPS_A_KILL - 1 steps, and a step may end before the kill is there.
    file = prepare(folder, device, weights, 2 * STEPS_A_KILL * (kills + 1))
    alone = started(file, 1, f"output_dir={folder / 'whole'}", log=log)
    if alone.wait(MOST_SECONDS) != 0:
        raise SystemExit(f"the run without a kill failed:\n{log.read_text()[-8000:]}")
    whole = losses(folder / "whole")
    draw, run, found = random.Random(seed), folder / "run", list[dict[str, float]]()

    def known() -> dict[str, Any]:
        own = losses(run)
        return {
            "device": device,
            "weights": weights,
            "kills": found,
            "steps": len(own),
            "longest_seconds": max(one["seconds"] for one in found) if found else None,
            "largest_difference": max(abs(loss / whole[step] - 1) for step, loss in own.items()),
        }

    while len(found) < kills:
        ranks = RANKS[len(found) % len(RANKS)]
        killed = kill_once(file, run, ranks, draw, log)
        if killed is None:
            break
        found.append({"ranks": ranks, "seconds": killed[0], "step": killed[1]})
        tell(known())
    last = started(file, RANKS[0], f"output_dir={run}", "--resume", log=log)
    if last.wait(MOST_SECONDS) != 0:
        raise SystemExit(f"the run did not go on:\n{log.read_text()[-8000:]}")
    if whole.keys() != losses(run).keys():
        raise SystemExit(f"expected steps {sorted(whole)}, got {sorted(losses(run))}")
    return known()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--weights", choices=["replicated", "zero1", "zero2", "zero3"], default="replicated"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="keeps what the runs print")
    arguments = parser.parse_args()

    def tell(result: dict[str, Any]) -> None:
        last = result["kills"][-1]
        print(
            f"kill {len(result['kills'])}: {last['ranks']} ranks, step {last['step']}, all ended "
            f"after {last['seconds']:.2f} s; losses so far differ by "
            f"{result['largest_difference']:.1e} at most",
            flush=True,
        )
        if arguments.json is not None:
            write_record(arguments.json, result)

    with tempfile.TemporaryDirectory() as folder:
        log = arguments.log or Path(folder) / "log.txt"
        of_run = (arguments.kills, arguments.device, arguments.seed, arguments.weights)
        result = measured(*of_run, Path(folder), log, tell)
    print(
        f"{len(result['kills'])} kills: all ranks ended within {result['longest_seconds']} s; "
        f"losses differ by {result['largest_difference']:.1e} at most"
    )
    if arguments.json is not None:
        write_record(arguments.json, result)


if __name__ == "__main__":
    main()
