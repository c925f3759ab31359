"""The loss of one chunk and the gradient of its embedding: through autograd, and in place.

    python bench/chunk_loss.py [--json FILE]

Forward and backward of a head of Qwen2.5-7B's shape on random hidden states, with the sum of its
weight's gradient in fp32; kernels by torch's profiler. The products alone are timed beside them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.record import write_record
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM

from oomb.core.inputs import check_inputs
from oomb.core.loss import ChunkLoss
from oomb.core.main_grad import MainGrads
from oomb.model.causal import CausalModel
from oomb.model.cross_entropy import launch
from oomb.model.embedding import summed_embedding
from oomb.model.fused import replaced_forwards

_BLOCKS = [(4096, 8), (8192, 8), (8192, 16), (16384, 16), (32768, 32)]


def seconds(run: Callable[[], object], times: int = 10) -> float:
    """Of one run on the GPU, from a queue of them."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def kernels(run: Callable[[], object]) -> dict[str, float]:
    """Seconds by kernel of one run."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in recorded.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            name = event.name()[:90]
            spent[name] = spent.get(name, 0.0) + event.duration_ns() / 1e9
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def make_model(hidden: int, vocabulary: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=hidden // 128,
        num_key_value_heads=1,
    )
    with torch.device("cuda"):
        model: Qwen2ForCausalLM = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model


def losses(model: Qwen2ForCausalLM, tokens: int) -> dict[str, Callable[[], object]]:
    """Loss of a chunk with its gradients, by way."""
    causal = CausalModel(model)
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), device="cuda")
    given: dict[str, Any] = dict.fromkeys(
        ["attention_mask", "position_ids", "document_ids", "loss_weights", "num_items_in_batch"]
    )
    inputs = check_inputs(
        ids, ids, **given, vocab_size=model.config.vocab_size, device=causal.device
    )
    hidden = torch.randn(1, tokens, model.config.hidden_size, device="cuda").bfloat16()
    hidden.requires_grad_()
    sums = MainGrads()
    loss = ChunkLoss.of_call(
        causal.head, inputs, [(0, inputs.tokens)], model.config.vocab_size, False, sums
    )
    through = ChunkLoss(**{**vars(loss), "weight": None})

    def way(of: ChunkLoss) -> Callable[[], object]:
        def run() -> object:
            session = causal.session(
                lambda _: torch.empty(0), largest_position=tokens, rope_angles="model", sums=sums
            )
            with session:
                return of.of_chunk(hidden, 0, 1.0)

        return run

    return {"loss through autograd": way(through), "loss in place": way(loss)}


def embeddings(model: Qwen2ForCausalLM, tokens: int) -> dict[str, Callable[[], object]]:
    """Gradient of the embedding of a chunk, added to its sum, by way."""
    module = model.get_input_embeddings()
    weight: nn.Parameter = module.weight
    ids = torch.randint(weight.shape[0], (1, tokens), device="cuda")
    d_y = torch.randn(1, tokens, weight.shape[1], device="cuda").bfloat16()
    dense, by_row = MainGrads(), MainGrads()

    def autograd() -> None:
        with dense.collecting([weight]):
            kept = dense._sums
            dense._sums = total
            module(ids).backward(d_y)
            dense._sums = kept

    def rows() -> None:
        with replaced_forwards(summed_embedding(model, by_row)):
            module(ids).backward(d_y)

    total: dict[nn.Parameter, torch.Tensor] = {}
    return {"embedding through autograd": autograd, "embedding by row": rows}


def products(model: Qwen2ForCausalLM, tokens: int) -> Callable[[], object]:
    """The three products of the head, nothing else."""
    weight = model.lm_head.weight.detach()
    x = torch.randn(tokens, weight.shape[1], device="cuda").bfloat16()
    logits = torch.empty(tokens, weight.shape[0], device="cuda", dtype=torch.bfloat16).normal_()
    total = torch.zeros(weight.shape, device="cuda")

    def run() -> None:
        F.linear(x, weight)
        torch.mm(logits, weight)
        torch.ops.aten.addmm.dtype_out(total, logits.t(), x, torch.float32, out=total)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of the chunk")
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(options.hidden, options.vocabulary)
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "arguments": vars(options)}
    record["arguments"] = {k: v for k, v in vars(options).items() if k != "json"}
    flops = 3 * 2 * options.tokens * options.hidden * options.vocabulary
    alone = seconds(products(model, options.tokens))
    record["three products"] = alone
    print(f"{1e3 * alone:8.2f} ms  three products ({flops / alone / 1e12:.0f} TFLOP/s)")
    ways = losses(model, options.tokens) | embeddings(model, options.tokens)
    for name, run in ways.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        spent = seconds(run)
        peak = torch.cuda.max_memory_allocated() - before
        split = kernels(run)
        record[name] = {"seconds": spent, "peak_bytes": peak, "kernels": split}
        print(f"\n{1e3 * spent:8.2f} ms  {name}, peak {peak / 2**30:.2f} GiB")
        for kernel, part in list(split.items())[:10]:
            print(f"{1e3 * part:8.2f}     {kernel}")
    logits = torch.randn(options.tokens, options.vocabulary, device="cuda").bfloat16()
    targets = torch.randint(options.vocabulary, (options.tokens,), device="cuda")
    print()
    for block, warps in _BLOCKS:
        spent = seconds(lambda b=block, w=warps: launch(logits, targets, 1e-6, b, w))  # type: ignore[misc]
        record[f"kernel {block} {warps}"] = spent
        moved = 3 * logits.nbytes / spent / 1e12
        print(f"{1e3 * spent:8.2f} ms  kernel, block {block}, {warps} warps ({moved:.2f} TB/s)")
    if options.json is not None:
        write_record(options.json, record)


if __name__ == "__main__":
    main()
