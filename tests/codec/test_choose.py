"""Which way an object is stored, and what a sample foretells."""

from __future__ import annotations

import numpy as np
import pytest

from moonclipfs import _codec
from moonclipfs.codec import choose, encoded
from moonclipfs.codec.choose import Base
from moonclipfs.errors import UsageError
from moonclipfs.limits import BLOCK_ELEMENTS
from moonclipfs.types import DType
from tests.codec.samples import FLOATS, updated, weights


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)
def test_the_nearest_of_several_bases_is_taken(dtype: DType) -> None:
    n = 3 * BLOCK_ELEMENTS
    old, new = updated(n, dtype, scale=1e-5)
    far = weights(n, dtype, seed=77)
    encoding = choose.encode(new, dtype, [Base(far, dtype), Base(old, dtype), Base(far, dtype)])
    assert encoding.base == 1
    assert len(encoding.data) < len(choose.encode(new, dtype).data)


def test_unrelated_bases_are_not_taken() -> None:
    n = 3 * BLOCK_ELEMENTS
    assert choose.encode(weights(n, DType.F32), DType.F32, [Base(weights(n, DType.F32, 5), DType.F32)]).base is None


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F8_E4M3, DType.F8_E5M2], ids=lambda dtype: dtype.name)
def test_a_cast_of_the_base_costs_next_to_nothing(dtype: DType) -> None:
    master = weights(200_000, DType.F32)
    narrow = _codec.cast(master, DType.F32, dtype)
    encoding = choose.encode(narrow, dtype, [Base(master, DType.F32)])
    assert encoding.base == 0 and len(encoding.data) < 200
    assert encoded.decode(encoding.data, master) == narrow


def test_a_narrow_base_gives_a_wide_object_its_upper_half() -> None:
    master = weights(3 * BLOCK_ELEMENTS, DType.F32)
    narrow = _codec.cast(master, DType.F32, DType.BF16)
    encoding = choose.encode(master, DType.F32, [Base(narrow, DType.BF16)])
    assert encoding.base == 0
    assert len(master) / len(encoding.data) > 1.9


def test_bases_of_types_that_cannot_predict_are_skipped() -> None:
    raw = weights(1000, DType.F32)
    for dtype in (DType.U8, DType.I64, DType.BYTES):
        assert choose.encode(raw, DType.F32, [Base(raw, dtype)]).base is None
        assert choose.encode(raw, dtype, [Base(raw, DType.F32)]).base is None
    assert choose.encode(raw, DType.I32, [Base(raw, DType.F32)]).base == 0


def test_a_base_may_start_elsewhere() -> None:
    old, new = updated(4 * BLOCK_ELEMENTS, DType.F32)
    part = new[4 * BLOCK_ELEMENTS :]
    whole = choose.encode(part, DType.F32, [Base(old, DType.F32, BLOCK_ELEMENTS)])
    cut = choose.encode(part, DType.F32, [Base(old[4 * BLOCK_ELEMENTS :], DType.F32)])
    assert whole.base == cut.base == 0
    assert abs(len(whole.data) - len(cut.data)) < 8
    assert encoded.decode(whole.data, old) == part


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F8_E4M3, DType.BYTES], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_predictions_come_near(dtype: DType, share: float) -> None:
    if dtype is DType.BYTES:
        old = new = np.random.default_rng(4).integers(0, 50, 3_000_000, dtype=np.uint8).tobytes()
    else:
        old, new = updated(1_000_000, dtype, share, 1e-5)
    for bases in [], [Base(old, dtype)]:
        size = len(choose.encode(new, dtype, bases).data)
        assert abs(choose.predict(new, dtype, bases) - size) < 0.1 * size


def test_ratios_of_synthetic_updates() -> None:
    """What the entropy of these numbers allows, within a few percent: the coder itself loses nearly nothing."""
    old, new = updated(1_000_000, DType.F32, scale=1e-6)
    full, delta = choose.encode(new, DType.F32), choose.encode(new, DType.F32, [Base(old, DType.F32)])
    assert len(new) / len(full.data) > 1.2
    assert len(new) / len(delta.data) > 1.95
    old, new = updated(1_000_000, DType.BF16, scale=1e-6)
    assert len(new) / len(choose.encode(new, DType.BF16, [Base(old, DType.BF16)]).data) > 25


@pytest.mark.parametrize("length", [0, 1, 3, 10, 100, 1000])
def test_small_objects_hardly_grow(length: int) -> None:
    raw = np.random.default_rng(length).bytes(length)
    for dtype in DType:
        assert len(choose.encode(raw, dtype).data) <= length + 75


def test_integers_and_structure() -> None:
    positions = np.arange(100_000, dtype=np.int64).tobytes()
    assert len(choose.encode(positions, DType.I64).data) < len(positions) // 100
    mask = np.tri(512, dtype=np.float32).tobytes()
    assert len(choose.encode(mask, DType.F32).data) < len(mask) // 100


def test_what_is_too_long_is_refused() -> None:
    with pytest.raises(UsageError):
        choose.encode(memoryview(bytearray((1 << 30) + 1)), DType.BYTES)
