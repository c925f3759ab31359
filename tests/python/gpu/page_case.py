"""Schedules played on a page manager of the GPU, with kernels that stamp pages and check stamps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from oomb import _C

WORDS = 512  # int64 words of a slot


class _Memory:
    """Device memory at an address, for torch.as_tensor."""

    def __init__(self, address: int, shape: tuple[int, ...], kind: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": kind,
            "version": 3,
        }


def pool_view(manager: _C.PageManager) -> torch.Tensor:
    """The device pool as int64 [half slots, words of half a slot]; once it has memory."""
    shape = (2 * manager.device_slots, WORDS // 2)
    return torch.as_tensor(_Memory(manager.pool_address(), shape, "<i8"), device="cuda")


def table(capsule: object) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(capsule)


@dataclass
class Case:
    """One call: chunks are filled, then swept backwards; sizes and delays come from the seed.

    Three seeds of four keep outputs, of every other chunk and layer, in ``pieces`` slots each.
    """

    seed: int
    spin: bool = True
    switches: dict[str, object] = field(default_factory=dict)
    chunks: int = 0

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.layers = rng.randint(1, 3)
        self.batch = rng.randint(1, 2)
        self.chunks = self.chunks or rng.randint(3, 5)
        self.chunk_pages = rng.randint(1, 3)
        self.grad_slots = rng.randint(1, 2)
        self.device_slots = self.batch * (1 + self.grad_slots) + rng.randint(0, 16)

        self.pieces = self.seed % 4

    def keeps(self, chunk: int, layer: int) -> bool:
        return self.pieces > 0 and (chunk + layer) % 2 == 0

    @property
    def pages(self) -> int:
        return self.chunks * self.chunk_pages

    def manager(self) -> _C.PageManager:
        return _C.PageManager(
            device="cuda:0",
            slot_bytes=WORDS * 8,
            device_slots=self.device_slots,
            host_slots=512,
            copy_delay_seed=self.seed if self.spin else None,
            **self.switches,
        )


class Player:
    """Plays cases on a manager; ``bad`` counts words that are not what they have to be."""

    def __init__(self) -> None:
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self.digest = torch.zeros((), dtype=torch.int64, device="cuda")

    def play(self, case: Case, manager: _C.PageManager) -> None:
        self.case, self.manager = case, manager
        self.rng = random.Random(case.seed)
        self.visit_index = 0
        visits, n, per = [], case.chunks, case.chunk_pages
        for chunk in range(n):
            visits += [(layer, 0, 0, chunk * per) for layer in range(case.layers)]
        for chunk in reversed(range(n)):
            for layer in range(case.layers):
                kept = case.keeps(chunk, layer)
                visits.append(
                    (layer, 3, *self._pieces(chunk)) if kept else (layer, 0, 0, chunk * per)
                )
            for layer in reversed(range(case.layers)):
                visits.append((layer, 1, 0, chunk * per))
                visits.append((layer, 2, chunk * per, (chunk + 1) * per))
        manager.begin_call(
            num_layers=case.layers,
            pages_per_sequence=[case.pages] * case.batch,
            grad_slots=case.grad_slots,
            visits=np.array(visits, dtype=np.int32),
            outputs=n * case.pieces,
        )
        try:
            self._play()
        finally:
            manager.end_call()

    def _play(self) -> None:
        case, manager = self.case, self.manager
        stream = torch.cuda.current_stream().cuda_stream
        self.keys = [table(manager.block_table(layer)) for layer in range(case.layers)]
        self.grads = [table(manager.gradient_table(layer)) for layer in range(case.layers)]
        shape = (case.layers, case.batch, case.pages)
        ids = torch.arange(case.layers * case.batch * case.pages, device="cuda").view(shape)
        self.key_stamp = ids * 1009 + case.seed * 1_000_003 + 1
        self.grad_stamp = torch.zeros(shape, dtype=torch.int64, device="cuda")
        self.touched: set[tuple[int, int]] = set()
        for layer in range(case.layers):
            manager.create_gradients(layer, 0, case.pages)
        per = case.chunk_pages
        for chunk in range(case.chunks):
            for layer in range(case.layers):
                page = chunk * per
                while page < (chunk + 1) * per:
                    stop = min(page + max(1, manager.max_create()), (chunk + 1) * per)
                    manager.create(layer, page, stop, stream)
                    self._write_keys(layer, page, stop)
                    manager.commit(layer, page, stop, stream)
                    page = stop
                self._visit(layer, False, stream)
                if case.keeps(chunk, layer):
                    self._keep_output(chunk, layer, stream)
        for chunk in reversed(range(case.chunks)):
            for layer in range(case.layers):
                if case.keeps(chunk, layer):
                    self._take_output(chunk, layer, stream)
                else:
                    self._visit(layer, False, stream)
            for layer in reversed(range(case.layers)):
                self._visit(layer, True, stream)
                for page in range(chunk * per, (chunk + 1) * per):
                    manager.acquire_gradients(layer, page, page + 1, stream)
                    if (layer, page) in self.touched:
                        self._check_gradients(layer, page, page + 1, False)
                    manager.drop(layer, page, page + 1, stream=stream)
                self.visit_index += 1

    def _visit(self, layer: int, accumulate: bool, stream: int) -> None:
        for first, last in self.manager.waves(self.visit_index):
            self.manager.acquire(self.visit_index, first, last, stream=stream)
            self._check_keys(layer, first, last)
            if accumulate:
                self._check_gradients(layer, first, last, True)
                self.touched.update((layer, page) for page in range(first, last))
            self.manager.release(self.visit_index, first, last, stream=stream)
        self.visit_index += 1

    def _pieces(self, chunk: int) -> tuple[int, int]:
        return chunk * self.case.pieces, (chunk + 1) * self.case.pieces

    def _keep_output(self, chunk: int, layer: int, stream: int) -> None:
        """The last piece is half full; the source is overwritten at once."""
        first, last = self._pieces(chunk)
        output = torch.zeros((last - first) * WORDS - WORDS // 2, dtype=torch.int64, device="cuda")
        self._spin()
        output.fill_(self._output_stamp(chunk, layer))
        step = self.manager.max_outputs()
        for begin in range(first, last, step):
            end = min(begin + step, last)
            part = output[(begin - first) * WORDS : (end - first) * WORDS]
            self.manager.write_output(
                layer=layer,
                begin=begin,
                end=end,
                source=part.data_ptr(),
                num_bytes=8 * part.numel(),
                stream=stream,
            )
        output.fill_(-1)

    def _take_output(self, chunk: int, layer: int, stream: int) -> None:
        first, last = self._pieces(chunk)
        output = torch.zeros((last - first) * WORDS - WORDS // 2, dtype=torch.int64, device="cuda")
        for begin, end in self.manager.waves(self.visit_index):
            self._spin()
            part = output[(begin - first) * WORDS : (end - first) * WORDS]
            self.manager.read_output(
                visit=self.visit_index,
                begin=begin,
                end=end,
                target=part.data_ptr(),
                num_bytes=8 * part.numel(),
                stream=stream,
            )
        self.visit_index += 1
        self.bad += (output != self._output_stamp(chunk, layer)).sum()
        self.digest += output.sum()

    def _output_stamp(self, chunk: int, layer: int) -> int:
        return 7919 * (chunk * self.case.layers + layer) + self.case.seed + 2

    # "Kernels" ----------------------------------------------------------------------------------

    def _spin(self) -> None:
        if self.case.spin and self.rng.random() < 0.3:
            torch.cuda._sleep(self.rng.randrange(400_000))

    def _write_keys(self, layer: int, first: int, last: int) -> None:
        self._spin()
        self.pool = pool_view(self.manager)
        slots = self.keys[layer][:, first:last].reshape(-1).long()
        stamps = self.key_stamp[layer, :, first:last].reshape(-1, 1)
        for half in (0, 1):
            self.pool.index_copy_(0, 2 * slots + half, stamps.expand(-1, WORDS // 2).contiguous())

    def _check_keys(self, layer: int, first: int, last: int) -> None:
        self._spin()
        slots = self.keys[layer][:, first:last].reshape(-1).long()
        stamps = self.key_stamp[layer, :, first:last].reshape(-1, 1)
        for half in (0, 1):
            found = self.pool.index_select(0, 2 * slots + half)
            self.bad += (found != stamps).sum()
            self.digest += found.sum()

    def _check_gradients(self, layer: int, first: int, last: int, add: bool) -> None:
        self._spin()
        stamps = self.grad_stamp[layer, :, first:last].reshape(-1, 1)
        following = stamps * 3 + self.key_stamp[layer, :, first:last].reshape(-1, 1)
        for which in (0, 1):
            halves = self.grads[layer][:, first:last, which].reshape(-1).long()
            parts = (0, 1) if self.case.grad_slots == 2 else (0,)
            for part in parts:
                found = self.pool.index_select(0, halves + part)
                self.bad += (found != stamps).sum()
                self.digest += found.sum()
                if add:
                    rows = following.expand(-1, WORDS // 2).contiguous()
                    self.pool.index_copy_(0, halves + part, rows)
        if add:
            self.grad_stamp[layer, :, first:last] = following.view(self.case.batch, last - first)


class TightTier:
    """Rare situations: a tier of three slots, page 0 has just left it, page 1 goes next.

    As in tests/cpp/offload/stamp_test.cpp, where the first two are drawn.
    """

    def __init__(self, seed: int, wait: str | None) -> None:
        self.rng = random.Random(seed)
        self.manager = _C.PageManager(
            device="cuda:0",
            slot_bytes=WORDS * 8,
            device_slots=3,
            host_slots=2,
            copy_delay_seed=seed,
            disabled_wait=wait,
        )
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        # Between page 1 and page 0 two visits pass, so that no slot still counts as in use.
        reads = [(2, 4), (1, 2), (5, 6), (5, 6), (0, 1)]
        visits = np.array([(0, 0, *pages) for pages in reads], dtype=np.int32)
        self.manager.begin_call(num_layers=1, pages_per_sequence=[6], grad_slots=1, visits=visits)
        self.stream = torch.cuda.current_stream().cuda_stream
        self.table = table(self.manager.block_table(0))
        for page in range(4):
            self._write(page, page + 1)

    def hand_on_host_slot(self) -> int:
        self._read(0)
        self.manager.drop(0, 0, 1, stream=self.stream)
        self._write(4, 6)
        return self._finish()

    def fetch_back_at_once(self) -> int:
        self.manager.drop(0, 2, 3, stream=self.stream)
        self._read(0)
        return self._finish()

    def store_over_a_store(self) -> int:
        """Page 0 dies while it is stored; its place on the host goes to page 3 at once."""
        self.manager.drop(0, 0, 1, stream=self.stream)
        self._write(4, 6)
        self.manager.drop(0, 1, 2, stream=self.stream)
        self._read(3)
        return self._finish()

    def _write(self, first: int, last: int) -> None:
        self.manager.create(0, first, last, self.stream)
        self.pool = pool_view(self.manager).view(self.manager.device_slots, WORDS)
        for page in range(first, last):
            stamps = torch.full((1, WORDS), page + 1, device="cuda", dtype=torch.int64)
            self.pool.index_copy_(0, self.table[0, page : page + 1].long(), stamps)
        self.manager.commit(0, first, last, self.stream)

    def _read(self, page: int) -> None:
        self.manager.acquire(0, page, page + 1, self.stream)
        found = self.pool.index_select(0, self.table[0, page : page + 1].long())
        self.bad += (found != page + 1).sum()
        self.manager.release(0, page, page + 1, self.stream)

    def _finish(self) -> int:
        self.manager.end_call()
        self.manager.close()
        return int(self.bad)
