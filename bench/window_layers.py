"""Pages of layers with sliding windows: those that a later chunk sees, beside all of them.

    python bench/window_layers.py              # 12 layers of Gemma 3 27B, 64K tokens, one GPU

Of the 12 layers 10 have a window of 1,024 tokens and 2 see everything. Weights are random and, but
for norms, frozen. Both kinds of step run in one process, with 4 GiB of pages on the GPU.
"""

from __future__ import annotations

import argparse
import time
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

import oomb
from oomb.core.layout import Chunks

GIB = 2**30


def make_model() -> PreTrainedModel:
    config = Gemma3TextConfig(
        num_hidden_layers=12,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        sliding_window=1024,
        vocab_size=32768,
        max_position_embeddings=131072,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: PreTrainedModel = Gemma3ForCausalLM(config)
    model.bfloat16()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
            parameter.requires_grad_(False)
    return model


def all_pages() -> AbstractContextManager[object]:
    return mock.patch.object(Chunks, "pages_within", lambda self, chunk, window: self.pages(chunk))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--chunk-size", type=int, default=4096)
    given = parser.parse_args()
    model = make_model()
    ids = torch.randint(32768, (1, given.tokens), generator=torch.Generator().manual_seed(1)).cuda()
    config = oomb.Config(
        chunk_size=given.chunk_size,
        device_memory="4GiB",
        host_memory="64GiB",
        keep_outputs="none",
    )
    for name, pages in (("all pages", all_pages()), ("pages that are seen", nullcontext())):
        with pages, oomb.Engine(model, config) as engine:
            for _ in range(2):  # the first one warms up
                torch.cuda.synchronize()
                began = time.perf_counter()
                step = engine.forward_backward(ids, ids)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - began
        stats = step.stats
        print(
            f"{name}: {seconds:.2f} s, loss {float(step.loss):.6f}, GiB of pages on the GPU "
            f"{stats.device_peak_bytes / GIB:.2f}, on the host {stats.host_peak_bytes / GIB:.2f}, "
            f"to the GPU {stats.h2d_bytes / GIB:.2f}, from it {stats.d2h_bytes / GIB:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
