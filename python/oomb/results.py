"""What a call returns and reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Time and memory of one call; ``*_peak_bytes`` are those of the page pools.

    Attributes:
        fill_seconds, sweep_seconds: of each pass; an evaluation is a fill.
        device_peak_bytes, host_peak_bytes: pages that each tier held at most.
        h2d_bytes, d2h_bytes: pages moved to the device (prefetch) and to the host (offload).
        h2d_seconds, d2h_seconds: in which pages moved, without the time that copies waited; 0 where
            that is not measured (CPU).
        exposed_copy_seconds: time that compute waited for pages.
        exposed_growth_seconds: time that the call waited for new memory of the host tier, which a
            GPU's calls keep for the next.
        fetched_weight_bytes: of weights that the host keeps, copied to the device.
        exposed_weight_seconds: time that compute waited for these; on a CPU, that of the copies.
        exposed_by_chunk, exposed_by_layer: exposed_copy_seconds, a number per chunk or layer, of
            each pass: "fill", "forward" and "backward" of the sweep.
        kept_output_share: share that was kept, of the outputs that could be kept for the sweep.
        kept_output_bytes: memory that they took, of both tiers or of torch.
        kept_mlp_output_bytes: of both tiers, that outputs of MLPs took beside them.
        loose_output_bytes: of torch: earlier chunks compute less again in that room.
        kept_output_seconds: time that the fill took to compute them, which the sweep was spared.
        recomputed: swept chunks by what backward computed again of them, as of
            ``Config.recompute``.
        border_state_bytes: host memory that states of recurrences and convolutions at the borders
            between chunks took, beside the pools.
        image_feature_bytes: host memory that features of images and their gradients took, of
            several ranks those of this one's tokens; ``host_memory`` does not cap it.
        reserved_ratio: torch's reserved over its allocated memory on the GPU, at their peaks since
            these were last reset; beyond 1 is lost in fragments. 1 on a CPU.
        exchange_seconds: time that this rank waited for exchanges with others, and for these ranks;
            what ran beside exchanges hid the rest.
        gathered_weight_bytes: bytes of sharded weights received from the other ranks.
        scattered_sum_bytes: bytes received of sums of gradients that became shards.
        hit_rate: share of pages that were on the device, or on their way, when asked for.
    """

    fill_seconds: float = 0.0
    sweep_seconds: float = 0.0
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    exposed_copy_seconds: float = 0.0
    exposed_growth_seconds: float = 0.0
    fetched_weight_bytes: int = 0
    exposed_weight_seconds: float = 0.0
    hit_rate: float = 1.0
    h2d_seconds: float = 0.0
    d2h_seconds: float = 0.0
    exposed_by_chunk: dict[str, list[float]] = field(default_factory=dict)
    exposed_by_layer: dict[str, list[float]] = field(default_factory=dict)
    kept_output_share: float = 0.0
    kept_output_bytes: int = 0
    kept_mlp_output_bytes: int = 0
    loose_output_bytes: int = 0
    kept_output_seconds: float = 0.0
    recomputed: dict[str, int] = field(default_factory=dict)
    border_state_bytes: int = 0
    image_feature_bytes: int = 0
    reserved_ratio: float = 1.0
    exchange_seconds: float = 0.0
    gathered_weight_bytes: int = 0
    scattered_sum_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a call stands, at a chunk border.

    Attributes:
        phase: ``"fill"`` (chunks in order) or ``"sweep"`` (from the last to the first).
        chunk: the one that is done, from 0.
        num_chunks: chunks of the sequence.
        tokens_done: tokens of this phase that are done, of all sequences together.
        seconds: since the call began. A GPU may still be at work on what the host has queued.
        device_bytes, host_bytes: pages that each tier holds now.
        h2d_bytes, d2h_bytes: moved since the call began.
        exposed_copy_seconds: time that compute waited for copies since the call began.
    """

    phase: Literal["fill", "sweep"]
    chunk: int
    num_chunks: int
    tokens_done: int
    seconds: float
    device_bytes: int = 0
    host_bytes: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    exposed_copy_seconds: float = 0.0


Selection = list[list[torch.Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Result of ``forward_backward`` or ``evaluate``.

    Attributes:
        loss: 0-d detached tensor, fp32 (fp64 for fp64 models); an estimate with SampledChunks.
        num_valid_tokens: counted target tokens.
        stats: time and memory.
        selection: ``selection[layer][chunk]``: int32 [batch, query_blocks, heads or 1, <= budget]
            page numbers, ascending, -1 padded; None where the block saw its whole past. Empty
            unless ``Config(record_selection=True)``.
        logprobs: [batch, tokens] log-probability of each counted token given its past, 0 elsewhere;
            None unless asked for.
        metrics: "entropy" (nats) and "accuracy" (share of tokens that are the most likely one),
            means over counted tokens of the chunks that were swept; empty unless asked for.
    """

    loss: torch.Tensor
    num_valid_tokens: int
    stats: Stats
    selection: Selection = field(default_factory=list)
    logprobs: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
