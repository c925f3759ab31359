"""How large the page lists of a call are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomb.config import PageRule
from oomb.core.layout import Chunks
from oomb.model.causal import LayerShape


@dataclass(frozen=True)
class ListSizes:
    """Sizes of the page lists of one call, int32.

    Attributes:
        layers: number of layers that choose.
    """

    rule: PageRule
    chunks: Chunks
    layers: int
    batch: int
    kv_heads: int

    @staticmethod
    def of(rule: PageRule, chunks: Chunks, shapes: Sequence[LayerShape], batch: int) -> ListSizes:
        """Layers with a sliding window see their past whole, and have none."""
        choosing = [shape for shape in shapes if not shape.window]
        heads = choosing[0].kv_heads if choosing else 1
        return ListSizes(rule, chunks, len(choosing), batch, heads)

    @property
    def first_chunk(self) -> int:
        """The first chunk whose past holds more pages than a list: there a choice begins."""
        numbers = range(self.chunks.number)
        return next((c for c in numbers if self.chooses(c)), self.chunks.number)

    def of_layer(self, chunk: int) -> tuple[int, int, int, int]:
        """Shape [batch, query blocks, heads or 1, max_pages] of the lists of a layer and chunk."""
        begin, end = self.chunks.span(chunk)
        blocks = -(-(end - begin) // self.chunks.page_size)
        return self.batch, blocks, self._heads, self.rule.max_pages

    @property
    def of_call(self) -> tuple[int, int, int]:
        """Shape [chunks that choose, layers, words of a whole chunk]."""
        words = self.batch * self.chunks.most_pages * self._heads * self.rule.max_pages
        return self.chunks.number - self.first_chunk, self.layers, words

    @property
    def chunk_bytes(self) -> int:
        """All layers of a chunk."""
        _, layers, words = self.of_call
        return 4 * layers * words

    @property
    def num_bytes(self) -> int:
        """All of the call."""
        return self.of_call[0] * self.chunk_bytes

    def host_bytes(self, device_type: str) -> int:
        """Host memory that they take. A GPU reads them in pinned memory, which torch hands out in
        powers of two."""
        if device_type != "cuda" or self.num_bytes == 0:
            return self.num_bytes
        return 1 << (self.num_bytes - 1).bit_length()

    @property
    def _heads(self) -> int:
        return 1 if self.rule.share == "all_heads" else self.kv_heads

    def chooses(self, chunk: int) -> bool:
        """Whether a chunk's past holds more pages than a list."""
        return self.chunks.past_pages(chunk) > self.rule.max_pages
