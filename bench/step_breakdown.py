"""Where the time of a step goes: a profile of the GPU, by kind of kernel.

    python bench/step_breakdown.py --tokens 64K [--attention topk] [--device-memory 8GiB]
    python bench/step_breakdown.py --tokens 32K --layers 4 --float8 rowwise_with_gw_hp
    python bench/step_breakdown.py --tokens 32K --model deepseek-v2-lite --layers 3 --lora 16
    python bench/step_breakdown.py --tokens 16K --model qwen2.5-32b --layers 8 --lora 16 --nf4
    torchrun --nproc-per-node 2 bench/step_breakdown.py --tokens 256K --layers 4 --chunk-size 8192

Every kernel falls into one kind by its name; the loss is what runs between two markers around it
(products of the head included). Gaps are the time in which no kernel ran; of them, waits for pages
are counted by the page manager. Ranks share each step; rank 0's kernels are told of, and of each
rank the longest exchanges and gaps, with when they began. ``--host`` tells where the thread that
starts the kernels was meanwhile, in an evaluation and in a step.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import torch
from support.four_bits import in_four_bits
from support.host_samples import HostSamples
from support.published import published
from support.record import write_record
from torch.profiler import ProfilerActivity, profile

import oomb
from oomb.cli.bench_step import SELECTIONS, prepare_lists, with_selection
from oomb.cli.kept import share_or_word
from oomb.core.loss import ChunkLoss
from oomb.lengths import parse_length
from oomb.parallel.job import is_first, of_ranks, ranks_of_job
from oomb.parallel.peer_copies import PeerCopies
from oomb.trace.shapes import SHAPES, random_model
from oomb.train.float8 import with_float8

_KINDS = {  # first match counts
    "exchanges": r"^nccl|oomb::peers",
    "copies": r"^Memcpy",
    "memset": r"^Memset",
    "attention": r"oomb::attention::(sm90|sm80|plain)|oomb::attention::delta|delta_kernel",
    "selection": r"page_score|page_select|score_|query_sums",
    "pages": r"oomb::",
    "unpacking": r"[dD]equantize",
    "linear": r"nvjet|gemm|cutlass|xmma|cublas",
    "norm, gate": r"_rms_norm|_swiglu|silu|liger",
    "other elementwise": r".",
}
_MARKER = "spin_kernel"


def _marked_loss() -> None:
    """Put a marker before and after each chunk's loss."""
    plain = ChunkLoss.of_chunk

    def marked(*arguments: object, **keywords: object) -> object:
        torch.cuda._sleep(1)
        try:
            return plain(*arguments, **keywords)  # type: ignore[arg-type]
        finally:
            torch.cuda._sleep(1)

    ChunkLoss.of_chunk = marked  # type: ignore[method-assign, assignment]


def _kind(name: str) -> str:
    return next(kind for kind, pattern in _KINDS.items() if re.search(pattern, name))


