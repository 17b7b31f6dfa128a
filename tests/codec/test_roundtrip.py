"""Whatever goes in comes out: any bytes, any type, any base, any range of blocks, with every kernel set."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import _codec
from moonclipfs.codec import choose, encoded
from moonclipfs.codec.choose import Base
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.limits import BLOCK_BYTES, BLOCK_ELEMENTS
from moonclipfs.types import DType
from tests.codec.samples import FLOATS, any_case, any_raw, available_kernels, updated, weights
from tests.codec.twin import Twin


def base_of(encoding: choose.Encoding, bases: list[Base]) -> bytes | None:
    return None if encoding.base is None else bytes(bases[encoding.base].raw)


@given(any_case())
def test_any_object_comes_back(case: tuple[bytes, DType, list[Base]]) -> None:
    raw, dtype, bases = case
    encoding = choose.encode(raw, dtype, bases)
    assert encoded.decode(encoding.data, base_of(encoding, bases)) == raw
    assert Twin(encoding.data).decode(base_of(encoding, bases) or b"") == raw
    head = encoded.head_length(encoding.data[: encoded.PREFIX_BYTES])
    parsed = encoded.parse(encoding.data[:head], len(encoding.data))
    assert (parsed.dtype, parsed.raw_length, parsed.is_delta) == (dtype, len(raw), encoding.base is not None)


@given(any_raw(), any_raw(), st.sampled_from(DType), st.sampled_from(DType), st.integers(0, 3000), st.booleans())
def test_every_delta_comes_back(
    raw: bytes, base: bytes, dtype: DType, base_dtype: DType, start: int, models: bool
) -> None:
    if not _codec.can_predict(dtype, base_dtype):
        with pytest.raises(UsageError):
            _codec.encode(raw, dtype, encoded.TRANSFORM_DELTA, base, base_dtype, start)
        return
    data = _codec.encode(raw, dtype, encoded.TRANSFORM_DELTA, base, base_dtype, start, models)
    assert encoded.decode(data, base) == raw
    assert Twin(data).decode(base) == raw


@given(any_raw(), st.sampled_from(DType), st.sampled_from([0, 1, 2]), st.booleans())
def test_every_full_transform_comes_back(raw: bytes, dtype: DType, transform: int, models: bool) -> None:
    if transform and dtype is DType.BYTES:
        with pytest.raises(UsageError):
            _codec.encode(raw, dtype, transform)
        return
    data = _codec.encode(raw, dtype, transform, models=models)
    assert encoded.decode(data) == raw
    assert Twin(data).decode() == raw


@pytest.mark.parametrize("dtype", [DType.BYTES, DType.U8, *FLOATS], ids=lambda dtype: dtype.name)
def test_any_range_of_blocks_decodes_alone(dtype: DType, kernel: str) -> None:
    block = BLOCK_BYTES if dtype is DType.BYTES else BLOCK_ELEMENTS * dtype.width
    length = 2 * block + block // 2 + 3
    old = np.random.default_rng(5).integers(0, 60, length, dtype=np.uint8)
    new = old + (np.random.default_rng(6).random(length) < 0.1)
    raw, base = new.astype(np.uint8).tobytes(), old.tobytes()
    for bases in [], [Base(base, dtype)]:
        encoding = choose.encode(raw, dtype, bases)
        head = encoding.data[: encoded.head_length(encoding.data[: encoded.PREFIX_BYTES])]
        parsed = encoded.parse(head, len(encoding.data))
        assert parsed.blocks == 3
        for first in range(4):
            for count in range(4 - first):
                offset, size = parsed.payload_range(first, count)
                base_start, base_size = parsed.base_range(first, count)
                out = bytearray(parsed.raw_bytes(first, count))
                payload = encoding.data[offset : offset + size]
                facing = base[base_start : base_start + base_size] if encoding.base is not None else None
                encoded.decode_blocks(parsed, head, first, count, payload, out, facing)
                assert out == raw[first * block : (first + count) * block]
                each = encoded.decode_each(parsed, head, first, count, payload, facing)
                assert each == [raw[at * block : (at + 1) * block] for at in range(first, first + count)]


def test_r057_no_buffer_needs_to_be_aligned(kernel: str) -> None:
    before, after = updated(5000, DType.F32)
    want = choose.encode(after, DType.F32, [Base(before, DType.F32)]).data
    for shift in range(1, 8):
        raw = memoryview(bytes(shift) + after)[shift:]
        base = memoryview(bytes(8 - shift) + before)[8 - shift :]
        data = choose.encode(raw, DType.F32, [Base(base, DType.F32)]).data
        assert data == want
        assert encoded.decode(memoryview(bytes(shift) + data)[shift:], base) == after


def test_what_a_base_lacks_counts_as_zero() -> None:
    before, after = updated(BLOCK_ELEMENTS + 700, DType.F32)
    for kept in (0, 3, 2800, 4 * BLOCK_ELEMENTS, 4 * BLOCK_ELEMENTS + 7):
        short = before[:kept]
        data = _codec.encode(after, DType.F32, encoded.TRANSFORM_DELTA, short, DType.F32, 0)
        assert encoded.decode(data, short) == after
        assert data == _codec.encode(
            after, DType.F32, encoded.TRANSFORM_DELTA, short[: kept // 4 * 4].ljust(len(after), b"\0"), DType.F32, 0
        )


def test_the_wrong_base_is_told_by_the_check() -> None:
    before, after = updated(3000, DType.F32)
    encoding = choose.encode(after, DType.F32, [Base(before, DType.F32)])
    assert encoding.base == 0
    with pytest.raises(CorruptError, match="block 0"):
        encoded.decode(encoding.data, after)
    with pytest.raises(UsageError, match="base"):
        encoded.decode(encoding.data)


def test_buffers_that_do_not_fit_are_refused() -> None:
    data = choose.encode(weights(100, DType.F32), DType.F32).data
    length = encoded.head_length(data[: encoded.PREFIX_BYTES])
    parsed = encoded.parse(data[:length], len(data))
    for payload, size in (
        (data[length:-1], 400),
        (data[length:] + b"x", 400),
        (data[length:], 399),
        (data[length:], 401),
    ):
        with pytest.raises(UsageError):
            encoded.decode_blocks(parsed, data[:length], 0, 1, payload, bytearray(size))
    for first, count in ((0, 2), (1, 1), (2, 0), (0, -1), (-1, 1)):
        with pytest.raises(UsageError):
            parsed.payload_range(first, count)
    with pytest.raises((TypeError, ValueError, BufferError)):
        encoded.decode_blocks(parsed, data[:length], 0, 1, data[length:], bytes(400))


def test_threads_work_at_the_same_time_and_do_not_share_scratch() -> None:
    pairs = [updated(40_000, DType.F32, seed=seed) for seed in range(6)]
    want = [choose.encode(after, DType.F32, [Base(before, DType.F32)]).data for before, after in pairs]
    wrong: list[int] = []

    def work(index: int) -> None:
        before, after = pairs[index % len(pairs)]
        for _ in range(5):
            data = choose.encode(after, DType.F32, [Base(before, DType.F32)]).data
            if data != want[index % len(pairs)] or encoded.decode(data, before) != after:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def short_encodings() -> list[Callable[[], object]]:
    """Encoders of objects of every type in every way, most of them shorter than a few elements."""
    source = np.random.default_rng(3).integers(0, 7, 5000, dtype=np.uint8).tobytes()
    found: list[Callable[[], object]] = []
    for dtype, length in itertools.product(DType, (*range(10), 15, 17, 63, 250, 1001, 4999)):
        raw, old = source[:length], source[length // 2 :: 2]
        found.append(partial(choose.encode, raw, dtype))
        can = filter(partial(_codec.can_predict, dtype), (DType.F32, dtype))
        found.extend(partial(_codec.encode, raw, dtype, encoded.TRANSFORM_DELTA, old, base, 3) for base in can)
    return found


def test_encodings_do_not_depend_on_what_was_encoded_before(kernel: str) -> None:
    """Nothing of one object gets into another through memory that is used again."""
    encoders = short_encodings()
    order, chance = list(range(len(encoders))), random.Random(8)
    first: dict[int, object] = {}
    for fill in (0, 0x11, 0xFF, None):
        for length in (8 * BLOCK_ELEMENTS, 4 * BLOCK_ELEMENTS + 1):
            old = chance.randbytes(length) if fill is None else bytes([fill]) * length
            for dtype in (DType.F64, DType.F32, DType.BYTES):
                _codec.encode(old, dtype, 1 if dtype is not DType.BYTES else 0)
            _codec.encode(old, DType.F64, encoded.TRANSFORM_DELTA, old, DType.F32, 5)
        for number in order:
            data = encoders[number]()
            assert first.setdefault(number, data) == data, encoders[number]
        chance.shuffle(order)


@given(any_case())
def test_all_kernels_give_the_same_bytes(case: tuple[bytes, DType, list[Base]]) -> None:
    raw, dtype, bases = case
    before = _codec.kernel()
    try:
        results = []
        for name in available_kernels():
            _codec.use_kernel(name)
            encoding = choose.encode(raw, dtype, bases)
            results.append(encoding)
            assert encoded.decode(results[0].data, base_of(encoding, bases)) == raw
        assert all(result == results[0] for result in results)
    finally:
        _codec.use_kernel(before)
