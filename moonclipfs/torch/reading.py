"""Bytes of saved tensors into memory: decoded on all threads, straight to where they are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait

import torch

from moonclipfs import limits
from moonclipfs.torch.dtypes import as_bytes, memory_of
from moonclipfs.torch.saved import SavedTensor

_WINDOW = 256
"""Ranges that wait for a thread at one time."""


def read_all(wanted: Iterable[tuple[SavedTensor, torch.Tensor]], pool: Executor) -> None:
    """Fill tensors of the shapes of what is saved, on whatever device and of whatever dtype.

    What is C-contiguous on the host and of the saved dtype is decoded in place; for anything else there is one copy of
    one tensor at a time. Raises CorruptError; what was read by then has been overwritten.
    """
    later = []
    window = _Window(pool)
    try:
        for saved, target in wanted:
            if _is_direct(saved, target):
                window.read(saved, as_bytes(target.detach()))
            else:
                later.append((saved, target))
        window.finish()
        for saved, target in later:
            copy = torch.empty(saved.shape, dtype=saved.dtype)
            window.read(saved, as_bytes(copy))
            window.finish()
            with torch.no_grad():
                target.copy_(copy)
    finally:
        window.stop()


def _is_direct(saved: SavedTensor, target: torch.Tensor) -> bool:
    return target.device.type == "cpu" and target.dtype is saved.dtype and target.is_contiguous()


class _Window:
    """Ranges on their way, a bounded number."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._pending: set[Future[None]] = set()

    def read(self, saved: SavedTensor, out: torch.Tensor) -> None:
        memory = memory_of(out)
        for at in _starts(saved.length):
            part = memory[at : at + limits.PREFETCH_BYTES]
            self._pending.add(self._pool.submit(_fill, saved, at, part))
            if len(self._pending) >= _WINDOW:
                self._collect(wait(self._pending, return_when=FIRST_COMPLETED).done)

    def finish(self) -> None:
        """Wait for all of it. Raises what reading raised."""
        self._collect(wait(self._pending).done)

    def stop(self) -> None:
        """After an error: nobody writes to any target any more."""
        wait([future for future in self._pending if not future.cancel()])

    def _collect(self, done: Iterable[Future[None]]) -> None:
        for future in list(done):
            self._pending.discard(future)
            future.result()


def _starts(length: int) -> Iterator[int]:
    return iter(range(0, length, limits.PREFETCH_BYTES))


def _fill(saved: SavedTensor, at: int, out: memoryview) -> None:
    if len(out) < limits.BLOCK_BYTES:
        saved.reader.read_into(saved.offset + at, out)  # small tensors share their blocks with others
    else:
        saved.reader.stream_into(saved.offset + at, out)
