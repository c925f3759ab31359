"""Seconds that ranks of a sequence spend in exchanges."""

from __future__ import annotations

import torch

from oomb.plan.gpus import gpu_of_device
from oomb.plan.machine import Machine
from oomb.plan.pages import PageCall
from oomb.plan.rates import Rates
from oomb.plan.sharded_weights import ShardedWeightsUse
from oomb.trace.trace import Trace

# Of the products of weight gradients of a layer, those that wait for exchanges: two of seven.
_BESIDE = 2 / 7


def exchange_seconds(
    call: PageCall,
    trace: Trace,
    machine: Machine,
    rates: Rates,
    products: float,
    shards: ShardedWeightsUse | None = None,
) -> float:
    """Of a rank; 0 where nothing is known of what links the ranks.

    Queries, keys, values, outputs and latents travel in the fill, and both ways in the sweep; sums
    of gradients do once, which is counted as if nothing ran beside them. Where an output was kept
    nothing travels forwards, and all that attention's backward needs does later. Between GPUs of
    one host products hide what of heads travels backwards. Shared weights are gathered, and their
    sums scattered, besides. Where ranks divide pages, queries and parts of outputs travel among
    those of a head.

    Args:
        products: FLOP of weight gradients of a layer's linear layers, per token.
    """
    ranks, gpu = machine.ranks, machine.gpu or gpu_of_device(machine.name)
    if ranks == 1 or gpu is None:
        return 0.0
    others = (ranks - 1) / ranks  # of what a rank has or gets, the part that travels
    begin, end = call.chunks.span(0)
    tokens = call.batch * (end - begin) / ranks
    of_head = others * ranks * tokens * call.layout.dtype.itemsize
    forward = backward = 0.0
    for layer, shape in enumerate(call.shapes):
        around = of_head * 2 * (shape.query_heads + shape.kv_heads) * shape.head_dim
        by_tokens = shape.copies == 1 and not shape.latent and call.outputs is not None
        kept = int(call.outputs.kept[:, layer].sum()) if call.outputs and by_tokens else 0
        forward += (call.filled + len(call.swept) - kept) * around
        backward += (len(call.swept) + kept) * around
        forward += (call.filled + 2 * len(call.swept)) * of_head * shape.latent
    received = others * 2 * trace.sum_bytes if shards is None else shards.received_bytes(call)
    received += call.batch * (end - begin) * _parts_of_chunk_tokens(call)
    rate = gpu.peer_bytes_per_second or gpu.link_bytes_per_second
    hidden = 0.0
    if gpu.peer_bytes_per_second and all(shape.copies == 1 for shape in call.shapes):
        layers = len(call.shapes) / call.shapes[0].groups
        hidden = _BESIDE * tokens * len(call.swept) * layers * products / rates.matrix
    return (forward + received) / rate + max(0.0, backward / rate - hidden)


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
