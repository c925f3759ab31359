"""One forward of a model by layers: what each was given, asked of attention, and made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from oomb.model.causal import CausalModel, LayerRunner
from oomb.model.fused import replaced_forwards
from oomb.model.generators import kept_generators
from oomb.model.interface import AttentionCall, Handler
from oomb.model.mixers import Mixer, MixerRunner, States, joined
from oomb.model.modes import kept_modes
from oomb.model.own_attention import watched_attention
from oomb.model.own_code import watched_code
from oomb.model.rope import rotary_modules
from oomb.model.swap import Swaps, swapping
from oomb.model.widened import mixed_in_fp32

_KEPT_BUFFER = 2**16  # elements up to which a buffer is also kept by value
# transformers' note that hooks which collect outputs are there. They stay, so the note has to: it
# would install them again, and then collect everything twice.
_HOOKED = "_output_capturing_hooks_installed"


@dataclass
class Attended:
    """One call of attention and its result [batch, tokens, heads, head_dim]."""

    call: AttentionCall
    o: torch.Tensor
    in_fp64: bool = False


@dataclass
class Observation:
    """Hidden states that enter and leave layers, and their attention; by layer.

    ``mixed`` has what mixers gave, by their number; ``wide`` what they gave in fp32 row by row, and
    for all rows at once; ``cut`` those in which gradient does not reach a state that they read.
    """

    entered: dict[int, torch.Tensor] = field(default_factory=dict)
    attended: dict[int, Attended] = field(default_factory=dict)
    mixed: dict[int, Any] = field(default_factory=dict)
    wide: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    left: dict[int, torch.Tensor] = field(default_factory=dict)
    hidden: torch.Tensor | None = None  # the decoder's output
    logits: torch.Tensor | None = None


def observe_own(
    model: CausalModel, ids: torch.Tensor, positions: torch.Tensor | None
) -> Observation:
    """The model's own forward, with its own attention; positions None: those it takes itself."""
    seen = Observation()

    def attended(call: AttentionCall, o: torch.Tensor, in_fp64: bool) -> None:
        seen.attended[model.layer_of(call.module)] = Attended(call, o, in_fp64)

    def layer(index: int, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        reseed(model, index)
        seen.entered[index] = given_to(args, keywords).clone()  # layers may change it in place
        output = forward(*args, **keywords)
        seen.left[index] = first_of(output).clone()
        return output

    def decoder(forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if positions is not None and keywords.get("position_ids") is None:
            keywords["position_ids"] = positions  # some heads do not hand them on
        output = forward(*args, **keywords)
        seen.hidden = output.last_hidden_state
        return output

    def mixer(index: int, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        seen.mixed[index] = forward(*args, **keywords)
        return seen.mixed[index]

    forwards = {model.decoder: partial(decoder, model.decoder.forward)}
    for index, mixing in enumerate(model.mixers):
        forwards[mixing.module] = partial(mixer, index, mixing.module.forward)
    for index, (module, forward) in enumerate(model.layer_forwards().items()):
        forwards[module] = partial(layer, index, forward)
    with (
        watched_attention(attended),
        watched_code(model.decoder, attended),
        replaced_forwards(forwards),
    ):
        reseed(model, -1)
        output = model.causal(input_ids=ids, position_ids=positions, use_cache=False)
    seen.logits = output.logits
    return seen


def observe_chunks(
    model: CausalModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    own: Observation,
    first: int = 0,
    *,
    wide: bool = False,
) -> Observation:
    """The decoder as the engine runs it, a chunk in each row; what it does is observed only once.

    Every layer is given what it was given in ``own``, and the same results of attention and of
    mixers. So what differs is the layer's own doing, and a router that flips by rounding is not
    carried on. A mixer runs row by row, and each row has the states that the one before has left.

    Args:
        first: token of each row from where this is so; those before it keep what they have, and
            their attention gives zeros.
        wide: mixers also run in fp32.
    """
    seen = Observation()

    def attention(call: AttentionCall) -> torch.Tensor:
        index = model.layer_of(call.module)
        shape = (*call.q.transpose(1, 2).shape[:3], call.v.shape[-1])
        o = own.attended[index].o.to(call.q.dtype).reshape(shape).clone()
        o[:, :first] = 0
        seen.attended[index] = Attended(call, o)
        return o.transpose(1, 2)

    def layer(index: int, forward: Callable[..., Any], args: Any, keywords: Any) -> Any:
        reseed(model, index)
        given = given_to(args, keywords)
        seen.entered[index] = given
        theirs = own.entered[index].reshape(given.shape).clone()
        theirs[..., :first, :] = given[..., :first, :]
        args, keywords = replaced(args, keywords, given, theirs)
        output = forward(*args, **keywords)
        seen.left[index] = first_of(output).clone()
        return output

    def mixer(index: int, forward: Callable[..., Any], args: Any, keywords: Any) -> Any:
        mixing = model.mixers[index]
        in_fp32 = mixed_in_fp32(mixing, forward, args, keywords) if wide else None
        if in_fp32 is not None:
            seen.wide[index] = in_fp32
        outputs, states = [], None
        for row in mixing.given(args, keywords).split(1):
            if states is not None and _is_cut(mixing, forward, args, keywords, row, states):
                seen.cut.add(index)
            output, states = mixing.stretch(forward, args, keywords, row, states)
            outputs.append(output)
        seen.mixed[index] = joined(outputs, dim=0)
        return _exchanged(seen.mixed[index], own.mixed[index], first)

    seen.hidden = hidden_in_session(model, ids, positions, attention, layer, mixer)
    return seen


def hidden_in_session(
    model: CausalModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    attention: Handler,
    layer: LayerRunner,
    mixer: MixerRunner,
) -> torch.Tensor:
    """The decoder's output, of these in place of attention, layers and mixers."""
    places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    session = model.session(
        attention,
        layer,
        mixer,
        largest_position=int(positions.max()),
        rope_angles="model",
        places=lambda: places,
    )
    with session:
        reseed(model, -1)
        return model.hidden(ids, positions)


def _is_cut(
    mixing: Mixer,
    forward: Callable[..., Any],
    args: Any,
    keywords: Any,
    row: torch.Tensor,
    before: States,
) -> bool:
    """Whether a mixer's output or a state it hands on changes with what it was handed, while
    autograd does not lead there."""

    def made(states: States) -> list[torch.Tensor]:
        output, left = mixing.stretch(forward, args, keywords, row, states)
        parts = [output] if isinstance(output, torch.Tensor) else list(output)
        return [x for x in (*parts, *left.values()) if isinstance(x, torch.Tensor)]

    with torch.enable_grad():
        leaves = {name: state.detach().clone().requires_grad_() for name, state in before.items()}
        given = made(leaves)
        without = made({name: torch.zeros_like(state) for name, state in before.items()})
    return any(
        not torch.equal(one, other) and not _leads_to(one, list(leaves.values()))
        for one, other in zip(given, without, strict=True)
    )


def _leads_to(made: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    """Whether the graph of a tensor has one of the leaves."""
    pending, known = [made.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if any(getattr(node, "variable", None) is leaf for leaf in leaves):
            return True
        pending += [earlier for earlier, _ in node.next_functions]
    return False


def reseed(model: CausalModel, layer: int) -> None:
    """Let dropout draw the same in every observation; inside :func:`undisturbed`."""
    torch.default_generator.manual_seed(layer + 1)
    if model.device.type == "cuda":
        with torch.cuda.device(model.device):
            torch.cuda.manual_seed(layer + 1)


@swapping
def undisturbed(swaps: Swaps, model: CausalModel) -> None:
    """Without autograd. Afterwards random state, buffers and what modules remember are as before.

    What is remembered is that of rotary modules and models. Other modules keep what they set: a
    quantised layer may have packed its weights anew.
    """
    modules = list(model.causal.modules())
    buffers = [(m, dict(m._buffers)) for m in modules if m._buffers]
    small = [
        (x, x.clone(), x._version)
        for _, named in buffers
        for x in named.values()
        if x is not None and x.numel() <= _KEPT_BUFFER and not x.is_inference()
    ]
    models = [m for m in modules if isinstance(m, PreTrainedModel)]
    memories = [(m, dict(vars(m))) for m in (*models, *rotary_modules(model.decoder))]

    def restore() -> None:
        with torch.no_grad():
            for module, remembered in memories:
                _restore(vars(module), remembered)
            for module, named in buffers:
                _restore(module._buffers, named)
            for buffer, value, version in small:
                if buffer._version != version:
                    buffer.copy_(value)

    swaps.afterwards(kept_modes())
    swaps.afterwards(restore)
    swaps.also(kept_generators(model.rng_devices()))
    torch.set_grad_enabled(False)


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys() - {_HOOKED}:
        del now[name]
    now.update(before)


def given_to(args: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    """The hidden states among a layer's arguments."""
    named = keywords.get("hidden_states")
    given: torch.Tensor = named if named is not None else args[0]
    return given


def replaced(
    args: tuple[Any, ...], keywords: dict[str, Any], given: torch.Tensor, new: torch.Tensor
) -> tuple[list[Any], dict[str, Any]]:
    """A layer's arguments with other hidden states."""
    changed = [new if x is given else x for x in args]
    return changed, {name: new if x is given else x for name, x in keywords.items()}


def _exchanged(ours: Any, theirs: Any, first: int) -> Any:
    """Their output of a mixer from token ``first`` of each row on, in the shape of ours."""
    if not isinstance(ours, torch.Tensor):
        return type(ours)(_exchanged(x, y, first) for x, y in zip(ours, theirs, strict=True))
    exchanged = theirs.reshape(ours.shape).to(ours.dtype).clone()
    exchanged[:, :first] = ours[:, :first]
    return exchanged


def first_of(output: Any) -> torch.Tensor:
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return first
