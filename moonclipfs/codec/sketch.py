"""Sketches: 32 bytes that tell which tensors look alike, whatever their dtype, without their elements at hand."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moonclipfs.types import Buffer, DType

SKETCH_BYTES: Final = 32
NO_SKETCH: Final = bytes(SKETCH_BYTES)
"""Of bytes without element type and of objects of fewer elements than a sketch has places."""

# dtype: bits of the exponent, bits of the mantissa, exponent bias
_FLOATS = {
    DType.F64: (11, 52, 1023), DType.C128: (11, 52, 1023), DType.F32: (8, 23, 127), DType.C64: (8, 23, 127),
    DType.BF16: (8, 7, 127), DType.F16: (5, 10, 15), DType.F8_E4M3: (4, 3, 7), DType.F8_E5M2: (5, 2, 15),
    DType.F8_E4M3FNUZ: (4, 3, 8), DType.F8_E5M2FNUZ: (5, 2, 16),
}  # fmt: skip


def sketch(raw: Buffer, dtype: DType) -> bytes:
    """Return sign and binary exponent of the elements at 32 places spread evenly over the object.

    A place is `sign << 7 | exponent`, with the value's binary exponent clamped to -63..63 and counted from 64, or 0
    for a zero. It does not depend on the dtype, so a bf16 copy of an fp32 tensor has nearly the same sketch; integers
    count as the numbers that they are.
    """
    width = dtype.width
    elements = len(memoryview(raw).cast("B")) // width
    if dtype is DType.BYTES or elements < SKETCH_BYTES:
        return NO_SKETCH
    places = (2 * np.arange(SKETCH_BYTES, dtype=np.int64) + 1) * elements // (2 * SKETCH_BYTES)
    every: NDArray[np.unsignedinteger[Any]] = np.frombuffer(raw, dtype=f"<u{width}", count=elements)
    words = every[places].astype(np.uint64)
    if dtype in _FLOATS:
        exponent_bits, mantissa_bits, bias = _FLOATS[dtype]
        sign = words >> np.uint64(exponent_bits + mantissa_bits)
        field = (words >> np.uint64(mantissa_bits)) & np.uint64((1 << exponent_bits) - 1)
        mantissa = words & np.uint64((1 << mantissa_bits) - 1)
        subnormal = _bit_length(mantissa) - mantissa_bits
        exponent = np.where(field > 0, field.astype(np.int64), subnormal) - bias
        zero = (field == 0) & (mantissa == 0)
    else:
        top = np.uint64(8 * width - 1)
        signed = dtype in (DType.I8, DType.I16, DType.I32, DType.I64)
        sign = words >> top if signed else np.zeros_like(words)
        mask = np.uint64((1 << 8 * width) - 1)
        magnitude = np.where(sign > 0, (~words + np.uint64(1)) & mask, words)
        exponent = _bit_length(magnitude) - 1
        zero = magnitude == 0
    clamped = np.clip(exponent, -63, 63) + 64
    return np.where(zero, 0, clamped | (sign.astype(np.int64) << 7)).astype(np.uint8).tobytes()


def similarity(one: bytes, many: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Return for each row of `many` (n, 32) at how many places it equals `one`; zeros never count as equal."""
    mine = np.frombuffer(one, dtype=np.uint8)
    equal: NDArray[np.intp] = np.count_nonzero((many == mine) & (mine != 0), axis=1)
    return equal


def _bit_length(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    return np.array([int(value).bit_length() for value in values], dtype=np.int64)
