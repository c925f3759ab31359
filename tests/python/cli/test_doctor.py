from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from oomb import _C
from oomb.cli import app
from oomb.cli.doctor import (
    check_cuda,
    check_memory,
    check_recurrent,
    check_threads,
    check_versions,
)
from oomb.cli.machine import UNLIMITED, MemoryLimits, format_bytes, read_memory_limits

GIB = 1 << 30


def device(problem: str = "") -> _C.Device:
    return {
        "index": 0,
        "name": "H200",
        "capability": (9, 0),
        "multiprocessors": 132,
        "total_bytes": 141 * GIB,
        "problem": problem,
    }


def status(*devices: _C.Device, built: bool = True, problem: str = "") -> _C.CudaStatus:
    return {
        "built": built,
        "runtime_version": 13000,
        "driver_version": 13000 if devices else 0,
        "devices": list(devices),
        "problem": problem,
    }


def limits(**changes: object) -> MemoryLimits:
    fields: dict[str, object] = {
        "total": 64 * GIB,
        "available": 60 * GIB,
        "cgroup_limit": UNLIMITED,
        "cgroup_used": GIB,
        "pinned": UNLIMITED,
        "huge_pages": "madvise",
    }
    return MemoryLimits(**{**fields, **changes})  # type: ignore[arg-type]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class TestCommand:
    def test_shows_every_section_of_this_machine(self) -> None:
        result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == 0, result.output
        for word in ("Build", "Devices", "Limits", "Versions", _C.build_info()["version"], "torch"):
            assert word in result.output

    def test_without_arguments_shows_help(self) -> None:
        assert "doctor" in CliRunner().invoke(app, []).output


class TestFindings:
    def test_nothing_to_say_about_a_good_machine(self) -> None:
        assert check_cuda(status(device()), "13.0") == []
        assert check_memory(limits(), has_gpu=True) == []

    @pytest.mark.parametrize(
        ("environment", "spins"),
        [
            ({}, True),
            ({"OMP_WAIT_POLICY": "ACTIVE"}, True),
            ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
            ({"GOMP_SPINCOUNT": "0"}, False),
            ({"GOMP_SPINCOUNT": "30000"}, True),
            ({"KMP_BLOCKTIME": "0"}, False),
        ],
    )
    def test_threads_that_spin(self, environment: dict[str, str], spins: bool) -> None:
        findings = check_threads(environment)
        assert len(findings) == spins
        assert all("OMP_WAIT_POLICY=passive" in finding.remedy for finding in findings)

    def test_a_cpu_build_beside_a_cpu_torch_is_fine(self) -> None:
        assert check_cuda(status(built=False, problem="built without CUDA"), None) == []

    def test_a_cpu_build_beside_a_cuda_torch_is_not(self) -> None:
        (finding,) = check_cuda(status(built=False, problem="built without CUDA"), "13.0")
        assert "OOMB_CUDA=on" in finding.remedy

    @pytest.mark.parametrize(
        ("problem", "remedy"),
        [
            ("no NVIDIA driver", "install the driver"),
            ("no device", "CUDA_VISIBLE_DEVICES"),
            ("driver version is insufficient", "13.0"),
        ],
    )
    def test_no_device(self, problem: str, remedy: str) -> None:
        (finding,) = check_cuda(status(problem=problem), "13.0")
        assert problem in finding.problem
        assert remedy in finding.remedy

    def test_a_device_that_cannot_run_our_code_is_named(self) -> None:
        (finding,) = check_cuda(status(device("no kernel image is available")), "13.0")
        assert "device 0 (H200): no kernel image" in finding.problem

    def test_low_memory_and_limits(self) -> None:
        low = limits(available=GIB, pinned=1 << 16, huge_pages="never")
        assert len(check_memory(low, has_gpu=True)) == 3
        assert len(check_memory(low, has_gpu=False)) == 1

    @pytest.mark.parametrize(
        ("triton", "fla", "capability", "said"),
        [
            ("3.3.1", "0.6.0", (9, 0), False),
            ("3.4.0", "0.6.0", (9, 0), True),
            ("3.6.0", "0.6.0", (9, 0), True),
            ("3.7.0+git1", "0.6.0", (9, 0), True),
            ("3.7.1", "0.6.0", (9, 0), False),
            ("3.10.0", "0.6.0", (9, 0), False),
            ("3.6.0", None, (9, 0), False),
            (None, "0.6.0", (9, 0), False),
            ("3.6.0", "0.6.0", (8, 0), False),
            ("3.6.0", "0.6.0", (10, 0), False),
        ],
    )
    def test_delta_nets_without_a_backward(
        self, triton: str | None, fla: str | None, capability: tuple[int, int], said: bool
    ) -> None:
        of_gpu = device()
        of_gpu["capability"] = capability
        versions = {"triton": triton, "flash-linear-attention": fla}
        found = check_recurrent(versions, status(of_gpu))
        assert len(found) == said
        assert all("3.7.1" in finding.remedy and not finding.fatal for finding in found)

    def test_a_missing_package_is_fatal(self) -> None:
        versions = {"torch": None, "transformers": "5.0", "numpy": "2.0", "greenlet": "3.5"}
        (finding,) = check_versions(versions)
        assert finding.fatal
        assert finding.remedy == "pip install torch"


class TestMemoryLimits:
    def test_reads_control_group_version_2(self, tmp_path: Path) -> None:
        write(tmp_path, "proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
        write(tmp_path, "sys/fs/cgroup/memory.max", f"{3 * GIB}\n")
        write(tmp_path, "sys/fs/cgroup/memory.current", f"{GIB}\n")
        write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        found = read_memory_limits(tmp_path, memlock=1 << 20)
        assert found == MemoryLimits(8 * GIB, 4 * GIB, 3 * GIB, GIB, 1 << 20, "madvise")
        assert found.usable == 2 * GIB

    def test_reads_control_group_version_1_without_a_limit(self, tmp_path: Path) -> None:
        write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
        write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n")
        found = read_memory_limits(tmp_path, memlock=-1)
        assert found.cgroup_limit == UNLIMITED
        assert found.pinned == UNLIMITED
        assert found.usable is None

    def test_an_empty_machine_is_unknown_not_an_error(self, tmp_path: Path) -> None:
        found = read_memory_limits(tmp_path, memlock=0)
        assert (found.total, found.available, found.cgroup_limit) == (None, None, None)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "unknown"),
        (UNLIMITED, "unlimited"),
        (0, "0 B"),
        (1536, "1.50 KiB"),
        (40 * GIB, "40.00 GiB"),
    ],
)
def test_format_bytes(count: int | None, text: str) -> None:
    assert format_bytes(count) == text
