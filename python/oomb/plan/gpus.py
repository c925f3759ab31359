"""GPUs that a plan can be made for without having one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oomb.nearest import nearest

_GB, _GIB, _TERA = 10**9, 2**30, 10**12
_OF_NVLINK = 0.55  # that NCCL gave on a pair of H200s, in messages of a chunk's size


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by figures, and the host it is taken to be in.

    Attributes:
        name: for people.
        memory_bytes: of the device, the whole of it.
        flops: dense bf16 products with sums in fp32, per second.
        bytes_per_second: of its memory.
        link_bytes_per_second: to the host, each way.
        host_bytes: memory of the host for one GPU, where nothing is said.
        peer_bytes_per_second: that a GPU receives from others of its host; None: over its link.
        basis: ``"datasheet"``, or ``"given"`` where somebody has given figures.
    """

    name: str
    memory_bytes: int
    flops: float
    bytes_per_second: float
    link_bytes_per_second: float
    host_bytes: int
    basis: str = "datasheet"
    peer_bytes_per_second: float | None = None
    capability: int = 80  # compute capability, 90 for 9.0


def _gpu(
    name: str,
    memory: float,
    flops: float,
    traffic: float,
    link: float,
    host: int,
    nvlink: float | None = None,
    *,
    capability: int,
) -> Gpu:
    """In the units of datasheets: GB, TFLOP/s, GB/s, GB/s; GiB of host memory; GB/s each way."""
    return Gpu(
        name=name,
        memory_bytes=int(memory * _GB),
        flops=flops * _TERA,
        bytes_per_second=traffic * _GB,
        link_bytes_per_second=link * _GB,
        host_bytes=host * _GIB,
        peer_bytes_per_second=None if nvlink is None else _OF_NVLINK * nvlink * _GB,
        capability=capability,
    )


# NVIDIA's datasheets (H200, H100 SXM, HGX B200, GH200, A100 SXM, L40S) and architecture whitepapers
# (GA102, AD102 and GB202 for RTX 3090, 4090 and 5090). FLOP/s without sparsity. Links: PCIe 4.0 x16
# (32 GB/s), 5.0 (64 GB/s), NVLink-C2C. Hosts: an eighth of a DGX, what a GH200 has; of single cards
# an assumption.
GPUS = {
    "h200": _gpu("H200", 141, 989, 4800, 64, 256, 450, capability=90),
    "h100": _gpu("H100", 80, 989, 3350, 64, 256, 450, capability=90),
    "b200": _gpu("B200", 180, 2250, 8000, 64, 256, 900, capability=100),
    "gh200": _gpu("GH200", 96, 989, 4000, 450, 446, capability=90),
    "a100-80": _gpu("A100 80 GB", 80, 312, 2039, 32, 256, 300, capability=80),
    "a100-40": _gpu("A100 40 GB", 40, 312, 1555, 32, 128, 300, capability=80),
    "l40s": _gpu("L40S", 48, 362, 864, 32, 128, capability=89),
    "rtx5090": _gpu("RTX 5090", 32, 209.5, 1792, 64, 64, capability=120),
    "rtx4090": _gpu("RTX 4090", 24, 165, 1008, 32, 64, capability=89),
    "rtx3090": _gpu("RTX 3090", 24, 71, 936, 32, 64, capability=86),
}
_ALSO = {"a100": "a100-80"}

HOST_BYTES = 64 * _GIB  # of a host of which nothing is known
# Of a GPU by figures, where one is missing: PCIe 4.0 x16, and traffic as of most GPUs above.
_LINK, _FLOPS_PER_BYTE = 32 * _GB, 200


def gpu_of_name(name: str) -> Gpu:
    """One of :data:`GPUS`, whose names may be written as on the box (``"RTX 4090"``).

    Raises:
        ValueError: no GPU of that name.
    """
    wanted = "".join(name.lower().split())
    wanted = wanted.replace("-", "") if wanted.startswith("rtx") else wanted
    found = GPUS.get(_ALSO.get(wanted, wanted))
    if found is None:
        raise ValueError(
            f"gpu: expected one of {', '.join(GPUS)}, got {name!r}{nearest(wanted, GPUS)}; of "
            "another give its figures: gpu_memory, gpu_tflops, gpu_bandwidth, gpu_link"
        )
    return found


def gpu_of_device(name: str) -> Gpu | None:
    """The GPU that a driver calls so, such as ``"NVIDIA H100 80GB HBM3"``; None where it is none of
    :data:`GPUS`, or a build of one that is slower."""
    words = set(name.lower().replace("-", " ").replace("rtx ", "rtx").split())
    if words & {"pcie", "nvl", "laptop", "mig"}:
        return None
    names = words & {"a100", *GPUS}
    return gpu_of_name(names.pop()) if len(names) == 1 else None


def gpu_of_figures(
    name: str | None,
    memory_bytes: int | None,
    tflops: float | None,
    bandwidth: float | None,
    link: float | None,
) -> Gpu | None:
    """A named GPU with other figures, or one of the caller's own; None where nothing was said.

    Args:
        name: as of :func:`gpu_of_name`, or None.
        memory_bytes: the whole of it.
        tflops: dense bf16 TFLOP/s; bandwidth, link: GB/s of its memory and to the host, each way.

    Raises:
        ValueError: a name that is unknown, a figure that is not above 0, or figures without a
            memory.
    """
    figures = {"gpu_tflops": tflops, "gpu_bandwidth": bandwidth, "gpu_link": link}
    given = {figure: value for figure, value in figures.items() if value is not None}
    for figure, value in given.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{figure}: expected a number above 0, got {value!r}")
    if name is None and not given:
        return None
    if name is not None:
        gpu = gpu_of_name(name)
    elif memory_bytes is None or tflops is None:
        missing = "gpu_memory" if memory_bytes is None else "gpu_tflops"
        raise ValueError(f"{missing}: expected a figure beside {', '.join(given)}, got none")
    else:
        gpu = Gpu(
            name="a GPU by figures",
            memory_bytes=memory_bytes,
            flops=tflops * _TERA,
            bytes_per_second=tflops * _TERA / _FLOPS_PER_BYTE,
            link_bytes_per_second=_LINK,
            host_bytes=HOST_BYTES,
        )
    return replace(
        gpu,
        memory_bytes=gpu.memory_bytes if memory_bytes is None else memory_bytes,
        flops=gpu.flops if tflops is None else tflops * _TERA,
        bytes_per_second=gpu.bytes_per_second if bandwidth is None else bandwidth * _GB,
        link_bytes_per_second=gpu.link_bytes_per_second if link is None else link * _GB,
        basis="given" if given else gpu.basis,
    )
