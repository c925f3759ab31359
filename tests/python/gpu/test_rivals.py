"""The ways to train that ``oomb bench step --against`` measures, on a GPU."""

from __future__ import annotations

import pytest
import torch

from oomb.rivals.offload import OffloadedInputs
from oomb.rivals.training import Ordinary, Tuned, TunedKept
from oomb.trace.shapes import ModelShape, random_model

pytestmark = pytest.mark.gpu

SHAPE = ModelShape("qwen2", 4, 512, 1024, 8, 2, 64, 1000)
TOKENS = 20_000  # more than a tile


def test_tuned_training_is_as_exact_as_ordinary_training() -> None:
    """Against the same weights in fp32; tiles are summed in bf16, so not quite twice as good."""
    torch.manual_seed(0)
    model = random_model(SHAPE, device="cuda", dtype=torch.bfloat16, positions=TOKENS)
    exact = random_model(SHAPE, device="cuda", dtype=torch.float32, positions=TOKENS)
    exact.load_state_dict(model.state_dict())
    ids = torch.randint(SHAPE.vocabulary, (1, TOKENS), device="cuda")
    exact(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    errors = {}
    for kind in (Ordinary, Tuned, TunedKept):
        model.zero_grad()
        rival = kind(model, SHAPE)
        with rival.prepared(TOKENS):
            rival.step(ids)
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        errors[kind] = [float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs]
    for usual, tuned in zip(errors[Ordinary], errors[Tuned], strict=True):
        assert tuned <= 3 * usual
    for usual, kept in zip(errors[Ordinary], errors[TunedKept], strict=True):
        assert kept <= 3 * usual


def test_offloaded_inputs_come_back_while_compute_goes_on() -> None:
    """Tensors are freed and written over as soon as they are stored."""
    shape = torch.Size((1, 4096, 1024))
    with OffloadedInputs(6, shape, torch.float32, torch.device("cuda")) as offloaded:
        for _ in range(3):
            for layer in range(6):
                x = torch.full(shape, float(layer), device="cuda")
                offloaded.put(layer, x)
                del x
                torch.full(shape, -1.0, device="cuda")  # would take its place
            for layer in reversed(range(6)):
                assert bool((offloaded.get(layer) == layer).all())
