"""What the tests of experts share: experts, how they are compared, and files that count what is read of them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor

from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.torch.elements import as_bytes

Place = Path | LayerPath


def expert(seed: int, *, width: int = 4, hidden: int = 8) -> dict[str, Tensor]:
    """The weights of one expert."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w1": torch.randn(hidden, width, generator=generator),
        "w2": torch.randn(width, hidden, generator=generator),
    }


def with_moments(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """An expert with Adam's moments, in the order of mini-AGI's files."""
    weights = expert(seed)
    moments = {f"{name}{suffix}": (weights[name].square() / 8).to(dtype) for suffix in ("_m", "_v") for name in weights}
    return {**weights, **moments}


def bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """What two sets of tensors are compared by: dtype, shape and every bit."""
    return {name: (one.dtype, tuple(one.shape), as_bytes(one).tobytes()) for name, one in tensors.items()}


def files(place: Place) -> dict[str, bytes]:
    """Every file of a directory but hidden ones, by name."""
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file() and path.name[0] != "."}


class CountingPath(PosixPath):
    """A path whose files, opened by it or by paths made from it, count the bytes that are read of them."""

    bytes_read = 0

    def open(self, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        """As pathlib's, with a count of reads."""
        return _Counting(str(self), mode) if mode == "rb" else super().open(mode, *arguments, **options)


class _Counting(io.FileIO):
    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        CountingPath.bytes_read += count or 0
        return count or 0
