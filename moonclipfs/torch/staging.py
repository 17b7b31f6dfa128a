"""Host memory that a save copies tensors into while training waits, kept for the next save."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

import torch

from moonclipfs.torch.copying import copy_all
from moonclipfs.torch.dtypes import as_words

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of one tensor: its bytes on the host, C-contiguous.

    `unchanged` says that they are those of the save before, under the same key.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: torch.Tensor
    unchanged: bool


@dataclass(frozen=True, slots=True)
class _Slot:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    length: int


class HostBuffers:
    """One arena that holds a copy of everything that is saved. Used by one save at a time."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    @property
    def size(self) -> int:
        """Bytes of memory held."""
        return self._arena.numel()

    def take(self, tensors: Mapping[str, torch.Tensor], pool: Executor, threads: int) -> dict[str, Staged]:
        """Copy tensors (without shards or wrappers), by a key that tells the same one in the next save.

        At most `threads` threads copy: the caller's, and those of `pool` as they come.
        """
        slots = _plan(tensors)
        kept = self._reserve(slots, pinned=any(tensor.is_cuda for tensor in tensors.values()))
        known = self._slots if kept and slots == self._slots else {}
        self._slots = slots
        plain: list[str] = []
        odd: list[str] = []
        for key, tensor in tensors.items():
            simple = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()
            (plain if simple and not tensor.is_neg() else odd).append(key)
        places = {key: (self._at(slots[key]).data_ptr(), tensors[key].data_ptr(), slots[key].length) for key in plain}
        unchanged = copy_all({key: (*places[key], key in known) for key in plain}, pool, threads)
        self._copy_odd([(self._at(slots[key]), tensors[key]) for key in odd])
        return {
            key: Staged(tensor.dtype, tuple(tensor.shape), self._at(slots[key]), key in unchanged)
            for key, tensor in tensors.items()
        }

    def _at(self, slot: _Slot) -> torch.Tensor:
        return self._arena[slot.start : slot.start + slot.length]

    def _copy_odd(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy what lies on a device, or in another order than its copy is to have."""
        with torch.no_grad():
            for target, tensor in pairs:
                if tensor.numel():
                    words = as_words(tensor.resolve_conj().resolve_neg())
                    target.view(words.dtype).view(words.shape).copy_(words, non_blocking=True)
        for device in {tensor.device for _, tensor in pairs if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

    def _reserve(self, slots: Mapping[str, _Slot], *, pinned: bool) -> bool:
        """Have memory for the slots; False when it is new."""
        size = max((slot.start + slot.length for slot in slots.values()), default=0)
        if size > self._arena.numel() or pinned != self._pinned:
            self._arena = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._arena, self._pinned = _allocate(size, pinned=pinned), pinned
            return False
        return True


def _plan(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Slot]:
    slots = {}
    start = 0
    for key, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        slots[key] = _Slot(tensor.dtype, tuple(tensor.shape), start, length)
        start += -(-length // _ALIGN) * _ALIGN
    return slots


def _allocate(size: int, *, pinned: bool) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # else the first save takes longer for the page faults than for the copy
    return torch.frombuffer(memory, dtype=torch.uint8)
