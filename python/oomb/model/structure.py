"""Whether a model's tokens meet in attention and in states that are handed on, and nowhere else.

Its attention has to be what the engine computes, and a mixer (a recurrence, a convolution) has to
give in two stretches, with its states carried over, what it gives in one. Then running the model in
chunks is exact. Rounding decides nothing here: the same tokens go through each layer twice, as one
row of two chunks and as two rows of one, with the same hidden states given to every layer and the
same results of attention. What works token by token cannot tell the two apart, routers and experts
included. What looks at other tokens, at the length of its input or at a place in it gives something
else. What does so too little to be seen is told by gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.crossing import crossings
from oomb.model.faults import is_models_own, models_own
from oomb.model.interface import AttentionCall
from oomb.model.layer_shape import LayerShape
from oomb.model.observation import Observation, observe_chunks, observe_own, undisturbed
from oomb.model.own_attention import plain_attention
from oomb.model.own_mixing import why_no_call
from oomb.model.probe import attention_shapes
from oomb.model.router_check import routers_of
from oomb.model.swap import Swaps, swapping

_CHUNK = 16  # tokens; two chunks are looked at
_FAR = 100_000  # a position that no short text has

# Errors are per token, relative to the token's norm. The same products over the same rows give 0 in
# bf16 and at most 4e-6 in fp32 (a library may round rows by their place); what is wrong shows by
# 5e-3 in bf16 and 1e-3 in fp32, even where it makes up 3 % of a layer.
_SAME = {torch.bfloat16: 2e-3, torch.float16: 3e-4}
_SAME_OTHERWISE = 5e-5
# Other kernels, or other rows beside them, round elsewhere: by a few units of the last place.
_ROUNDED = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
_ROUNDED_OTHERWISE = 1e-3
# Of mixers in fp32: those of random models are at 2e-6 or less.
_WIDE = 2e-4
# Attention functions that run in fp64 still take their softmax in fp32.
_IN_FP64 = 1e-4

_Place = tuple[int, str]  # a layer (their number: behind them all), and a part of it


def checked_shapes(model: CausalModel) -> list[LayerShape]:
    """Shapes of the attention of layers, of a model that gives in chunks what it gives as a whole.

    The model runs in the mode that it is in, and is afterwards as it was.

    Raises:
        UnsupportedModelError: it cannot be run exactly, or fails; names the layer and the reason.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (1, 2 * _CHUNK), generator=generator).to(model.device)
    near = torch.arange(2 * _CHUNK, device=model.device)[None]
    # Under the caller's autocast the two would differ by its rounding, and autograd refuses what is
    # made in an inference mode.
    autocast = torch.autocast(model.device.type, enabled=False)
    with torch.inference_mode(False), undisturbed(model), autocast, _still_head(model):
        own = _own(model, ids)
        shapes = attention_shapes(model, own.attended.keys())
        if model.mixers:
            own = _own(model, ids)  # with what they give
        _check_attention(model, own)
        _check_head(model, own, ids)
        _check_layers(model, own, ids, near)
        _check_gradient(model, own, ids, near)
        far = near + _reach(model, 2 * _CHUNK)
        there = _own_where_it_can(model, ids, far) if far[0, 0] else None
        if there is not None:
            _check_attention(model, there)
            _check_layers(model, there, ids, far)
    model.routers = routers_of(model)
    return shapes


@swapping
def _still_head(swaps: Swaps, model: CausalModel) -> None:
    """Dropout behind the decoder draws nothing: rows of the head are tried in several orders."""
    for module in model.head.dropouts():
        swaps.replace(module, "training", False)


