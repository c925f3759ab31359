"""What compute-sanitizer watches: the tiers' own kernels and copies, without torch.

Usage: tiers_under_sanitizer.py <path of the extension module> [device]

Pages, their gradients, and outputs of every other chunk and layer that are kept from fill to sweep.
"""

import importlib.util
import sys
from typing import Any

import numpy as np

spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
assert spec is not None and spec.loader is not None
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)

DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda:0"
LAYERS, CHUNKS, PAGES, PIECES = 2, 4, 3, 3


def keeps(chunk: int, layer: int) -> bool:
    return (chunk + layer) % 2 == 0


class Memory:
    """Bytes of the device, which a page manager of its own holds in a call that does not end."""

    def __init__(self, num_bytes: int) -> None:
        self.manager: Any = _C.PageManager(
            device=DEVICE, slot_bytes=num_bytes, device_slots=2, host_slots=0
        )
        self.manager.begin_call(
            num_layers=1,
            pages_per_sequence=[1],
            grad_slots=1,
            visits=np.array([(0, 0, 0, 1)], dtype=np.int32),
        )
        self.manager.create(0, 0, 1)
        self.address = self.manager.pool_address()

    def close(self) -> None:
        self.manager.end_call()
        self.manager.close()


def play(grad_slots: int, poison: bool, slot_bytes: int) -> None:
    manager = _C.PageManager(
        device=DEVICE,
        slot_bytes=slot_bytes,
        device_slots=7,
        host_slots=200,
        shuffle_seed=1,
        copy_delay_seed=1,
        poison=poison,
    )
    output = Memory(PIECES * slot_bytes)
    bytes_of_output = PIECES * slot_bytes - slot_bytes // 2  # the last piece is half full
    visits = []
    for chunk in range(CHUNKS):
        visits += [(layer, 0, 0, chunk * PAGES) for layer in range(LAYERS)]
    for chunk in reversed(range(CHUNKS)):
        for layer in range(LAYERS):
            if keeps(chunk, layer):
                visits.append((layer, 3, chunk * PIECES, (chunk + 1) * PIECES))
        visits += [(layer, 1, 0, chunk * PAGES) for layer in range(LAYERS)]
    manager.begin_call(
        num_layers=LAYERS,
        pages_per_sequence=[CHUNKS * PAGES],
        grad_slots=grad_slots,
        visits=np.array(visits, dtype=np.int32),
        outputs=CHUNKS * PIECES,
    )
    for layer in range(LAYERS):
        manager.create_gradients(layer, 0, CHUNKS * PAGES)

    def copy_output(copy: Any, begin: int, end: int, of: int, **where: int) -> None:
        """Pieces [begin, end) of the output whose first piece is ``of``."""
        offset = (begin - of) * slot_bytes
        num_bytes = min((end - begin) * slot_bytes, bytes_of_output - offset)
        address = output.address + offset
        name = "source" if "layer" in where else "target"
        copy(begin=begin, end=end, num_bytes=num_bytes, **{name: address}, **where)

    for index, (layer, kind, first, last) in enumerate(visits):
        chunk = last // PAGES
        if kind == 0:
            for page in range(last, last + PAGES):
                manager.create(layer, page, page + 1)
                manager.commit(layer, page, page + 1)
        if kind == 3:
            for begin, end in manager.waves(index):
                copy_output(manager.read_output, begin, end, first, visit=index)
            manager.check_integrity()
            continue
        for begin, end in manager.waves(index):
            manager.acquire(index, begin, end)
            manager.release(index, begin, end)
        if kind == 0 and keeps(chunk, layer):
            for piece in range(chunk * PIECES, (chunk + 1) * PIECES):
                copy_output(manager.write_output, piece, piece + 1, chunk * PIECES, layer=layer)
        if kind == 1:
            manager.acquire_gradients(layer, last, last + 1)
            manager.drop(layer, last, last + PAGES)
        manager.check_integrity()
    manager.end_call()
    manager.close()
    output.close()


for case in ((1, False, 4096), (2, True, 4096), (1, True, 1000)):
    play(*case)
print("all pages played")
