"""Memory that a call cannot have: the driver's word before its first chunk, or torch's within."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from oomb.core.tiers import free_memory
from oomb.errors import OutOfMemoryError
from oomb.model.faults import is_out_of_memory
from oomb.units import bytes_text, parse_size

_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B?)")
_REMEDY = "lower device_memory or chunk_size, or set recompute='layer'"


def leave_to_driver(device: torch.device, pool_bytes: int) -> int:
    """Have torch give up memory that it holds unused, where a tier could not grow otherwise.

    Returns:
        How much of ``pool_bytes`` the tier can get. A segment of torch's with a single tensor in it
        stays torch's, so this may be less than what is free.
    """
    if device.type != "cuda":
        return pool_bytes
    if torch.cuda.mem_get_info(device)[0] < pool_bytes:
        torch.cuda.empty_cache()
    return min(pool_bytes, torch.cuda.mem_get_info(device)[0])


def with_torchs_unused(device: torch.device, step: Callable[[], None]) -> None:
    """Take a step that a tier may have to grow for; refused, once more with what torch can give up.

    Args:
        step: changes nothing where it raises.
    """
    try:
        step()
    except OutOfMemoryError:
        if not _give_up_unused(device):
            raise
        step()


def _give_up_unused(device: torch.device) -> bool:
    """Whether the driver has more memory after torch has given up what it can."""
    if device.type != "cuda":
        return False
    before = torch.cuda.mem_get_info(device)[0]
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] > before


def refused(error: BaseException, device: torch.device, pool_bytes: int) -> OutOfMemoryError | None:
    """What to raise for an error in a call; None if it is no refusal of memory.

    Args:
        pool_bytes: pages on the device at that moment.
    """
    if not is_out_of_memory(error):
        return None
    tried = _TRIED.search(str(error))
    needed = 0 if tried is None else parse_size("size", tried[1]) or 0
    on_gpu = device.type == "cuda"  # what torch holds unused was of no use
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory(device)
    wanted = bytes_text(needed) if needed else "memory"
    return OutOfMemoryError(
        f"torch needed {wanted} more beside {bytes_text(pool_bytes)} of pages, {bytes_text(free)} "
        f"are free: the device is out of memory. {_REMEDY.capitalize()}",
        needed_bytes=needed,
        available_bytes=free,
    )
