"""Trains in children that are killed or asked to stop at some moment, and resumes in others.

A script of its own: one process imports everything, runs no kernel and forks, so that a child costs
no start. Prints one JSON object.

    python killed_runs.py kill|stop NUMBER FOLDER
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OOMB_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from transformers import TrainerCallback

import oomb
import oomb.checkpoint.store as store_module
from oomb.checkpoint import CheckpointStore
from oomb.hf import Trainer
from trainer.runs import CONFIG, arguments, model, packed

STEPS = 20
NEXT = 5  # losses to compare after a resume


class Losses(TrainerCallback):
    """Appends each step's loss to a file; stops after ``last`` steps."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        self._path, self._last = path, last

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "loss" in logs:
            with open(self._path, "a") as file:
                file.write(f"{state.global_step} {logs['loss']!r}\n")
        if self._last is not None and state.global_step >= self._last:
            control.should_training_stop = True


def run(folder: Path, losses: Path, resume: bool = False, observer: Any = None) -> None:
    """One process of a run. A resumed one takes NEXT steps."""
    checkpoint = CheckpointStore(folder / "checkpoints").newest_intact() if resume else None
    last = checkpoint.step + NEXT if checkpoint is not None else None
    if resume and checkpoint is None:
        last = NEXT
    trainer = Trainer(
        model(),
        arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=1, save_total_limit=2),
        train_dataset=packed(),
        oomb_config=CONFIG,
        observer=observer,
        callbacks=[Losses(losses, last)],
    )
    trainer.train(resume_from_checkpoint=True if checkpoint is not None else None)


