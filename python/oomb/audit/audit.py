"""One text through a model: exact, and under each rule that might replace it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from oomb.audit.advice import advice
from oomb.audit.gradients import KEPT_SUMS, Gradients, Groups, compare, gradients_of_call, products
from oomb.audit.mass import attention_mass
from oomb.audit.outputs import Recorder, compare_outputs
from oomb.audit.results import (
    Audit,
    RoundedAudit,
    SampledAudit,
    SparseAudit,
    SparseLayer,
    TruncatedAudit,
    budget_of,
)
from oomb.audit.sampled import audit_sampled
from oomb.audit.untouched import untouched
from oomb.config import (
    AllChunks,
    BackwardRule,
    Config,
    Dense,
    PageRule,
    SampledChunks,
    TruncatedChunks,
)
from oomb.core.inputs import IGNORED
from oomb.engine.engine import Engine
from oomb.model.causal import CausalModel
from oomb.results import Progress

OnCall = Callable[[str], None]


def audit(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    *,
    config: Config | None = None,
    attention: Sequence[PageRule] = (),
    backward: Sequence[SampledChunks | TruncatedChunks] = (),
    kv_grad_dtype: Literal["bfloat16"] | None = None,
    draws: int = 16,
    sample_blocks: int = 32,
    tolerance: float = 0.1,
    on_call: OnCall | None = None,
) -> Audit:
    """Errors of sparse attention, sampled and truncated chunks and gradient pages in bf16, against
    exact training on a text.

    The model, its gradients, its mode and torch's random state are left as they were. Dropout is
    off meanwhile. Host memory: gradients in fp32 twice (sampled chunks: three times), and with
    ``attention`` a copy of the keys.

    Args:
        model: as for :class:`oomb.Engine`.
        input_ids, labels: [batch, tokens] int64, as for ``forward_backward``.
        config: sizes and memory; ``attention`` and ``backward`` are not used. None: defaults.
        attention: rules to audit: :class:`oomb.TopKPages`, or an :class:`oomb.PageRule` of your
            own.
        backward: rules to audit.
        kv_grad_dtype: audits gradient pages of this dtype too; everything else then has them in
            fp32. Where keys are in fp32 or fp64 pages are never in less, and the error is 0.
        draws: per rule of sampled chunks, at least 2. Where there are no more subsets of the chunks
            than this, every subset is run once instead, and the figures are expectations.
        sample_blocks: query blocks at which layer outputs and attention mass are taken, spread
            evenly over the text; all, where there are no more.
        tolerance: relative error of the gradient that ``advice`` accepts.
        on_call: told before each pass over the text.

    Raises:
        ValueError: an argument does not fit, and nothing was run; or the exact gradient is zero or
            not finite, and nothing can be compared with it.
    """
    own = config if config is not None else Config()
    _check(attention, backward, kv_grad_dtype, draws, sample_blocks, tolerance)
    _check_tokens(input_ids, labels)
    told = on_call if on_call is not None else lambda _: None
    causal = CausalModel(model)
    groups = Groups(model, causal.layers)
    if kv_grad_dtype is not None:
        own = replace(own, kv_grad_dtype="float32")
    num_blocks = -(-_tokens_run(labels) // own.page_size)
    blocks = evenly(num_blocks, sample_blocks)
    with untouched(model):
        reference = _Reference(model, causal, groups, own, input_ids, labels, blocks)
        reference.run(told, outputs=bool(attention))
        sparse = [reference.sparse(rule, told) for rule in attention]
        sampled = [
            reference.sampled(rule, draws, told)
            for rule in backward
            if isinstance(rule, SampledChunks)
        ]
        truncated = [
            reference.truncated(rule, told)
            for rule in backward
            if isinstance(rule, TruncatedChunks)
        ]
        rounded = None
        if kv_grad_dtype is not None:
            rounded = reference.rounded(kv_grad_dtype, told)
    return Audit(
        num_tokens=input_ids.shape[1],
        num_chunks=reference.num_chunks,
        chunk_size=own.chunk_size,
        page_size=own.page_size,
        loss=reference.loss,
        sampled_blocks=blocks,
        num_blocks=num_blocks,
        sparse=sparse,
        sampled=sampled,
        truncated=truncated,
        rounded=rounded,
        advice=advice(sparse, sampled, tolerance, truncated, rounded),
    )


def evenly(number: int, most: int) -> list[int]:
    """At most ``most`` of ``range(number)``, evenly spread, the last one among them."""
    if number <= most:
        return list(range(number))
    return sorted({round((place + 1) * number / most) - 1 for place in range(most)})


class _Reference:
    """The exact run, and others against it."""

    def __init__(
        self,
        model: nn.Module,
        causal: CausalModel,
        groups: Groups,
        config: Config,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        blocks: list[int],
    ) -> None:
        self._model = model
        self._causal = causal
        self._groups = groups
        self._config = config
        self._arguments = input_ids, labels
        self._blocks = blocks
        token = torch.arange(input_ids.shape[1])
        self._rows = torch.isin(token // config.page_size, torch.tensor(blocks))
        self._outputs: list[torch.Tensor] = []
        self._gradients: Gradients = {}
        self.loss = 0.0
        self.num_chunks = 0

    def run(self, told: OnCall, *, outputs: bool) -> None:
        config = self._with(Dense())
        with Engine(self._model, config) as engine:
            if outputs:
                told("exact: layer outputs")
                recorder = Recorder(self._causal, self._rows, attention=False)
                with recorder.recording():
                    engine.evaluate(*self._arguments)
                layers = range(len(self._causal.layers))
                self._outputs = [recorder.outputs(layer) for layer in layers]
            told("exact: gradient")
            step, self._gradients = gradients_of_call(
                engine, self._groups, *self._arguments, on_progress=self._count
            )
            self.loss = float(step.loss)
        norm = sum(products(self._gradients, self._gradients).values()) ** 0.5
        if not 0.0 < norm < math.inf:  # errors are relative to it
            raise ValueError(
                "model: expected a gradient that is finite and not zero on this text, got one of "
                f"norm {norm:g}"
            )

    def sparse(self, rule: PageRule, told: OnCall) -> SparseAudit:
        config = self._with(rule)
        recorder = Recorder(self._causal, self._rows, attention=True)
        with Engine(self._model, config) as engine:
            told(f"budget {budget_of(rule)}: layer outputs")
            with recorder.recording():
                step = engine.evaluate(*self._arguments)
            told(f"budget {budget_of(rule)}: gradient")
            _, found = gradients_of_call(engine, self._groups, *self._arguments)
        gradients, whole = compare(self._groups, found, self._gradients)
        layers = []
        for layer, gradient in enumerate(gradients):
            attention, mass = recorder.attention(layer), None
            if attention is not None:
                mass = attention_mass(
                    attention,
                    self._blocks,
                    step.selection[layer],
                    chunk_size=config.chunk_size,
                    page_size=config.page_size,
                    device=self._causal.device,
                )
            layers.append(
                SparseLayer(
                    output=compare_outputs(recorder.outputs(layer), self._outputs[layer]),
                    gradient=gradient,
                    mass=None if mass is None else mass.seen / mass.rows,
                    past_mass=mass.past_seen / mass.past if mass and mass.past > 0 else None,
                )
            )
        return SparseAudit(rule=rule, loss=float(step.loss), gradient=whole, layers=layers)

    def sampled(self, rule: SampledChunks, draws: int, told: OnCall) -> SampledAudit:
        return audit_sampled(
            self._model,
            self._with(Dense()),
            rule,
            self._groups,
            self._gradients,
            *self._arguments,
            num_chunks=self.num_chunks,
            draws=draws,
            on_call=told,
        )

    def truncated(self, rule: TruncatedChunks, told: OnCall) -> TruncatedAudit:
        told(f"window {rule.window}: gradient")
        with Engine(self._model, self._with(Dense(), rule)) as engine:
            _, found = gradients_of_call(engine, self._groups, *self._arguments)
        layers, whole = compare(self._groups, found, self._gradients)
        return TruncatedAudit(rule=rule, gradient=whole, layers=layers)

    def rounded(self, kv_grad_dtype: str, told: OnCall) -> RoundedAudit:
        told(f"gradient pages in {kv_grad_dtype}: gradient")
        with Engine(self._model, self._with(Dense(), kv_grad_dtype=kv_grad_dtype)) as engine:
            _, found = gradients_of_call(engine, self._groups, *self._arguments)
        layers, whole = compare(self._groups, found, self._gradients)
        return RoundedAudit(kv_grad_dtype=kv_grad_dtype, gradient=whole, layers=layers)

    def _with(
        self, attention: Dense | PageRule, backward: BackwardRule | None = None, **others: Any
    ) -> Config:
        changed = {
            "attention": attention,
            "backward": backward or AllChunks(),
            **KEPT_SUMS,
            "record_selection": True,
            **others,
        }
        return Config(**{**vars(self._config), **changed})

    def _count(self, progress: Progress) -> None:
        if progress.phase == "sweep":
            self.num_chunks = progress.num_chunks


def _check(
    attention: Sequence[PageRule],
    backward: Sequence[SampledChunks | TruncatedChunks],
    kv_grad_dtype: str | None,
    draws: int,
    sample_blocks: int,
    tolerance: float,
) -> None:
    if kv_grad_dtype not in (None, "bfloat16"):
        raise ValueError(f"kv_grad_dtype: expected 'bfloat16' or None, got {kv_grad_dtype!r}")
    if not attention and not backward and kv_grad_dtype is None:
        raise ValueError(
            "attention, backward, kv_grad_dtype: expected something to audit, got none"
        )
    for name, rules, kind, names in (
        ("attention", attention, PageRule, "oomb.PageRule"),
        (
            "backward",
            backward,
            (SampledChunks, TruncatedChunks),
            "oomb.SampledChunks or oomb.TruncatedChunks",
        ),
    ):
        for rule in rules:
            if not isinstance(rule, kind):
                raise ValueError(f"{name}: expected {names} rules, got {rule!r}")
    for rule in attention:
        Config(attention=rule)  # says what is wrong with a rule of the user's own
    for name, value, least in (("draws", draws, 2), ("sample_blocks", sample_blocks, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an int >= {least}, got {value!r}")
    if not tolerance > 0:
        raise ValueError(f"tolerance: expected a number > 0, got {tolerance!r}")


def _check_tokens(input_ids: torch.Tensor, labels: torch.Tensor) -> None:
    for name, value in (("input_ids", input_ids), ("labels", labels)):
        if not isinstance(value, torch.Tensor) or value.ndim != 2:
            raise ValueError(f"{name}: expected a tensor of [batch, tokens], got {value!r}")


def _tokens_run(labels: torch.Tensor) -> int:
    """Tokens up to the last that predicts one; the engine runs no more."""
    predicting = (labels[:, 1:] != IGNORED).any(dim=0).nonzero()
    if predicting.numel() == 0:
        raise ValueError("labels: expected at least one token to predict, got none")
    return int(predicting.max()) + 1
