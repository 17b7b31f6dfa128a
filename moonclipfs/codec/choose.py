"""The choice of how an object is stored: full, or as a delta against one of the bases that are offered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moonclipfs import _codec
from moonclipfs.codec.encoded import (
    TRANSFORM_BYTES,
    TRANSFORM_DELTA,
    TRANSFORM_PLAIN,
    TRANSFORM_ROTATED,
    head_length,
)
from moonclipfs.limits import BLOCK_ELEMENTS
from moonclipfs.types import Buffer, DType

CHOICE_PIECES: Final = 32
PREDICTION_PIECES: Final = 256
"""A prediction looks at as many elements as a block has, so that what a block costs by itself is counted rightly."""
PIECE_ELEMENTS: Final = BLOCK_ELEMENTS // PREDICTION_PIECES
SAMPLED_FROM: Final = 2 * BLOCK_ELEMENTS
"""Objects of fewer elements are not sampled: every way is tried on the whole."""
SMALL: Final = 4096
"""Objects of so many elements or fewer are also tried without entropy models, which may not pay for themselves."""
CLOSE: Final = 1.005
"""Estimates that differ by less than this factor are settled by encoding both."""

_FLOATS = frozenset(
    {DType.F16, DType.BF16, DType.F32, DType.F64, DType.F8_E4M3, DType.F8_E5M2, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ}
) | {DType.C64, DType.C128}


@dataclass(frozen=True, slots=True)
class Base:
    """Raw bytes that may predict an object: its element `i` from element `start + i` of these, of type `dtype`."""

    raw: Buffer
    dtype: DType
    start: int = 0


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoded object, and the index of its base among those offered (None: it needs none)."""

    data: bytes
    base: int | None


def encode(raw: Buffer, dtype: DType, bases: Sequence[Base] = ()) -> Encoding:
    """Encode `raw` in the smallest of the ways that a sample shows to be promising.

    All blocks have been decoded and compared with `raw`, and the finished head has been read: CorruptError if anything
    differs (memory is at fault, or the codec).
    Raises UsageError above `limits.RAW_BYTES`.
    """
    view = memoryview(raw).cast("B")
    ways = _ways(dtype, bases)
    if len(ways) > 1 and len(view) >= SAMPLED_FROM * dtype.width:
        sizes = [_estimate(view, dtype, None if way is None else bases[way], CHOICE_PIECES) for way in ways]
        ways = [way for way, size in zip(ways, sizes, strict=True) if size <= min(sizes) * CLOSE]
    encodings = (Encoding(_encode_one(view, dtype, None if way is None else bases[way]), way) for way in ways)
    return min(encodings, key=lambda encoding: len(encoding.data))


def predict(raw: Buffer, dtype: DType, bases: Sequence[Base] = ()) -> int:
    """Return the stored size in bytes that a sample of `raw` foretells, usually within a few percent."""
    view = memoryview(raw).cast("B")
    chosen = (None if way is None else bases[way] for way in _ways(dtype, bases))
    return round(min(_estimate(view, dtype, base, PREDICTION_PIECES) for base in chosen))


def _ways(dtype: DType, bases: Sequence[Base]) -> list[int | None]:
    """Indexes of the bases that can predict elements of `dtype`, and None for doing without."""
    return [None, *(index for index, base in enumerate(bases) if _codec.can_predict(dtype, base.dtype))]


def _encode_one(raw: Buffer, dtype: DType, base: Base | None, verify: bool = True) -> bytes:
    data = _encode_as(raw, dtype, base, True, verify)
    if dtype is not DType.BYTES and len(raw) <= SMALL * dtype.width:
        data = min(data, _encode_as(raw, dtype, base, False, verify), key=len)
    return data


def _encode_as(raw: Buffer, dtype: DType, base: Base | None, models: bool, verify: bool) -> bytes:
    if base is not None:
        return _codec.encode(raw, dtype, TRANSFORM_DELTA, base.raw, base.dtype, base.start, models, verify)
    if dtype is DType.BYTES:
        transform = TRANSFORM_BYTES
    else:
        transform = TRANSFORM_ROTATED if dtype in _FLOATS else TRANSFORM_PLAIN
    return _codec.encode(raw, dtype, transform, models=models, verify=verify)


def _estimate(view: memoryview, dtype: DType, base: Base | None, pieces: int) -> float:
    """Encoded size, from pieces spread evenly over the object that are encoded as if they were one block."""
    width = dtype.width
    elements = len(view) // width
    if elements < SAMPLED_FROM:
        return len(_encode_one(view, dtype, base, verify=False))
    starts = [piece * (elements - PIECE_ELEMENTS) // (pieces - 1) for piece in range(pieces)]
    sample = b"".join(view[start * width : (start + PIECE_ELEMENTS) * width] for start in starts)
    if base is not None:
        base = Base(_pieces(base, starts), base.dtype)
    data = _encode_one(sample, dtype, base, verify=False)
    fixed = head_length(data)
    return fixed + (len(data) - fixed) * len(view) / len(sample)


def _pieces(base: Base, starts: Sequence[int]) -> bytes:
    """The base's elements that face the sample, with zeros for those that it lacks."""
    width = base.dtype.width
    raw = memoryview(base.raw).cast("B")
    length = PIECE_ELEMENTS * width
    offsets = ((base.start + start) * width for start in starts)
    return b"".join(bytes(raw[offset : offset + length]).ljust(length, b"\0") for offset in offsets)