def in_child(work: Callable[[], None]) -> int:
    """Process id of a child that does ``work`` and ends with the exit code Python would give."""
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        work()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def ended(child: int) -> int:
    """Waits; the exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read_losses(path: Path) -> dict[int, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {int(step): loss for step, loss in (line.split() for line in lines)}


def resumed(folder: Path, reference: dict[int, str]) -> dict[str, Any]:
    """Resume a broken run; whether its next losses are those of the run without a break."""
    store = CheckpointStore(folder / "checkpoints")
    found = store.newest_intact()
    step = found.step if found is not None else 0
    code = ended(in_child(lambda: run(folder, folder / "resumed.txt", resume=True)))
    losses = read_losses(folder / "resumed.txt")
    expected = {s: reference[s] for s in range(step + 1, min(step + NEXT, STEPS) + 1)}
    return {
        "step": step,
        "rejected": [reason for _, reason in store.rejected],
        "resume_code": code,
        "same_losses": losses == expected,
        "compared": len(expected),
    }


# Moments inside a save, each of one process: (function of the store, before or after it).
_SAVING = ["write_manifest", "sync", "write_marker", "prune"]


def die_inside_a_save(place: str, step: int) -> None:
    """Make this process kill itself at a place of saving step ``step``."""

    def armed(own: Callable[..., Any]) -> Callable[..., Any]:
        def dies(*given: Any, **named: Any) -> Any:
            if current and current[-1] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*given, **named)

        return dies

    current: list[int] = []
    own_save = CheckpointStore.save

    def save(self: CheckpointStore, at: int, *given: Any, **named: Any) -> Path:
        current.append(at)
        return own_save(self, at, *given, **named)

    CheckpointStore.save = save  # type: ignore[method-assign]
    if place == "prune":
        store_module.shutil.rmtree = armed(store_module.shutil.rmtree)  # type: ignore[assignment]
    else:
        setattr(store_module, place, armed(getattr(store_module, place)))


def kill(number: int, folder: Path, reference: dict[int, str], seconds: float) -> list[Any]:
    """kill -9: half at random moments, half at random places of a save of a random step."""
    draw = random.Random(20261121)
    results = []
    for index in range(number):
        run_folder = folder / f"run-{index}"
        inside = index % 2 == 1
        place = _SAVING[index // 2 % len(_SAVING)]
        step = draw.randrange(3, STEPS - NEXT - 4)

        def work(
            run_folder: Path = run_folder,
            inside: bool = inside,
            place: str = place,
            step: int = step,
        ) -> None:
            if inside:
                die_inside_a_save(place, step)
            run(run_folder, run_folder.with_suffix(".txt"))

        child = in_child(work)
        if not inside:
            after = draw.randrange(STEPS - NEXT - 4)  # steps, and then about two more
            losses = run_folder.with_suffix(".txt")
            while len(read_losses(losses)) < after:
                time.sleep(0.002)
            # Steps are counted too: others may have slowed the run that took ``seconds``.
            latest, most = draw.uniform(0.0, 2.0) * seconds / STEPS, STEPS - NEXT - 2
            latest += time.perf_counter()
            while time.perf_counter() < latest and len(read_losses(losses)) < most:
                time.sleep(0.002)
            os.kill(child, signal.SIGKILL)
        code = ended(child)
        left = sorted(p.name for p in (run_folder / "checkpoints").glob(".unfinished*"))
        result = {"code": code, "inside": place if inside else "", "left": left}
        results.append({**result, **resumed(run_folder, reference)})
    return results


class Stopped:
    """Sends SIGTERM to its process at one progress report, or a while after it."""

    def __init__(self, at: int, delay: float) -> None:
        self._at, self._delay = at, delay
        self.reports = 0

    def on_progress(self, step: int, progress: oomb.Progress) -> None:
        self.reports += 1
        if self.reports == self._at:
            if self._delay:
                signal.setitimer(signal.ITIMER_REAL, self._delay)
            else:
                os.kill(os.getpid(), signal.SIGTERM)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def stop(number: int, folder: Path, reference: dict[int, str], _: float) -> list[Any]:
    """SIGTERM at random chunks, every second one between two chunk borders."""
    draw = random.Random(20261122)
    results = []
    for index in range(number):
        run_folder = folder / f"run-{index}"
        log = run_folder.with_suffix(".log")
        # 15 chunks in most steps (3 micro-batches of 2 filled and 3 swept chunks)
        at, delay = draw.randrange(1, 120), 0.002 * (index % 2)

        def work(
            run_folder: Path = run_folder, log: Path = log, at: int = at, delay: float = delay
        ) -> None:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            watched = Stopped(at, delay)
            count_reports_after_the_signal(watched, log)
            run(run_folder, run_folder.with_suffix(".txt"), observer=watched)

        code = ended(in_child(work))
        finished = read_losses(run_folder.with_suffix(".txt"))
        result = {
            "code": code,
            "finished": max(finished, default=0),
            "reports_after": json.loads(log.read_text()),
        }
        results.append({**result, **resumed(run_folder, reference)})
    return results


def count_reports_after_the_signal(watched: Stopped, log: Path) -> None:
    """Writes how many chunk borders were passed between the signal and the end of training."""
    from oomb.hf.interrupt import SignalWatch

    own_receive, own_exit = SignalWatch._receive, SignalWatch.__exit__
    reports_at_signal: list[int] = []

    def receive(self: SignalWatch, *given: Any) -> None:
        reports_at_signal.append(watched.reports)
        own_receive(self, *given)

    def leave(self: SignalWatch, *given: Any) -> None:
        log.write_text(json.dumps(watched.reports - reports_at_signal[0]))
        own_exit(self, *given)

    SignalWatch._receive = receive  # type: ignore[method-assign]
    SignalWatch.__exit__ = leave  # type: ignore[method-assign]


def main() -> None:
    kind, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    code = ended(in_child(lambda: run(folder / "whole", folder / "whole.txt")))
    seconds = time.perf_counter() - began
    reference = read_losses(folder / "whole.txt")
    assert code == 0 and len(reference) == STEPS
    results = {"kill": kill, "stop": stop}[kind](number, folder, reference, seconds)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
