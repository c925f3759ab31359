"""Three tiny chunks through the engine beside the model's own forward, before the first call."""

from __future__ import annotations

import torch

from oomb.config import Config
from oomb.core.inputs import check_inputs
from oomb.engine.call import Calls
from oomb.model.causal import CausalModel
from oomb.model.probe import check_against_stock

_CHUNKS, _SMALL_PAGE = 3, 16


def check_chunks(model: CausalModel, calls: Calls, config: Config) -> None:
    """Compare chunked logits with those of the stock forward.

    Raises:
        UnsupportedModelError: they differ by more than rounding, or the model fails.
    """
    on_gpu = model.device.type == "cuda"  # its kernels are for pages as they are
    page = config.page_size if on_gpu else min(_SMALL_PAGE, config.page_size)
    tiny = Config(chunk_size=page, page_size=page, rope_angles=config.rope_angles, recompute="none")

    def chunked_logits(ids: torch.Tensor) -> torch.Tensor:
        collected: list[torch.Tensor] = []
        logits_of = model.head.logits
        inputs = check_inputs(
            ids,
            ids,
            attention_mask=None,
            position_ids=None,
            document_ids=None,
            loss_weights=None,
            num_items_in_batch=None,
            vocab_size=model.vocab_size,
            device=model.device,
            every_token=True,
        )
        with calls.under_way(tiny, inputs, None) as call, call.loop.running():
            call.loop.hidden_states(lambda hidden: collected.append(logits_of(hidden[0])))
        return torch.cat(collected)

    # Under the caller's autocast the two would differ by its rounding.
    with torch.autocast(model.device.type, enabled=False):
        check_against_stock(model, _CHUNKS * page, chunked_logits)
