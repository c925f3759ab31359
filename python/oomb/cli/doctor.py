"""``oomb doctor``: what was built, what the machine offers, and what to do about each problem."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from oomb.cli.machine import UNLIMITED, MemoryLimits, format_bytes, read_memory_limits

if TYPE_CHECKING:
    from oomb._C import BuildInfo, CudaStatus

PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "greenlet",
    "accelerate",
    "datasets",
    "pydantic",
    "peft",
    "trl",
    "triton",
    "liger-kernel",
    "flash-linear-attention",
    "mamba-ssm",
    "causal-conv1d",
    "torchao",
    "bitsandbytes",
    "matplotlib",
)
REQUIRED = ("torch", "transformers", "numpy", "greenlet")
# Of Triton: under these flash-linear-attention refuses a backward on Hopper (its chunk_o.py).
NO_DELTA_NETS = ((3, 4, 0), (3, 7, 1))
GIB = 1 << 30
_WAITING = {"passive": "sleep; in a script import oomb before torch, or set OMP_WAIT_POLICY"}


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy. ``fatal``: nothing runs until it is solved."""

    problem: str
    remedy: str
    fatal: bool = False


def package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def check_cuda(status: CudaStatus, torch_cuda: str | None) -> list[Finding]:
    findings = []
    if not status["built"]:
        if torch_cuda:
            findings.append(
                Finding(
                    "this build has no CUDA, but torch has: GPU models cannot be trained",
                    "reinstall with OOMB_CUDA=on pip install --force-reinstall --no-deps .",
                )
            )
        return findings
    if not status["devices"]:
        remedy = {
            "no NVIDIA driver": "install the driver, or give the container access to the GPU",
            "no device": "check CUDA_VISIBLE_DEVICES",
        }.get(
            status["problem"], "the driver must support CUDA " + _version(status["runtime_version"])
        )
        findings.append(Finding(f"no GPU can be used: {status['problem']}", remedy))
    for device in status["devices"]:
        if device["problem"]:
            findings.append(
                Finding(
                    f"device {device['index']} ({device['name']}): {device['problem']}",
                    "kernels are built for compute capability 8.0 and newer; check nvidia-smi",
                )
            )
    if status["devices"] and not torch_cuda:
        findings.append(
            Finding(
                "torch is built without CUDA", "install a CUDA build of torch (see pytorch.org)"
            )
        )
    return findings


def check_recurrent(versions: Mapping[str, str | None], status: CudaStatus) -> list[Finding]:
    """Kernels of recurrent layers that would fail in the backward, when the fill is done."""
    triton = versions["triton"]
    if versions["flash-linear-attention"] is None or triton is None:
        return []
    first, fixed = NO_DELTA_NETS
    number = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    on_hopper = any(device["capability"][0] == 9 for device in status["devices"])
    if not on_hopper or not first <= number < fixed:
        return []
    return [
        Finding(
            f"gated delta nets (Qwen3.5, Qwen3-Next) cannot be trained: on this GPU "
            f"flash-linear-attention has no backward for them under Triton {triton}",
            "pip install 'triton>=3.7.1', or a torch that brings it",
        )
    ]


def check_memory(limits: MemoryLimits, has_gpu: bool) -> list[Finding]:
    findings = []
    if has_gpu and limits.pinned != UNLIMITED and limits.pinned < GIB:
        findings.append(
            Finding(
                f"pinned memory is limited to {format_bytes(limits.pinned)} (RLIMIT_MEMLOCK)",
                "most drivers ignore it; if the host tier fails to grow, raise it with ulimit -l "
                "unlimited (docker: --ulimit memlock=-1)",
            )
        )
    usable = limits.usable
    if usable is not None and usable < 2 * GIB:
        findings.append(
            Finding(
                f"only {format_bytes(usable)} of host memory can be used",
                "free some, raise the container's limit, or set Config(host_memory=...) lower",
            )
        )
    if limits.huge_pages == "never" and has_gpu:
        findings.append(
            Finding(
                "transparent huge pages are off: the host tier grows more slowly",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root",
            )
        )
    return findings


def check_threads(environment: Mapping[str, str]) -> list[Finding]:
    """Torch's threads wait for work by spinning, unless they are told to sleep."""
    if wait_policy(environment) == "passive":
        return []
    return [
        Finding(
            "threads that wait spin: where cores are shared, a step on the CPU takes several times "
            "as long",
            "export OMP_WAIT_POLICY=passive before Python starts",
        )
    ]


