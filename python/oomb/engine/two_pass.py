"""A call in two passes, between which its user computes any loss of per-token values."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch

from oomb.callers import warn_caller
from oomb.core.inputs import all_labels, check_callable
from oomb.core.loop import OnProgress
from oomb.core.loss import ChunkLoss
from oomb.core.pools import Pools
from oomb.core.token_values import TokenValues
from oomb.core.tree import tree_of
from oomb.engine.admission import Admission
from oomb.engine.call import Call
from oomb.engine.calls import Calls
from oomb.engine.ranks import spans_here
from oomb.engine.surroundings import surroundings
from oomb.engine.training import Training
from oomb.engine.wanted import Wanted
from oomb.engine.watch import Watch
from oomb.errors import Error
from oomb.model.swap import Swaps, after_all, as_before_afterwards, entered
from oomb.parallel.failure import failed_rank
from oomb.parallel.token_values import agreed, complete_
from oomb.results import Stats

_HOW = {
    "new": "one whose values were taken, inside its with block",
    "running": "one that is not running",
    "swept": "one that was not swept: a second sweep would add its gradient twice",
    "failed": "one without an error: its pages are gone; begin the call anew",
    "over": "one inside its with block: behind it its pages are gone",
    "constant": "one begun with gradients enabled, whose values are no constants",
}


class TwoPass(AbstractContextManager["TwoPass"]):
    """Per-token values of a call as leaves, then its sweep with the gradients they were given.

    For a loss F(a) of values a_t of tokens, dF/dθ = Σ_t g_t da_t/dθ with g = dF/da. Entering the
    block fills, which gives a; the user's ``backward()`` gives g; :meth:`sweep` does the rest. It
    is exact for every F, of one token or of all.

    Entering raises OutOfMemoryError as a call does. Leaving the block without a sweep is no error,
    and no gradient.

    Attributes:
        logprobs: [batch, tokens] log-probability of each labelled token given its past, at the
            token itself; 0 where there is none. fp32 (fp64 for fp64 models).
        entropies: [batch, tokens] of the distributions that predict them, in nats.
        hidden: [batch, tokens, hidden_size] last hidden states behind the final norm, in the
            model's dtype, in host memory; undefined in padding.
        statistics: [batch, tokens] each, constants, by the names that were asked for:
            "mean_logits" (over the temperature), "is_top1" (bool: the token is the most likely
            one), "log_sum_sq_probs" (log Σ p²).
        num_valid_tokens: labelled tokens.

    Values that were not asked for are None.
    """

    _said = False  # that a call came between two passes

    def __init__(
        self,
        calls: Calls,
        pools: Pools,
        training: Training,
        admission: Admission,
        wanted: Wanted,
        on_progress: OnProgress | None,
        share_prefixes: bool | str,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None,
        *,
        images: dict[str, Any],
        **given: Any,
    ) -> None:
        """Arguments as of :meth:`oomb.Engine.two_pass`; nothing is run."""
        self._calls, self._pools, self._training = calls, pools, training
        self._model, self._admission = training.model, admission
        self._placement = calls.placement
        self._wanted, self._on_progress = wanted, on_progress
        self._held = Swaps()  # the pages
        self._state = "new"
        self._displaced = False
        self._leaves: dict[str, torch.Tensor] = {}
        self.statistics: dict[str, torch.Tensor] = {}
        self._watch = Watch(self._model, head=not wanted.hidden)
        self._train = torch.is_grad_enabled()

        def prepare() -> None:
            check_callable("on_progress", on_progress)
            wanted.expect_given_by(self._model)
            targets = all_labels(input_ids, given["attention_mask"]) if labels is None else labels
            none: dict[str, Any] = {"loss_weights": None, "num_items_in_batch": None}
            none["every_token"] = wanted.hidden
            rows = admission.checked(input_ids, targets, images=images, **given, **none)
            mixers = self._model.mixers
            self._tree = tree_of(share_prefixes, rows, training.config, mixers, wanted.hidden)
            self._inputs = rows if self._tree is None else self._tree.inputs
            self.num_valid_tokens = rows.num_valid
            if self._train:
                if torch.is_inference_mode_enabled():
                    raise Error("two_pass: expected no torch.inference_mode() around it, got one")
                self._parameters = training.parameters()

        admission.together(prepare, images)
        others = {"share_prefixes": share_prefixes, "torch.is_grad_enabled()": self._train}
        others |= {**given, **vars(wanted)}
        admission.expect_alike(images, input_ids=input_ids, labels=labels, **others)

    @property
    def logprobs(self) -> Any:
        return self._leaves.get("logprobs")

    @property
    def entropies(self) -> Any:
        return self._leaves.get("entropies")

    @property
    def hidden(self) -> Any:
        return self._leaves.get("hidden")

    def of_sequences(self) -> torch.Tensor:
        """[batch, labels] of a sequence classifier: its own head on :attr:`hidden` of each
        sequence's last token, in the caller's graph.

        Raises:
            Error: the call has no hidden states, or is no classifier's.
        """
        head, rows = self._model.head, self._inputs if self._tree is None else self._tree.rows
        if self.hidden is None or head.gives_logits:
            raise Error(
                "call.of_sequences: expected a sequence classifier, and hidden=True, got "
                f"{type(self._model.causal).__name__}, hidden={self.hidden is not None}"
            )
        with head.attached():
            return head.of_sequences(self.hidden, rows.input_ids)

    # The first pass -------------------------------------------------------------------------------

    def __enter__(self) -> TwoPass:
        if self._state != "new":
            raise Error("two_pass: expected a call that was not begun, got one that was")
        try:
            as_before_afterwards(self._fill)
        except BaseException:
            self._end()
            raise
        return self

    def _fill(self) -> None:
        self._state = "running"
        self._pools.lend(self._give_back)
        device = self._model.device
        self._autocast = (
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
        )
        self._swept: list[int] | None = None
        with self._placement.call(), Swaps() as swaps, self._pools.told_of_errors():
            if self._train:
                self._placement.expect_same(self._draw)
            swaps.also(surroundings(self._model))
            self._calls.gather(swaps)
            self._seed = self._calls.dropout_seed(swaps)
            self._call = call = self._begin(self._new_values(), every_output=True)
            with call.loop.running():
                self._fill_seconds = call.loop.evaluate()
            assert isinstance(call.loss, TokenValues)
            for value in (*call.loss.values.values(), *call.loss.statistics.values()):
                complete_(self._placement, value, device)
            self._leaves = self._as_rows(call.loss.values)
            self.statistics = self._as_rows(call.loss.statistics)
            self._placement.settle(lambda: None)
        if not self._train:
            self._held.put_back()
            self._state = "constant"
            return
        for leaf in self._leaves.values():
            leaf.requires_grad_()
        self._versions = [p._version for p in self._parameters]
        self._modes = self._model.modes
        self._watch.on()
        self._state = "filled"

    def _draw(self) -> dict[str, str]:
        chunks = self._inputs.chunks(self._training.config)
        self._swept = self._training.drawn(chunks.number)
        return {"backward.draw": repr(self._swept)}

    def _as_rows(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._tree is None:
            return values
        return {name: self._tree.to_rows(name, x) for name, x in values.items()}

    def _begin(self, loss: ChunkLoss, **others: Any) -> Call:
        return self._calls.begin(
            self._held,
            self._training.config,
            self._inputs,
            self._swept or None,  # of an empty draw nothing is kept
            loss,
            self._seed,
            self._training.number,
            self._on_progress,
            **others,
        )

    def _new_values(self) -> TokenValues:
        plain = ChunkLoss.of_call(
            self._model.head,
            self._inputs,
            self._spans(),
            self._model.vocab_size,
            False,
            self._training.grads if self._train else None,
        )
        return self._wanted.values(self._model, plain)

    def _spans(self) -> list[tuple[int, int]]:
        return spans_here(self._inputs.chunks(self._training.config), self._calls.placement)

    # Between --------------------------------------------------------------------------------------

    def _watch_again(self) -> None:
        if self._state == "filled" and self._pools.are_lent_to(self._give_back):
            self._watch.on()  # else another one is open, whose sweep would meet the hooks

    def _give_back(self) -> None:
        """The pages, to another call; the sweep fills again."""
        if self._state == "filled":
            self._displaced = True
            after_all(self._watch_again)
        if self._state != "running":
            self._watch.off()
            self._held.put_back()

    def _end(self) -> None:
        self._watch.off()
        self._held.put_back()
        self._pools.forget(self._give_back)
        if self._state in ("new", "filled", "running"):
            self._state = "over"

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        is_shared = error is not None and failed_rank(error) is not None
        try:
            if self._state == "filled" and not is_shared and self._admission.is_usable:
                self._leave(error)
        finally:
            self._end()

    def _leave(self, error: BaseException | None) -> None:
        """Without a sweep, for which other ranks may wait."""
        if error is None:
            self._placement.expect_same(lambda: {"call.sweep()": "was not called"})
            return

        def fail() -> None:
            raise error

        with suppress(BaseException):  # it goes on as it is
            self._placement.together(fail)

    # The second pass ------------------------------------------------------------------------------

    def sweep(self) -> Stats:
        """Back-propagate what the values were given as ``.grad``; adds to ``param.grad``.

        Returns:
            Time and memory of both passes.

        Raises:
            Error: it was swept, failed or is over; no value has a gradient; the model is not what
                it was in the fill. No gradient is changed then.
            OutOfMemoryError: as of a call.
        """
        gradients: dict[str, torch.Tensor] = {}

        def called() -> dict[str, str]:
            gradients.update(self._given())
            return {"call.sweep()": "called", "values with a gradient": repr(sorted(gradients))}

        self._admission.expect_usable()  # before other ranks are waited for
        self._placement.expect_same(called)
        self._state = "running"
        try:
            if not self._swept:
                self._training.add_zeros(self._parameters)
                stats = Stats(fill_seconds=self._fill_seconds)
            else:
                stats = as_before_afterwards(partial(self._sweep, gradients))
            self._state = "swept"
        finally:
            if self._state == "running":
                self._state = "failed"
            self._end()
        return stats

    def _given(self) -> dict[str, torch.Tensor]:
        """Gradients that the values were given, where a sweep of them can begin."""
        if self._state != "filled":
            raise Error(f"call.sweep: expected {_HOW[self._state]}")
        gradients = {n: leaf.grad for n, leaf in self._leaves.items() if leaf.grad is not None}
        if not gradients:
            names = " or ".join(f"call.{name}" for name in self._leaves)
            raise Error(
                f"call.sweep: expected a gradient on {names}, got none: call backward() on a loss "
                "of them first"
            )
        self._expect_same_model()
        if torch.is_inference_mode_enabled():
            raise Error("call.sweep: expected no torch.inference_mode() around it, got one")
        if self._training.config.check_finite:
            for name, grad in gradients.items():
                if not bool(grad.isfinite().all()):
                    raise Error(f"call.{name}.grad: expected finite values, got NaN or Inf")
        return gradients

    def _expect_same_model(self) -> None:
        same = [id(p) for p in self._training.parameters()] == [id(p) for p in self._parameters]
        if not same or self._versions != [p._version for p in self._parameters]:
            raise Error(
                "call.sweep: expected the parameters of the fill, got others or changed ones: step "
                "the optimizer and switch adapters after the sweep"
            )
        if self._model.modes != self._modes:
            mode = "train" if self._modes[0] else "eval"
            raise Error(f"call.sweep: expected the model in the mode of the fill, {mode}()")

    def _sweep(self, gradients: dict[str, torch.Tensor]) -> Stats:
        training, swept, device = self._training, self._swept, self._model.device
        placement, weights = self._placement, self._calls.weights
        assert swept is not None
        self._watch.off()
        with placement.call(), Swaps() as swaps:
            swaps.afterwards(self._held.put_back)
            training.grads.clear()
            gradients = agreed(placement, gradients, device)
            if self._tree is not None:
                gradients = {name: self._tree.from_rows(name, x) for name, x in gradients.items()}
            with Swaps() as around, self._pools.told_of_errors():
                around.also(surroundings(self._model))
                self._calls.gather(around, sums=True)
                dtype, enabled = self._autocast
                around.also(entered(torch.autocast(device.type, dtype=dtype, enabled=enabled)))
                self._calls.keep_generators(around)
                call = self._filled_again() if self._displaced else self._call
                loss = call.loss
                assert isinstance(loss, TokenValues)
                loss.sweep_with(gradients, self._spans())
                swaps.afterwards(training.settled())
                plain = weights.plain(self._parameters)
                with training.collecting(plain), call.loop.running():
                    seconds = call.loop.sweep(swept, training.loss_factor)
                step = call.result(self._fill_seconds, seconds)
                self._held.put_back()  # room for the gradients
            training.grads.sum_over(placement, weights, self._parameters)
            stats = call.with_exchanges(step).stats
            keep = training.config.keep_main_grad
            placement.settle(partial(training.grads.commit, self._parameters, keep, zeros=False))
        return stats

    def _filled_again(self) -> Call:
        """Another call of the engine has had the pools since."""
        if not TwoPass._said:
            TwoPass._said = True
            warn_caller(
                "two_pass: another call of its engine came between fill and sweep, so the sweep "
                "fills again; to spare that, call before the with block (said once)"
            )
        assert self._swept
        choice = self._call.attention.pages.choice
        self._pools.lend(self._give_back)
        lists = None if choice is None else choice.lists
        call = self._begin(self._call.loss, lists=lists)
        with call.loop.running():
            self._fill_seconds += call.loop.fill(self._swept[-1])
        return call
