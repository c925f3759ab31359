"""A Hugging Face causal language model as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oomb.errors import UnsupportedModelError
from oomb.model.adapters import Products, adapter_forwards, device_multiplies_wide
from oomb.model.base_model import base_model
from oomb.model.embedding import summed_embedding
from oomb.model.float8 import float8_forwards
from oomb.model.fused import fused_forwards, replaced_forwards
from oomb.model.head import Head
from oomb.model.host_weights import HostWeights
from oomb.model.interface import AttentionCall, Handler, attention_handler, placeholder_mask
from oomb.model.last_product import LastProduct, last_products
from oomb.model.latent import divided_expansions, watched_expansions
from oomb.model.layer_shape import compute_capability
from oomb.model.linear import WeightSums, summed_forwards
from oomb.model.mixers import Mixer, MixerRunner
from oomb.model.own_code import interface_forwards, refuse_alibi
from oomb.model.rope import angles_of_call
from oomb.model.rotary import fused_rotation, modeling_files, replaced_rotation
from oomb.model.routers import Routers
from oomb.model.swap import Swaps
from oomb.model.temperature import Places, temperatures_of_call
from oomb.model.weight_only import unpacking_forwards

# Runs a decoder layer: (layer index, the layer's own forward, args, keywords) -> output.
LayerRunner = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_SHARED = -1  # in place of the layer of a module that several layers lead to
_running: ContextVar[int] = ContextVar("decoder layer that is running")


class CausalModel:
    """Decoder, layers and head of a causal language model.

    Attributes:
        mixers: what hands states from token to token beside attention, in the order of the forward.
        paged: of each decoder layer that calls attention, its number among these.
        ends_in_mixer: nothing attends behind the last mixer.
        mask_windows: of each decoder layer whose sliding window is in its mask alone.
        mask_blocks: of each decoder layer whose mask shows it blocks of tokens, their size.
        host_weights: of layers whose weights come from the host; None: all are on the device.
        capability: compute capability of its GPU, 90 for 9.0; None: it is elsewhere.
        routers: whose load-balancing loss is part of the model's own; None: there is no such loss.

    The check at construction finds these; without it every layer has attention alone.

    Raises:
        UnsupportedModelError: the model cannot be run exactly; names the layer and the reason.
    """

    def __init__(self, model: nn.Module) -> None:
        self.causal: Any = base_model(model)
        self.decoder: Any = _decoder(self.causal)
        self.layers = _decoder_layers(self.decoder)
        self.layer_names = _names(self.decoder, self.layers)
        self.head = Head(self.causal, self.decoder)
        self._attention_layer: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            for module in layer.modules():
                known = self._attention_layer.setdefault(id(module), index)
                self._attention_layer[id(module)] = index if known == index else _SHARED
        self.mixers: list[Mixer] = []
        self.paged = {index: index for index in range(len(self.layers))}
        self.ends_in_mixer = False
        self.mask_windows: dict[int, int] = {}
        self.mask_blocks: dict[int, int] = {}
        self.host_weights: HostWeights | None = None
        self.routers: Routers | None = None
        self.capability = compute_capability(self.device)
        _refuse_jitter(self.causal)
        _refuse_layerdrop(self.decoder)
        _refuse_replaced(self.causal)
        refuse_alibi(self.decoder, self.layer_names[0])
        self._fused = fused_forwards(self.decoder, self.device)
        self._products = Products() if device_multiplies_wide(self.device) else None
        self._rotating = modeling_files(self.decoder)
        self._rotation = fused_rotation(self.device)

    @property
    def modes(self) -> list[bool]:
        """Of all its modules, whether they are in training mode."""
        return [module.training for module in self.causal.modules()]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.causal.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.causal.get_input_embeddings().weight.dtype
        return dtype

    def expect_logits(self, argument: str) -> None:
        """Refuse what needs logits of tokens where a head classifies sequences.

        Raises:
            ValueError: it does.
        """
        if not self.head.gives_logits:
            raise ValueError(
                f"{argument}: expected a model with a language-model head, got "
                f"{type(self.causal).__name__}: train its head on engine.two_pass(…, "
                "hidden=True, logprobs=False)"
            )

    @property
    def loss_dtype(self) -> torch.dtype:
        """fp32, or fp64 for a model in fp64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def rng_devices(self) -> list[torch.device]:
        """Devices whose random state a call may change, beside the CPU."""
        return [self.device] if self.device.type == "cuda" else []

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding now: tokens may be added after an engine was made."""
        return int(self.causal.get_input_embeddings().weight.shape[0])

    @property
    def is_fused(self) -> bool:
        """Norms and gates run as single kernels."""
        return bool(self._fused)

    @property
    def rounds_elsewhere(self) -> bool:
        """Some of its parts, rotation included, run as other kernels than its own."""
        if self._products is not None and adapter_forwards(self.decoder, self._products):
            return True
        if float8_forwards(self.causal, None):
            return True
        return self.is_fused or (bool(self._rotating) and self._rotation is not None)

    def last_products(self, sums: WeightSums) -> list[LastProduct | None]:
        """Of each layer, as of :func:`oomb.model.last_product.last_products`."""
        return last_products(self.layers, sums.takes, self._products)

    def layer_of(self, module: nn.Module) -> int:
        """Index of the decoder layer that an attention module belongs to."""
        index = self._attention_layer.get(id(module))
        if index is None:
            raise UnsupportedModelError(
                f"{type(module).__name__}: attention outside the decoder's layers"
            )
        return _running.get() if index == _SHARED else index

    def window_of(self, call: AttentionCall) -> int:
        """Sliding window of a layer's attention; 0: unlimited."""
        return call.window or self.mask_windows.get(self.layer_of(call.module), 0)

    def layer_forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        """Forwards of the layers, during which :meth:`layer_of` knows whose turn it is."""
        return {layer: _telling(index, layer.forward) for index, layer in enumerate(self.layers)}

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        on_router_logits: Callable[[tuple[torch.Tensor, ...]], object] | None = None,
        **of_images: Any,
    ) -> torch.Tensor:
        """Last hidden states [batch, tokens, hidden_size] of a chunk; inside :meth:`session`.

        Args:
            on_router_logits: gets those of each router, [batch · tokens, experts].
        """
        arguments = {"attention_mask": placeholder_mask(input_ids.device), **of_images}
        if on_router_logits is not None:
            arguments["output_router_logits"] = True
        output = self.decoder(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **arguments
        )
        if on_router_logits is not None:
            on_router_logits(output.router_logits or ())
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def session(
        self,
        handler: Handler,
        run_layer: LayerRunner | None = None,
        run_mixer: MixerRunner | None = None,
        *,
        largest_position: int,
        rope_angles: str,
        sums: WeightSums | None = None,
        places: Places | None = None,
    ) -> Swaps:
        """Give attention, layers, angles and head to the engine; afterwards all is as before.

        Args:
            sums: takes the weight gradients of linear layers; None: autograd's usual way.
            places: of the tokens that are run, for queries that grow with them; None: from 0 on.
        """

        def begin(swaps: Swaps) -> None:
            swaps.also(attention_handler(self.decoder, handler))
            swaps.also(replaced_forwards(interface_forwards(self.decoder)))
            swaps.also(watched_expansions(self.decoder))
            for module in self.decoder.modules():
                # Hugging Face's own checkpointing would run every layer's attention again.
                if getattr(module, "gradient_checkpointing", False):
                    swaps.replace(module, "gradient_checkpointing", False)
            swaps.also(replaced_forwards(self._fused))
            if self._products is not None:
                swaps.also(replaced_forwards(adapter_forwards(self.decoder, self._products)))
            swaps.also(replaced_forwards(unpacking_forwards(self.causal)))
            swaps.also(replaced_forwards(float8_forwards(self.causal, sums)))
            swaps.also(replaced_rotation(self._rotating, self._rotation))
            if sums is not None:
                swaps.also(replaced_forwards(summed_forwards(self.causal, sums)))
                swaps.also(replaced_forwards(summed_embedding(self.causal, sums)))
            swaps.also(divided_expansions(self.decoder))
            if places is not None:
                swaps.also(temperatures_of_call(self.decoder, places))
            swaps.also(angles_of_call(self.decoder, largest_position, rope_angles))
            for index, (layer, forward) in enumerate(self.layer_forwards().items()):
                routed = forward if run_layer is None else _routed(index, forward, run_layer)
                swaps.replace(layer, "forward", routed)
            if run_mixer is not None:
                for index, mixer in enumerate(self.mixers):
                    forward = _routed(index, mixer.module.forward, run_mixer)
                    swaps.replace(mixer.module, "forward", forward)
            swaps.also(self.head.attached())

        return Swaps(begin)