def _breakdown(events: list[tuple[float, float, str]]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by kind, and by kernel name; microseconds come in."""
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    in_loss, busy_until = False, 0.0
    busy = 0.0
    for begin, end, name in sorted(events):
        if _MARKER in name:
            in_loss = not in_loss
            continue
        kind = "loss" if in_loss and not name.startswith("Memcpy") else _kind(name)
        kinds[kind] = kinds.get(kind, 0.0) + (end - begin) / 1e6
        names[name[:110]] = names.get(name[:110], 0.0) + (end - begin) / 1e6
        if kind != "copies":
            busy += max(0.0, end - max(begin, busy_until)) / 1e6
            busy_until = max(busy_until, end)
    first = min(begin for begin, _, _ in events)
    kinds["gaps"] = (max(end for _, end, _ in events) - first) / 1e6 - busy
    return kinds, names


def _longest(events: list[tuple[float, float, str]], number: int) -> list[tuple[float, float, str]]:
    """Exchanges and gaps: when they began, and seconds."""
    found: list[tuple[float, float, str]] = []
    first = busy_until = min(begin for begin, _, _ in events)
    for begin, end, name in sorted(events):
        if begin > busy_until:
            found.append((busy_until - first, begin - busy_until, f"gap before {name[:50]}"))
        if _kind(name) == "exchanges":
            found.append((begin - first, end - begin, name[:50]))
        busy_until = max(busy_until, end)
    found.sort(key=lambda one: -one[1])
    return sorted((at / 1e6, spent / 1e6, name) for at, spent, name in found[:number])


def _network(arguments: argparse.Namespace, length: int) -> Any:
    """On the GPU, in bf16."""
    layers, name, lora = arguments.layers, arguments.model, arguments.lora
    if name not in SHAPES:
        return published(name, tokens=length, layers=layers, lora=lora, device="cuda").model
    model: Any = random_model(
        SHAPES[name],
        device="cuda",
        dtype=torch.bfloat16,
        positions=length,
        layers=layers or None,
    )
    if arguments.nf4:
        in_four_bits(model)
    if lora:
        from peft import LoraConfig, get_peft_model  # optional

        adapter = LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    return model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-7b", help="of oomb plan")
    parser.add_argument("--tokens", default="64K")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights are trained")
    parser.add_argument("--nf4", action="store_true", help="linear layers in NF4, with --lora")
    parser.add_argument("--float8", metavar="RECIPE", help="linear layers, of torchao")
    parser.add_argument("--attention", default="dense", choices=["dense", "topk"])
    parser.add_argument("--selection", default="synthetic", choices=list(SELECTIONS))
    parser.add_argument("--budget", type=int, default=64, help="pages, with topk")
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--kv-grad-dtype", default="float32")
    parser.add_argument("--keep-outputs", default="auto", help="auto, all, none or a share")
    parser.add_argument("--recompute", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--top", type=int, default=25, help="kernels")
    parser.add_argument("--longest", type=int, default=0, help="exchanges and gaps")
    parser.add_argument("--nccl", action="store_true", help="exchanges go through NCCL")
    parser.add_argument("--host", type=int, default=0, help="functions of the host's thread")
    arguments = parser.parse_args()

    length = parse_length("tokens", arguments.tokens)
    with ranks_of_job("cuda") as mesh:
        _measure(arguments, length, mesh)


def _measure(arguments: argparse.Namespace, length: int, mesh: Any) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    dense = arguments.attention == "dense"
    config = oomb.Config(
        attention=oomb.Dense() if dense else oomb.TopKPages(budget=arguments.budget),
        chunk_size=arguments.chunk_size,
        device_memory=arguments.device_memory,
        host_memory=arguments.host_memory,
        keep_outputs=share_or_word(arguments.keep_outputs),
        kv_grad_dtype=arguments.kv_grad_dtype,
        recompute=arguments.recompute,
    )
    torch.manual_seed(0)
    network = _network(arguments, length)
    if arguments.float8:
        with_float8(network, arguments.float8, torch.device("cuda"))
    _marked_loss()
    if arguments.nccl:
        PeerCopies.has_room = lambda *_: False  # type: ignore[method-assign]
    settings = network.config
    config = with_selection(config, arguments.selection, settings.num_hidden_layers)
    with oomb.Engine(network, config, mesh=mesh) as engine:
        prepare_lists(engine.config, settings.num_key_value_heads, length, device)
        for tokens in (2 * config.chunk_size + 1, length):
            ids = torch.randint(settings.vocab_size, (1, tokens), device=device)
            engine.forward_backward(ids, ids)
        network.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        plain = engine.forward_backward(ids, ids)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        in_evaluation, in_step = HostSamples(), HostSamples()
        if arguments.host:
            with in_evaluation.looking():
                engine.evaluate(ids, ids)
            with in_step.looking():
                engine.forward_backward(ids, ids)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            engine.forward_backward(ids, ids)
            torch.cuda.synchronize()
    events = [
        (event.start_ns() / 1e3, event.end_ns() / 1e3, event.name())
        for event in recorded.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    longest = of_ranks(mesh, _longest(events, arguments.longest))
    if not is_first():
        return
    kinds, names = _breakdown(events)
    print(f"{arguments}\n{seconds:.2f} s without the profiler; {plain.stats}")
    for kind, spent in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"{spent:9.3f} s  {100 * spent / seconds:5.1f} %  {kind}")
    print()
    for name, spent in sorted(names.items(), key=lambda item: -item[1])[: arguments.top]:
        print(f"{spent:9.3f} s  {_kind(name):18} {name}")
    for rank, ones in enumerate(longest):
        for at, spent, name in ones:
            print(f"rank {rank}, {at:9.4f} s: {1e3 * spent:8.2f} ms  {name}")
    if arguments.host:
        for what, looks in (("evaluate", in_evaluation), ("step", in_step)):
            print(f"\n{what}, {looks.spent:.2f} s with looks at the host's stack")
            print("\n".join(looks.lines(arguments.host)))
    if arguments.json is not None:
        given = {k: str(v) for k, v in vars(arguments).items() if k != "json"}
        record = {"arguments": given, "seconds": seconds}
        record |= {"stats": vars(plain.stats), "by_kind": kinds}
        write_record(arguments.json, record)


if __name__ == "__main__":
    main()
