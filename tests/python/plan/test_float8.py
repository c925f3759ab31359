"""Plans of float8 layers: seconds beside steps that an H100 took, memory, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

import oomb
from oomb.cli import app
from oomb.model.float8 import RECIPE, columns_in_float8, rows_in_float8, scaled_product
from oomb.plan import Machine, Planner, recommend
from oomb.trace.meter import Meter

pytest.importorskip("torchao.float8")
RESULTS = Path(__file__).parents[3] / "bench" / "results"
CASES = {"64k": "9GiB", "256k": "12GiB"}  # the part of a name; pages on the device


@pytest.fixture(scope="module", params=["bf16", RECIPE])
def planner(request: pytest.FixtureRequest) -> tuple[str, Planner]:
    machine = Machine.described(gpu="h100", host_memory="120GiB")
    return request.param, Planner("qwen2.5-7b", machine, float8=request.param == RECIPE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(2)
def test_seconds_are_foretold(case: str, planner: tuple[str, Planner]) -> None:
    kind, of_kind = planner
    record = json.loads((RESULTS / f"float8-{case}-h100-2026-11-25.json").read_text())
    rows = [row for row in record["rows"] if row["kind"] == kind]
    assert rows
    for row in rows:
        config = oomb.Config(
            chunk_size=row["chunk_size"],
            attention=oomb.TopKPages(budget=64),
            device_memory=CASES[case],
            main_grad_dtype="bfloat16",
            kv_grad_dtype="bfloat16",
        )
        prediction = of_kind.predict(record["tokens"], config, optimizer=None)
        assert prediction.seconds == pytest.approx(row["seconds"], rel=0.15)


def test_products_count_as_what_they_take() -> None:
    with FakeTensorMode(), Meter() as meter:
        x, w = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (100, 48))
        (a, p), (b, q) = rows_in_float8(x), rows_in_float8(w)
        turned, scales = columns_in_float8(w)
        assert meter.work.flops == 0
        codes = a.nbytes + b.nbytes + turned.nbytes
        assert codes == (100 + 48 + 48) * 64
        assert meter.live_bytes == x.nbytes + w.nbytes + codes + 4 * (100 + 48 + 64)
        y = scaled_product(a, p, b, q, None, torch.bfloat16, True)
        forward = meter.work.flops
        assert 0.5 * 2 * 100 * 64 * 48 < forward < 0.6 * 2 * 100 * 64 * 48
        scaled_product(*rows_in_float8(y), turned, scales, None, torch.bfloat16, False)
        assert meter.work.flops == pytest.approx(2 * forward)


@pytest.mark.parametrize(
    ("gpu", "arguments", "words"),
    [
        ("a100-80", {}, "float8: expected a GPU with products in float8"),
        ("h100", {"adapter": LoraConfig(r=4)}, "float8: expected all weights to train, got adap"),
    ],
)
def test_what_cannot_be_is_refused(gpu: str, arguments: dict[str, Any], words: str) -> None:
    machine = Machine.described(gpu=gpu)
    with pytest.raises(ValueError, match=words):
        recommend("qwen2.5-0.5b", 4096, machine=machine, float8=True, **arguments)


def test_the_command_plans_it(tmp_path: Path) -> None:
    seconds = []
    for own in ([], ["--float8"]):
        arguments = ["qwen2.5-1.5b", "--context", "32K", "--gpu", "h200", *own]
        arguments += ["--keep-outputs", "none"]  # of products in float8 nothing is kept
        out = tmp_path / "plan.json"
        done = CliRunner().invoke(app, ["plan", *arguments, "--out", str(out)])
        assert done.exit_code == 0, done.output
        seconds.append(json.loads(out.read_text())["seconds"])
    assert 0.7 * seconds[0] < seconds[1] < 0.98 * seconds[0]