def _telling(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def telling(*args: Any, **keywords: Any) -> Any:
        before = _running.set(index)
        try:
            return forward(*args, **keywords)
        finally:
            _running.reset(before)

    return telling


def _routed(
    index: int, forward: Callable[..., Any], run: LayerRunner | MixerRunner
) -> Callable[..., Any]:
    def routed(*args: Any, **keywords: Any) -> Any:
        return run(index, forward, args, keywords)

    return routed


def check_places(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse weights that are not there, or not together.

    Raises:
        UnsupportedModelError: some are on the meta device, or on another one than the rest.
    """
    places: set[torch.device] = set()
    for name, weight in weights:
        if weight.device.type == "meta":
            raise UnsupportedModelError(
                f"{name}: expected weights in memory, got none (device 'meta'); load them, or ask "
                "oomb.plan, which needs no weights"
            )
        places.add(weight.device)
    if len(places) > 1:
        named = ", ".join(sorted(map(str, places)))
        raise UnsupportedModelError(
            f"model: expected all weights on one device, got {named}; load it with "
            "device_map={'': 0}, or move it with model.to('cuda')"
        )


def _refuse_jitter(causal: PreTrainedModel) -> None:
    for name, module in causal.named_modules():
        jitter = getattr(module, "jitter_noise", 0) or getattr(module, "router_jitter_noise", 0)
        if jitter:
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}): router jitter is not supported"
            )


def _refuse_layerdrop(decoder: nn.Module) -> None:
    for name, module in decoder.named_modules():
        dropped = getattr(module, "layerdrop", 0) or 0
        if dropped > 0:
            raise UnsupportedModelError(
                f"{name or 'decoder'} ({type(module).__name__}): expected layerdrop 0, got "
                f"{dropped}: it would leave a layer out of some chunks of a text; set it to 0"
            )


def _refuse_replaced(causal: PreTrainedModel) -> None:
    loss = vars(causal).get("_loss_function")
    if loss is not None and not str(getattr(loss, "__module__", "")).startswith("transformers."):
        raise UnsupportedModelError(
            f"{type(causal).__name__}: expected the loss_function of its class, got "
            f"{getattr(loss, '__qualname__', loss)!r}, which would not be called: the engine "
            "computes the cross-entropy of each token itself; weigh tokens with loss_weights, and "
            "take the replacement away with del model._loss_function"
        )
    own_term = getattr(causal, "z_loss_coefficient", 0) or 0
    if own_term:
        raise UnsupportedModelError(
            f"{type(causal).__name__}: expected z_loss_coefficient 0, got {own_term}: its loss has "
            "a term of its own, which the engine does not add; set it to 0 and give the term with "
            "token_loss"
        )
    wrapper = vars(causal).get("forward")
    if getattr(wrapper, "__wrapped__", None) is not None and "_original_forward" in vars(causal):
        raise UnsupportedModelError(
            f"{type(causal).__name__}: its forward is wrapped by accelerate's mixed precision, "
            "which would hold for its head alone; give the engine "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False) and call it inside "
            "accelerator.autocast()"
        )


def _decoder(causal: Any) -> nn.Module:
    """The decoder; some models mean a head or themselves by ``get_decoder``."""
    decoder: Any = causal.get_decoder()
    is_one = isinstance(decoder, PreTrainedModel) and decoder is not causal
    if is_one and decoder.get_output_embeddings() is not None:
        return _decoder(decoder)
    inner = decoder if is_one else getattr(causal, "model", None)
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(causal).__name__}: expected a decoder (a transformers model) as "
            f"model.get_decoder() or model.model, got {type(decoder).__name__}"
        )
    return inner


def _decoder_layers(decoder: Any) -> list[nn.Module]:
    """The list of modules that the decoder's config calls hidden layers; the outermost such."""
    config = decoder.config
    number = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
    if number == 0:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: expected at least one decoder layer, got a config with none"
        )
    found = [(n, m) for n, m in decoder.named_modules() if isinstance(m, nn.ModuleList)]
    lists = [(name.count("."), m) for name, m in found if len(m) == number]
    depth = min((d for d, _ in lists), default=0)
    outermost = [m for d, m in lists if d == depth]
    if len(outermost) != 1:
        sizes = ", ".join(f"{name} of {len(m)}" for name, m in found[:4])
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: expected its decoder layers in one torch.nn.ModuleList of "
            f"as many modules as its config has layers ({number}), got {sizes or 'none'}"
        )
    return list(outermost[0])


def _names(decoder: nn.Module, layers: list[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in decoder.named_modules()}
    return [f"{names[id(layer)]} ({type(layer).__name__})" for layer in layers]
