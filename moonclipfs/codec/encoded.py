"""Encoded objects: reading the head, and decoding ranges of blocks. FORMAT.md beside this file has the byte tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from moonclipfs import _codec
from moonclipfs.errors import UsageError
from moonclipfs.types import Buffer, DType

PREFIX_BYTES: Final = _codec.PREFIX_BYTES
"""Bytes from the start of an encoded object that tell the length of its head."""

TRANSFORM_BYTES: Final = 0
TRANSFORM_PLAIN: Final = 1
TRANSFORM_ROTATED: Final = 2
TRANSFORM_DELTA: Final = 3


@dataclass(frozen=True, slots=True)
class Encoded:
    """The checked head of an encoded object.

    `block_bytes` are the raw bytes of every block but the last, `head_length` the bytes before the first encoded block,
    `offsets` the places of the blocks inside the encoded object (one more than there are blocks). In a delta, element
    `i` is predicted by element `base_start + i` of the base; elements are those of `DType.width`.
    """

    dtype: DType
    raw_length: int
    block_bytes: int
    blocks: int
    is_delta: bool
    base_dtype: DType
    base_start: int
    head_length: int
    encoded_length: int
    transform: int
    offsets: tuple[int, ...]

    def payload_range(self, first: int, count: int) -> tuple[int, int]:
        """Return (offset, length) inside the encoded object of `count` encoded blocks from block `first`."""
        self._check(first, count)
        return self.offsets[first], self.offsets[first + count] - self.offsets[first]

    def base_range(self, first: int, count: int) -> tuple[int, int]:
        """Return (offset, length) in the raw bytes of the base that `count` blocks from `first` are decoded against.

        The caller clips it to the length of the base: what is missing there counts as zero. (0, 0) if not a delta.
        """
        self._check(first, count)
        if not self.is_delta:
            return 0, 0
        elements_a_block = self.block_bytes // self.dtype.width
        elements = self.raw_bytes(first, count) // self.dtype.width
        start = self.base_start + first * elements_a_block
        return start * self.base_dtype.width, elements * self.base_dtype.width

    def raw_bytes(self, first: int, count: int) -> int:
        """Return how many bytes `count` blocks from block `first` decode to."""
        self._check(first, count)
        return min(self.raw_length, (first + count) * self.block_bytes) - min(self.raw_length, first * self.block_bytes)

    def _check(self, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > self.blocks:
            raise UsageError(f"{count} blocks from {first} of an object of {self.blocks} blocks")


def head_length(prefix: Buffer) -> int:
    """Return the length of the head, given the first `PREFIX_BYTES` bytes; raises CorruptError."""
    return _codec.head_length(prefix)


def parse(head: Buffer, encoded_length: int) -> Encoded:
    """Check the first `head_length` bytes of an encoded object of `encoded_length` bytes; raises CorruptError."""
    dtype, base_dtype, transform, raw_length, base_start, block_bytes, length, lengths = _codec.parse_head(
        head, encoded_length
    )
    is_delta = transform == TRANSFORM_DELTA
    return Encoded(
        dtype=DType(dtype),
        raw_length=raw_length,
        block_bytes=block_bytes,
        blocks=len(lengths),
        is_delta=is_delta,
        base_dtype=DType(base_dtype) if is_delta else DType.BYTES,
        base_start=base_start,
        head_length=length,
        encoded_length=encoded_length,
        transform=transform,
        offsets=tuple(itertools.accumulate(lengths, initial=length)),
    )


def decode_blocks(
    encoded: Encoded, head: Buffer, first: int, count: int, payload: Buffer, out: Buffer, base: Buffer | None = None
) -> None:
    """Decode and verify `count` blocks from block `first` into `out`, in one call without the GIL.

    `head` are the bytes that `encoded` was parsed from, `payload` exactly the bytes of `encoded.payload_range`, `out`
    a writable buffer of exactly `encoded.raw_bytes(first, count)` bytes. For a delta, `base` are the raw bytes of
    `encoded.base_range`, clipped to the base. Raises CorruptError naming the block at fault; UsageError when the
    buffers do not fit.
    """
    if encoded.is_delta and base is None:
        raise UsageError("a delta cannot be decoded without the bytes of its base")
    _codec.decode_blocks(head, encoded.encoded_length, first, count, payload, out, base)


def decode_each(
    encoded: Encoded, head: Buffer, first: int, count: int, payload: Buffer, base: Buffer | None = None
) -> list[bytes]:
    """As `decode_blocks`, into new bytes of its own for each block."""
    if encoded.is_delta and base is None:
        raise UsageError("a delta cannot be decoded without the bytes of its base")
    return _codec.decode_each(head, encoded.encoded_length, first, count, payload, base)


def decode(data: Buffer, base: Buffer | None = None) -> bytes:
    """Decode a whole encoded object; `base`: all raw bytes of the base of a delta. Raises CorruptError, UsageError."""
    view = memoryview(data).cast("B")
    length = head_length(view[:PREFIX_BYTES])
    encoded = parse(view[:length], len(view))
    base_bytes = None
    if encoded.is_delta:
        if base is None:
            raise UsageError("a delta cannot be decoded without the bytes of its base")
        start, size = encoded.base_range(0, encoded.blocks)
        base_bytes = memoryview(base).cast("B")[start : start + size]
    return _codec.decode_bytes(
        view[:length], len(view), 0, encoded.blocks, view[length:], encoded.raw_length, base_bytes
    )
