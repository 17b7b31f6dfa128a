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
    decode,
    head_length,
)
from moonclipfs.errors import CorruptError
from moonclipfs.limits import BLOCK_ELEMENTS
from moonclipfs.types import Buffer, DType

SAMPLE_PIECES: Final = 8
PIECE_ELEMENTS: Final = BLOCK_ELEMENTS // SAMPLE_PIECES
CLOSE: Final = 1.02
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
    """Encode `raw` in the smallest of the ways that a sample shows to be promising, and verify the result.

    Raises CorruptError when the encoding does not decode to `raw`, UsageError above `limits.RAW_BYTES`.
    """
    view = memoryview(raw).cast("B")
    ways = _estimates(view, dtype, bases)
    least = min(size for size, _ in ways)
    best: Encoding | None = None
    for size, way in ways:
        if size <= least * CLOSE:
            data = _encode_one(view, dtype, None if way is None else bases[way])
            if best is None or len(data) < len(best.data):
                best = Encoding(data, way)
    assert best is not None
    if decode(best.data, None if best.base is None else bases[best.base].raw) != view:
        raise CorruptError(
            f"the encoding of {len(view)} bytes of {dtype.name} does not decode to them; nothing was stored"
        )
    return best


def predict(raw: Buffer, dtype: DType, bases: Sequence[Base] = ()) -> int:
    """Return the stored size in bytes that a sample of `raw` foretells, usually within a few percent."""
    return round(min(size for size, _ in _estimates(memoryview(raw).cast("B"), dtype, bases)))


def _estimates(view: memoryview, dtype: DType, bases: Sequence[Base]) -> list[tuple[float, int | None]]:
    ways: list[tuple[float, int | None]] = [(_estimate(view, dtype, None), None)]
    for index, base in enumerate(bases):
        if _codec.can_predict(dtype, base.dtype):
            ways.append((_estimate(view, dtype, base), index))
    return ways


def _encode_one(view: Buffer, dtype: DType, base: Base | None) -> bytes:
    if base is not None:
        return _codec.encode(view, dtype, TRANSFORM_DELTA, base.raw, base.dtype, base.start)
    if dtype is DType.BYTES:
        return _codec.encode(view, dtype, TRANSFORM_BYTES)
    return _codec.encode(view, dtype, TRANSFORM_ROTATED if dtype in _FLOATS else TRANSFORM_PLAIN)


def _estimate(view: memoryview, dtype: DType, base: Base | None) -> float:
    """Encoded size, from pieces spread evenly over the object that are encoded as if they were one block."""
    width = dtype.width or 1
    elements = len(view) // width
    if elements <= 2 * BLOCK_ELEMENTS:
        return len(_encode_one(view, dtype, base))
    starts = [piece * (elements - PIECE_ELEMENTS) // (SAMPLE_PIECES - 1) for piece in range(SAMPLE_PIECES)]
    sample = b"".join(view[start * width : (start + PIECE_ELEMENTS) * width] for start in starts)
    if base is None:
        data = _encode_one(sample, dtype, None)
    else:
        data = _encode_one(sample, dtype, Base(_pieces(base, starts), base.dtype))
    fixed = head_length(data)
    return fixed + (len(data) - fixed) * len(view) / len(sample)


def _pieces(base: Base, starts: Sequence[int]) -> bytes:
    """The base's elements that face the sample, with zeros for those that it lacks."""
    width = base.dtype.width
    raw = memoryview(base.raw).cast("B")
    length = PIECE_ELEMENTS * width
    offsets = ((base.start + start) * width for start in starts)
    return b"".join(bytes(raw[offset : offset + length]).ljust(length, b"\0") for offset in offsets)
