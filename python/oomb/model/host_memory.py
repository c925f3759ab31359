"""Host memory that a GPU copies from without waiting: mapped for it, registered with the driver."""

from __future__ import annotations

import mmap
import sys
import weakref

import torch


def host_block(num_bytes: int, device: torch.device) -> torch.Tensor:
    """[num_bytes] uint8 in host memory, page-locked where ``device`` is a GPU.

    torch's own pinned memory comes in powers of two, so that blocks of 1.7 GB would take 2.1.

    Raises:
        RuntimeError: the driver does not register it.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)  # it has no address that could be registered
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        block.zero_()  # its pages exist before they are locked
        runtime = torch.cuda.cudart()
        address = block.data_ptr()
        with torch.cuda.device(device):
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, len(memory), 0)))
        # The tensor holds the mapping: when the last view of it is gone, before it is unmapped.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return block
