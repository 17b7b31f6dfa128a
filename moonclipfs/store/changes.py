"""How much a tensor changed: element by element in windows of bounded size, and only where it can have changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.errors import LimitError
from moonclipfs.formats.layout import Tensor
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.values import absolute_differences, element_codes, is_number, to_numbers
from moonclipfs.types import DType, Extent, Source

Range = tuple[int, int]
"""(offset, length)."""
_SPARSE = 0.5
"""Changed elements are picked out when they are less than this share: picking costs as much as computing."""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """The change of a tensor's elements.

    `changed` counts elements whose bits differ (values, between two dtypes; NaN equals NaN there). The numbers are in
    float64 over all elements; those whose difference is NaN or infinite are counted in `not_finite` and left out.
    They are None for elements without values (quantised blocks), where an element is a byte.
    """

    elements: int
    changed: int
    not_finite: int = 0
    max_abs: float | None = None
    mean_abs: float | None = None
    norm: float | None = None

    @property
    def share(self) -> float:
        """Changed elements of all, 0 to 1."""
        return self.changed / self.elements if self.elements else 0.0


class _Total:
    def __init__(self) -> None:
        self.changed = self.not_finite = self.counted = 0
        self.max_abs = self.sum_abs = self.sum_square = 0.0

    def add(self, differences: NDArray[np.float64], changed: int) -> None:
        """Take, and overwrite, the differences of elements, of which `changed` are changed; those left out are zero."""
        self.changed += changed
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(differences.sum())
            if not math.isfinite(total):
                finite = differences[np.isfinite(differences)]
                self.not_finite += len(differences) - len(finite)
                differences, total = finite, float(finite.sum())
            if len(differences):
                self.max_abs = max(self.max_abs, float(differences.max()))
                self.sum_abs += total
                self.sum_square += float(np.square(differences, out=differences).sum())

    def result(self, elements: int, *, numbers: bool) -> ValueChange:
        if not numbers:
            return ValueChange(elements, self.changed)
        mean = self.sum_abs / max(1, elements - self.not_finite)
        return ValueChange(elements, self.changed, self.not_finite, self.max_abs, mean, math.sqrt(self.sum_square))


def differing_ranges(
    left: Recipe | None, left_offset: int, right: Recipe | None, right_offset: int, length: int
) -> list[Range]:
    """The parts of `length` bytes of two files that are not known to be equal, as (offset in the part, length).

    Equal are holes, equal literals, and the same place of the same object. None is a file that is not stored.
    """
    if not length:
        return []
    if left is None or right is None:
        return [(0, length)]
    ranges: list[Range] = []
    at = 0
    for part, equal in _lockstep(left, left_offset, right, right_offset, length):
        if not equal:
            if ranges and sum(ranges[-1]) == at:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + part)
            else:
                ranges.append((at, part))
        at += part
    return ranges


def _lockstep(
    left: Recipe, left_offset: int, right: Recipe, right_offset: int, length: int
) -> Iterator[tuple[int, bool]]:
    """Yield (length, known to be equal) over the parts in which both files stay inside one extent."""
    ours, theirs = left.locate(left_offset, length), right.locate(right_offset, length)
    a, a_at, a_left = next(ours)
    b, b_at, b_left = next(theirs)
    done = 0
    while True:
        part = min(a_left, b_left)
        yield part, _same(a, a_at, b, b_at, part)
        done += part
        if done == length:
            return
        a_at, a_left, b_at, b_left = a_at + part, a_left - part, b_at + part, b_left - part
        if not a_left:
            a, a_at, a_left = next(ours)
        if not b_left:
            b, b_at, b_left = next(theirs)


def _same(a: Extent, a_at: int, b: Extent, b_at: int, length: int) -> bool:
    if a.literal is not None and b.literal is not None:
        return a.literal[a_at : a_at + length] == b.literal[b_at : b_at + length]
    if a.is_hole or b.is_hole or a.object_id is None:
        return a.is_hole and b.is_hole
    return a.object_id == b.object_id and a.object_offset + a_at == b.object_offset + b_at


def compare_values(left: Source, old: Tensor, right: Source, new: Tensor, ranges: list[Range]) -> ValueChange:
    """Count what changed between two tensors of one shape; only `ranges` (bytes of both) can differ.

    Raises LimitError when their elements lie in different orders and are more than COMPARE_STRIDED_BYTES.
    """
    elements = math.prod(old.shape)
    numbers = is_number(old.dtype) and is_number(new.dtype)
    if not numbers:
        elements = old.length
    total = _Total()
    if (old.strides is None and new.strides is None) or _same_order(old, new):
        for first, count in _windows(ranges, elements, old.dtype, new.dtype):
            _count(total, _read(left, old, first, count), old.dtype, _read(right, new, first, count), new.dtype)
    elif elements:
        ours, theirs = _gather(left, old), _gather(right, new)
        everything = [(0, -(-elements * old.dtype.bits // 8))]
        for first, count in _windows(everything, elements, old.dtype, new.dtype):
            _count(total, ours[first : first + count], old.dtype, theirs[first : first + count], new.dtype)
    return total.result(elements, numbers=numbers)


def _same_order(old: Tensor, new: Tensor) -> bool:
    """True when both tensors hold each element once, in one and the same order: transposed alike, for example."""
    if old.strides is None or old.strides != new.strides:
        return False
    expected = 1
    for stride, dimension in sorted(zip(old.strides, old.shape, strict=True)):
        if dimension != 1 and stride != expected:
            return False
        expected *= dimension
    return True


def _windows(ranges: list[Range], elements: int, old: DType, new: DType) -> Iterator[Range]:
    """(first element, count) of windows that cover `ranges`, aligned so that elements below a byte stay whole."""
    widest = max(old.bits, new.bits)
    step = limits.COMPARE_WINDOW_BYTES * 8 // widest // 8 * 8
    done = 0
    for offset, length in ranges:
        first = max(done, offset * 8 // old.bits // 8 * 8)
        end = min(elements, -(-(offset + length) * 8 // old.bits // 8) * 8)
        for at in range(first, end, step):
            yield at, min(step, end - at)
        done = max(done, end)


def _read(source: Source, tensor: Tensor, first: int, count: int) -> NDArray[Any]:
    bits = tensor.dtype.bits
    return element_codes(source.read(tensor.offset + first * bits // 8, count * bits // 8), tensor.dtype)


def _gather(source: Source, tensor: Tensor) -> NDArray[Any]:
    """The codes of a tensor of any strides, in the order of its elements."""
    elements = math.prod(tensor.shape)
    if max(tensor.length, elements * tensor.dtype.width) > limits.COMPARE_STRIDED_BYTES:
        raise LimitError(f"elements in another order, and more than {limits.COMPARE_STRIDED_BYTES} bytes")
    codes = element_codes(source.read(tensor.offset, tensor.length), tensor.dtype)
    if tensor.strides is None:
        return codes
    last = sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.strides, strict=True))
    if min(tensor.strides) < 0 or last >= len(codes):
        raise LimitError("strides that reach outside its bytes")
    pair = codes.shape[1:]
    strides = tuple(stride * codes.strides[0] for stride in tensor.strides) + codes.strides[1:]
    view = np.lib.stride_tricks.as_strided(codes, tensor.shape + pair, strides, writeable=False)
    return np.ascontiguousarray(view).reshape(elements, *pair)


def _count(total: _Total, left: NDArray[Any], old: DType, right: NDArray[Any], new: DType) -> None:
    if old == new:
        differs = left != right if left.ndim == 1 else (left != right).any(axis=1)
        changed = int(np.count_nonzero(differs))
        if not changed or not is_number(old):
            total.changed += changed
            return
        if changed < len(differs) * _SPARSE:
            left, right = left[differs], right[differs]
        differences = absolute_differences(left, right, old)
        if len(left) > changed:
            differences[~differs] = 0.0  # else an infinity would differ from itself
        total.add(differences, changed)
        return
    a, b = to_numbers(left, old), to_numbers(right, new)
    changed = int(np.count_nonzero((a != b) & ~(np.isnan(a) & np.isnan(b))))
    with np.errstate(invalid="ignore", over="ignore"):
        differences = np.abs(a - b)
    differences[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    total.add(differences, changed)
