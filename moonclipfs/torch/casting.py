"""Saving tensors in a narrower dtype: which ones, and how they are rounded.

Rounding is to nearest, ties to even, in one step from the source. NaN stays NaN with its sign, infinities and what is
subnormal in either type are exact. The 8-bit types come with a scale for each tensor, a power of two, so that scaling
rounds nothing: the largest finite value comes as near to the type's largest as it can. e4m3 has no infinities: a tensor
that holds one is kept as it is. Integers, bool and complex numbers are never cast, and nothing is made wider.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from moonclipfs.errors import UsageError
from moonclipfs.types import Buffer

log = logging.getLogger(__name__)

_NAMES = {
    "fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16",
    "float16": "float16", "half": "float16", "fp64": "float64", "float64": "float64", "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
}  # fmt: skip
KEEP = "keep"
"""In place of a dtype: tensors of this pattern stay as they are."""
_SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SCALED = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest finite value of each dtype that comes with a scale."""
_FP16_OVERFLOW = 65520.0
_PART = 1 << 20
"""Elements looked at together."""
_NAN = {torch.float64: 0x7FF8 << 48, torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00,
        torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7F}  # fmt: skip
"""The positive NaN that stands for any."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = {**_WORDS, 1: torch.int8}


@dataclass(frozen=True, slots=True)
class Cast:
    """How one tensor is saved: as `dtype`, its values times 2 to the power of `exponent`; `source` is what it was."""

    source: torch.dtype
    dtype: torch.dtype
    exponent: int = 0


class CastRules:
    """Which tensors are saved in which dtype: one for all, or by the first glob pattern that a name matches."""

    def __init__(self, rules: str | torch.dtype | Mapping[str, str | torch.dtype] | None) -> None:
        """Raises UsageError for a dtype or a pattern that makes no sense."""
        if rules is None:
            rules = {}
        elif isinstance(rules, (str, torch.dtype)):
            rules = {"*": rules}
        elif not isinstance(rules, Mapping) or not rules:
            raise UsageError(f"save_dtype is {rules!r}: give a dtype, or a dict of glob patterns and dtypes")
        self._rules = [(pattern, _target(pattern, word)) for pattern, word in rules.items()]

    def dtype_for(self, name: str, source: torch.dtype, part: str = "") -> torch.dtype:
        """The dtype that a tensor of a part is saved in; its own where no rule makes it narrower.

        A pattern is for NAME or for PART/NAME: `optimizer/*` are all of the optimizer's.
        """
        if source not in _SOURCES:
            return source
        for pattern, target in self._rules:
            if _matches(pattern, part, name):
                return target if target is not None and target.itemsize <= source.itemsize else source
        return source

    def without_match(self, names: Iterable[tuple[str, str]]) -> list[str]:
        """The patterns that match none of the tensors, each given as part and name."""
        known = list(names)
        return [pattern for pattern, _ in self._rules if not any(_matches(pattern, *one) for one in known)]


def _matches(pattern: str, part: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f"{part}/{name}", pattern)


def _target(pattern: object, word: object) -> torch.dtype | None:
    if not isinstance(pattern, str) or not pattern.strip():
        raise UsageError(f"save_dtype: {pattern!r} is no pattern: give a glob as `*.weight`")
    if word == KEEP:
        return None
    word = str(word) if isinstance(word, torch.dtype) else word
    name = _NAMES.get(word.removeprefix("torch.")) if isinstance(word, str) else None
    if name is None:
        known = ", ".join(sorted({*_NAMES, KEEP}))
        raise UsageError(f"save_dtype: there is no dtype {word!r} to save in; known are {known}")
    found: torch.dtype = getattr(torch, name)
    return found


def plan(values: torch.Tensor, dtype: torch.dtype, where: str) -> Cast | None:
    """How to cast flat `values`; None when they have to stay as they are, which the log tells. `where` names them."""
    most = _SCALED.get(dtype)
    if most is None and dtype is not torch.float16:
        return Cast(values.dtype, dtype)
    largest = 0.0
    for first in range(0, values.numel(), _PART):
        part = values[first : first + _PART]
        if dtype is torch.float8_e4m3fn and bool(torch.isinf(part).any()):
            log.warning("%s holds infinities, which fp8 e4m3 has not: it is saved as it is", where)
            return None
        largest = max(largest, float(torch.where(torch.isfinite(part), part, 0).abs().max()))
    if most is None:
        if largest >= _FP16_OVERFLOW:
            log.warning("%s holds %g, which becomes an infinity in fp16", where, largest)
        return Cast(values.dtype, dtype)
    return Cast(values.dtype, dtype, _exponent(largest, most))


def _exponent(largest: float, most: float) -> int:
    """The highest power of two by which `largest` may be multiplied to be no more than `most`; 0 for nothing."""
    if largest == 0.0:
        return 0
    exponent = math.frexp(most)[1] - math.frexp(largest)[1]
    return exponent if math.ldexp(largest, exponent) <= most else exponent - 1


def cast(values: torch.Tensor, how: Cast) -> torch.Tensor:
    """Flat values in the dtype that they are saved in."""
    wide = values if values.dtype is torch.float64 else values.to(torch.float32)
    scaled = _scaled(wide, how.exponent)
    if scaled.dtype is torch.float64 and how.dtype is not torch.float32:
        scaled = _rounded_to_odd(scaled)
    narrow = scaled.to(how.dtype)
    _mark_nan(values, narrow)
    return narrow


def _mark_nan(values: torch.Tensor, made: torch.Tensor) -> None:
    """Where `values` are NaN, make what was `made` of them the NaN of the same sign: torch may drop it, in fp16 say."""
    nan = torch.isnan(values)
    if bool(nan.any()):
        words = made.view(_WORDS[made.dtype.itemsize])
        sign = values.view(_SIGNED[values.dtype.itemsize]) < 0
        words[nan & ~sign] = _NAN[made.dtype]
        words[nan & sign] = _negative(_NAN[made.dtype], made.dtype.itemsize)


def _negative(word: int, size: int) -> int:
    """`word` with its sign bit set, as torch's integers of `size` bytes hold it: signed, but for those of one byte."""
    top = 1 << (8 * size - 1)
    return word | top if size == 1 else word - top