def _own(model: CausalModel, ids: torch.Tensor) -> Observation:
    """The model's own forward, given nothing but tokens.

    Raises:
        UnsupportedModelError: it fails, or its logits are not finite.
    """
    with models_own(model.causal, f"its own forward fails on {ids.shape[-1]} tokens"):
        own = observe_own(model, ids, None)
    if own.logits is None or not bool(own.logits.isfinite().all()):
        raise UnsupportedModelError(
            f"{type(model.causal).__name__}: expected finite logits of its own forward, got NaN "
            "or infinity; look for weights that are not finite, or not loaded"
        )
    return own


def _own_where_it_can(
    model: CausalModel, ids: torch.Tensor, positions: torch.Tensor
) -> Observation | None:
    """The same at positions that the model need not have; None where it has not."""
    try:
        return observe_own(model, ids, positions)
    except Exception as error:
        if not is_models_own(error):
            raise
        return None


def _reach(model: CausalModel, tokens: int) -> int:
    """A first position far away, inside every table of positions that the model may have.

    Reading behind a table's end would break the GPU's context, not raise.
    """
    config: Any = model.causal.config.get_text_config()
    declared = {
        value
        for name, value in config.to_dict().items()
        if isinstance(value, int) and ("position" in name or "seq" in name or "context" in name)
    }
    embedding = model.causal.get_input_embeddings()
    reach = _FAR
    for module in model.decoder.modules():
        if isinstance(module, nn.Embedding) and module is not embedding:
            reach = min(reach, module.num_embeddings)
        named = {**vars(module), **module._buffers, **module._parameters}
        for name, table in named.items():
            if name != "weight" and isinstance(table, torch.Tensor) and table.ndim > 1:
                reach = min(reach, *(n for n in table.shape if n in declared), _FAR)
    return max(0, reach - tokens - 8)  # some tables begin with rows of their own


def _check_attention(model: CausalModel, own: Observation) -> None:
    """Each layer's own attention function against what the engine computes."""
    for layer, attended in own.attended.items():
        call, block = attended.call, model.mask_blocks.get(layer, 0)
        ours = plain_attention(replace(call, window=model.window_of(call), block=block))
        error = float(_errors(attended.o.flatten(2), ours.flatten(2)).max())
        limit = _IN_FP64 if attended.in_fp64 else _rounded(model)
        if not error <= limit:
            rounds = (
                ""
                if attended.in_fp64 or model.dtype not in _ROUNDED
                else (
                    f", or takes the softmax in {str(model.dtype).removeprefix('torch.')} (load it "
                    "with attn_implementation='sdpa')"
                )
            )
            raise UnsupportedModelError(
                f"{model.layer_names[layer]}: its attention function "
                f"({model.causal.config._attn_implementation!r}) does not give the softmax over "
                "earlier tokens that the engine computes: it has a bias, a cap, a mask or a scale "
                f"of its own{rounds} ({_by(error, limit)})"
            )


