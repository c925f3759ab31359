"""What a call will take, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from oomb.config import Config, PageRule
from oomb.core.border_states import border_bytes
from oomb.core.gradient_reach import GradientReach
from oomb.core.kept_outputs import Keeping, KeptOutputs, Rooms
from oomb.core.layout import Chunks
from oomb.core.list_sizes import ListSizes
from oomb.core.main_grad import sum_dtype
from oomb.core.tiers import PageLayout, free_memory, slots_of_call
from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel, LayerShape
from oomb.model.mixers import state_bytes
from oomb.trace.layerwise import LayerwiseBytes, layerwise_bytes
from oomb.trace.trace import Setting, Tracer
from oomb.units import bytes_text

# Values of one layer that autograd keeps per token, in units of the hidden size and of the MLP's
# inner size: norms, projections, residuals; gate, up, product.
_HIDDEN_KEPT, _INNER_KEPT = 10, 4
_TRIFLE = 0.02  # of free memory: activations whose exact size decides nothing

ACTIVATION_SHARE = 0.4  # of free memory; where activations take more, layers recompute

_tracers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory of one call.

    Attributes:
        device_bytes: device tier, a chunk's activations and the gradient sums.
        host_bytes: host tier, page lists, and states at the borders between chunks.
        seconds: predicted time; None until a call of this shape was measured.
        fits: both tiers hold it now.
        advice: what to change, most useful first, and whether ordinary training would need less;
            empty where there is nothing to say.
    """

    device_bytes: int
    host_bytes: int
    seconds: float | None
    fits: bool
    advice: tuple[str, ...]


