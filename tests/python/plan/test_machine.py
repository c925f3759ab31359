"""Machines that a plan is for: this one, one by name, one by figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oomb.core import tiers
from oomb.core.tiers import free_memory
from oomb.plan import GPUS, Machine, recommend
from oomb.plan import machine as machines
from oomb.plan.gpus import gpu_of_device

GIB, GB = 2**30, 10**9


def test_a_named_gpu_has_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not ask what is free here."""
    monkeypatch.setattr(machines, "free_memory", lambda _: 2 * GIB)
    machine = Machine.described(gpu="h200")
    assert machine.host_bytes == GPUS["h200"].host_bytes == 256 * GIB
    assert machine.host_assumed
    result = recommend("qwen2.5-7b", 2**18, machine=machine, timed=False)
    assert result.fits
    assert result.prediction.host_bytes > 2 * GIB
    said = Machine.described(gpu="h200", host_memory="125GiB")
    assert (said.host_bytes, said.host_assumed) == (125 * GIB, False)
    assert Machine.here("cpu").host_bytes == 2 * GIB


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "rtx-4090", "a100", "A100-80", *GPUS])
def test_names(name: str) -> None:
    gpu = Machine.described(gpu=name).gpu
    assert gpu is not None
    assert gpu.basis == "datasheet"
    if "4090" in name:
        assert gpu == GPUS["rtx4090"]
    if name.lower().startswith("a100") and name != "a100-40":
        assert gpu == GPUS["a100-80"]


def test_a_gpu_by_figures() -> None:
    machine = Machine.described(device_memory="48GB", tflops=150, link=25, host_memory="96GiB")
    assert (machine.device_type, machine.local) == ("cuda", False)
    assert machine.device_bytes == 48 * GB - GIB  # for the driver's context
    assert machine.host_bytes == 96 * GIB
    gpu = machine.gpu
    assert gpu is not None
    assert (gpu.flops, gpu.link_bytes_per_second, gpu.basis) == (150e12, 25e9, "given")
    named = Machine.described(gpu="rtx3090", device_memory="48GB", bandwidth=800).gpu
    assert named is not None
    assert (named.memory_bytes, named.bytes_per_second) == (48 * GB, 800e9)
    assert named.flops == GPUS["rtx3090"].flops


def test_twice_the_figures_take_half_the_time() -> None:
    seconds = []
    for factor in (1, 2):
        machine = Machine.described(
            device_memory="80GB", tflops=400 * factor, bandwidth=3000 * factor, link=50 * factor
        )
        prediction = recommend("qwen2.5-0.5b", 2**17, machine=machine).prediction
        assert prediction.basis == "given"
        seconds.append(prediction.seconds)
    assert seconds[0] == pytest.approx(2 * (seconds[1] or 0), rel=0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu": "rtx409"}, "did you mean 'rtx4090'"),
        ({"gpu": "mine"}, "gpu: expected one of h200"),
        ({"tflops": 100}, "gpu_memory: expected a figure beside gpu_tflops, got none"),
        ({"link": 25, "device_memory": "24GB"}, "gpu_tflops: expected a figure beside gpu_link"),
        ({"tflops": 0, "device_memory": "24GB"}, "gpu_tflops: expected a number above 0, got 0"),
        ({"gpu": "h100", "link": -1}, "gpu_link: expected a number above 0, got -1"),
        ({"gpu": "h100", "bandwidth": float("nan")}, "gpu_bandwidth: expected a number above 0"),
    ],
)
def test_figures_that_are_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine.described(**given)


# A share of the card -----------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """80 GiB, of which others have 10 and torch 6, 4 of them unused."""
    state = {"fraction": 1.0}

    def fraction(device: Any) -> float:
        if torch._utils._get_device_index(device, allow_cpu=False) != 0:  # as torch asks
            raise AssertionError(device)
        return state["fraction"]

    answers: dict[str, Any] = {
        "mem_get_info": lambda _: (64 * GIB, 80 * GIB),
        "memory_reserved": lambda _: 6 * GIB,
        "memory_allocated": lambda _: 2 * GIB,
        "get_per_process_memory_fraction": fraction,
        "current_device": lambda: 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer, raising=False)
    return state


@pytest.mark.parametrize(
    ("fraction", "free"), [(1.0, 68), (0.9, 68), (0.5, 38), (0.025, 0), (0.01, 0)]
)
def test_a_share_of_the_card(card: dict[str, float], fraction: float, free: int) -> None:
    """What torch uses counts against the share; what it holds unused can be had."""
    card["fraction"] = fraction
    assert free_memory(torch.device("cuda", 0)) == free * GIB
    assert free_memory(torch.device("cuda")) == free * GIB


def test_the_share_where_torch_cannot_say(
    card: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert free_memory(torch.device("cuda", 0)) == 68 * GIB


def test_this_machine_has_the_share(
    card: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    card["fraction"] = 0.5
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert Machine.here("cuda").device_bytes == 38 * GIB


@pytest.mark.parametrize(
    ("limit", "current", "file_cache", "head_room"),
    [("8589934592", 3 * GIB, GIB, 6 * GIB), ("1073741824", 2 * GIB, 0, 0), ("max", 0, 0, None)],
    ids=["limit", "above it", "none"],
)
def test_the_control_group_bounds_host_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    current: int,
    file_cache: int,
    head_room: int | None,
) -> None:
    """What files have cached of its memory can be had."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{current}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon 5\nfile {file_cache}\ninactive_file {file_cache}\n"
    )
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    places = {"/sys/fs/cgroup": tmp_path, "/proc/meminfo": tmp_path / "meminfo"}
    monkeypatch.setattr(tiers, "Path", lambda place: places[place])
    expected = 64 * GIB if head_room is None else head_room
    assert free_memory(torch.device("cpu")) == expected


def test_a_slice_of_a_card_is_what_there_is(
    card: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells a process in a MIG slice of that slice alone, and names no whole card."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (16 * GIB, 18 * GIB))
    assert free_memory(torch.device("cuda", 0)) == 16 * GIB
    card["fraction"] = 0.5
    assert free_memory(torch.device("cuda", 0)) == 7 * GIB
    assert gpu_of_device("NVIDIA H100 80GB HBM3 MIG 2g.20gb") is None
