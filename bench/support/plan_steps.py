"""Steps that were measured on an H200 beside what the plan foretells of them, without a GPU.

Called by ``bench/plan_accuracy.py --steps``. Every cell with two figures has what was predicted
first, then what was measured.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from support.record import RESULTS

import oomb
from oomb.plan import UNIFORM, Choices, Machine, Planner

GIB = 2**30
HEAD = (
    "| step | seconds: predicted | measured | | host pages, GiB | H2D, GiB | D2H, GiB "
    "| torch beyond the weights, GiB |",
    "|---|---|---|---|---|---|---|---|",
)


def measured(path: pathlib.Path) -> list[dict[str, Any]]:
    """The last step of each setting in a file of ``oomb bench step``, if no optimizer ran; on one
    GPU."""
    rows = json.loads(path.read_text()).get("rows", [])
    ours = [row for row in rows if isinstance(row, dict) and "attention" in row]
    ours = [row for row in ours if row.get("ranks", 1) == 1]
    if any("optimizer_seconds" in row for row in ours):
        return []
    settings = ("tokens", "device_memory", "keep_outputs", "chunk_size")
    return list({tuple(row.get(name) for name in settings): row for row in ours}.values())


def line(planner: Planner, row: dict[str, Any]) -> str:
    kept = row.get("kept_output_share", 0.0)
    of_mlps = row.get("kept_mlp_output_bytes", 0)
    config = oomb.Config(
        attention=oomb.TopKPages() if row["attention"] == "topk" else oomb.Dense(),
        kv_grad_dtype=row["kv_grad_dtype"],
        main_grad_dtype=row.get("main_grad_dtype", "float32"),
        chunk_size=row.get("chunk_size", 4096),
        page_size=row.get("page_size", 128),
        recompute=row.get("recompute", "auto"),
        device_memory=row["device_peak_bytes"],
        keep_outputs="auto" if of_mlps else kept,
    )
    choices = UNIFORM if row["selection"] == "uniform" else Choices()
    plan = planner.predict(row["tokens"], config, optimizer=None, choices=choices)
    assert plan.seconds is not None
    name = [row["attention"], f"{row['tokens']:,}", row["kv_grad_dtype"]]
    name += [f"{row['device_peak_bytes'] / GIB:.0f} GiB on the GPU"]
    name += [f"chunk {config.chunk_size}"] if config.chunk_size != 4096 else []
    name += [f"{kept:.0%} of outputs kept"] if kept else []
    name += [row["selection"]] if row["attention"] == "topk" else []
    pairs = [
        (plan.host_pool_bytes, row["host_peak_bytes"]),
        (plan.h2d_bytes, row["h2d_bytes"]),
        (plan.d2h_bytes, row["d2h_bytes"]),
        (plan.torch_peak_bytes - plan.parameter_bytes, row["torch_peak_bytes"]),
    ]
    cells = [
        ", ".join(name),
        f"{plan.seconds:.1f}",
        f"{row['seconds']:.1f}",
        f"{100 * (plan.seconds / row['seconds'] - 1):+.0f} %",
        *(f"{a / GIB:.1f} · {b / GIB:.1f}" for a, b in pairs),
    ]
    return f"| {' | '.join(cells)} |"


def show(files: list[pathlib.Path], host_memory: str) -> None:
    """A markdown row for each step of ``files``; none given: those of the whole Qwen2.5-7B."""
    planner = Planner("qwen2.5-7b", Machine.described(gpu="h200", host_memory=host_memory))
    print("\n".join(HEAD), flush=True)
    found = sorted(RESULTS.glob("step-qwen2.5-7b-*.json"))
    for path in files or [path for path in found if "-layers-" not in path.name]:
        for row in measured(path):
            print(line(planner, row), flush=True)
