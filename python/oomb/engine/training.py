"""What the calls of an engine that train have in common: number, draws, parameters, state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from oomb.config import Config, SampledChunks
from oomb.core.call_pages import seed_of_call
from oomb.core.inputs import expect
from oomb.core.main_grad import MainGrads
from oomb.model.causal import CausalModel
from oomb.model.swap import Swaps, as_before_afterwards


class Training:
    """Training through one engine.

    Attributes:
        grads: take the gradients of a call.
        number: of calls whose gradients are written.
    """

    def __init__(self, model: CausalModel, config: Config, grads: MainGrads) -> None:
        self.model = model
        self.config = config
        self.grads = grads
        self.number = 0

    def parameters(self) -> list[nn.Parameter]:
        """Those that receive gradients.

        Raises:
            ValueError: there are none, or they cannot.
        """
        parameters = [p for p in self.model.causal.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(
                "model: expected parameters that require gradients, got none (adapters of peft are "
                "loaded frozen unless is_trainable=True)"
            )
        if any(p.is_inference() for p in parameters):
            raise ValueError(
                "model: expected parameters made outside torch.inference_mode(), got some of inside"
            )
        return parameters

    def drawn(self, num_chunks: int) -> list[int]:
        """Chunks of the next call that receive gradient, ascending."""
        drawn = list(self.config.backward.draw(num_chunks, self.number))
        if drawn != sorted(set(drawn)) or not all(0 <= chunk < num_chunks for chunk in drawn):
            raise ValueError(
                f"backward.draw: expected ascending chunks below {num_chunks}, got {drawn}"
            )
        return drawn

    def upcoming(self, num_chunks: int) -> Sequence[int]:
        """The same before the call: one where none is drawn, a range where all are."""
        if isinstance(self.config.backward, SampledChunks):
            return self.drawn(num_chunks) or [0]
        return range(num_chunks)  # a list of a long text's would be long

    @property
    def loss_factor(self) -> float:
        """Of a drawn chunk."""
        rule = self.config.backward
        return rule.loss_factor if isinstance(rule, SampledChunks) else 1.0

    def collecting(self, parameters: list[nn.Parameter]) -> Swaps:
        """While active, the next call's gradients are added to the sums."""
        return self.grads.collecting(parameters, seed_of_call(self.number))

    def settled(self) -> Callable[[], None]:
        """Ends the call that begins now: it counts if its gradients are written, all or none."""
        return partial(self._settle, self.number)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to draw and round as this one would have."""
        rule = self.config.backward
        seed = rule.seed if isinstance(rule, SampledChunks) else None
        return {"step": self.number, "sampling_seed": seed}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`state`.

        Raises:
            ValueError: no such state, or one of another sampling seed.
        """
        step = state.get("step") if isinstance(state, dict) else None
        whole = isinstance(step, int) and step >= 0
        expect(whole, "state", "one of engine.state_dict()", repr(state))
        own = self.state()["sampling_seed"]
        if state.get("sampling_seed") != own:
            raise ValueError(
                f"state: expected sampling_seed {own}, got {state.get('sampling_seed')}"
            )
        self.number = state["step"]

    def add_zeros(self, parameters: list[nn.Parameter]) -> None:
        """A call of which no chunk was drawn: the estimate is 0."""

        def run() -> None:
            with Swaps() as swaps:
                self.grads.clear()
                swaps.afterwards(self.settled())
                self.grads.commit(parameters, keep=False, zeros=True)

        as_before_afterwards(run)

    def _settle(self, number: int) -> None:
        if self.grads.settle():
            self.number = number + 1
