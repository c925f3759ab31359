"""Predicted beside measured: memory of both tiers and seconds of a step, for twelve configurations.

    python bench/plan_accuracy.py                      # the GPU where there is one, else the CPU
    python bench/plan_accuracy.py --device cpu --cases lora,sampled --json accuracy.json
    python bench/plan_accuracy.py --steps              # bench/results/step-qwen2.5-7b-*.json

``--steps`` runs nothing: it takes long steps that ``oomb bench step`` measured on an H200 and
prints what the plan foretells of them.

Otherwise each configuration runs here: a small warm-up, a step with the optimizer, and then the
steps that are measured. On a GPU these are three, of which the median counts, because they are
short (only one where every step draws other chunks). On the CPU it is one, and every configuration
has a process of its own. Memory on the CPU is what the process holds resident at its peak beyond
what it held before the model was made. On a GPU it is what torch's allocator and the page pools
report, and what the driver has given to both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from support import plan_steps
from support.record import write_record
from transformers import AutoConfig, AutoModelForCausalLM

import oomb
from oomb import _C
from oomb.cli.bench_step import with_selection
from oomb.plan import UNIFORM, Choices, Machine, Planner, Prediction, rates

MIB = 2**20
# Freed blocks go back to the system, so that the peak is that of live tensors.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
}


@dataclass(frozen=True)
class Case:
    """One configuration; ``chunks`` of ``chunk`` tokens, chunks eight times as long on a GPU."""

    settings: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen2"
    gpu_model: str = "7b"  # of _CUDA_SHAPES
    shape: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    batch: int = 1
    chunks: int = 8
    chunk: int = 512
    tier_share: float = 0.0  # of the pages that the device tier may hold; 0: all
    selection: str = "model"  # what page-sparse attention chooses, of bench_step.SELECTIONS
    dtype: str = "float32"
    optimizer: str = "adamw_torch"
    steps: int = 3  # that are measured on a GPU


CASES = {
    "full": Case(),
    "lora": Case(lora=True),
    "recompute": Case({"recompute": "layer"}, gpu_model="0.5b"),
    "topk": Case({"attention": oomb.TopKPages(budget=4)}, chunks=12, gpu_model="0.5b"),
    "sampled": Case({"backward": oomb.SampledChunks(keep=0.5, seed=37)}, chunks=12, steps=1),
    "windows": Case(family="mistral", shape={"sliding_window": 300}),
    "two-tiers": Case(tier_share=0.25),
    "two-tiers-bf16": Case({"kv_grad_dtype": "bfloat16"}, tier_share=0.25, dtype="bfloat16"),
    "topk-two-tiers": Case(
        {"attention": oomb.TopKPages(budget=16)}, chunks=24, tier_share=0.25, selection="synthetic"
    ),
    "topk-uniform": Case(
        {"attention": oomb.TopKPages(budget=16)}, chunks=24, tier_share=0.25, selection="uniform"
    ),
    "batch": Case(batch=2, chunks=4, chunk=512, gpu_model="0.5b"),
    "large-vocabulary": Case(
        shape={"vocab_size": 65536}, chunks=4, optimizer="sgd", gpu_model="0.5b"
    ),
}
_CPU_SHAPE = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}
_CUDA_SHAPES: dict[str, dict[str, Any]] = {
    "7b": {  # Qwen2.5-7B with some of its layers
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 10,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 152064,
    },
    "0.5b": {  # Qwen2.5-0.5B
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}
_LONGER = 8  # chunks, windows and budgets on a GPU, in tokens
_CPU_PAGE, _GPU_PAGE = 64, 128


_CHOICES = {"model": Choices(), "synthetic": Choices(), "uniform": UNIFORM}


def model_config(case: Case, device: str) -> Any:
    own = dict(case.shape)
    if device == "cuda":
        if "sliding_window" in own:
            own["sliding_window"] *= _LONGER
        if "vocab_size" in own:
            own["vocab_size"] *= 4
    sizes = (_CPU_SHAPE if device == "cpu" else _CUDA_SHAPES[case.gpu_model]) | own
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(case.family, max_position_embeddings=2**20, **sizes, **special)


def adapter(case: Case) -> Any:
    if not case.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def settings(case: Case, device: str) -> tuple[oomb.Config, int, torch.dtype]:
    """Engine settings, tokens per sequence and dtype of a case on a device."""
    scale, page_size = (1, _CPU_PAGE) if device == "cpu" else (_LONGER, _GPU_PAGE)
    chunk = case.chunk * scale
    tokens = case.chunks * chunk
    dtype = torch.bfloat16 if device == "cuda" else getattr(torch, case.dtype)
    own = dict(case.settings)
    rule = own.get("attention")
    if isinstance(rule, oomb.TopKPages):
        own["attention"] = replace(rule, budget=rule.budget * scale * _CPU_PAGE // page_size)
    config = oomb.Config(**{"chunk_size": chunk, "page_size": page_size, "recompute": "none"} | own)
    if case.tier_share:
        planner = Planner(model_config(case, device), Machine.here(device), dtype=dtype)
        pages = planner.pages(tokens, config, case.batch)
        cap = int(pages.needed_slots * case.tier_share) * pages.layout.slot_bytes
        config = oomb.Config(**{**vars(config), "device_memory": cap, "host_memory": "8GiB"})
    return config, tokens, dtype


def predict(case: Case, device: str, timed: bool) -> Prediction:
    config, tokens, dtype = settings(case, device)
    planner = Planner(
        model_config(case, device), Machine.here(device), dtype=dtype, adapter=adapter(case)
    )
    return planner.predict(
        tokens,
        config,
        batch_size=case.batch,
        optimizer=case.optimizer,
        timed=timed,
        step=1,
        choices=_CHOICES[case.selection],
    )


# Measuring ----------------------------------------------------------------------------------------


def status(name: str) -> int:
    """Bytes of a field of this process's status: VmRSS, its peak VmHWM."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; this needs Linux")


