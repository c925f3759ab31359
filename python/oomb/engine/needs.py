"""What a call needs on the device besides its pages, counted alike before and in the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from oomb.config import Config
from oomb.core.copying import linear_flops
from oomb.core.host_sums import layer_bytes, own_parameters, spared_bytes
from oomb.core.page_demand import PageDemand
from oomb.core.pools import Needs
from oomb.core.recompute import Recompute, levels_below
from oomb.core.rounded_sums import sum_dtype
from oomb.core.tiers import TIER_SHARE, free_memory
from oomb.engine.tracers import tracer_of
from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.parallel.weights import Weights
from oomb.trace.setting import Setting
from oomb.trace.tower import TowerUse
from oomb.trace.trace import Trace

# Values of one layer that autograd keeps per token, in units of the hidden size and of the MLP's
# inner size: norms, projections, residuals; gate, up, product.
_HIDDEN_KEPT, _INNER_KEPT = 10, 4
_PATCHES = 16  # of an image for a token, at most
_SCRATCH_TIMES = 2  # of the past's keys and values: beside them what makes them of latents
_TRIFLE = 0.02  # of free memory: activations whose exact size decides nothing
_PLENTY = 0.8  # of what pages may take: a call below it fits, whatever a trifle comes to
_INPUT_BYTES = 2 * 8  # per token, beside the arguments: positions and targets
_STATE_BYTES = 8  # per trainable value: an optimizer's two states that may still come

_FEW_CHUNKS = 4  # whose outputs take less than what a chunk spares by computing layers again
_MANY_CHUNKS = 2**14  # of which one is worth keeping: they are not looked at one by one

_ACTIVATION_SHARE = 0.4  # of free memory; where activations take more, some are computed again

_WHOLE = Weights()
_NO_TOWER = TowerUse()


def counted_tokens(config: Config, tokens: int) -> int:
    """Tokens that a call's longest chunk is counted with.

    A text shorter than ``chunk_size`` is rounded up, by an eighth at most: each length that is met
    takes a run on tensors without memory.

    Args:
        tokens: of a sequence, without the last, which predicts nothing.
    """
    return min(config.chunk_size, _rounded_up(min(config.chunk_size, max(1, tokens))))


def _rounded_up(number: int) -> int:
    step = 1 << max(0, number.bit_length() - 4)
    return -(-number // step) * step


def recompute_of(config: Config, activations: Callable[[Recompute], int], free: int) -> Recompute:
    """What backward computes again; of ``"auto"`` as little as activations leave room for.

    Args:
        activations: bytes of a chunk's.
        free: bytes of the device.
    """
    if config.recompute != "auto":
        return config.recompute
    least: tuple[Recompute, ...] = ("none", "pointwise")
    fitting = (one for one in least if activations(one) <= _ACTIVATION_SHARE * free)
    return next(fitting, "layer")


def may_vary(config: Config, demand: PageDemand, recompute: Recompute) -> bool:
    """Whether a call's chunks may differ in what backward computes again."""
    keeps = config.keep_outputs != "none" and recompute != "none"
    number = len(demand.swept)
    if not keeps or number <= _FEW_CHUNKS:
        return False
    if config.keep_outputs != "auto" or number > _MANY_CHUNKS:
        return True
    return demand.keeping.of_attention.pays(demand.device_type)


def others_of(
    demand: PageDemand, activations: int, gradients: int, tower: TowerUse = _NO_TOWER
) -> int:
    """Bytes on the device besides pages and arguments.

    Mean keys and scores of pages are gone before the sums of gradients come.

    Args:
        tower: of the call's images, which runs after the chunks; its sums are among ``gradients``.
    """
    inputs = demand.batch * demand.chunks.tokens * _INPUT_BYTES
    lists = 0 if demand.list_sizes is None else demand.list_sizes.chunk_bytes
    of_chunk = lists + activations + max(gradients, demand.choosing_bytes)
    return inputs + max(of_chunk, gradients + tower.after_bytes - tower.sum_bytes)


def activations_of(trace: Trace) -> int:
    """Of a chunk, without the sums of gradients."""
    return trace.sweep_peak_bytes - trace.sum_bytes


def needs_of(
    model: CausalModel,
    config: Config,
    demand: PageDemand,
    tokens: int,
    recompute: Recompute,
    weights: Weights,
    *,
    begun: bool,
    exact: bool = False,
    image_tokens: int = 0,
) -> Needs:
    """What a call needs besides its pages.

    Args:
        tokens: of a chunk, as of :func:`counted_tokens`.
        begun: the call has gathered the weights that it keeps.
        exact: counted even where a rule of thumb decides nothing.
        image_tokens: of the call, that show images.
    """
    if demand.reach is None:
        return Needs()
    gradients = gradient_bytes(model.causal.parameters(), config, weights)
    if config.main_grad_device == "host":
        own = own_parameters(model.layers)
        gradients -= spared_bytes(layer_bytes(own, config.main_grad_dtype, weights))
    gradients += weights.to_come(begun=begun)
    estimate = _estimated(model, demand, tokens, recompute)
    estimate += _estimated_tower(model, image_tokens)
    others = others_of(demand, estimate, gradients)
    free = free_memory(model.device)
    room = _PLENTY * (TIER_SHARE * free - others)
    of_levels: tuple[int, ...] = ()
    varies = not weights.is_sharded and may_vary(config, demand, recompute)  # they do not trace
    assert not isinstance(config.device_memory, str)
    of_pages = max(demand.needed_slots * demand.layout.slot_bytes, config.device_memory or 0)
    if exact or varies or estimate >= _TRIFLE * free or of_pages > room:
        tower = tower_of(model, config, demand, image_tokens)
        activations = counted(model, config, demand, tokens, recompute)
        others = others_of(demand, activations, gradients, tower)
        levels = (*levels_below(recompute), recompute) if varies else ()
        known = [traced(model, config, demand, tokens, level) for level in levels]
        if None not in known:  # else a rule of thumb, which may say too little of some
            of_levels = tuple(one for one in known if one is not None)
    return Needs(
        others=others,
        activations=of_levels,
        host_spare=spare_of(model.causal.parameters()) // weights.ranks,
        linear_flops=linear_flops(model.layers),
    )


