"""Seconds that ranks of a sequence spend in exchanges."""

from __future__ import annotations

import torch

from oomb.plan.gpus import gpu_of_device
from oomb.plan.machine import Machine
from oomb.plan.pages import PageCall
from oomb.plan.sharded_weights import ShardedWeightsUse
from oomb.trace.trace import Trace


def exchange_seconds(
    call: PageCall, trace: Trace, machine: Machine, shards: ShardedWeightsUse | None = None
) -> float:
    """Of a rank, if nothing overlaps them; 0 where nothing is known of what links the ranks.

    Queries, keys, values, outputs and latents travel in the fill, and both ways in the sweep; at
    the end the sums of gradients do. Shared weights are gathered, and their sums scattered,
    besides. Where ranks divide pages, queries and parts of outputs travel among those of a head.
    """
    ranks, gpu = machine.ranks, machine.gpu or gpu_of_device(machine.name)
    if ranks == 1 or gpu is None:
        return 0.0
    others = (ranks - 1) / ranks  # of what a rank has or gets, the part that travels
    heads = sum(2 * (s.query_heads + s.kv_heads) * s.head_dim + s.latent for s in call.shapes)
    of_token = heads * ranks * call.layout.dtype.itemsize
    begin, end = call.chunks.span(0)
    tokens = call.batch * (end - begin) / ranks
    passes = call.filled + 2 * len(call.swept)
    received = others * of_token * tokens * passes
    received += others * 2 * trace.sum_bytes if shards is None else shards.received_bytes(call)
    received += call.batch * (end - begin) * _parts_of_chunk_tokens(call)
    return received / (gpu.peer_bytes_per_second or gpu.link_bytes_per_second)


def _parts_of_chunk_tokens(call: PageCall) -> float:
    """Bytes that a rank receives around attention over divided pages, for a token of each chunk."""
    total, dtype = 0.0, call.layout.dtype
    statistic = 8 if dtype == torch.float64 else 4
    for layer, shape in enumerate(call.shapes):
        if not shape.divided:
            continue
        filled = call.filled * (layer < call.layers.fill_attends)
        kept = 0 if call.outputs is None else int(call.outputs.kept[:, layer].sum())
        of_query, swept = shape.head_dim * dtype.itemsize, len(call.swept)
        # Queries, and outputs with their log-sum-exp; queries, what was left on their outputs, and
        # gradients of queries, with two statistics.
        forward = (filled + swept - kept) * (2 * of_query + statistic)
        backward = swept * (3 * of_query + 2 * statistic)
        total += (shape.copies - 1) * shape.query_heads * (forward + backward)
    return total