def build(case: Case, device: str, dtype: torch.dtype, layers: int | None = None) -> Any:
    config = model_config(case, device)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if case.lora:
        from peft import get_peft_model

        model = get_peft_model(model, adapter(case))
    return model


def measure(case: Case, device: str, timed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    config, tokens, dtype = settings(case, device)
    vocabulary = model_config(case, device).vocab_size
    warm_up(case, device, dtype, config)
    memory = GpuMemory() if device == "cuda" else ProcessMemory()
    model = build(case, device, dtype)
    kinds = {"adamw_torch": torch.optim.AdamW, "sgd": torch.optim.SGD}
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = kinds[case.optimizer](parameters, lr=1e-4)
    ids = torch.randint(vocabulary, (case.batch, tokens), device=device)
    layers = model.config.num_hidden_layers
    with oomb.Engine(model, with_selection(config, case.selection, layers)) as engine:
        times = []
        for step in range(1 + (case.steps if device == "cuda" else 1)):
            if step == 1:
                gc.collect()  # takes 0.3 s and more where much is imported, and belongs to no step
                memory.start_anew()
            whole = step or timed  # for the optimizer's states two chunks will do
            given = ids if whole else ids[:, : 2 * config.chunk_size]
            began = rates.clock()
            result = engine.forward_backward(given, given, on_progress=memory.look)
            float(result.loss)  # waits for the device
            times.append(rates.clock() - began)
            optimizer.step()
            optimizer.zero_grad()
        stats = result.stats
        return {
            "seconds": statistics.median(times[1:]),
            "fill_seconds": stats.fill_seconds,
            "device_pool_bytes": stats.device_peak_bytes,
            "host_pool_bytes": stats.host_peak_bytes,
            "h2d_bytes": stats.h2d_bytes,
            "d2h_bytes": stats.d2h_bytes,
            "exposed_copy_seconds": stats.exposed_copy_seconds,
            **memory.peaks(),
        }


class ProcessMemory:
    """The peak of what this process holds resident, beyond what it held at first."""

    def __init__(self) -> None:
        self._before = status("VmRSS")

    def start_anew(self) -> None:
        pathlib.Path("/proc/self/clear_refs").write_text("5")

    def look(self, progress: oomb.Progress) -> None:
        pass

    def peaks(self) -> dict[str, int]:
        return {"process_bytes": status("VmHWM") - self._before}


class GpuMemory:
    """Peaks by torch's counters and, at the chunks' ends, by the driver's, beyond those at first.

    The driver's has blocks that torch holds unused.
    """

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self._allocated, self._used = torch.cuda.memory_allocated(), self._driver_used()
        self._most_used = 0

    def start_anew(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._most_used = 0

    def look(self, progress: oomb.Progress) -> None:
        self._most_used = max(self._most_used, self._driver_used())

    def peaks(self) -> dict[str, int]:
        return {
            "torch_peak_bytes": torch.cuda.max_memory_allocated() - self._allocated,
            "device_bytes": self._most_used - self._used,
        }

    def _driver_used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free


def warm_up(case: Case, device: str, dtype: torch.dtype, config: oomb.Config) -> None:
    """Two layers, three chunks: libraries, kernels and their buffers are in place afterwards."""
    own = {"device_memory": None, "host_memory": None, "backward": oomb.AllChunks()}
    small = oomb.Config(**{**vars(config), **own})
    model = build(case, device, dtype, layers=2)
    ids = torch.randint(8, (case.batch, 3 * config.chunk_size), device=device)
    with oomb.Engine(model, small) as engine:
        engine.forward_backward(ids, ids)


# Comparing ----------------------------------------------------------------------------------------


def compare(case: Case, device: str, timed: bool, flags: list[str]) -> dict[str, Any]:
    if device == "cpu":  # an allocator that gives everything back is slow
        measured = in_child(case, device, ["--no-time", *flags], ALLOCATOR)
        if timed:
            measured["seconds"] = in_child(case, device, flags, {})["seconds"]
    else:  # nothing stays behind on the device, and a process takes long to start
        measured = measure(case, device, timed)
    prediction = predict(case, device, timed)
    row: dict[str, Any] = {"case": case_name(case), "fits": prediction.fits}
    names = ["seconds", "device_pool_bytes", "host_pool_bytes", "h2d_bytes", "d2h_bytes"]
    if device == "cuda":
        names += ["torch_peak_bytes", "device_bytes"]
    for name in names:
        row[name] = {"predicted": getattr(prediction, name), "measured": measured[name]}
    if device == "cpu":  # both tiers are the process's
        both = prediction.device_bytes + prediction.host_bytes
        row["process_bytes"] = {"predicted": both, "measured": measured["process_bytes"]}
    row |= {name: measured[name] for name in ("fill_seconds", "exposed_copy_seconds")}
    if prediction.duration is not None:
        row["duration"] = vars(prediction.duration)
    return row


def in_child(
    case: Case, device: str, flags: list[str], environment: dict[str, str]
) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--device", device, "--child", case_name(case), *flags],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def case_name(case: Case) -> str:
    return next(name for name, own in CASES.items() if own == case)


def show(row: dict[str, Any]) -> None:
    parts = [f"{row['case']:17}"]
    for name, pair in row.items():
        if not isinstance(pair, dict) or "predicted" not in pair or pair["predicted"] is None:
            continue
        if name in ("h2d_bytes", "d2h_bytes"):
            continue
        predicted, measured = pair["predicted"], pair["measured"]
        unit = 1 if name == "seconds" else MIB
        off = f"{100 * (predicted / measured - 1):+.1f} %" if measured else f"{predicted:+d} B"
        label = name.removesuffix("_bytes")
        parts.append(f"{label} {predicted / unit:.1f} | {measured / unit:.1f} ({off})")
    print("  ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas between")
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk, instead of the cases' own")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers here")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's CPU time, for a machine that is busy"
    )
    parser.add_argument(
        "--steps", nargs="*", type=pathlib.Path, metavar="FILE", help="results of oomb bench step"
    )
    parser.add_argument("--host-memory", default="512GiB", help="of the machine of --steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps is not None:
        plan_steps.show(arguments.steps, arguments.host_memory)
        return
    if arguments.cpu_time:
        rates.clock = time.process_time
        torch.set_num_threads(1)
        _C.set_num_threads(1)
    if arguments.chunk:
        CASES.update({name: replace(case, chunk=arguments.chunk) for name, case in CASES.items()})
    if arguments.child:
        found = measure(CASES[arguments.child], arguments.device, not arguments.no_time)
        print(json.dumps(found))
        return
    print(f"predicted | measured, MiB and seconds, on {Machine.here(arguments.device).name}")
    rows = []
    for name in arguments.cases.split(","):
        flags = ["--cpu-time"] if arguments.cpu_time else []
        flags += ["--chunk", str(arguments.chunk)] if arguments.chunk else []
        rows.append(compare(CASES[name], arguments.device, not arguments.no_time, flags))
        show(rows[-1])
        if arguments.json:
            record = {"torch": torch.__version__, "device": arguments.device, "rows": rows}
            write_record(arguments.json, record)


if __name__ == "__main__":
    main()
