"""Elements of every dtype as numbers: exactly, with NumPy alone, whatever their width.

The codes of an array are its elements' bit patterns as unsigned integers, one a row; a complex number is a row of two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonclipfs.types import Buffer, DType

_SIGNED = {DType.I8: np.int8, DType.I16: np.int16, DType.I32: np.int32, DType.I64: np.int64}
_UNSIGNED = frozenset({DType.BOOL, DType.U8, DType.U16, DType.U32, DType.U64})
_IEEE = {DType.F16: np.float16, DType.F32: np.float32, DType.F64: np.float64}
_COMPLEX = {DType.C64: np.float32, DType.C128: np.float64}

# Exponent bits, mantissa bits, bias of the small floats.
_SMALL = {
    DType.F8_E4M3: (4, 3, 7),
    DType.F8_E5M2: (5, 2, 15),
    DType.F8_E4M3FNUZ: (4, 3, 8),
    DType.F8_E5M2FNUZ: (5, 2, 16),
    DType.F4: (2, 1, 1),
    DType.F6_E2M3: (2, 3, 1),
    DType.F6_E3M2: (3, 2, 3),
}


def is_number(dtype: DType) -> bool:
    """True when elements have values; BYTES have none."""
    return dtype != DType.BYTES


def element_codes(raw: Buffer, dtype: DType) -> NDArray[Any]:
    """The codes of the elements in `raw`, lowest bits first in types below a byte.

    Raises ValueError unless `raw` is a whole number of elements.
    """
    if dtype.bits == 4:
        packed = np.frombuffer(raw, np.uint8)
        return np.stack([packed & 0x0F, packed >> 4], axis=1).reshape(-1)
    if dtype.bits == 6:
        groups = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.uint32)
        words = groups[:, 0] | groups[:, 1] << np.uint32(8) | groups[:, 2] << np.uint32(16)
        return np.stack([words >> np.uint32(shift) & np.uint32(0x3F) for shift in (0, 6, 12, 18)], axis=1).reshape(-1)
    codes = np.frombuffer(raw, np.dtype(f"<u{dtype.width}"))
    return codes.reshape(-1, 2) if dtype in _COMPLEX else codes


def to_numbers(codes: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """The values behind `codes`: float64 (exact for all but 64-bit integers), or complex128 for complex types."""
    codes = np.ascontiguousarray(codes)
    with np.errstate(invalid="ignore"):  # signalling NaNs are values like any other
        if dtype in _COMPLEX:
            return codes.view(_COMPLEX[dtype]).astype(np.float64).view(np.complex128).reshape(-1)
        if dtype in _IEEE:
            return codes.view(_IEEE[dtype]).astype(np.float64)
        if dtype == DType.BF16:
            return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype in _SIGNED:
        return codes.view(_SIGNED[dtype]).astype(np.float64)
    if dtype in _UNSIGNED:
        return codes.astype(np.float64)
    values: NDArray[np.float64] = _table(dtype)[codes]
    return values


def absolute_differences(left: NDArray[Any], right: NDArray[Any], dtype: DType) -> NDArray[np.float64]:
    """|left - right| of the elements behind two arrays of codes of one dtype; NaN or inf where either is."""
    if dtype in _SIGNED or dtype in _UNSIGNED:
        a, b = (x.view(_SIGNED[dtype]) if dtype in _SIGNED else x for x in (left, right))
        # Integers wrap, so the larger minus the smaller is right as an unsigned number even across the whole range.
        differences: NDArray[np.float64] = np.where(a > b, a - b, b - a).view(left.dtype).astype(np.float64)
        return differences
    with np.errstate(invalid="ignore", over="ignore"):
        differences = np.abs(to_numbers(left, dtype) - to_numbers(right, dtype))
    return differences


@lru_cache
def _table(dtype: DType) -> NDArray[np.float64]:
    """The value of each code of a float of 8 bits or fewer."""
    if dtype == DType.F8_E8M0:
        return np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan])
    exponent_bits, mantissa_bits, bias = _SMALL[dtype]
    special = _SPECIAL.get(dtype, _no_special)
    values = []
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        mantissa = code & ((1 << mantissa_bits) - 1)
        exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
        sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
        significand = mantissa / (1 << mantissa_bits) + (1 if exponent else 0)
        found = special(code)
        values.append(sign * significand * 2.0 ** (max(exponent, 1) - bias) if found is None else sign * found)
    return np.array(values)


def _no_special(code: int) -> float | None:
    return None


def _e4m3(code: int) -> float | None:
    return np.nan if code & 0x7F == 0x7F else None


def _e5m2(code: int) -> float | None:
    if code & 0x7C != 0x7C:
        return None
    return np.nan if code & 0x03 else np.inf


def _fnuz(code: int) -> float | None:
    return np.nan if code == 0x80 else None


_SPECIAL: dict[DType, Callable[[int], float | None]] = {
    DType.F8_E4M3: _e4m3,
    DType.F8_E5M2: _e5m2,
    DType.F8_E4M3FNUZ: _fnuz,
    DType.F8_E5M2FNUZ: _fnuz,
}
