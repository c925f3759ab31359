"""Images of a call, chunk by chunk: features put at their placeholders, their gradient collected.

    before   tower(images) ──▶ features, once, without a graph, in the host's memory
    fill     chunk 0, 1, …     embeddings of its tokens, features at its placeholders
    sweep    chunk …, 1, 0     the same; its features are leaves, whose gradient goes to the host
    after    tower(images) once more, with a graph; one backward from the features' gradients

A row of features belongs to one token, so to one chunk: no gradient is added to another. Of ranks
that share a sequence each computes all features and has the rows of the tokens that it runs; what
it propagates is the gradient of these, and sums over ranks are the whole one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from oomb.config import AllChunks, Config, PageRule
from oomb.core.border_states import Carry
from oomb.core.chunk_run import ChunkRun, current_run
from oomb.core.image_blocks import Block, blocks_of, with_later_keys
from oomb.core.inputs import CallInputs, expect
from oomb.core.layout import Chunks
from oomb.errors import UnsupportedModelError
from oomb.model.images import Images
from oomb.model.interface import AttentionCall
from oomb.model.swap import Swaps, swapping
from oomb.parallel.placement import Placement


class ImageRows(Carry):
    """The images of one call; None: it has none, and nothing is done.

    Attributes:
        num_bytes: of the host's memory, features and gradients of this rank's tokens.
    """

    def __init__(
        self, images: Images | None, chunks: Chunks, placement: Placement, device: torch.device
    ) -> None:
        self._images = images
        self._device = device
        self._chunks = chunks
        self._leaves: dict[int, list[torch.Tensor]] = {}  # by chunk that is swept
        self._gradients: list[torch.Tensor] = []
        self._blocks: dict[int, list[Block]] = {}
        self._awaiting: dict[int, torch.Tensor] = {}  # tokens of chunks, until they are embedded
        self.num_bytes = 0
        if images is None:
            return
        slices = [placement.slices(*span) for span in chunks.spans]
        self._run = [of_chunk.run for of_chunk in slices]
        # Rows of a chunk lie together, sequence by sequence: one copy brings them.
        used = (images.rows[:, 1] < chunks.tokens).nonzero()[:, 0]
        tokens = images.rows[used, 1].contiguous()
        ends = torch.tensor([end for _, end in chunks.spans])
        of_chunk = torch.searchsorted(ends, tokens, right=True)
        first, last = torch.tensor([of.own for of in slices])[of_chunk].unbind(1)
        here = (first <= tokens) & (tokens < last)
        used, of_chunk = used[here], of_chunk[here]
        order = of_chunk.argsort(stable=True)
        self._rows = used[order]
        counts = torch.bincount(of_chunk, minlength=chunks.number)
        self._last: list[int] = [0, *counts.cumsum(0).tolist()]
        self._features = [_on_host(x[self._rows], device) for x in images.features]
        self.num_bytes = sum(x.nbytes for x in self._features)
        if images.propagate is not None:
            self._gradients = [torch.zeros_like(x) for x in self._features]
            self.num_bytes *= 2
        for chunk, (begin, end) in enumerate(chunks.spans):
            self._blocks[chunk] = blocks_of(images.blocks, begin, end, device)

    def embedding(self, module: nn.Module) -> Swaps:
        """While active, the embedding gives features at placeholders."""
        return _filled(module, self) if self._images is not None else Swaps()

    @contextmanager
    def on(self, run: ChunkRun) -> Iterator[None]:
        """Around a chunk's run, and in the sweep around its backward."""
        if self._images is None:
            yield
            return
        if run.phase == "sweep" and self._gradients:
            self._leaves[run.chunk] = [x.requires_grad_() for x in self._load(run.chunk)]
        yield
        assert run.chunk not in self._awaiting, "the decoder has not embedded its tokens"
        begin, end = self._last[run.chunk], self._last[run.chunk + 1]
        for leaf, gradient in zip(self._leaves.pop(run.chunk, []), self._gradients, strict=False):
            if leaf.grad is not None:
                gradient[begin:end].copy_(leaf.grad)

    def positions(self, begin: int, end: int) -> torch.Tensor | None:
        """Of tokens [begin, end), where they are not those of text."""
        if self._images is None or self._images.position_ids is None:
            return None
        return self._images.position_ids[..., begin:end]

    def arguments(self, chunk: int, ids: torch.Tensor) -> dict[str, Any]:
        """What the decoder gets beside tokens ``ids`` and positions."""
        images = self._images
        if images is None:
            return {}
        if self._number(chunk) or self._gradients:
            self._awaiting[chunk] = ids
        arguments = {} if images.masks is None else {"attention_mask": images.masks}
        if len(images.features) > 1 and self._number(chunk):
            begin, end = self._run[chunk]
            shape = images.input_ids.shape[0], end - begin
            mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
            mask.view(-1)[self._places(chunk)] = True
            arguments["visual_pos_masks"] = mask
            arguments["deepstack_visual_embeds"] = self._current(chunk)[1:]
        return arguments

    def seen_both_ways(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
        """What adds to a layer's o and lse the later keys of each image; None: they are hidden."""
        images = self._images
        if images is None or not any(call.mask is mask for mask in images.seen_both_ways):
            return None
        blocks = self._blocks[current_run().chunk]
        if not blocks:
            return None

        def added(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            for block in blocks:
                o, lse = with_later_keys(o, lse, q, k, v, call, block)
            return o, lse

        return added

    def propagate(self) -> None:
        """From the gradients of all chunks to tower and projector."""
        if self._images is None or self._images.propagate is None:
            return
        gradients = []
        for given, collected in zip(self._images.features, self._gradients, strict=True):
            whole = torch.zeros_like(given)
            whole[self._rows] = collected
            gradients.append(whole)
        self._images.propagate(gradients)

    def _number(self, chunk: int) -> int:
        return self._last[chunk + 1] - self._last[chunk]

    def _current(self, chunk: int) -> list[torch.Tensor]:
        leaves = self._leaves.get(chunk)
        return self._load(chunk) if leaves is None else leaves

    def _load(self, chunk: int) -> list[torch.Tensor]:
        span = slice(self._last[chunk], self._last[chunk + 1])
        return [x[span].to(self._device, non_blocking=True, copy=True) for x in self._features]

    def _places(self, chunk: int) -> torch.Tensor:
        """[n]: of a chunk's rows, in the tokens [B * C] that are run."""
        assert self._images is not None
        begin, end = self._run[chunk]
        rows = self._images.rows[self._rows[self._last[chunk] : self._last[chunk + 1]]]
        return (rows[:, 0] * (end - begin) + rows[:, 1] - begin).to(self._device)

    def put(self, ids: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, C, hidden_size] of a chunk's tokens, features at its placeholders.

        Some heads ask the embedding, too: what they get is left as it is.
        """
        awaiting = (chunk for chunk, its in self._awaiting.items() if its is ids)
        chunk = next(awaiting, None)
        if chunk is None:
            return embeds
        del self._awaiting[chunk]
        if self._gradients and torch.is_grad_enabled() and not embeds.requires_grad:
            # Nothing of this chunk may train: its gradient still reaches features of earlier ones.
            embeds = embeds.detach().requires_grad_()
        if not self._number(chunk):
            return embeds
        features = self._current(chunk)[0].to(embeds.dtype)
        return embeds.flatten(0, 1).index_copy(0, self._places(chunk), features).view_as(embeds)


@swapping
def _filled(swaps: Swaps, module: nn.Module, rows: ImageRows) -> None:
    forward: Callable[..., torch.Tensor] = module.forward
    swaps.replace(module, "forward", lambda ids: rows.put(ids, forward(ids)))


def _on_host(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return x.pin_memory() if device.type == "cuda" else x


def expect_images_fit(inputs: CallInputs, config: Config, images: Images) -> None:
    """Refuse what would not be exact with these images.

    Raises:
        ValueError, UnsupportedModelError: names the setting or argument.
    """
    if images.position_ids is not None:
        model = config.rope_angles == "model"
        expect(model, "rope_angles", "'model' where positions count height and width", "'float64'")
    if not len(images.blocks):
        return
    if isinstance(config.attention, PageRule) or not isinstance(config.backward, AllChunks):
        setting = config.attention if isinstance(config.attention, PageRule) else config.backward
        raise UnsupportedModelError(
            f"{type(setting).__name__}: expected oomb.Dense() and oomb.AllChunks() for a model "
            "whose image tokens see one another, since its chunks end where images do"
        )
    if inputs.first_key is not None:
        row, begin, last = images.blocks[:, 0], images.blocks[:, 1], images.blocks[:, 2] - 1
        held = last < inputs.tokens
        first = inputs.first_key.cpu()
        apart = first[row[held], begin[held]] != first[row[held], last[held]]
        expect(not bool(apart.any()), "document_ids", "images inside a document", "one in two")
