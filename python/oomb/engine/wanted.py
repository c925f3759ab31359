"""Which per-token values a call in two passes gives, and the room for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from oomb.core.inputs import expect
from oomb.core.loss import ChunkLoss
from oomb.core.token_values import STATISTICS, TokenValues
from oomb.engine.router_loss import expect_no_router_loss
from oomb.model.causal import CausalModel
from oomb.parallel.whole import has_shards


@dataclass(frozen=True)
class Wanted:
    """Which per-token values a call gives."""

    logprobs: bool
    entropies: bool
    hidden: bool
    temperature: float
    statistics: tuple[str, ...]

    @staticmethod
    def checked(
        logprobs: bool,
        entropies: bool,
        hidden: bool,
        temperature: float,
        statistics: Sequence[str] = (),
    ) -> Wanted:
        """
        Raises:
            ValueError: nothing is asked for, or no temperature.
        """
        for name, value in (("logprobs", logprobs), ("entropies", entropies), ("hidden", hidden)):
            expect(isinstance(value, bool), name, "True or False", repr(value))
        some = logprobs or entropies or hidden
        expect(some, "logprobs", "True where neither entropies nor hidden is", "False")
        finite = isinstance(temperature, Real) and 0 < temperature < math.inf
        expect(finite, "temperature", "a number > 0", repr(temperature))
        known = not isinstance(statistics, str) and set(statistics) <= set(STATISTICS)
        expect(known, "statistics", f"some of {', '.join(STATISTICS)}", repr(statistics))
        return Wanted(logprobs, entropies, hidden, float(temperature), tuple(statistics))

    def expect_given_by(self, model: CausalModel) -> None:
        """Raise an error where a head that classifies sequences has no such values, or is sharded,
        or where the model adds a loss of its own to any of them."""
        expect_no_router_loss(model, "two_pass")
        if not model.head.gives_logits and has_shards(model.head.own_weights()):
            raise ValueError(
                "model: expected a whole head beside sharded weights, got shards of it, and it "
                "runs outside the engine's calls: leave it out by fully_shard(…, "
                "ignored_params=set(model.score.parameters()))"
            )
        if self.logprobs or self.entropies or self.statistics:
            model.expect_logits("logprobs, entropies and statistics")

    def values(self, model: CausalModel, plain: ChunkLoss) -> TokenValues:
        """Zeros for each, in place of a plain loss of the same call."""
        shape = plain.inputs.batch, plain.inputs.num_given

        def room(dtype: torch.dtype = model.loss_dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        values: dict[str, torch.Tensor] = {}
        if self.logprobs:
            values["logprobs"] = room()
        if self.entropies:
            values["entropies"] = room()
        statistics = {
            name: room(torch.bool) if name == "is_top1" else room() for name in self.statistics
        }
        if self.hidden:
            size = model.causal.get_input_embeddings().weight.shape[1]
            values["hidden"] = torch.zeros(*shape, size, dtype=model.dtype)
        return TokenValues(
            **vars(plain),
            temperature=self.temperature,
            values=values,
            statistics=statistics,
        )
