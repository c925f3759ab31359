"""Memory that a call cannot have: foreseen before its first chunk, or refused to torch within."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from oomb.config import parse_size
from oomb.core.kept_outputs import Keeping, KeptOutputs
from oomb.core.tiers import free_memory
from oomb.errors import OutOfMemoryError
from oomb.model.faults import is_out_of_memory
from oomb.units import bytes_text

_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B?)")
_REMEDY = "lower device_memory or chunk_size, or set recompute='layer'"


def expect_room(device: torch.device, pool_bytes: int, others: int) -> None:
    """Check that a device has room for a tier and for what a call needs besides.

    Raises:
        OutOfMemoryError: it has not.
    """
    free = free_memory(device)
    if pool_bytes + others > free:
        raise OutOfMemoryError(
            f"the call needs {bytes_text(pool_bytes)} of pages on the device and "
            f"{bytes_text(others)} for the activations of a chunk and the sums of gradients, "
            f"{bytes_text(free)} are free: the device is out of memory. {_REMEDY.capitalize()}",
            needed_bytes=pool_bytes + others,
            available_bytes=free,
        )


def expect_room_for_outputs(keeping: Keeping, outputs: KeptOutputs, free_slots: int) -> None:
    """Check that the tiers have room for outputs of attention beside a call's pages.

    Raises:
        OutOfMemoryError: they have not; the text has the largest share that would fit.
    """
    if outputs.slots <= free_slots:
        return
    free = max(0, free_slots) * outputs.slot_bytes
    fitting = keeping.most_within(free_slots) / len(keeping.order)
    raise OutOfMemoryError(
        f"keep_outputs: expected room for {bytes_text(outputs.num_bytes)} beside the call's pages, "
        f"got {bytes_text(free)}: the tiers are out of memory. The largest share that fits is "
        f"keep_outputs={int(1000 * fitting) / 1000}; raise host_memory or device_memory for more",
        needed_bytes=outputs.num_bytes,
        available_bytes=free,
    )


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
