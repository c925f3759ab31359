"""Held-out loss of a small model trained from scratch: ordinary, chunked, page-sparse, sampled.

    python bench/loss_curves.py --json curves.json --plot curves.png [--jobs 18] [--devices 3]
    python bench/loss_curves.py --plot-only curves.json curves.png
    python bench/loss_curves.py --table curves.json

Every method sees the same text in the same order from the same weights, once per seed. The text is
the source of Python's library, one token per byte, cut anywhere; the loss is in nats per byte, of
files that are not trained on, always under exact attention. On a GPU weights are fp32 under bf16
autocast.

"other kernel" is ordinary training once more with another attention kernel of torch's: what
rounding alone does to the loss of a training run, by which the other differences can be judged. In
bf16 it grows; in fp32 (on a CPU) it does not within some hundred steps, if the rate is moderate.

Runs are processes, several at a time on each GPU. Finished ones are kept in the JSON file, and a
second call makes those that are missing. Picture and table (markdown) need nothing but that file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.record import write_record
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import oomb
from oomb.cli.demo_text import Text, python_source
from oomb.model.float8 import RECIPE as FLOAT8_RECIPE
from oomb.train.float8 import with_float8

METHODS = ("ordinary", "other kernel", "exact", "sparse", "sampled 1/2", "sampled 1/4")
FLOAT8 = "float8"  # exact, with products in float8; on a CPU, where they are emulated
# The first of these kernels that the device has.
ORDINARY = {
    "ordinary": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "other kernel": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}
CHUNKS, PAGES = 8, 128  # of a sequence
BUDGET_SHARE = 4  # a block sees one of so many past pages at the end of a sequence
WANTED_GAP = 0.005  # of exact to ordinary training, in nats per byte
TIMED_STEPS = range(10, 20)  # what the estimated duration comes from

Curve = list[float]


def make_model(options: argparse.Namespace, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 256),
        head_dim=64,
        max_position_embeddings=options.tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: PreTrainedModel = Qwen2ForCausalLM(config).to(options.device)
    model.set_attn_implementation("sdpa")
    return model


def settings_of(method: str, options: argparse.Namespace, seed: int) -> oomb.Config:
    chunk, page = options.tokens // CHUNKS, options.tokens // PAGES
    settings: dict[str, Any] = {"chunk_size": chunk, "page_size": page}
    if method == "sparse":
        budget = PAGES // BUDGET_SHARE
        settings["attention"] = oomb.TopKPages(budget=budget, sink_pages=1, recent_pages=2)
    if method.startswith("sampled"):
        settings["backward"] = oomb.SampledChunks(keep=1 / int(method[-1]), seed=seed, cap=2.0)
    return oomb.Config(**settings)


def marks(options: argparse.Namespace) -> list[int]:
    """Steps after which the held-out loss is taken."""
    return sorted({*range(0, options.steps + 1, options.every), options.steps})


def train(method: str, seed: int, text: Text, options: argparse.Namespace) -> Iterator[float]:
    """Held-out loss after each of ``marks``, the untrained model's first."""
    model = make_model(options, seed)
    if method == FLOAT8:
        with_float8(model, FLOAT8_RECIPE, torch.device(options.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, options.steps)
    held_out = text.held_out_batch(options.held_out * options.tokens)
    held_out = held_out.view(options.held_out, options.tokens).to(options.device)
    draws = torch.Generator().manual_seed(seed)
    begins = torch.randint(text.train.numel(), (options.steps, options.batch), generator=draws)
    with (
        oomb.Engine(model, settings_of("exact", options, seed)) as judge,
        oomb.Engine(model, settings_of(method, options, seed)) as engine,
    ):
        for step in range(options.steps + 1):
            if step > 0:
                rows = [text.batch(begin, options.tokens) for begin in begins[step - 1].tolist()]
                ids = torch.cat(rows).to(options.device)
                if method in ORDINARY:
                    ordinary_step(model, ids, ORDINARY[method])
                else:
                    with autocast(options.device):
                        engine.forward_backward(ids, ids)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
                tell_pace(step)
            if step in marks(options):
                with autocast(options.device):
                    yield float(judge.evaluate(held_out, held_out).loss)


def ordinary_step(model: PreTrainedModel, ids: torch.Tensor, kernels: list[SDPBackend]) -> None:
    with sdpa_kernel(kernels, set_priority=True):
        with autocast(ids.device.type):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()


def autocast(device: str) -> torch.autocast:
    """Products and attention in bf16 where there are units for it."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


_pace: dict[int, float] = {}


def tell_pace(step: int) -> None:
    """Print seconds per step once."""
    if step in (TIMED_STEPS.start, TIMED_STEPS.stop):
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        _pace[step] = time.perf_counter()
    if step == TIMED_STEPS.stop:
        spent = _pace[TIMED_STEPS.stop] - _pace[TIMED_STEPS.start]
        print(json.dumps({"seconds_per_step": spent / len(TIMED_STEPS)}), flush=True)


class Runs:
    """Every seed and method in a process of its own; what is done is in the record.

    Attributes:
        record: ``arguments``, ``steps``, ``curves[method][seed]``.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._estimated = False
        given = {k: v for k, v in vars(options).items() if k in COMPARED}
        self.record: dict[str, Any] = {"arguments": given, "steps": marks(options), "curves": {}}
        if options.json is not None and options.json.exists():
            kept = json.loads(options.json.read_text())
            if kept["arguments"] != given:
                raise SystemExit(f"--json: {options.json} has runs of other arguments")
            self.record["curves"] = kept["curves"]

    def missing(self) -> list[tuple[int, str]]:
        """(seed, method) in order."""
        curves = self.record["curves"]
        wanted = [(s, m) for s in range(self._options.seeds) for m in self._options.methods]
        return [(s, m) for s, m in wanted if str(s) not in curves.get(m, {})]

    def make(self) -> None:
        """Make those that are missing, as far as the time limit allows."""
        missing = self.missing()
        print(f"{len(missing)} runs to make, {self._options.jobs} at a time", flush=True)
        with ThreadPoolExecutor(self._options.jobs) as pool:
            for number, (seed, method) in enumerate(missing):
                pool.submit(self._guarded, number, seed, method)

    def _guarded(self, number: int, seed: int, method: str) -> None:
        try:
            self._run(number, seed, method)
        except Exception as error:
            print(f"seed {seed}  {method:12} failed: {error}", flush=True)

    def _run(self, number: int, seed: int, method: str) -> None:
        left = self._options.seconds - (time.monotonic() - self._began)
        if left <= 0:
            return
        began = time.monotonic()
        curve: Curve = []
        with self._process(number, seed, method, left) as lines:
            for line in lines:
                told = json.loads(line)
                if "seconds_per_step" in told:
                    self._estimate(told["seconds_per_step"], time.monotonic() - began)
                else:
                    curve.append(told["loss"])
        if len(curve) < len(self.record["steps"]):
            print(f"seed {seed}  {method:12} stopped after {len(curve)} losses", flush=True)
            return
        with self._lock:
            self.record["curves"].setdefault(method, {})[str(seed)] = curve
            spent = time.monotonic() - began
            print(f"seed {seed}  {method:12} {curve[-1]:.4f}  {spent:.0f} s", flush=True)
            if self._options.json is not None:
                write_record(self._options.json, self.record)

    @contextmanager
    def _process(self, number: int, seed: int, method: str, left: float) -> Iterator[Any]:
        """Lines of JSON of one run; it ends when the time is over."""
        arguments = [sys.executable, __file__, "--only", method, str(seed)]
        for name in COMPARED:
            arguments += [f"--{name.replace('_', '-')}", str(getattr(self._options, name))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} | self._device(number)
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
        stop = threading.Timer(left, process.terminate)
        stop.start()
        try:
            yield process.stdout
        finally:
            stop.cancel()
            process.terminate()
            process.wait()

    def _device(self, number: int) -> dict[str, str]:
        if self._options.devices == 1:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(i) for i in range(self._options.devices)]
        return {"CUDA_VISIBLE_DEVICES": names[number % self._options.devices]}

    def _estimate(self, per_step: float, until_now: float) -> None:
        """Once, from the pace of the first run that tells, with all the others beside it."""
        with self._lock:
            if self._estimated:
                return
            self._estimated = True
            rounds = -(-len(self.missing()) // self._options.jobs)
            of_run = until_now + (self._options.steps - TIMED_STEPS.stop) * per_step
            print(f"estimated duration: {rounds * of_run:.0f} s", flush=True)


def gaps(record: dict[str, Any], method: str, base: str) -> dict[str, float]:
    """Final loss of a method less that of another, for each seed that both have."""
    ours, theirs = record["curves"][method], record["curves"][base]
    return {seed: ours[seed][-1] - theirs[seed][-1] for seed in sorted(ours) if seed in theirs}


def done(record: dict[str, Any]) -> list[str]:
    return [method for method in METHODS if method in record["curves"]]


def compare(record: dict[str, Any]) -> None:
    """Print final losses, and how far each method is from the first, per seed."""
    if not done(record):
        return
    base = done(record)[0]
    print(f"\nfinal held-out loss, and its difference from {base!r}, per seed")
    for method in done(record):
        mean = statistics.fmean(run[-1] for run in record["curves"][method].values())
        differences = gaps(record, method, base).values()
        told = "  ".join(f"{gap:+.4f}" for gap in differences)
        largest = max(map(abs, differences), default=0.0)
        verdict = ""
        if method == "exact" and base == "ordinary":
            verdict = f"  largest {largest:.4f}, wanted <= {WANTED_GAP}"
        print(f"{method:12} {mean:.4f}   {told}{verdict}")


def table(record: dict[str, Any]) -> str:
    """Final losses in markdown, and what was trained under them."""
    methods = done(record)
    seeds = sorted({seed for runs in record["curves"].values() for seed in runs})
    base = methods[0]
    head = ["method", "held-out loss", *(f"seed {seed}" for seed in seeds)]
    lines = [head, ["---"] * len(head)]
    for method in methods:
        final = {seed: run[-1] for seed, run in record["curves"][method].items()}
        told = final if method == base else gaps(record, method, base)
        form = ".4f" if method == base else "+.4f"
        cells = [format(told[seed], form) if seed in told else "" for seed in seeds]
        lines.append([method, f"{statistics.fmean(final.values()):.4f}", *cells])
    asked = record["arguments"]
    about = (
        f"{asked['steps']} steps of {asked['batch']} x {asked['tokens']:,} tokens; "
        f"{asked['layers']} layers of {asked['hidden']}; {asked['device']}. Mean over seeds in "
        f"nats per byte; per seed the loss of {base} training, and the others' difference from it."
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n" + about


def draw(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for method in done(record):
        points = list(zip(*record["curves"][method].values(), strict=True))
        mean = [statistics.fmean(point) for point in points]
        exact = method == "exact"  # lies on the ordinary one
        line = axes.plot(record["steps"], mean, ":" if exact else "-", label=method)[0]
        low, high = ([f(point) for point in points] for f in (min, max))
        axes.fill_between(record["steps"], low, high, alpha=0.15, color=line.get_color())
    seeds = max(map(len, record["curves"].values()))
    axes.set(xlabel="steps", ylabel="held-out loss, nats per byte")
    axes.set_title(f"mean and range of {seeds} seeds", fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


# Options on which a curve depends.
COMPARED = ("device", "batch", "tokens", "steps", "every", "hidden", "layers", "rate", "held_out")


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--tokens", type=int, default=8192, help="per sequence")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=40, help="steps between evaluations")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--held-out", type=int, default=8, help="sequences of held-out text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=(*METHODS, FLOAT8))
    parser.add_argument("--jobs", type=int, default=18 if gpu else 1, help="runs at a time")
    parser.add_argument("--devices", type=int, default=1, help="GPUs to spread them over")
    parser.add_argument("--seconds", type=float, default=3600, help="stop what still runs then")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--plot-only", nargs=2, type=Path, metavar=("JSON", "PNG"), help="run nothing"
    )
    parser.add_argument("--table", type=Path, metavar="JSON", help="print it; run nothing")
    parser.add_argument("--only", nargs=2, metavar=("METHOD", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        method, seed = options.only
        for loss in train(method, int(seed), python_source(), options):
            print(json.dumps({"loss": loss}), flush=True)
        return
    if options.plot_only is not None:
        kept, picture = options.plot_only
        draw(json.loads(kept.read_text()), picture)
        return
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    runs = Runs(options)
    runs.make()
    compare(runs.record)
    if options.plot is not None and runs.record["curves"]:
        draw(runs.record, options.plot)
    raise SystemExit(1 if runs.missing() else 0)


if __name__ == "__main__":
    main()