def counted_tokens(config: Config, tokens: int) -> int:
    """Tokens that a call's longest chunk is counted with.

    A text shorter than ``chunk_size`` is rounded up, by an eighth at most: each length that is met
    takes a run on tensors without memory.

    Args:
        tokens: of a sequence, without the last, which predicts nothing.
    """
    longest = min(config.chunk_size, max(1, tokens))
    step = 1 << max(0, longest.bit_length() - 4)
    return min(config.chunk_size, -(-longest // step) * step)


def activation_bytes(
    model: CausalModel, batch: int, tokens: int, recompute: bool, main_grad_dtype: str = "float32"
) -> int:
    """What a chunk takes of torch's memory beside parameters and gradient sums.

    A rule of thumb where that is a trifle beside what is free; else counted.

    Args:
        tokens: of the chunk, as of :func:`counted_tokens`.
        main_grad_dtype: as in :class:`oomb.Config`; sums in bf16 take work space.
    """
    estimate = _estimated(model, batch, tokens, recompute)
    if estimate < _TRIFLE * free_memory(model.device):
        return estimate
    return _counted(model, batch, tokens, recompute, main_grad_dtype)


def _counted(
    model: CausalModel, batch: int, tokens: int, recompute: bool, main_grad_dtype: str
) -> int:
    """By a run of one chunk on tensors without memory."""
    if model.causal not in _tracers:
        try:
            _tracers[model.causal] = Tracer(model.causal, model.device.type, model.is_fused)
        except Exception:  # who cannot be copied raises whatever it likes; an estimate will do
            return _estimated(model, batch, tokens, recompute)
    try:
        trace = _tracers[model.causal].trace(
            Setting(tokens, batch, recompute, True, main_grad_dtype)
        )
    except (UnsupportedModelError, TypeError):  # its forward looks at values
        return _estimated(model, batch, tokens, recompute)
    return int(trace.sweep_peak_bytes - trace.sum_bytes)


def _estimated(model: CausalModel, batch: int, tokens: int, recompute: bool) -> int:
    settings: Any = model.decoder.config
    hidden: int = settings.hidden_size
    inner = getattr(settings, "intermediate_size", 4 * hidden)
    if not isinstance(inner, int):  # one per layer
        inner = max(inner)
    size = torch.finfo(model.dtype).bits // 8
    per_token = (_HIDDEN_KEPT * hidden + _INNER_KEPT * inner) * size
    layers = len(model.layers)
    kept = 2 * hidden * size * layers + per_token if recompute else per_token * layers
    return batch * tokens * kept


def gradient_bytes(model: CausalModel, config: Config) -> int:
    """The sums of parameter gradients over chunks."""
    parameters = [p for p in model.causal.parameters() if p.requires_grad]
    return sum(p.numel() * sum_dtype(p, config.main_grad_dtype).itemsize for p in parameters)


def _gradient_bytes_as_they_are(model: CausalModel) -> int:
    parameters = [p for p in model.causal.parameters() if p.requires_grad]
    return sum(p.numel() * p.element_size() for p in parameters)


def _layerwise(model: CausalModel, shapes: list[LayerShape], tokens: int) -> LayerwiseBytes:
    return layerwise_bytes(
        tokens,
        layers=len(model.layers),
        hidden_size=model.decoder.config.hidden_size,
        shape=shapes[0],
        element_bytes=torch.finfo(model.dtype).bits // 8,
    )


def _keeping(
    layout: PageLayout, shapes: list[LayerShape], config: Config, chunks: Chunks, batch: int
) -> Keeping:
    rule = config.attention
    budget = rule.max_pages * config.page_size if isinstance(rule, PageRule) else None
    none = KeptOutputs.none(chunks, layout, shapes, batch)
    return Keeping.of(none, chunks, shapes, range(chunks.number), batch, budget)


def plan_call(
    model: CausalModel,
    shapes: list[LayerShape],
    layout: PageLayout,
    config: Config,
    num_tokens: int,
    batch: int,
    recompute: bool,
) -> Plan:
    """Plan of ``forward_backward`` on ``batch`` sequences of ``num_tokens`` tokens."""
    tokens = max(1, num_tokens - 1)  # the last predicts nothing
    chunks = Chunks(tokens, config.chunk_size, config.page_size)
    pages = batch * chunks.first_page(chunks.number - 1)
    # A draw of sampled chunks may be of all of them.
    reach = GradientReach.of(config.backward, range(chunks.number)).at_once(len(shapes))
    gradients = batch * chunks.first_page(reach)
    page_bytes = slots_of_call(layout, len(shapes), pages, gradients) * layout.slot_bytes
    summaries = lists = 0
    if isinstance(config.attention, PageRule):
        sizes = ListSizes.of(config.attention, chunks, shapes, batch)
        summaries = sizes.layers * pages * layout.summary_bytes
        lists = sizes.host_bytes(model.device.type)
    handed = border_bytes(state_bytes(model.mixers), batch, chunks.number)
    # Mean keys are gone before the sums of gradients come.
    counted = counted_tokens(config, tokens)
    others = _counted(model, batch, counted, recompute, config.main_grad_dtype)
    others += max(gradient_bytes(model, config), summaries)
    free = free_memory(model.device)
    assert config.device_memory is None or isinstance(config.device_memory, int)
    host_memory = config.host_memory
    assert host_memory is None or isinstance(host_memory, int)
    room = max(0, free - others) if config.device_memory is None else config.device_memory

    def host_free_beside(on_device: int) -> int:
        host_free = free_memory(torch.device("cpu"))
        if model.device.type == "cpu":
            host_free = max(0, host_free - others - on_device)
        host_free = max(0, host_free - lists - handed)
        return host_free if host_memory is None else min(host_free, host_memory)

    # Where pages alone do not fit, what would be kept beside them does not matter.
    if config.keep_outputs != "none" and page_bytes <= room + host_free_beside(room):
        keeping = _keeping(layout, shapes, config, chunks, batch)
        slot = layout.slot_bytes
        rooms = Rooms(
            (room - page_bytes) // slot,
            host_free_beside(room) // slot,
            config.device_memory is not None,
            config.host_memory is not None,
        )
        page_bytes += keeping.wanted(config.keep_outputs, rooms, model.device.type).num_bytes
    on_device = min(page_bytes, room)
    on_host = page_bytes - on_device
    host_free = host_free_beside(on_device)
    advice = []
    too_much_on_device = on_device + others > free
    fits = on_host <= host_free and not too_much_on_device
    if too_much_on_device and not recompute:
        advice.append("set recompute='layer'")
    if too_much_on_device:
        advice.append("lower chunk_size" if others > free else "lower device_memory")
    if on_host > host_free:
        if layout.grad_slots > 1:
            advice.append("set kv_grad_dtype='bfloat16': half the memory of the gradient pages")
        advice.append(f"raise host_memory to {bytes_text(on_host)}")
    layerwise = _layerwise(model, shapes, num_tokens * batch)
    theirs = layerwise.device_bytes + _gradient_bytes_as_they_are(model) + layerwise.host_bytes
    if theirs < on_device + others + on_host + lists + handed:
        advice.append(
            "ordinary training with checkpointing, tiled MLP and loss, and layer inputs offloaded "
            f"to the host needs less memory here: about {bytes_text(theirs)} on device and host, "
            f"{bytes_text(layerwise.host_bytes)} of them on the host"
        )
    return Plan(
        device_bytes=on_device + others,
        host_bytes=on_host + lists + handed,
        seconds=None,
        fits=fits,
        advice=tuple(advice),
    )