def tower_of(model: CausalModel, config: Config, demand: PageDemand, image_tokens: int) -> TowerUse:
    """What a call's images take around its chunks; nothing where that cannot be told.

    Both numbers of tokens are rounded up, as :func:`counted_tokens` does it.

    Raises:
        ValueError: there are some, and the model sees none.
    """
    shown = _rounded_up(image_tokens)
    tokens = max(shown, _rounded_up(demand.batch * (demand.chunks.tokens + 1)))
    try:
        tracer = tracer_of(model)
    except Exception:  # as of counted
        return _NO_TOWER
    try:
        return tracer.tower.use(shown, tokens, config.main_grad_dtype)
    except UnsupportedModelError:
        return _NO_TOWER


def _estimated_tower(model: CausalModel, image_tokens: int) -> int:
    """At most: what autograd keeps of a tower."""
    tower: Any = getattr(model.causal.config, "vision_config", None)
    if not image_tokens or tower is None:
        return 0
    layers = tower.depth if hasattr(tower, "depth") else tower.num_hidden_layers
    per_patch: int = (_HIDDEN_KEPT + 4 * _INNER_KEPT) * tower.hidden_size * layers
    return image_tokens * _PATCHES * per_patch * torch.finfo(model.dtype).bits // 8


def spare_of(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of an optimizer's state that may yet come to the host's memory."""
    return _STATE_BYTES * sum(p.numel() for p in parameters if p.requires_grad)


def activation_bytes(
    model: CausalModel, config: Config, demand: PageDemand, tokens: int, recompute: Recompute
) -> int:
    """What a chunk takes of torch's memory beside parameters and gradient sums.

    A rule of thumb where that is a trifle beside what is free; else counted.

    Args:
        tokens: of the chunk, as of :func:`counted_tokens`.
    """
    estimate = _estimated(model, demand, tokens, recompute)
    if estimate < _TRIFLE * free_memory(model.device):
        return estimate
    return counted(model, config, demand, tokens, recompute)


def counted(
    model: CausalModel, config: Config, demand: PageDemand, tokens: int, recompute: Recompute
) -> int:
    """The same by a run of one chunk on tensors without memory, where the model allows it."""
    found = traced(model, config, demand, tokens, recompute)
    return _estimated(model, demand, tokens, recompute) if found is None else found


def traced(
    model: CausalModel, config: Config, demand: PageDemand, tokens: int, recompute: Recompute
) -> int | None:
    """By such a run alone; sums in bf16 take work space. None: the model does not allow it."""
    try:
        tracer = tracer_of(model)
    except Exception:  # who cannot be copied raises whatever it likes
        return None
    try:
        trace = tracer.trace(
            setting_of(config, demand, tokens, recompute, waves=True, recurrent=bool(model.mixers))
        )
    except (UnsupportedModelError, TypeError):  # its forward looks at values
        return None
    of_routers = 0 if model.routers is None else model.routers.kept_bytes(demand.batch * tokens)
    return activations_of(trace) + of_routers


def setting_of(
    config: Config,
    demand: PageDemand,
    tokens: int,
    recompute: Recompute,
    *,
    waves: bool,
    recurrent: bool,
) -> Setting:
    """How a chunk of a call is traced.

    Args:
        tokens, recurrent: as of :func:`oomb.engine.ranks.tokens_here`.
        waves: as of :class:`Setting`.
    """
    return Setting(
        tokens=tokens,
        batch=demand.batch,
        recompute=recompute,
        waves=waves,
        main_grad_dtype=config.main_grad_dtype,
        expanded=demand.expanded,
        ranks=1 if recurrent else demand.ranks,
        divides_pages=config.divide_pages,
        head_groups=demand.shapes[0].groups,
    )


def _estimated(model: CausalModel, demand: PageDemand, tokens: int, recompute: Recompute) -> int:
    settings: Any = model.decoder.config
    hidden: int = settings.hidden_size
    inner = getattr(settings, "intermediate_size", 4 * hidden)
    if not isinstance(inner, int):  # one per layer
        inner = max(inner)
    size = torch.finfo(model.dtype).bits // 8
    per_token = (_HIDDEN_KEPT * hidden + _INNER_KEPT * inner) * size
    layers = len(model.layers)
    kept = per_token * layers
    if recompute == "layer":
        kept = 2 * hidden * size * layers + per_token
    scratch = 0
    if demand.expanded is not None:
        scratch = demand.expanded.scratch_bytes(demand.batch, size)
    return demand.batch * tokens * kept + _SCRATCH_TIMES * scratch


def gradient_bytes(
    parameters: Iterable[nn.Parameter], config: Config, weights: Weights = _WHOLE
) -> int:
    """The sums over chunks of the gradients of those that are trained."""
    trained = [p for p in parameters if p.requires_grad]
    sizes = [p.numel() * sum_dtype(p, config.main_grad_dtype).itemsize for p in trained]
    return weights.held(trained, sizes)
