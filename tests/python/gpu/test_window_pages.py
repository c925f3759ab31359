"""On a GPU, too, kernels never ask for pages that layers with a sliding window do not keep."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import oomb
from oomb.core.layout import Chunks

pytestmark = pytest.mark.gpu

CHUNK, VOCABULARY = 512, 256
# One token; within a page of 64, or just not; no multiple of a page or of the kernels' tiles;
# nearly a chunk; several chunks.
WINDOWS = (1, 50, 65, 130, 200, 500, 1300)
KINDS = ("plain", "padded", "documents")


def make(window: int, head_dim: int, dtype: torch.dtype, device: str = "cuda") -> Any:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        sliding_window=window,
        max_position_embeddings=4096,
    )
    return MistralForCausalLM(config).to(device=device, dtype=dtype)


def gradients_of(
    model: Any, batch: dict[str, torch.Tensor], **settings: Any
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with oomb.Engine(model, oomb.Config(chunk_size=CHUNK, **settings)) as engine:
        loss = engine.forward_backward(**batch).loss
    return {"loss": loss} | {name: p.grad.clone() for name, p in model.named_parameters()}


def batch_of(kind: str, device: str = "cuda") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = 2 if kind == "padded" else 1
    ids = torch.randint(1, VOCABULARY, (rows, 2900), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 1111:] = 0
        batch["labels"][1, 1111:] = -100
    if kind == "documents":
        lengths = torch.tensor([700, 1, 900, 1299])
        batch["document_ids"] = torch.arange(4).repeat_interleave(lengths)[None]
    return {name: x.to(device) for name, x in batch.items()}


@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype"),
    [
        (64, 64, "bfloat16"),
        (128, 64, "bfloat16"),
        (64, 128, "bfloat16"),
        (128, 128, "bfloat16"),
        (128, 256, "bfloat16"),
        (64, 64, "float32"),
    ],
)
def test_pages_that_nobody_reads_change_no_bit(
    page_size: int, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = getattr(torch, dtype)
    slot = 2 * 2 * page_size * head_dim * of.itemsize
    tiers: dict[str, Any] = {"device_memory": 24 * slot, "host_memory": "256MiB"}
    for window, kind in zip(WINDOWS, itertools.cycle(KINDS), strict=False):
        model, batch = make(window, head_dim, of), batch_of(kind)
        with monkeypatch.context() as patch:
            patch.setattr(Chunks, "pages_within", lambda self, chunk, window: self.pages(chunk))
            expected = gradients_of(model, batch, page_size=page_size)
        for memory in ({}, tiers):
            found = gradients_of(model, batch, page_size=page_size, **memory)
            different = [n for n, value in expected.items() if not torch.equal(found[n], value)]
            assert not different, (window, kind, memory)
