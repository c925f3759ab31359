"""Each rank runs on a GPU of its own, and the GPUs are of one kind."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from oomb.parallel.agreement import expect_own_device

A_GPU = ("host", "first", "9.0")  # name of the host, the GPU there, its compute capability


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (A_GPU, "expected a GPU for each rank, got ranks 2 and 5 with one GPU of host"),
        (("host", "second", "8.0"), "one compute capability, got 9.0 on rank 2 and 8.0 on rank 5"),
        (("host", "second", "9.0"), ""),
        (("other", "first", "9.0"), ""),
    ],
)
def test_ranks_have_gpus_of_their_own_of_one_kind(second: tuple[str, str, str], text: str) -> None:
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match=text) if text else nullcontext():
        expect_own_device(lambda _: [A_GPU, second], [2, 5], gpu, gpu)
