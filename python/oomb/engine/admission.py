"""What every call passes before anything is allocated: an open engine, arguments that fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from oomb.config import Config
from oomb.core.inputs import CallInputs, expect
from oomb.core.main_grad import check_sums
from oomb.engine.images import inputs_with_images
from oomb.engine.ranks import gathering
from oomb.engine.router_loss import expect_divisor, expect_settings_fit, routed
from oomb.engine.training import Training
from oomb.errors import Error
from oomb.model import one_call
from oomb.model.causal import CausalModel, check_places
from oomb.model.host_weights import moved_to_host
from oomb.model.quantized import check_quantized
from oomb.model.rope import warn_of_far_positions, warn_of_unknown_positions
from oomb.model.swap import Swaps
from oomb.parallel.agreement import arguments_text, model_text
from oomb.parallel.placement import Placement
from oomb.parallel.weights import Weights

T = TypeVar("T")


class Admission:
    """Lets calls of one engine in, in the process that made it and until it is closed.

    Attributes:
        closed: no call will be let in again.
    """

    def __init__(self, training: Training, placement: Placement, weights: Weights) -> None:
        self.closed = False
        self._training = training
        self._model = training.model
        self._config = training.config
        self._placement, self._weights = placement, weights
        self._process = os.getpid()
        self._warned_of_far = False
        self._warned_of_unknown = False
        expect_settings_fit(self._model, self._config)

    def close(self) -> None:
        """Let no call in again."""
        self.closed = True
        if self._model.host_weights is not None:
            self._model.host_weights.close()

    def together(self, prepare: Callable[[], T], images: Mapping[str, Any]) -> T:
        """What ``prepare`` returned, which checks a call's arguments; an error of one rank is
        raised by all.

        Args:
            images: as of :meth:`checked`; ranks that gather weights for them must do so alike.

        Raises:
            Error: no call can run; at once, since nobody answers a rank that has left the others.
        """
        self.expect_usable()
        if self._weights.is_sharded:
            given = sorted(name for name, value in images.items() if value is not None)
            self._placement.expect_same(lambda: {"arguments for images": repr(given)})
            if given:
                return gathering(self._placement, self._weights, prepare)
        return self._placement.together(prepare)

    def checked(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        *,
        images: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> CallInputs:
        """A call's arguments as the chunk loop takes them.

        Args:
            images: the model's own arguments for images, as they were given.

        Raises:
            ValueError, Error: of :meth:`oomb.Engine.forward_backward`.
        """
        wanted = routed(self._model, images, others)
        inputs = inputs_with_images(
            self._model, self._config, self._weights, input_ids, labels, images, wanted
        )
        if wanted is not others:
            expect_divisor(inputs, others)
        if self._config.rope_angles == "model" and not self._warned_of_far:
            self._warned_of_far = warn_of_far_positions(inputs.largest_position)
        if not self._warned_of_unknown:
            config = self._model.causal.config
            self._warned_of_unknown = warn_of_unknown_positions(inputs.largest_position, config)
        return inputs

    def expect_alike(self, images: Mapping[str, Any], **arguments: Any) -> None:
        """Raise a ValueError unless all ranks make the same call with the same weights.

        Args:
            images: as of :meth:`checked`.
        """
        if self._placement.ranks == 1:
            return
        causal, device = self._model.causal, self._model.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        settings = {
            "config": self._config,
            "engine.state_dict()": self._training.state(),
            "torch.autocast": autocast,  # pages and messages are in its dtype
        }
        self._placement.expect_same(
            lambda: arguments_text({**settings, **arguments, **images}) | model_text(causal)
        )

    def expect_usable(self) -> None:
        """Raise an Error where no call can run."""
        self.expect_own_process()
        if self.closed:
            raise Error("engine: expected an open engine, got one that was closed")
        one_call.expect_none()  # before other ranks are waited for

    @property
    def is_usable(self) -> bool:
        """In the engine's own process, while it is open."""
        return not self.closed and os.getpid() == self._process

    def expect_own_process(self) -> None:
        """Raise an Error in a process forked from the engine's."""
        if os.getpid() != self._process:
            raise Error(
                f"engine: expected a call in process {self._process}, which made the engine, got "
                f"one in process {os.getpid()}, forked from it; make an engine of its own there"
            )


def admitted(model: nn.Module, config: Config, weights: Weights) -> CausalModel:
    """A model whose parameters are where, and of what kind, an engine can use them.

    Raises:
        UnsupportedModelError, ValueError: they are not.
    """
    with Swaps() as swaps:
        weights.begin(swaps.afterwards)
        causal = CausalModel(model)
        if config.weights == "device":
            check_places(causal.causal.named_parameters())
        check_sums(causal.causal.parameters(), config.main_grad_dtype)
        check_quantized(causal.causal)
    if config.weights == "host":
        expect(not weights.is_sharded, "weights", "'device' for a sharded model", "'host'")
        moved = moved_to_host(causal.causal, causal.layers, causal.layer_names)
        causal = CausalModel(model)  # of the device that it is on now
        causal.host_weights = moved
    weights.know_layers(causal.layers)
    return causal
