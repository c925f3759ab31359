from __future__ import annotations

import pytest
import torch

from oomb.errors import Error, OutOfMemoryError, UnsupportedModelError


class TestOutOfMemoryError:
    def test_is_caught_as_ours_and_as_torch_s(self) -> None:
        for kind in (Error, RuntimeError, torch.OutOfMemoryError):
            with pytest.raises(kind):
                raise OutOfMemoryError("device tier")

    def test_message_has_the_words_that_retry_loops_look_for(self) -> None:
        assert " out of memory." in OutOfMemoryError("kv pool: 3 pages missing").args[0]
        text = "device tier is out of memory. 3 pages missing"
        assert OutOfMemoryError(text).args == (text,)

    def test_carries_sizes(self) -> None:
        error = OutOfMemoryError("x", needed_bytes=10, available_bytes=4)
        assert (error.needed_bytes, error.available_bytes) == (10, 4)


def test_unsupported_model_is_ours() -> None:
    assert issubclass(UnsupportedModelError, Error)
