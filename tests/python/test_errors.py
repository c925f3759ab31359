from __future__ import annotations

import numpy as np
import pytest
import torch

from oomb import _C
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


class TestTranslation:
    """What the native core throws arrives as the documented Python exceptions."""

    def manager(self, device_slots: int) -> _C.PageManager:
        return _C.PageManager(
            device="cpu", slot_bytes=4096, device_slots=device_slots, host_slots=8
        )

    def test_a_bad_argument_is_a_value_error(self) -> None:
        with pytest.raises(ValueError, match="^device: expected .*, got tpu$"):
            _C.PageManager(device="tpu", slot_bytes=4096, device_slots=4, host_slots=4)

    def test_too_little_memory_is_ours_with_sizes(self) -> None:
        visits = np.array([[0, 1, 0, 4]], dtype=np.int32)
        with pytest.raises(OutOfMemoryError, match=" out of memory. ") as caught:
            self.manager(1).begin_call(
                num_layers=1, pages_per_sequence=[4], grad_slots=2, visits=visits
            )
        assert caught.value.needed_bytes > caught.value.available_bytes == 4096

    def test_misuse_is_an_error_of_ours(self) -> None:
        with pytest.raises(Error, match="no call has begun"):
            self.manager(8).create(0, 0, 1)
