"""The checksum of blocks and of heads, and which kernels compute it."""

from __future__ import annotations

from moonclipfs import _codec
from moonclipfs.types import Buffer


def xxh3_64(data: Buffer) -> int:
    """Return the 64-bit XXH3 of `data` with seed 0."""
    return _codec.xxh3_64(data)


def kernel() -> str:
    """Return the instruction set in use: scalar, avx2 or avx512. `$MOONCLIPFS_KERNEL` chooses it at start."""
    return _codec.kernel()
