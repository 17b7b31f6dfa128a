"""Host memory that a save copies tensors into while training waits, kept for the next save."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

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

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Staged]:
        """Copy tensors (without shards or wrappers), by a key that tells the same one in the next save."""
        slots = _plan(tensors)
        known = self._slots if slots == self._slots else {}
        self._reserve(slots, pinned=any(tensor.is_cuda for tensor in tensors.values()))
        self._slots = slots
        staged = {}
        on_devices = []
        with torch.no_grad():
            for key, tensor in tensors.items():
                slot = slots[key]
                target = self._arena[slot.start : slot.start + slot.length]
                unchanged = key in known and _is_same(target, tensor)
                if not unchanged:
                    _copy(target, tensor)
                    if tensor.device.type != "cpu":
                        on_devices.append(tensor.device)
                staged[key] = Staged(tensor.dtype, tuple(tensor.shape), target, unchanged)
        for device in set(on_devices):
            torch.accelerator.synchronize(device)
        return staged

    def forget(self) -> None:
        """Take nothing of the next save for unchanged."""
        self._slots = {}

    def _reserve(self, slots: Mapping[str, _Slot], *, pinned: bool) -> None:
        size = max((slot.start + slot.length for slot in slots.values()), default=0)
        if size > self._arena.numel() or pinned != self._pinned:
            self._arena = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._arena, self._pinned = _allocate(size, pinned=pinned), pinned


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


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.numel():
        words = as_words(_resolved(tensor))
        target.view(words.dtype).view(words.shape).copy_(words, non_blocking=True)


def _is_same(target: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor on the host has the very bytes of `target`; ends at the first difference."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    words = as_words(tensor)
    if words.dtype.is_complex:
        return False  # equal numbers may have other bytes
    return torch.equal(target.view(words.dtype).view(words.shape), words)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()