def _check_layers(
    model: CausalModel, own: Observation, ids: torch.Tensor, positions: torch.Tensor
) -> None:
    """Two chunks as rows of their own against one row of both."""

    def observed(
        ids: torch.Tensor, positions: torch.Tensor, first: int = 0, wide: bool = False
    ) -> Observation:
        with models_own(model.causal, "fails when it is run in chunks"):
            return observe_chunks(model, ids, positions, own, first, wide=wide)

    whole = own
    if model.rounds_elsewhere:
        whole = observed(ids, positions)
        _expect_few(model, _deviations(whole, own), _rounded(model), "run through fused kernels")
    other_past = ids.clone()
    other_past[:, :_CHUNK] = ids[:, _CHUNK:].flip(1)
    limit = _same(model)
    # States pass two borders at least: the second must not have forgotten the first.
    number = 4 if model.mixers else 2
    rows = observed(ids.view(number, -1), positions.view(number, -1), wide=_looks_wide(model))
    for mixer in rows.cut:
        raise UnsupportedModelError(
            f"{model.mixers[mixer].name}: reads a state of the tokens before that no gradient "
            f"would reach: it detaches it, or computes it outside of autograd{_at(positions)}"
        )
    given = [(mixer, x, own.mixed[mixer], _rounded(model)) for mixer, x in rows.mixed.items()]
    given += [(mixer, *both, _WIDE) for mixer, both in rows.wide.items()]
    for mixer, ours, theirs, most in given:
        error = float(_errors(_of_tokens(ours), _of_tokens(theirs)).max())
        if not error <= most:
            raise UnsupportedModelError(
                f"{model.mixers[mixer].name}: what it gives for tokens whose past it has as a "
                "state is not what it gives for all of them at once: it starts anew, or keeps "
                f"more than that state{_at(positions)} ({_by(error, most)})"
            )
    for place, errors in _deviations(rows, whole).items():
        error = float(errors.max())
        if not error <= limit:
            if place[1] == "left" and not _meets(model, own, place[0]):
                raise UnsupportedModelError(f"{why_no_call(model, place[0])}{_at(positions)}")
            whole = observed(ids, positions)
            mixed = _deviations(observed(other_past, positions, _CHUNK), whole, _CHUNK)
            if not float(_deviations(whole, own)[place].max()) <= _rounded(model):
                reason = "are others than in its own forward: look for positions of its own"
            elif not float(mixed[place].max()) <= limit:
                reason = (
                    "at a token depend on the tokens before it, outside of attention: look for a "
                    "convolution, a recurrence, a shift or a running statistic"
                )
            else:
                reason = (
                    "at a token depend on how many tokens it is given, or on its place among them: "
                    "look for a length, or for positions that it counts itself"
                )
            raise UnsupportedModelError(
                f"{_words(model, place)} {reason}{_at(positions)} ({_by(error, limit)})"
            )
    mixed = _deviations(observed(other_past, positions, _CHUNK), whole, _CHUNK)
    _expect_few(model, mixed, limit, "given other tokens beside them in the batch")


def _check_gradient(
    model: CausalModel, own: Observation, ids: torch.Tensor, positions: torch.Tensor
) -> None:
    """Refuse layers in which gradient goes from a token to others, though values may not show it.

    Raises:
        UnsupportedModelError: names the layer.
    """
    with models_own(model.causal, "fails when gradient goes through its layers"):
        places = crossings(model, ids, positions, own)
    if not places:
        return
    layer, part = places[0]
    if part == "left" and not _meets(model, own, layer):
        raise UnsupportedModelError(why_no_call(model, layer))
    raise UnsupportedModelError(
        f"{_words(model, places[0])} at a token depend on the hidden states of other tokens, "
        "outside of attention: gradient goes there, however little their values show it; look for "
        "a convolution, a shift, attention of its own, or a loss that is added in backward"
    )


def _expect_few(
    model: CausalModel, deviations: dict[_Place, torch.Tensor], limit: float, when: str
) -> None:
    """Most tokens agree; a few may go to other experts, since rounding differs here."""
    for place, errors in deviations.items():
        error = float(errors.median())
        if not error <= limit:
            raise UnsupportedModelError(
                f"{_words(model, place)} differ when {when} ({_by(error, limit)})"
            )


def _check_head(model: CausalModel, own: Observation, ids: torch.Tensor) -> None:
    """Logits of slices of hidden states, in any order, against the model's own."""
    assert own.hidden is not None and own.logits is not None
    if not model.head.gives_logits:
        with models_own(model.causal, "fails behind its decoder"), model.head.attached():
            ours = model.head.of_sequences(own.hidden, ids)
        error = float(_errors(ours, own.logits).max())
        if not error <= _rounded(model):
            raise UnsupportedModelError(
                f"{type(model.causal).__name__}: what it gives for a sequence is not made of the "
                f"hidden states of its last token ({_by(error, _rounded(model))})"
            )
        return
    hidden, expected = own.hidden.reshape(-1, own.hidden.shape[-1]), own.logits[0]
    cases = {
        "made of its decoder's output": (hidden, expected),
        "made of tokens in another order": (hidden.flip(0), expected.flip(0)),
        "made of fewer tokens": (hidden[:_CHUNK], expected[:_CHUNK]),
    }
    for what, (rows, logits) in cases.items():
        with models_own(model.causal, "fails when it is run in chunks"), model.head.attached():
            ours = model.head.logits(rows)
        error = float(_errors(ours, logits).max())
        if not error <= _rounded(model):
            raise UnsupportedModelError(
                f"{type(model.causal).__name__}: its logits differ when {what} "
                f"({_by(error, _rounded(model))})"
            )


