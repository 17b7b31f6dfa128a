"""Experts in RAM over an `ExpertStore`: the least recently used ones leave, and what was changed is written back."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import torch

from moonclipfs import limits
from moonclipfs.errors import ReadOnlyError, UsageError
from moonclipfs.torch.elements import in_ram
from moonclipfs.torch.experts import ExpertId, ExpertStore
from moonclipfs.torch.transfer import Transfer

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Held:
    """An expert in RAM. `put` says that it may differ from its file; `versions` tells tensors changed in place."""

    tensors: dict[str, torch.Tensor]
    put: bool
    versions: list[int]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, put: bool) -> Self:
        return cls(dict(tensors), put, [tensor._version for tensor in tensors.values()])

    @property
    def may_differ(self) -> bool:
        return self.put or self.versions != [tensor._version for tensor in self.tensors.values()]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ExpertTiers:
    """Experts of a store, of which RAM holds the `ram_capacity` that were used last, in at most `ram_bytes` bytes.

    One expert is held even if it alone is larger. `prefetch` threads read ahead what `prefetch()` names; with 0, none
    does. An expert that leaves RAM is written to its file if its bytes differ from what is there; one that cannot be
    written stays in RAM, and whoever needed its place gets the error: what was to be `put` is not taken then. Over a
    store that is open for reading only, `put` of anything but what the file holds raises ReadOnlyError.

    Thread-safe. Counters: `reads` of files and `hits` in RAM, `evictions`, `writebacks`, `bytes_read` and
    `bytes_written` of tensors, and `stall_s`, the seconds that `fetch` and `put` waited for files.
    """

    def __init__(
        self,
        store: ExpertStore,
        ram_capacity: int = 256,
        device: str | torch.device = "cpu",
        prefetch: int = 0,
        *,
        ram_bytes: int | None = None,
    ) -> None:
        """Raises UsageError for a capacity of nothing, or more threads than `limits.EXPERT_THREADS`."""
        if ram_capacity < 1 or (ram_bytes is not None and ram_bytes < 1):
            raise UsageError("RAM must hold at least one expert")
        if not 0 <= prefetch <= limits.EXPERT_THREADS:
            raise UsageError(f"{prefetch} threads to read ahead: between 0 and {limits.EXPERT_THREADS} are possible")
        self.store = store
        self.ram_capacity = ram_capacity
        self.ram_bytes = ram_bytes
        self.transfer = Transfer(torch.device(device))
        self.reads = self.hits = self.evictions = self.writebacks = self.bytes_read = self.bytes_written = 0
        self.stall_s = 0.0
        self._held: OrderedDict[ExpertId, _Held] = OrderedDict()
        self._held_bytes = 0
        self._reading: set[ExpertId] = set()
        self._writing: set[ExpertId] = set()
        self._queued: set[ExpertId] = set()
        self._changed = threading.Condition()
        """Guards all of the above; told when something was read, written or put."""
        self._pool = ThreadPoolExecutor(prefetch, "prefetch") if prefetch else None

    def fetch(self, expert: ExpertId) -> dict[str, torch.Tensor]:
        """Return the tensors of an expert on the device.

        On a CPU they are those that RAM holds: change copies, and `put` these. (A change in place is noticed when the
        expert leaves RAM, if torch made it before that.) Raises what `ExpertStore.read` raises.
        """
        return self.transfer.to_device(self.held(expert))

    def held(self, expert: ExpertId) -> dict[str, torch.Tensor]:
        """Return the tensors of an expert in RAM, as `fetch` does."""
        with self._changed:
            held = self._held.get(expert)
            if held is not None:
                self._held.move_to_end(expert)
                self.hits += 1
                return dict(held.tensors)
        with self._stalled():
            return self._load(expert, is_hit_when_read=True)

    def put(self, expert: ExpertId, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take these as the tensors of an expert, to be written when it leaves RAM or is flushed; a new one at once.

        Tensors in RAM are taken over, not copied. Raises UsageError for an expert that was deleted, ReadOnlyError when
        the store cannot be written and its file holds something else.
        """
        held = _Held.of({name: in_ram(tensor) for name, tensor in tensors.items()}, put=True)
        with self._stalled():
            if self.store.read_only:
                self._require_same(expert, held)
                held.put = False
            elif not self.store.exists(expert):
                self._write_new(held, partial(self.store.write, expert))  # from now on its number is taken
            self._admit(expert, held)

    def create(self, tensors: Mapping[str, torch.Tensor], layer: int | None = None) -> ExpertId:
        """Write a new expert to its file, hold it in RAM, and return its number."""
        held = _Held.of({name: in_ram(tensor) for name, tensor in tensors.items()}, put=True)
        with self._stalled():
            expert = self._write_new(held, partial(self.store.create, layer=layer))
            self._admit(expert, held)
        return expert

    def delete(self, expert: ExpertId) -> None:
        """Delete an expert, in RAM and in the store."""
        with self._changed:
            while expert in self._reading or expert in self._writing:
                self._changed.wait()
            self.store.delete(expert)
            self._remove(expert)

    def flush(self) -> None:
        """Write all changed experts to their files; they stay in RAM."""
        with self._changed:
            experts = list(self._held)
        for expert in experts:
            with self._changed:
                while expert in self._writing:
                    self._changed.wait()
                held = self._held.get(expert)
                if held is None or not held.may_differ:
                    continue
                self._writing.add(expert)
            self._write_back(expert, held)

    def prefetch(self, experts: Iterable[ExpertId]) -> int:
        """Begin to read experts that are not in RAM, as many as fit there, and return how many.

        What cannot be read is told to whoever fetches it.
        """
        begun = 0
        if self._pool is None:
            return 0
        for expert in experts:
            with self._changed:
                if expert in self._held or expert in self._reading or expert in self._queued:
                    continue
                if len(self._queued) >= min(self.ram_capacity, limits.EXPERT_QUEUE):
                    break
                self._queued.add(expert)
            self._pool.submit(self._read_ahead, expert)
            begun += 1
        return begun

    def report(self) -> dict[str, int | float]:
        """Return the counters, and what RAM holds."""
        with self._changed:
            return {
                "held": len(self._held), "held_bytes": self._held_bytes, "reads": self.reads, "hits": self.hits,
                "evictions": self.evictions, "writebacks": self.writebacks, "bytes_read": self.bytes_read,
                "bytes_written": self.bytes_written, "stall_s": self.stall_s,
            }  # fmt: skip

    def close(self) -> None:
        """End reading ahead, and flush."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_new(self, held: _Held, write: Callable[[Mapping[str, torch.Tensor]], _T]) -> _T:
        result = write(held.tensors)
        held.put = False
        with self._changed:
            self.bytes_written += held.nbytes
        return result

    def _load(self, expert: ExpertId, *, is_hit_when_read: bool) -> dict[str, torch.Tensor]:
        """Return an expert from RAM, where it is read into first unless another thread does that already."""
        with self._changed:
            while expert in self._reading:
                self._changed.wait()
            held = self._held.get(expert)
            if held is not None:
                self._held.move_to_end(expert)
                self.hits += is_hit_when_read
                return dict(held.tensors)
            self._reading.add(expert)
        try:
            read = _Held.of(self.store.read(expert, pinned=self.transfer.pinned), put=False)
            with self._changed:
                self.reads += 1
                self.bytes_read += read.nbytes
            self._admit(expert, read, is_read=True)
        finally:
            with self._changed:
                self._reading.discard(expert)
                self._changed.notify_all()
        return dict(read.tensors)

    def _read_ahead(self, expert: ExpertId) -> None:
        try:
            self._load(expert, is_hit_when_read=False)
        except Exception as error:
            log.info("reading expert %s ahead: %s", expert, error)  # whoever fetches it meets the error again
        finally:
            with self._changed:
                self._queued.discard(expert)

    def _remove(self, expert: ExpertId) -> None:
        held = self._held.pop(expert, None)
        if held is not None:
            self._held_bytes -= held.nbytes

    def _admit(self, expert: ExpertId, held: _Held, *, is_read: bool = False) -> None:
        """Hold an expert in RAM. The least recently used ones go first, each written back where it was changed.

        When one of these cannot be written, it stays, the expert is not taken, and the error is raised.
        """
        while True:
            with self._changed:
                if not is_read and expert in self._reading:
                    self._changed.wait()  # else what is read now, which is older, would replace this
                    continue
                if self._fits(expert, held):
                    self._remove(expert)
                    self._held[expert] = held
                    self._held_bytes += held.nbytes
                    return
                oldest = next((one for one in self._held if one != expert and one not in self._writing), None)
                if oldest is None:
                    self._changed.wait()
                    continue
                leaving = self._held[oldest]
                if not leaving.may_differ:
                    self._remove(oldest)
                    self.evictions += 1
                    continue
                self._writing.add(oldest)
            self._write_back(oldest, leaving)

    def _fits(self, expert: ExpertId, held: _Held) -> bool:
        before = self._held.get(expert)
        count = len(self._held) + (before is None)
        size = self._held_bytes + held.nbytes - (0 if before is None else before.nbytes)
        return count == 1 or (count <= self.ram_capacity and (self.ram_bytes is None or size <= self.ram_bytes))

    def _write_back(self, expert: ExpertId, held: _Held) -> None:
        """Write an expert that this thread has marked as being written, unless its file holds the same."""
        versions = [tensor._version for tensor in held.tensors.values()]
        try:
            if self.store.read_only:
                self._require_same(expert, held)
            written = not self.store.holds(expert, held.tensors)
            if written:
                self.store.write(expert, held.tensors)
            with self._changed:
                held.put, held.versions = False, versions
                if written:
                    self.writebacks += 1
                    self.bytes_written += held.nbytes
        finally:
            with self._changed:
                self._writing.discard(expert)
                self._changed.notify_all()

    def _require_same(self, expert: ExpertId, held: _Held) -> None:
        if not self.store.holds(expert, held.tensors):
            raise ReadOnlyError(
                f"expert {expert} was changed, and {self.store.root} is open for reading only: "
                "the change would be lost; open the experts for writing, in a dry run for example"
            )

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self.stall_s += time.monotonic() - started
