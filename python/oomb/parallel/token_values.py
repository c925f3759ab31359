"""Per-token values over ranks: each has those of the tokens it ran, and all need all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oomb.parallel.placement import Placement

_PIECE_BYTES = 64 * 2**20  # of a value on its way through a device
_APART = 1e-3  # more than the order of sums makes of one gradient


def complete_(placement: Placement, values: torch.Tensor, device: torch.device) -> None:
    """Fill in what other ranks have.

    Args:
        values: contiguous, on the device or the host; 0 where this rank has nothing.
        device: through which ranks send.
    """
    if placement.ranks == 1:
        return
    sent = values.view(torch.uint8) if values.dtype == torch.bool else values
    for piece in _pieces(sent):
        piece.copy_(placement.total(piece.to(device)))


def agreed(
    placement: Placement, gradients: dict[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """The first rank's gradients of values that all ranks have alike.

    A loss of the same values has the same gradient on each rank, but for sums whose order a GPU
    does not fix. The sweep needs one gradient, whose parts ranks propagate.

    Args:
        gradients: by name, the same names on all ranks.

    Raises:
        ValueError: a rank's are others; names it.
    """
    if placement.ranks == 1:
        return gradients
    found = {name: torch.empty_like(x).contiguous() for name, x in gradients.items()}
    differing = []
    for name, own in gradients.items():
        apart = size = 0.0
        for piece, room in zip(_pieces(own.contiguous()), _pieces(found[name]), strict=True):
            here = piece.to(device)
            first = placement.total(here if placement.rank == 0 else torch.zeros_like(here))
            apart += float((here.double() - first.double()).square().sum())
            size += float(first.double().square().sum())
            room.copy_(first)
        differing.append(apart > _APART**2 * size)  # also False where one of them is no number
    names = dict(zip(gradients, differing, strict=True))
    placement.expect_same(
        lambda: {f"call.{name}.grad": "differs" if x else "first" for name, x in names.items()}
    )
    return found


def _pieces(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from x.view(-1).split(max(1, _PIECE_BYTES // x.element_size()))