def _deviations(seen: Observation, own: Observation, first: int = 0) -> dict[_Place, torch.Tensor]:
    """Error of each token from ``first`` on, by place in the order of the forward."""
    found: dict[_Place, torch.Tensor] = {}
    for layer in own.entered:
        found[layer, "entered"] = _from(first, seen.entered[layer], own.entered[layer])
        if layer in own.attended:
            ours, theirs = (_named(x.attended[layer].call) for x in (seen, own))
            for name in ours:
                found[layer, name] = _from(first, ours[name], theirs[name])
        found[layer, "left"] = _from(first, seen.left[layer], own.left[layer])
    assert seen.hidden is not None and own.hidden is not None
    found[len(own.entered), "entered"] = _from(first, seen.hidden, own.hidden)
    return found


def _meets(model: CausalModel, own: Observation, layer: int) -> bool:
    """Whether tokens may meet in a layer."""
    return layer in own.attended or any(mixer.layer == layer for mixer in model.mixers)


def _of_tokens(output: Any) -> torch.Tensor:
    """A mixer's output, one tensor or several, as [batch, tokens, features]."""
    if isinstance(output, torch.Tensor):
        return output.flatten(2)
    return torch.cat([_of_tokens(part) for part in output], dim=-1)


def _named(call: AttentionCall) -> dict[str, torch.Tensor]:
    named = {"queries": call.q, "keys": call.k, "values": call.v}
    return {name: x.transpose(1, 2).flatten(2) for name, x in named.items()}


def _from(first: int, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return _errors(ours[..., first:, :], theirs[..., first:, :])


def _errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Error of each token, relative to its norm; features come last."""
    ours, theirs = (x.double().reshape(-1, x.shape[-1]) for x in (ours, theirs))
    norm = theirs.norm(dim=-1)
    floor = 1e-3 * norm.mean()
    errors: torch.Tensor = (ours - theirs).norm(dim=-1) / norm.maximum(floor).clamp_min(1e-30)
    return errors


def _same(model: CausalModel) -> float:
    return _SAME.get(model.dtype, _SAME_OTHERWISE)


def _rounded(model: CausalModel) -> float:
    return _ROUNDED.get(model.dtype, _ROUNDED_OTHERWISE)


def _looks_wide(model: CausalModel) -> bool:
    """Whether mixers run in fp32 too. A GPU's kernels for them round products to TF32, and would
    be compiled for a type that training never uses."""
    return model.dtype in _ROUNDED and model.device.type == "cpu"


def _words(model: CausalModel, place: _Place) -> str:
    (layer, part), names = place, model.layer_names
    if part == "left":
        return f"{names[layer]}: its hidden states"
    if part != "entered":
        return f"{names[layer]}: its {part}"
    kind = type(model.decoder).__name__
    if layer == 0:
        return f"{kind}: hidden states before {names[0]}"
    after = f"hidden states behind {names[layer - 1]}"
    return f"{kind}: {after}" + (f" and before {names[layer]}" if layer < len(names) else "")


def _at(positions: torch.Tensor) -> str:
    start = int(positions[0, 0])
    return f", at positions from {start} on" if start else ""


def _by(error: float, limit: float) -> str:
    return f"by {error:.1e} of a token's norm, limit {limit:.0e}"
