"""Every CUDA call of the tiers fails once, in a step whose pages and kept outputs spill."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_case import PAGE, VOCABULARY, gradients, make_model

import oomb
from oomb import _C

pytestmark = pytest.mark.gpu

CHUNK, TOKENS = 128, 500  # 4 chunks
DEVICE = "cuda"


@pytest.mark.parametrize(
    "attention", [oomb.Dense(), oomb.TopKPages(budget=2)], ids=["dense", "topk"]
)
def test_any_failing_cuda_call_leaves_gradients_and_the_next_step(attention: Any) -> None:
    """Each step gets its pools anew, so that their calls fail too."""
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

        def step() -> tuple[oomb.Step, dict[str, torch.Tensor]]:
            model.zero_grad()
            result = engine.forward_backward(ids, ids)
            return result, gradients(model)

        first, expected = step()
        assert first.stats.kept_output_share == 1 and first.stats.host_peak_bytes > 0
        assert first.stats.d2h_bytes > 0 and first.stats.h2d_bytes > 0
        engine._pools.close()
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        failed, k, met = 0, 0, True
        while met:
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
                met = raised or _C.cuda_calls_made() - before > k  # else it has fewer calls
                _C.fail_cuda_call(-1)
            if raised:
                failed += 1
                unchanged = [bool((p.grad == 7).all()) for p in model.parameters()]
                assert all(unchanged), f"gradients after call {k}"
            torch.cuda.synchronize()  # a pending error would show here
            if engine._pools.manager is not None:
                engine._pools.manager.check_integrity()
            again, found = step()
            assert torch.equal(again.loss, first.loss), f"after call {k}"
            assert all(torch.equal(found[n], x) for n, x in expected.items()), f"after call {k}"
            k += 1
        engine._pools.close()
        torch.cuda.synchronize()
        assert failed > 50
        assert torch.cuda.mem_get_info()[0] >= free - 2**21
