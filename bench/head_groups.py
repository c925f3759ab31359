"""What exchanges around attention take of memory and time, by the groups that heads are sent in.

    torchrun --nproc-per-node 2 bench/head_groups.py [--json groups.json]
    torchrun --nproc-per-node 2 bench/head_groups.py --device cpu --model qwen2.5-0.5b --groups 1 \
        --tokens 4K --chunk-size 1024

One exact step of a shape with few layers, in turn with each number of groups, in one process. Told
are, of the rank that has most: what attention of a whole chunk holds at once in torch's memory
(heads that came, outputs that go and that come back; not the layer's output that groups are put
into); the room that messages have in the memory of GPUs that write into each other's, which sums
of gradients use too; seconds of a step (the slowest rank's median) and of exchanges; and whether
loss and gradients have the bits of one group. Memory is told of GPUs alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from support.record import write_record
from torch.distributed.device_mesh import DeviceMesh

import oomb
from oomb.core.layer_attention import LayerAttention
from oomb.lengths import parse_length
from oomb.model.interface import AttentionCall
from oomb.parallel.job import is_first, ranks_of_job
from oomb.trace.shapes import SHAPES, random_model

WARM = 1


class Peaks:
    """Most bytes that attention of a whole chunk holds where nothing is propagated back."""

    def __init__(self, tokens: int, device: torch.device, groups: int) -> None:
        self.most = 0
        self._groups = groups
        self._tokens, self._device = tokens, device
        self._attend = LayerAttention.attend

    def __enter__(self) -> Peaks:
        peaks = self

        def attend(attention: LayerAttention, call: AttentionCall) -> torch.Tensor:
            return peaks._measured(attention, call)

        LayerAttention.attend = attend  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        LayerAttention.attend = self._attend  # type: ignore[method-assign]

    def _measured(self, attention: LayerAttention, call: AttentionCall) -> torch.Tensor:
        if torch.is_grad_enabled() or call.q.shape[2] < self._tokens:
            return self._attend(attention, call)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        o = self._attend(attention, call)
        held = torch.cuda.max_memory_allocated(self._device) - before
        self.most = max(self.most, held - (o.nbytes if self._groups > 1 else 0))
        return o


def measured(
    model: Any, ids: torch.Tensor, config: oomb.Config, mesh: DeviceMesh, times: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Row of one number of groups, and loss and gradients of its last step."""
    on_gpu = ids.device.type == "cuda"
    steps: list[oomb.Step] = []
    with oomb.Engine(model, config, mesh=mesh) as engine:
        held = 0
        if on_gpu:
            tokens = config.chunk_size // mesh.size()
            with Peaks(tokens, ids.device, config.head_groups) as peaks:
                engine.evaluate(ids, ids)
            held = peaks.most
        for _ in range(WARM + times):
            model.zero_grad(set_to_none=True)
            steps.append(engine.forward_backward(ids, ids))
        group: Any = engine._placement.group  # type: ignore[attr-defined]
        side = 0
        if on_gpu and group.peers is not None and group.peers._exchange is not None:
            side = group.peers._exchange.side_bytes
        timed = [step.stats for step in steps[WARM:]]
        seconds = statistics.median(x.fill_seconds + x.sweep_seconds for x in timed)
        exchange = statistics.median(x.exchange_seconds for x in timed)
        of_ranks = group.collect(lambda: (held, side, seconds, exchange))
    held, side, seconds, _ = (max(x) for x in zip(*of_ranks, strict=True))
    row = {
        "groups": config.head_groups,
        "attention_bytes": held,
        "message_bytes": side,
        "seconds": seconds,
        "exchange_seconds": [x[3] for x in of_ranks],
    }
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return row, [steps[-1].loss, *gradients]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", default="128K")
    parser.add_argument("--chunk-size", type=int, default=16384)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=3, help="timed, after one to warm up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "RANK" not in os.environ:  # as `make bench` starts it
        print("a bench of several processes: torchrun --nproc-per-node 2 bench/head_groups.py")
        return
    tokens, rows = parse_length("--tokens", options.tokens), list[dict[str, Any]]()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with ranks_of_job(options.device) as mesh:
        assert mesh is not None
        torch.manual_seed(0)
        model = random_model(
            SHAPES[options.model],
            device=options.device,
            dtype=dtype,
            positions=tokens,
            layers=options.layers,
        )
        ids = torch.randint(model.config.vocab_size, (1, tokens)).to(options.device)
        first = None
        for groups in options.groups:
            config = oomb.Config(chunk_size=options.chunk_size, head_groups=groups)
            row, found = measured(model, ids, config, mesh, options.steps)
            first = found if first is None else first
            row["same_bits"] = all(torch.equal(x, y) for x, y in zip(found, first, strict=True))
            rows.append(row)
            if is_first():
                print(
                    f"{groups} groups: attention holds {row['attention_bytes'] / 2**20:.1f} MiB "
                    f"({row['attention_bytes'] / max(1, rows[0]['attention_bytes']):.3f} of the "
                    f"first), room for messages {row['message_bytes'] / 2**20:.1f} MiB; step "
                    f"{row['seconds']:.2f} s, exchanges "
                    f"{'/'.join(f'{x:.3f}' for x in row['exchange_seconds'])} s; "
                    f"{'the same' if row['same_bits'] else 'other'} bits",
                    flush=True,
                )
    if options.json is not None and is_first():
        about = {"model": options.model, "layers": options.layers, "tokens": tokens}
        about |= {"chunk_size": options.chunk_size, "ranks": int(os.environ["WORLD_SIZE"])}
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
        write_record(options.json, {"device": name, **about, "rows": rows})


if __name__ == "__main__":
    main()