def wait_policy(environment: Mapping[str, str]) -> str:
    """What ``OMP_WAIT_POLICY`` says; ``"passive"`` also where spinning is off by another name."""
    off = environment.get("GOMP_SPINCOUNT") == "0" or environment.get("KMP_BLOCKTIME") == "0"
    return "passive" if off else environment.get("OMP_WAIT_POLICY", "").lower() or "not set"


def check_versions(versions: dict[str, str | None]) -> list[Finding]:
    return [
        Finding(f"{name} is not installed", f"pip install {name}", fatal=True)
        for name in REQUIRED
        if versions[name] is None
    ]


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", min_width=20)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _build_rows(info: BuildInfo, status: CudaStatus) -> list[tuple[str, str]]:
    rows = [
        ("oomb", f"{info['version']} ({info['build_type']}, {info['compiler']})"),
        ("python", f"{platform.python_version()} on {platform.machine()}"),
    ]
    if not info["cuda"]:
        return [*rows, ("CUDA", "not built")]
    return [
        *rows,
        ("CUDA", f"nvcc {info['cuda_compiler']} for {', '.join(info['cuda_architectures'])}"),
        ("driver supports", _version(status["driver_version"])),
    ]


def _share_rows() -> list[tuple[str, str]]:
    """GPUs of which this process may have a part only, as allocator settings say."""
    import torch

    from oomb.core.tiers import memory_fraction

    shares = {i: memory_fraction(torch.device("cuda", i)) for i in range(torch.cuda.device_count())}
    return [
        (f"cuda:{index}", f"{share:.0%} of its memory for a process of torch")
        for index, share in shares.items()
        if share < 1
    ]


def _device_rows(status: CudaStatus) -> list[tuple[str, str]]:
    rows = [("cpu", platform.processor() or platform.machine())]
    for device in status["devices"]:
        major, minor = device["capability"]
        rows.append(
            (
                f"cuda:{device['index']}",
                f"{device['name']}, {format_bytes(device['total_bytes'])}, capability "
                f"{major}.{minor}: {device['problem'] or 'works'}",
            )
        )
    return rows


def _memory_rows(limits: MemoryLimits) -> list[tuple[str, str]]:
    return [
        ("memory", f"{format_bytes(limits.total)}, {format_bytes(limits.available)} available"),
        ("control group", f"limit {format_bytes(limits.cgroup_limit)}, "
                          f"used {format_bytes(limits.cgroup_used)}"),
        ("pinned memory", format_bytes(limits.pinned)),
        ("huge pages", limits.huge_pages or "unknown"),
        ("waiting threads", _WAITING.get(wait_policy(os.environ), "spin")),
    ]  # fmt: skip


def doctor() -> None:
    """Show what was built, devices, limits and versions, and what to do about each problem."""
    console = Console()
    try:
        from oomb import _C
    except ImportError as error:
        console.print(f"oomb._C cannot be imported: {error}", style="red", markup=False)
        console.print("  reinstall: pip install --force-reinstall --no-deps .")
        raise typer.Exit(1) from error
    versions = package_versions()
    status, limits = _C.cuda_status(), read_memory_limits()
    torch_cuda, shares = None, []
    if versions["torch"] is not None:
        import torch

        torch_cuda = torch.version.cuda
        shares = _share_rows() if torch.cuda.is_available() else []
    console.print(_table("Build", _build_rows(_C.build_info(), status)))
    console.print(_table("\nDevices", _device_rows(status)))
    console.print(_table("\nLimits", [*_memory_rows(limits), *shares]))
    console.print(
        _table("\nVersions", [(name, value or "not installed") for name, value in versions.items()])
    )
    findings = [
        *check_versions(versions),
        *check_cuda(status, torch_cuda),
        *check_recurrent(versions, status),
        *check_memory(limits, has_gpu=bool(status["devices"])),
        *check_threads(os.environ),
    ]
    console.print()
    if not findings:
        console.print("No problem found.", style="green")
    for finding in findings:
        style = "red" if finding.fatal else "yellow"
        console.print(f"- {finding.problem}", style=style, markup=False)
        console.print(f"    {finding.remedy}", markup=False)
    if any(finding.fatal for finding in findings):
        raise typer.Exit(1)
