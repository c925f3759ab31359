"""Images of a call, in a plan: what their tower takes around the chunks, and features beside them.

before   inputs, tower                      the call's pages are not there
chunks   inputs, chunk, its features        pages
after    inputs, sums, tower and its sums   pages; only where something before the decoder trains
"""

from __future__ import annotations

from dataclasses import dataclass

from oomb.config import Config
from oomb.plan.pages import PageCall
from oomb.plan.rates import Rates
from oomb.trace.tower import TowerUse
from oomb.trace.trace import Tracer


@dataclass(frozen=True)
class ImagesUse:
    """Bytes of one rank.

    Attributes:
        chunk_bytes: of the device: a chunk's features, in the sweep with their gradients.
        host_bytes: of features, and of their gradients.
    """

    tower: TowerUse
    chunk_bytes: int
    host_bytes: int

    def seconds(self, rates: Rates) -> float:
        """Of the tower, which every rank runs on all images."""
        work = self.tower.work
        return work.flops / rates.matrix + work.moved_bytes / rates.traffic

    def before_bytes(self, given: int) -> int:
        """Before the chunks, beside what is ``given`` to the call; 0: there are no images."""
        return given + self.tower.before_bytes if self.tower.before_bytes else 0

    @staticmethod
    def of(tracer: Tracer, config: Config, call: PageCall, image_tokens: int) -> ImagesUse:
        """Of a call each of whose sequences shows images on ``image_tokens`` tokens.

        Raises:
            ValueError, UnsupportedModelError: of :meth:`oomb.trace.tower.Tower.use`.
        """
        shown, tokens = image_tokens * call.batch, (call.chunks.tokens + 1) * call.batch
        tower = tracer.tower.use(shown, tokens, config.main_grad_dtype)
        here = min(shown, call.batch * call.chunks.chunk_size) / max(1, shown) / call.ranks
        features = round(tower.feature_bytes * here)
        return ImagesUse(
            tower=tower,
            chunk_bytes=2 * features if tower.trains else features,
            host_bytes=tower.host_bytes(call.ranks),
        )
