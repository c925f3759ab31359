"""What compute-sanitizer watches: the tiers' own kernels and copies, without torch.

Usage: tiers_under_sanitizer.py <path of the extension module>
"""

import importlib.util
import sys

import numpy as np

spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
assert spec is not None and spec.loader is not None
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)

LAYERS, CHUNKS, PAGES = 2, 4, 3

for grad_slots, poison, slot_bytes in ((1, False, 4096), (2, True, 4096), (1, True, 1000)):
    manager = _C.PageManager(
        device="cuda:0",
        slot_bytes=slot_bytes,
        device_slots=7,
        host_slots=200,
        shuffle_seed=1,
        copy_delay_seed=1,
        poison=poison,
    )
    visits = []
    for chunk in range(CHUNKS):
        visits += [(layer, 0, 0, chunk * PAGES) for layer in range(LAYERS)]
    for chunk in reversed(range(CHUNKS)):
        visits += [(layer, 1, 0, chunk * PAGES) for layer in range(LAYERS)]
    manager.begin_call(
        num_layers=LAYERS,
        pages_per_sequence=[CHUNKS * PAGES],
        grad_slots=grad_slots,
        visits=np.array(visits, dtype=np.int32),
    )
    for layer in range(LAYERS):
        manager.create_gradients(layer, 0, CHUNKS * PAGES)
    for index, (layer, kind, _, last) in enumerate(visits):
        if kind == 0:
            for page in range(last, last + PAGES):
                manager.create(layer, page, page + 1)
                manager.commit(layer, page, page + 1)
        for begin, end in manager.waves(index):
            manager.acquire(index, begin, end)
            manager.release(index, begin, end)
        if kind == 1:
            manager.acquire_gradients(layer, last, last + 1)
            manager.drop(layer, last, last + PAGES)
        manager.check_integrity()
    manager.end_call()
    manager.close()
print("all pages played")
