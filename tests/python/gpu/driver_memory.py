"""Device memory taken from the driver itself: torch neither holds it nor keeps it afterwards."""

from __future__ import annotations

import ctypes

import torch

MIB = 2**20
_GRANULE = 2 * MIB  # the driver gives memory in such pieces


class Taken:
    """Memory that nobody else can have until :meth:`free`."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._pieces: list[ctypes.c_uint64] = []
        self._tensors: list[torch.Tensor] = []

    def take(self, leave: int = 0) -> None:
        """All that the driver has, and what torch can give up to it, but for ``leave`` bytes."""
        torch.cuda.empty_cache()
        size = torch.cuda.mem_get_info()[0]
        while size >= _GRANULE:
            room = torch.cuda.mem_get_info()[0] - leave
            piece = ctypes.c_uint64()
            wanted = min(size, room) // _GRANULE * _GRANULE
            if wanted > 0 and not self._driver.cuMemAlloc_v2(
                ctypes.byref(piece), ctypes.c_size_t(wanted)
            ):
                self._pieces.append(piece)
            else:
                size //= 2

    def take_all(self) -> None:
        """What the driver has, and the holes between tensors in torch's segments of memory."""
        self.take()
        size = 2**30
        while size >= MIB:
            try:
                self._tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2

    def __bool__(self) -> bool:
        return bool(self._pieces or self._tensors)

    def free(self) -> None:
        """Give everything back."""
        for piece in self._pieces:
            assert self._driver.cuMemFree_v2(piece) == 0
        self._pieces.clear()
        self._tensors.clear()


def torchs_own(size: int, held: int = 2**30) -> list[torch.Tensor]:
    """Memory that torch holds unused and cannot give up: one segment, and many for small tensors.

    Args:
        size, held: bytes of the segment and of the tensor that keeps it.
    """
    torch.cuda.empty_cache()
    whole = torch.empty(size, dtype=torch.uint8, device="cuda")
    begin = whole.data_ptr()
    del whole
    keeper = torch.empty(held, dtype=torch.uint8, device="cuda")
    assert begin <= keeper.data_ptr() < begin + size
    small = [torch.empty(MIB // 2, dtype=torch.uint8, device="cuda") for _ in range(128)]
    return [keeper, *small[::4]]