def _rounded_to_odd(values: torch.Tensor) -> torch.Tensor:
    """fp64 as fp32, in which a last bit of 1 stands for whatever that cannot hold: so the next rounding sees no false
    tie.
    """
    near = values.to(torch.float32)
    back = near.to(torch.float64)
    words = near.view(torch.int32)
    words = torch.where(back.abs() > values.abs(), words - 1, words)
    words = torch.where((back != values) & ~torch.isnan(values), words | 1, words)
    return words.view(torch.float32)


def _scaled(values: torch.Tensor, exponent: int) -> torch.Tensor:
    if not exponent:
        return values
    # In two steps: 2 to the power of the whole may be more than the type can hold.
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def restored(values: torch.Tensor, how: Cast) -> torch.Tensor:
    """Cast values in the dtype that they had: what was lost by rounding stays lost."""
    wide = torch.float64 if how.source is torch.float64 else torch.float32
    made = _scaled(values.to(wide), -how.exponent).to(how.source)
    _mark_nan(values, made)
    return made


class CastReader:
    """Bytes of a tensor in the dtype that it is saved in, made of the source as they are read."""

    def __init__(self, source: torch.Tensor, how: Cast) -> None:
        """`source` are the values, flat, on the host."""
        self._source = source
        self._how = how
        self.length = source.numel() * how.dtype.itemsize

    def read(self, offset: int, length: int) -> Buffer:
        """`length` bytes at `offset`."""
        size = self._how.dtype.itemsize
        first, last = offset // size, -(-(offset + length) // size)
        words = cast(self._source[first:last], self._how).view(torch.uint8)
        data: Buffer = words.numpy().data
        return memoryview(data)[offset - first * size : offset - first * size + length]
