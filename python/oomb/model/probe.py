"""What a model's attention looks like, and whether chunks give what its own forward gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from oomb import _C
from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel, LayerShape
from oomb.model.faults import models_own
from oomb.model.interface import AttentionCall, recorded_masks

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def attention_shapes(model: CausalModel) -> list[LayerShape]:
    """Shapes of every layer's attention, from one forward of two tokens.

    Raises:
        UnsupportedModelError: a layer does not call attention exactly once, sees its past in a
            shape that is neither causal nor a sliding window, or differs from the others in its
            pages.
    """
    shapes: dict[int, LayerShape] = {}

    def record(call: AttentionCall) -> torch.Tensor:
        layer = model.layer_of(call.module)
        where = model.layer_names[layer]
        if layer in shapes:
            raise UnsupportedModelError(f"{where}: calls attention more than once")
        if call.mask is not None and int(call.mask) != call.window:
            raise UnsupportedModelError(
                f"{where}: its mask is neither causal nor a sliding window of {call.window}"
            )
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        shapes[layer] = LayerShape(heads, kv_heads, call.q.shape[3], call.window)
        return torch.zeros_like(call.q)

    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    session = model.session(record, largest_position=1, rope_angles="model")
    own = models_own(model.decoder, "fails where attention is the engine's")
    with torch.no_grad(), recorded_masks(), session, own:
        model.decoder(input_ids=ids, position_ids=positions, use_cache=False)
    for layer, name in enumerate(model.layer_names):
        if layer not in shapes:
            raise UnsupportedModelError(
                f"{name}: does not call attention through transformers' interface: it is "
                "recurrent, a convolution, or brings attention of its own"
            )
        if _page_of(shapes[layer]) != _page_of(shapes[0]):
            raise UnsupportedModelError(
                f"{name}: its keys and values differ in shape from layer 0's"
            )
    return [shapes[layer] for layer in range(len(model.layers))]


def _page_of(shape: LayerShape) -> tuple[int, int]:
    return shape.kv_heads, shape.head_dim


def key_dtype(model: CausalModel) -> torch.dtype:
    """Dtype that keys have under the caller's autocast state: that of the pages."""
    seen: list[torch.dtype] = []

    class Seen(Exception):
        pass

    def record(call: AttentionCall) -> torch.Tensor:
        seen.append(call.k.dtype)
        raise Seen

    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    torch.clear_autocast_cache()
    session = model.session(record, largest_position=0, rope_angles="model")
    with (
        suppress(Seen),
        torch.no_grad(),
        torch.random.fork_rng(devices=model.rng_devices()),
        session,
    ):
        model.hidden(ids, ids)
    return seen[0]


def check_against_stock(
    model: CausalModel, tokens: int, chunked_logits: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Compare chunked logits with the model's own forward on a short sequence.

    Args:
        tokens: length of the probe, three chunks.
        chunked_logits: maps ids [1, tokens] to logits [tokens, vocabulary], chunk by chunk.

    Raises:
        UnsupportedModelError: they differ by more than rounding, or the model fails.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (1, tokens), generator=generator).to(model.device)
    training = [m for m in model.causal.modules() if m.training]
    model.causal.eval()  # dropout would differ between the two
    # fp32 weights under autocast have no fast kernel here, and do have one in a step.
    _C.set_attention_warnings(False)
    try:
        with torch.no_grad():
            positions = torch.arange(tokens, device=model.device)[None]
            stock = _own_logits(model, ids, positions).double()
            with models_own(model.causal, "fails when it is run in chunks"):
                ours = chunked_logits(ids).double()
    finally:
        _C.set_attention_warnings(True)
        for module in training:
            module.training = True
    error = float((ours - stock).norm() / (stock.norm() or 1))  # a new head may be all zero
    limit = _TOLERANCE.get(model.dtype, 0.1)
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(model.causal).__name__}: chunked logits differ from its own forward by "
            f"{error:.1e} (limit {limit:.0e}); it holds a part that chunks do not see"
        )


def _own_logits(model: CausalModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[tokens, vocabulary] of the model as it is."""
    with models_own(model.causal, f"its own forward fails on {ids.shape[-1]} tokens"):
        output = model.causal(input_ids=ids, position_ids=positions, use_cache=False)
        logits: torch.Tensor = output.logits[0]
    if not bool(logits.isfinite().all()):
        raise UnsupportedModelError(
            f"{type(model.causal).__name__}: expected finite logits of its own forward, got NaN "
            "or infinity; look for weights that are not finite, or not loaded"
        )
    return logits
