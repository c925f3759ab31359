"""The past of one layer of a chunk, as attention's kernels are shown it."""

from __future__ import annotations

from collections.abc import Iterator

from oomb import _C
from oomb.core.call_pages import CallPages
from oomb.core.page_protocol import Launch


class Past:
    """Where a layer's kernels find keys and values of earlier chunks: here in pages that hold them.

    Attributes:
        divides: a launch may become several.
    """

    divides = False

    def __init__(self, pages: CallPages, layer: int, chunk: int) -> None:
        self._pages, self._layer, self._chunk = pages, layer, chunk

    def parts(self, launch: Launch) -> Iterator[Launch]:
        """The launches that a launch becomes, in order."""
        yield launch

    def shown(self, part: Launch) -> _C.PastPages:
        """Pages of a part, for its kernel."""
        return self._pages.past(self._layer, self._chunk, part.shift)

    def gradients(self, part: Launch) -> _C.GradientPages:
        """Where the kernel of a part, after :meth:`shown`, adds to their gradients."""
        return self._pages.past_gradients(self._layer, self._chunk, part.shift)

    def added(self, part: Launch) -> None:
        """The kernel of a part's backward has been launched."""
