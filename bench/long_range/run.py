"""Whether models trained by chunks, sparsely or in part find what is far back.

    python bench/long_range/run.py quick --folder runs/quick [--seconds 540] [--seed 0 1 2]
    python bench/long_range/run.py --table runs/quick [--picture quality.png]
    python bench/long_range/run.py --table runs/learn runs/learn-64k --learning learning.png

Trains a small decoder from scratch on short sequences, extends its context with each method from
the same checkpoint, and asks every model for facts in long text that it has not seen, up to four
times the length it was trained on, under dense attention and under page budgets. A profile names
sizes and lengths: smoke, cpu, quick, methods, methods-64k, methods-128k, far; and learn-cpu, learn,
learn-64k and learn-128k, in which methods get equal steps from a start that does not find what is
far.

A run is made of pieces: a training, then its questions. What is done stands in
``results-SEED.json`` and in checkpoints (bf16 weights) beside it; called again it goes on with what
is missing. ``--seconds`` starts no training that would not end in time. The table is markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import oomb

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.record import write_record

from long_range.data import Data
from long_range.evaluation import exact_match
from long_range.foretold import foretold
from long_range.learning import draw_learning
from long_range.model import SIZES, load, new_model, save
from long_range.picture import draw
from long_range.profiles import PROFILES, Piece, Profile, pieces
from long_range.tables import table
from long_range.training import UNTRAINED, methods, train

PROBE = "needle, 8 keys"  # one alone is found by who copies any fact
_ENOUGH = 0.9  # of the needles
_PROBED = 16  # sequences
_DENSE = "exact"  # the method whose attention is dense
_PARTS = 20  # of a training, whose losses are averaged


class Run:
    """Pieces of a profile, in a folder."""

    def __init__(self, name: str, folder: Path, seed: int, device: str) -> None:
        self._profile: Profile = PROFILES[name]
        self._folder, self._seed, self._device = folder, seed, torch.device(device)
        self._path = folder / f"results-{seed}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.record: dict[str, Any] = {"profile": name, "seed": seed, "pieces": {}}
        if self._path.exists():
            self.record = json.loads(self._path.read_text())
        if self.record["profile"] != name:
            raise SystemExit(f"{self._path}: expected a run of {name}, got one of another profile")
        self._data = Data(seed)
        self._model: tuple[str, Any] | None = None  # the last that was asked

    def go_on(self, deadline: float, last: Sequence[str] = ()) -> None:
        """Every piece that is missing, as long as there is time; ``last``: as in ``pieces``."""
        for piece in pieces(self._profile, last):
            found = self.record["pieces"].setdefault(piece.name, {})
            begun = time.perf_counter()
            self._expect_same(piece, found)
            if "seconds" not in found:
                if begun + self._seconds(piece) > deadline:
                    print(f"no time left for {piece.name}", flush=True)
                    return
                self._train(piece, found)
            asked = self._ask(piece, found, deadline)
            found["whole"] = found.get("whole", 0.0) + time.perf_counter() - begun
            self._write()
            if not asked:
                return

    def _seconds(self, piece: Piece) -> float:
        """That a training takes at most; where steps count, as long as one of its level took with
        its looks and questions."""
        stage = piece.level.stage
        if not self._profile.probe_steps:
            return stage.seconds
        known = (
            float(found["whole"])
            for found in self.record["pieces"].values()
            if found.get("length") == stage.length and found.get("steps") and "whole" in found
        )
        return max(known, default=120.0)

    def _expect_same(self, piece: Piece, found: dict[str, Any]) -> None:
        """Older results of a piece have no settings."""
        now = _settings(piece)
        if found.get("settings", now) != now:
            raise SystemExit(
                f"{self._path}: expected {piece.name} of the profile's settings, got one trained "
                "with others; take a new folder"
            )

    def _train(self, piece: Piece, found: dict[str, Any]) -> None:
        stage, profile = piece.level.stage, self._profile
        self._model = None  # of the piece before
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if piece.begins_from is None:
            model = new_model(SIZES[profile.size], self._seed, profile.rope)
        else:
            model = load(self._checkpoint(piece.begins_from), piece.rope)
        model.to(self._device)  # type: ignore[arg-type]
        config = methods(stage.length, profile.page_size, self._seed)[piece.method]
        [attention] = self._own_attention(piece) or (_DENSE,)
        probes: list[dict[str, float]] = []
        tokens = 0.0
        between = max(profile.probe_steps, stage.steps // 12)  # a long start needs no more looks

        def look(step: dict[str, float]) -> None:
            share = self._asked(model, PROBE, stage.length, attention, _PROBED)
            found = {key: step[key] for key in ("step", "seconds")}
            probes.append({**found, "tokens": tokens, "needle": share})
            print(f"{piece.name}: {step['step']:.0f} steps, {step['seconds']:.0f} s, "
                  f"loss {step['loss']:.3f}, needles {share:.2f}", flush=True)  # fmt: skip

        def count(step: dict[str, float]) -> None:
            nonlocal tokens
            tokens += step["tokens"]
            steps, seconds = (step[key] - probes[-1][key] for key in ("step", "seconds"))
            due = seconds >= profile.probe_seconds
            if steps >= between if profile.probe_steps else due:
                look(step)

        nothing = {"step": 0.0, "seconds": 0.0, "tokens": 0.0, "loss": float("nan"), "pages": 0.0}
        steps = [nothing]
        look(nothing)
        if piece.method != UNTRAINED:
            steps = train(model, config, stage, self._data, on_step=count)
            if probes[-1]["tokens"] < tokens:
                look(steps[-1])
        found |= {
            "device": torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU",
            "settings": _settings(piece),
            "method": piece.method,
            "length": stage.length,
            "begins_from": piece.begins_from,
            "steps": int(steps[-1]["step"]),
            "tokens": tokens,
            "seconds": steps[-1]["seconds"],
            "losses": [] if piece.method == UNTRAINED else means([s["loss"] for s in steps]),
            "loss_is": "estimate" if piece.method.startswith("SpaCO") else "all chunks",
            "probes": probes,
            "reached": kept_from(probes),
            "asked": {},
        }
        if self._device.type == "cuda":
            pages = max(step["pages"] for step in steps)  # beside torch's own memory
            found["peak_bytes"] = torch.cuda.max_memory_allocated() + pages
        save(self._checkpoint(piece.name), model, profile.size, piece.rope)
        self._write()

    def _ask(self, piece: Piece, found: dict[str, Any], deadline: float) -> bool:
        """Whether everything was asked."""
        tried = dict.fromkeys((_DENSE, *piece.level.tried, *self._own_attention(piece)))
        for length in piece.level.asked:
            tasks = self._profile.tasks
            if length > piece.level.stage.length:
                tasks = self._profile.far_tasks or tasks
            for method in tried:
                for task in tasks:
                    attention = "dense" if method == _DENSE else method
                    key = f"{task} | {length} | {attention}"
                    if key in found["asked"]:
                        continue
                    if time.perf_counter() > deadline:
                        print(f"no time left to ask {piece.name}", flush=True)
                        return False
                    model = self._trained(piece)
                    share = self._asked(model, task, length, method, self._profile.number)
                    found["asked"][key] = share
                    print(f"{piece.name}: {key}: {share:.2f}", flush=True)
                self._write()
            here = length == piece.level.stage.length or not piece.level.audited
            if here and self._audited(piece) and time.perf_counter() <= deadline:
                self._foretell(piece, found, length)
        return True

    def _own_attention(self, piece: Piece) -> tuple[str, ...]:
        """Its method, where that attends to pages of a budget."""
        stage = piece.level.stage
        config = methods(stage.length, self._profile.page_size, self._seed)[piece.method]
        sparse = config is not None and isinstance(config.attention, oomb.TopKPages)
        return (piece.method,) if sparse else ()

    def _audited(self, piece: Piece) -> tuple[str, ...]:
        if piece.method == _DENSE:
            return piece.level.audited or piece.level.tried
        return piece.level.audited if piece.method == UNTRAINED else ()

    def _foretell(self, piece: Piece, found: dict[str, Any], length: int) -> None:
        told = found.setdefault("foretold", {}).setdefault(str(length), {})
        missing = tuple(name for name in self._audited(piece) if name not in told)
        if missing:
            told |= foretold(
                self._trained(piece),
                self._data,
                PROBE,
                missing,
                length=length,
                page_size=self._profile.page_size,
                seed=self._seed,
                draws=self._profile.audited_draws,
            )
            print(f"{piece.name}: the audit at {length}: {told}", flush=True)
            self._write()

    def _asked(self, model: Any, task: str, length: int, method: str, number: int) -> float:
        config = methods(length, self._profile.page_size, self._seed)[method]
        assert config is not None, method
        return exact_match(
            model,
            config,
            self._data,
            task,
            length=length,
            number=number,
            batch=max(1, min(number, self._profile.asked_tokens // length)),
        )

    def _trained(self, piece: Piece) -> Any:
        """Its checkpoint: what is asked is the same in a run of one call and of several."""
        if self._model is None or self._model[0] != piece.name:
            model = load(self._checkpoint(piece.name))
            model.to(self._device).eval()  # type: ignore[arg-type]
            self._model = piece.name, model
        return self._model[1]

    def _checkpoint(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-').replace('/', 'of')}-{self._seed}.pt"

    def _write(self) -> None:
        parting = self._path.with_suffix(".part")
        write_record(parting, self.record)
        parting.replace(self._path)


def _settings(piece: Piece) -> dict[str, Any]:
    """Of its training, as JSON keeps them."""
    settings = {"stage": asdict(piece.level.stage), "rope": asdict(piece.rope)}
    return dict(json.loads(json.dumps(settings)))


def kept_from(probes: list[dict[str, float]]) -> dict[str, float] | None:
    """The first look since which enough needles are found each time; None: there is none."""
    last = max((i for i, one in enumerate(probes) if one["needle"] < _ENOUGH), default=-1)
    return probes[last + 1] if last + 1 < len(probes) else None


def means(losses: list[float]) -> list[float]:
    """Of equal parts: a sampled step's loss is an estimate, the mean of many is near the loss."""
    return [float(part.mean()) for part in np.array_split(losses, min(_PARTS, len(losses)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", nargs="?", choices=PROFILES)
    parser.add_argument("--folder", type=Path, help="results and checkpoints")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one after the other")
    parser.add_argument(
        "--method", action="append", default=[], help="of the last level, in this order [all]"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--table", type=Path, nargs="+", help="print the results of folders")
    parser.add_argument("--picture", type=Path, help="of these folders: eight keys by length")
    parser.add_argument("--learning", type=Path, help="of these folders: eight keys by step")
    options = parser.parse_args()
    if options.table is not None:
        runs: list[dict[str, Any]] = []
        for folder in options.table:
            of_folder = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
            print(table(of_folder))
            runs += of_folder
        if options.picture is not None:
            draw(options.picture, runs, PROBE)
        if options.learning is not None:
            draw_learning(options.learning, runs, _ENOUGH)
    elif options.profile is None or options.folder is None:
        parser.error("expected a profile and --folder, or --table FOLDERS")
    else:
        known = PROFILES[options.profile].levels[-1].methods
        if unknown := [name for name in options.method if name not in known]:
            parser.error(f"--method: expected some of {', '.join(known)}, got {unknown[0]}")
        deadline = time.perf_counter() + options.seconds
        for seed in options.seed:
            run = Run(options.profile, options.folder, seed, options.device)
            run.go_on(deadline, options.method)


if __name__ == "__main__":
    main()
