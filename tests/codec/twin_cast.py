"""Casts between float formats through exact arithmetic on Python's and NumPy's doubles."""

from __future__ import annotations

import numpy as np

from moonclipfs.types import DType

# bits of the exponent, bits of the mantissa, whether there are infinities
SHAPES = {
    DType.F64: (11, 52, True), DType.F32: (8, 23, True), DType.BF16: (8, 7, True),
    DType.F16: (5, 10, True), DType.F8_E4M3: (4, 3, False), DType.F8_E5M2: (5, 2, True),
}  # fmt: skip


def to_doubles(words: np.ndarray, dtype: DType) -> np.ndarray:
    """The value of each word; every format is a part of double precision."""
    exponent_bits, mantissa_bits, has_infinity = SHAPES[dtype]
    if dtype is DType.F64:
        return words.astype(np.uint64).view(np.float64)
    wide = words.astype(np.int64)
    mantissa = wide & ((1 << mantissa_bits) - 1)
    field = wide >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = np.where(wide >> (exponent_bits + mantissa_bits) & 1, -1.0, 1.0)
    bias, top = (1 << exponent_bits - 1) - 1, (1 << exponent_bits) - 1
    significand = np.where(field > 0, mantissa + (1 << mantissa_bits), mantissa).astype(np.float64)
    value = np.ldexp(significand, np.where(field > 0, field, 1) - bias - mantissa_bits)
    if has_infinity:
        value = np.where(field == top, np.where(mantissa > 0, np.nan, np.inf), value)
    else:
        value = np.where((field == top) & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    return np.copysign(value, sign)


def cast(words: np.ndarray, dtype: DType, to: DType) -> np.ndarray:
    """Words of `to`, rounded to nearest and ties to even; one quiet NaN of each sign; overflow to infinity or NaN."""
    exponent_bits, mantissa_bits, has_infinity = SHAPES[to]
    value = to_doubles(words, dtype)
    bias, top = (1 << exponent_bits - 1) - 1, (1 << exponent_bits) - 1
    infinity = top << mantissa_bits | (0 if has_infinity else (1 << mantissa_bits) - 1)
    nan = infinity | (1 << mantissa_bits - 1 if has_infinity else 0)
    magnitude = np.where(np.isfinite(value), np.abs(value), 0.0)
    exponent = np.maximum(np.frexp(magnitude)[1].astype(np.int64) - 1, 1 - bias)
    exponent = np.where(magnitude > 0, exponent, 1 - bias)
    steps = np.rint(np.ldexp(magnitude, mantissa_bits - exponent)).astype(np.int64)
    # The implicit bit of a normal number adds one to the exponent field, and so does a carry.
    code = steps + (exponent + bias - 1 << mantissa_bits)
    code = np.where(np.isinf(value), infinity, np.minimum(code, infinity))
    code = np.where(np.isnan(value), nan, code).astype(np.uint64)
    sign = np.signbit(value).astype(np.uint64) << np.uint64(exponent_bits + mantissa_bits)
    return (code | sign).astype(f"<u{to.width}")
