"""Bytes of saved tensors into memory: decoded on all threads, straight to where they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait

import torch

from moonclipfs import limits
from moonclipfs.torch.casting import Cast, restored
from moonclipfs.torch.dtypes import as_bytes, memory_of
from moonclipfs.torch.saved import SavedTensor

_WINDOW = 256
"""Ranges that wait for a thread at one time."""
_CAST_ELEMENTS = 1 << 20
"""Elements that are restored from another dtype at a time."""


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
                window.read(saved, target.detach())
            else:
                later.append((saved, target))
        window.finish()
        for saved, target in later:
            copy = torch.empty(saved.shape, dtype=saved.dtype)
            window.read(saved, copy)
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
        """Begin to read into a C-contiguous tensor of the saved dtype."""
        if saved.cast is None:
            memory = memory_of(as_bytes(out))
            for at in range(0, saved.length, limits.PREFETCH_BYTES):
                self._submit(_fill, saved, at, memory[at : at + limits.PREFETCH_BYTES])
        else:
            flat = out.reshape(-1)
            for at in range(0, flat.numel(), _CAST_ELEMENTS):
                self._submit(_fill_cast, saved, saved.cast, at, flat[at : at + _CAST_ELEMENTS])

    def _submit(self, fill: Callable[..., None], *arguments: object) -> None:
        self._pending.add(self._pool.submit(fill, *arguments))
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


def _fill(saved: SavedTensor, at: int, out: memoryview) -> None:
    if len(out) < limits.BLOCK_BYTES:
        saved.reader.read_into(saved.offset + at, out)  # small tensors share their blocks with others
    else:
        saved.reader.stream_into(saved.offset + at, out)


def _fill_cast(saved: SavedTensor, how: Cast, first: int, out: torch.Tensor) -> None:
    narrow = torch.empty(out.numel(), dtype=how.dtype)
    _fill(saved, first * how.dtype.itemsize, memory_of(as_bytes(narrow)))
    with torch.no_grad():
        out.copy_(restored(narrow, how))
