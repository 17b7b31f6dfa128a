"""Values of every dtype, beside torch's own conversion where torch knows the type."""

from __future__ import annotations

import numpy as np
import pytest

from moonclipfs.store import values
from moonclipfs.types import DType

TORCH_NAMES = {
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E5M2: "float8_e5m2",
    DType.F8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8_E5M2FNUZ: "float8_e5m2fnuz",
    DType.F8_E8M0: "float8_e8m0fnu",
}


@pytest.mark.parametrize("dtype", TORCH_NAMES)
def test_every_bit_pattern_has_the_value_that_torch_gives(dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="torch is the reference here")
    raw = np.arange(1 << dtype.bits, dtype=f"<u{dtype.width}").tobytes()
    expected = torch.frombuffer(bytearray(raw), dtype=getattr(torch, TORCH_NAMES[dtype])).to(torch.float64).numpy()
    found = values.to_numbers(values.element_codes(raw, dtype), dtype)
    np.testing.assert_array_equal(found, expected)


def test_four_and_six_bit_floats() -> None:
    codes = values.element_codes(bytes(range(256)), DType.F4)
    assert codes[:4].tolist() == [0, 0, 1, 0]
    e2m1 = values.to_numbers(np.arange(16), DType.F4)
    assert e2m1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    packed = (1 | 2 << 6 | 63 << 12 | 5 << 18).to_bytes(3, "little")
    assert values.element_codes(packed, DType.F6_E2M3).tolist() == [1, 2, 63, 5]
    assert values.to_numbers(np.array([1, 31, 63]), DType.F6_E2M3).tolist() == [0.125, 7.5, -7.5]
    assert values.to_numbers(np.array([1, 31, 63]), DType.F6_E3M2).tolist() == [0.0625, 28, -28]


@pytest.mark.parametrize("dtype", [DType.I8, DType.I64, DType.U64, DType.U8])
def test_integer_differences_do_not_wrap(dtype: DType) -> None:
    kind = {DType.I8: np.int8, DType.I64: np.int64, DType.U64: np.uint64, DType.U8: np.uint8}[dtype]
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    a, b = (values.element_codes(np.array([x, y], kind).tobytes(), dtype) for x, y in ((low, high), (high, low)))
    assert values.absolute_differences(a, b, dtype).tolist() == [float(int(high) - int(low))] * 2


def test_complex_numbers_are_rows_of_two() -> None:
    raw = np.array([1 + 2j, 3 - 4j], np.complex64).tobytes()
    codes = values.element_codes(raw, DType.C64)
    assert codes.shape == (2, 2)
    assert values.to_numbers(codes, DType.C64).tolist() == [1 + 2j, 3 - 4j]
    assert values.absolute_differences(codes, codes[::-1], DType.C64)[0] == abs(-2 + 6j)
