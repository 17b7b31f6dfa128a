"""Sketches: alike for alike tensors, whatever their dtype."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from moonclipfs import _codec
from moonclipfs.codec.sketch import NO_SKETCH, SKETCH_BYTES, similarity, sketch
from moonclipfs.types import DType
from tests.codec.samples import FLOATS, any_raw, updated, weights


def matches(one: bytes, other: bytes) -> int:
    return int(similarity(one, np.frombuffer(other, np.uint8).reshape(1, -1))[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_a_copy_in_another_dtype_has_nearly_the_same_sketch(dtype: DType) -> None:
    raw = weights(10_000, DType.F32)
    copy = raw if dtype is DType.F32 else _codec.cast(raw, DType.F32, dtype)
    assert matches(sketch(raw, DType.F32), sketch(copy, dtype)) >= (28 if dtype.width > 1 else 20)


def test_updates_keep_the_sketch_and_other_weights_do_not() -> None:
    old, new = updated(10_000, DType.F32, scale=1e-5)
    assert matches(sketch(old, DType.F32), sketch(new, DType.F32)) >= 30
    assert matches(sketch(old, DType.F32), sketch(weights(10_000, DType.F32, 9), DType.F32)) <= 16


def test_what_has_no_sketch() -> None:
    assert sketch(bytes(1000), DType.BYTES) == NO_SKETCH
    assert sketch(bytes(1000), DType.F32) == NO_SKETCH  # all zero
    assert sketch(weights(31, DType.F32), DType.F32) == NO_SKETCH
    assert matches(NO_SKETCH, NO_SKETCH) == 0


def test_integers_of_any_width_by_their_bit_length() -> None:
    values = np.arange(-500, 500)
    one = sketch(values.astype("<i2").tobytes(), DType.I16)
    assert one == sketch(values.astype("<i8").tobytes(), DType.I64)
    assert one != sketch(values.astype("<i2").tobytes(), DType.U16)


def test_values() -> None:
    values = np.repeat(np.array([1.0, -1.0, 1.99, 2.0, 2.0**-70, -(2.0**70), 1e-45, 0.0], np.float32), 4)
    assert list(sketch(values.tobytes(), DType.F32)[::4]) == [64, 192, 64, 65, 1, 255, 1, 0]


@given(any_raw())
def test_any_bytes_as_any_type(raw: bytes) -> None:
    for dtype in DType:
        assert len(sketch(raw, dtype)) == SKETCH_BYTES
