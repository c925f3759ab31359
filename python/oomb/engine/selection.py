"""Which past pages each block of queries sees: chosen once, kept, and used by every later pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from oomb import _C
from oomb.config import TopKPages
from oomb.engine.layout import Chunks
from oomb.ops.launch import stream_of, workspace_on


class Selector:
    """Page lists of one call under :class:`oomb.TopKPages`.

    Lists are int32 [batch, query_blocks, heads or 1, budget], ascending, -1 padded. None: the past
    holds no more pages than the budget, and is seen whole.
    """

    def __init__(self, rule: TopKPages, chunks: Chunks, num_layers: int, max_pages: int) -> None:
        self._rule = rule
        self._chunks = chunks
        self._max_pages = max_pages
        self._lists: dict[tuple[int, int], torch.Tensor] = {}
        self._pages: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self._num_layers = num_layers
        self._host: HostLists | None = None  # where lists are when pages move

    def choose(
        self,
        layer: int,
        chunk: int,
        q: torch.Tensor,
        summary: torch.Tensor,
        num_past: int,
        first_key: torch.Tensor | None,
        num_keys: torch.Tensor | None,
    ) -> bool:
        """Choose the lists of a chunk's queries at a layer, if there is a choice and none was made.

        Args:
            q: [B, Hq, C, D]. No gradient flows through the choice.
            summary: [B, pages, Hkv, D] mean keys.

        Returns:
            Whether lists were chosen now.
        """
        num_pages = -(-num_past // self._chunks.page_size)
        if num_pages <= self._rule.budget or (layer, chunk) in self._lists:
            return False
        self._lists[layer, chunk] = self._choose(
            layer, chunk, q.detach(), summary, num_past, first_key, num_keys
        )
        return True

    def _choose(
        self,
        layer: int,
        chunk: int,
        q: torch.Tensor,
        summary: torch.Tensor,
        num_past: int,
        first_key: torch.Tensor | None,
        num_keys: torch.Tensor | None,
    ) -> torch.Tensor:
        rule, page_size = self._rule, self._chunks.page_size
        batch, _, tokens, _ = q.shape
        heads = 1 if rule.share == "all_heads" else summary.shape[2]
        blocks, num_pages = -(-tokens // page_size), -(-num_past // page_size)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scores = torch.empty(batch, blocks, heads, num_pages, dtype=dtype, device=q.device)
        _C.page_score(
            q=q,
            summary=summary,
            scores=scores,
            kind=rule.score,
            num_past=num_past,
            page_size=page_size,
            first_key=first_key,
            num_keys=num_keys,
            workspace=workspace_on(q.device),
            stream=stream_of(q.device),
        )
        if rule.chunk_budget is not None:
            _keep_best_of_chunk(scores, rule)
        shape = (batch, blocks, heads, rule.budget)
        lists = torch.empty(shape, dtype=torch.int32, device=q.device)
        _C.page_select(
            scores=scores,
            selection=lists,
            budget=rule.budget,
            sink_pages=rule.sink_pages,
            recent_pages=rule.recent_pages,
            stream=stream_of(q.device),
        )
        return lists

    def recorded(self, layer: int, chunk: int) -> torch.Tensor | None:
        lists = self._lists.get((layer, chunk))
        if lists is None and self._host is not None:
            return self._host.fetch(layer, chunk)
        return lists

    def request(self, layer: int, chunk: int) -> None:
        """Start bringing new lists to the host, for :meth:`pages`."""
        lists = self._lists[layer, chunk]
        if lists.is_cuda:
            if self._host is None:
                self._host = HostLists(self._num_layers, self._chunks.number, lists)
            self._host.send(layer, chunk, lists)

    def pages(self, layer: int, chunk: int) -> npt.NDArray[np.int64]:
        """Distinct pages of the lists, as sequence * max_pages + page, ascending.

        On a GPU the first call waits for the lists, so only a call whose pages move asks. From then
        on the lists are kept on the host.
        """
        if (layer, chunk) not in self._pages:
            lists = self._lists[layer, chunk]
            if self._host is not None:
                del self._lists[layer, chunk]
                lists = self._host.wait(layer, chunk)
            of_sequence = lists.numpy().reshape(lists.shape[0], -1)
            named = [
                np.unique(pages[pages >= 0]).astype(np.int64) + sequence * self._max_pages
                for sequence, pages in enumerate(of_sequence)
            ]
            self._pages[layer, chunk] = np.concatenate(named)
        return self._pages[layer, chunk]

    def as_lists(self, num_chunks: int) -> list[list[torch.Tensor | None]]:
        """``[layer][chunk]``, on the host, for ``step.selection``."""

        def kept(layer: int, chunk: int) -> torch.Tensor | None:
            lists = self.recorded(layer, chunk)
            return None if lists is None else lists.cpu()

        return [
            [kept(layer, chunk) for chunk in range(num_chunks)] for layer in range(self._num_layers)
        ]


class HostLists:
    """Lists of a call in pinned memory, read and written by kernels.

    A copy would wait behind the pages that are on their way.
    """

    def __init__(self, num_layers: int, num_chunks: int, like: torch.Tensor) -> None:
        shape = (num_layers, num_chunks, like.numel())
        self._words = torch.empty(shape, dtype=like.dtype, pin_memory=True)
        self._device = like.device
        self._shapes: dict[tuple[int, int], torch.Size] = {}
        self._arrivals: dict[tuple[int, int], torch.cuda.Event] = {}

    def send(self, layer: int, chunk: int, lists: torch.Tensor) -> None:
        """Device to host, behind the kernels that make the lists."""
        self._shapes[layer, chunk] = lists.shape
        self._copy(lists, self._of(layer, chunk))
        arrival = self._arrivals[layer, chunk] = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(self._device))

    def wait(self, layer: int, chunk: int) -> torch.Tensor:
        """The lists, on the host."""
        self._arrivals.pop((layer, chunk)).synchronize()
        return self._of(layer, chunk)

    def fetch(self, layer: int, chunk: int) -> torch.Tensor | None:
        """The lists, on the device again; None where there are none."""
        if (layer, chunk) not in self._shapes:
            return None
        lists = torch.empty(
            self._shapes[layer, chunk], dtype=self._words.dtype, device=self._device
        )
        self._copy(self._of(layer, chunk), lists)
        return lists

    def _of(self, layer: int, chunk: int) -> torch.Tensor:
        shape = self._shapes[layer, chunk]
        return self._words[layer, chunk, : shape.numel()].view(shape)

    def _copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        _C.copy_mapped(
            source=source.data_ptr(),
            destination=destination.data_ptr(),
            words=source.numel(),
            stream=stream_of(self._device),
        )


def _keep_best_of_chunk(scores: torch.Tensor, rule: TopKPages) -> None:
    """Leave at most ``chunk_budget`` pages of each sequence as candidates of its whole chunk.

    Pages rank by the highest score any block gives them; ties go to the lower page. Forced pages
    stay.
    """
    assert rule.chunk_budget is not None
    best = scores.amax(dim=(1, 2))  # [B, pages]
    num_pages = best.shape[1]
    if num_pages <= rule.chunk_budget:
        return
    forced = torch.zeros(num_pages, dtype=torch.bool, device=scores.device)
    forced[: rule.sink_pages] = True
    forced[num_pages - rule.recent_pages :] = rule.recent_pages > 0
    ranked = best.masked_fill(forced, torch.inf).sort(dim=1, descending=True, stable=True).indices
    dropped = torch.ones_like(best, dtype=torch.bool)
    dropped.scatter_(1, ranked[:, : rule.chunk_budget], False)
    scores.masked_fill_(dropped[:, None, None, :], -torch.inf)
