"""CUDA calls of the tiers fail, in a step whose pages and kept outputs spill.

Every single call of such pools fails in ``test_page_tiers.py``, which needs no model for it. Here
the engine is around them, and the calls of one place stand for one another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_case import PAGE, VOCABULARY, gradients, make_model

import oomb
from fault_places import Parts, cuda_calls_by_place, first_and_last
from oomb import _C

pytestmark = pytest.mark.gpu

CHUNK, TOKENS = 128, 500  # 4 chunks
DEVICE = "cuda"


def memory_outside_torch() -> int:
    """Bytes of the device that are not torch's: its caches grow as they like."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@pytest.mark.parametrize(
    "attention", [oomb.Dense(), oomb.TopKPages(budget=2)], ids=["dense", "topk"]
)
def test_a_failing_cuda_call_leaves_gradients_and_the_next_step(attention: Any) -> None:
    """The first and the last call of each place; each step gets its pools anew, so that theirs
    fail too."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator).to(DEVICE)
    model = make_model(torch.bfloat16, device=DEVICE)
    config = oomb.Config(
        chunk_size=CHUNK,
        page_size=PAGE,
        attention=attention,
        keep_outputs="all",
        device_memory=9 * 2 * PAGE * 64 * 2,  # of the 36 slots of pages alone
        host_memory="16MiB",
    )
    with oomb.Engine(model, config) as engine:

        def step(parts: Parts | None = None) -> oomb.Step:
            engine._pools.close()
            model.zero_grad()
            return engine.forward_backward(ids, ids, on_progress=parts)

        first = step()
        expected = gradients(model)
        assert first.stats.kept_output_share == 1 and first.stats.host_peak_bytes > 0
        assert first.stats.d2h_bytes > 0 and first.stats.h2d_bytes > 0
        places = cuda_calls_by_place(step)
        engine._pools.close()
        taken = memory_outside_torch()
        failed = 0
        for (place, order), numbers in places.items():
            for k in first_and_last(numbers):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 7)
                engine._pools.close()
                before, raised = _C.cuda_calls_made(), False
                _C.fail_cuda_call(k)
                try:
                    engine.forward_backward(ids, ids)
                except oomb.Error as error:
                    if "injected failure" not in str(error):
                        raise
                    raised = True
                finally:
                    met = raised or _C.cuda_calls_made() - before > k  # else it had fewer calls
                    _C.fail_cuda_call(-1)
                where = f"call {k}: {place}, {order}"
                if raised:
                    failed += 1
                    unchanged = [bool((p.grad == 7).all()) for p in model.parameters()]
                    assert all(unchanged), f"gradients after {where}"
                elif not met:
                    continue
                torch.cuda.synchronize()  # a pending error would show here
                if engine._pools.manager is not None:
                    engine._pools.manager.check_integrity()
                model.zero_grad()
                again = engine.forward_backward(ids, ids)
                found = gradients(model)
                assert torch.equal(again.loss, first.loss), f"after {where}"
                assert all(torch.equal(found[n], x) for n, x in expected.items()), f"after {where}"
        engine._pools.close()
        print(f"{sum(map(len, places.values()))} CUDA calls, {len(places)} places, {failed} failed")
        assert failed > 25
        assert memory_outside_torch() <= taken + 2**21
