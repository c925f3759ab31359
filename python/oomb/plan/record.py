"""The plan beside a run: predicted before it starts, measured after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oomb.plan.prediction import Prediction
from oomb.plan.recommendation import Recommendation
from oomb.replacing import replace_file

NAME = "plan.json"


def write_plan(run_dir: Path | str, plan: Recommendation | Prediction) -> Path:
    """Write ``RUN/plan.json`` with the prediction; replaces an earlier one.

    Returns:
        Its path. Keys: ``predicted`` (as ``Prediction.as_dict``), ``advice``, ``measured`` (null).
    """
    prediction = plan.prediction if isinstance(plan, Recommendation) else plan
    advice = list(plan.advice) if isinstance(plan, Recommendation) else []
    path = Path(run_dir) / NAME
    _write(path, {"predicted": prediction.as_dict(), "advice": advice, "measured": None})
    return path


def write_measured(
    run_dir: Path | str,
    *,
    seconds: float,
    device_pool_bytes: int,
    host_pool_bytes: int,
    torch_peak_bytes: int | None = None,
    **others: float | int | None,
) -> dict[str, Any]:
    """Put what a step took beside the prediction in ``RUN/plan.json``.

    Args:
        seconds: of ``forward_backward``, of a typical step after the first.
        device_pool_bytes, host_pool_bytes: peaks as in ``oomb.Stats``.
        torch_peak_bytes: the most that torch held on the device; None where nobody counts it.
        others: more measurements, kept under their names.

    Returns:
        The whole record; ``{}`` as prediction where the run began without one.
    """
    path = Path(run_dir) / NAME
    record = json.loads(path.read_text()) if path.exists() else {"predicted": {}, "advice": []}
    record["measured"] = {
        "seconds": seconds,
        "device_pool_bytes": device_pool_bytes,
        "host_pool_bytes": host_pool_bytes,
        "torch_peak_bytes": torch_peak_bytes,
        **others,
    }
    _write(path, record)
    return dict(record)


def _write(path: Path, record: dict[str, Any]) -> None:
    replace_file(path, json.dumps(record, indent=1).encode() + b"\n")
