"""The C code against its NumPy twin, bit for bit: hashes, casts, whole objects, and streams that are encoded again."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import _codec
from moonclipfs.codec import choose, encoded
from moonclipfs.codec.choose import Base
from moonclipfs.limits import BLOCK_ELEMENTS
from moonclipfs.types import DType
from tests.codec.samples import FLOATS, any_case, any_raw, updated, weights
from tests.codec.twin import DELTA, RANS, Twin
from tests.codec.twin_cast import cast
from tests.codec.twin_hash import xxh3_64


@pytest.mark.parametrize("length", [*range(20), 127, 128, 129, 240, 241, 255, 1023, 1024, 1025, 1088, 2049, 70_001])
def test_hash(length: int, kernel: str) -> None:
    data = np.random.default_rng(length).bytes(length)
    assert _codec.xxh3_64(data) == xxh3_64(data)


@given(st.binary(max_size=600))
def test_hash_of_anything(data: bytes) -> None:
    assert _codec.xxh3_64(data) == xxh3_64(data)


@pytest.mark.parametrize(("dtype", "to"), list(itertools.permutations(FLOATS, 2)))
def test_casts(dtype: DType, to: DType) -> None:
    unit = np.dtype(f"<u{dtype.width}")
    rng = np.random.default_rng(9)
    words = np.frombuffer(rng.bytes(40_000 * dtype.width), unit)
    if dtype.width <= 2:
        words = np.arange(1 << 8 * dtype.width, dtype=np.uint32).astype(unit)
    else:
        # Ties and what is around them, subnormals, and the borders of the other formats.
        near = np.frombuffer(_codec.cast(rng.bytes(20_000 * to.width), to, dtype), unit)
        half = unit.type(1 << (23 if dtype is DType.F32 else 52) - 8)
        words = np.concatenate([words, near, near + unit.type(1), near - unit.type(1), near + half, near | half])
    assert np.array_equal(
        np.frombuffer(_codec.cast(words.tobytes(), dtype, to), f"<u{to.width}"), cast(words, dtype, to)
    )


def test_casts_agree_with_numpy() -> None:
    values = np.random.default_rng(1).normal(size=10_000).astype(np.float32)
    values[:4] = [0.0, -0.0, np.inf, -np.inf]
    half = np.frombuffer(_codec.cast(values.tobytes(), DType.F32, DType.F16), np.float16)
    assert half.tobytes() == values.astype(np.float16).tobytes()
    assert _codec.cast(values.tobytes(), DType.F32, DType.F64) == values.astype(np.float64).tobytes()


@given(any_case())
def test_streams_are_what_the_twin_writes(case: tuple[bytes, DType, list[Base]]) -> None:
    raw, dtype, bases = case
    encoding = choose.encode(raw, dtype, bases)
    check_streams(encoding.data, raw, b"" if encoding.base is None else bytes(bases[encoding.base].raw))


def check_streams(data: bytes, raw: bytes, base: bytes) -> int:
    """Compare the streams of all blocks; returns how many planes are in them."""
    twin, planes = Twin(data), 0
    for block in range(twin.blocks if twin.transform else 0):
        start, end = twin.block_range(block)
        methods, _, _, stream = twin.layout(block)
        assert twin.encode_stream(block, raw[start:end], base) == stream
        planes += methods.count(RANS)
    return planes


@pytest.mark.parametrize("dtype", [*FLOATS, DType.F8_E4M3FNUZ], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_updates_of_weights(dtype: DType, share: float, kernel: str) -> None:
    if dtype is DType.F8_E4M3FNUZ:
        before, after = updated(20_001, DType.F8_E4M3, share, 1e-3)
    else:
        before, after = updated(20_001, dtype, share, 1e-4)
    encoding = choose.encode(after, dtype, [Base(before, dtype)])
    twin = Twin(encoding.data)
    assert encoding.base == 0 and twin.transform == DELTA
    assert twin.decode(before) == after
    assert check_streams(encoding.data, after, before) >= 1
    assert encoded.decode(encoding.data, before) == after


def test_full_objects_of_many_blocks_use_the_class_of_the_block(kernel: str) -> None:
    quiet = np.frombuffer(weights(2 * BLOCK_ELEMENTS, DType.F32), np.float32)
    raw = _codec.cast(np.concatenate([quiet, quiet * 4096]).tobytes(), DType.F32, DType.BF16)
    data = choose.encode(raw, DType.BF16).data
    twin = Twin(data)
    assert len(twin.models[1].tables) == 2
    assert twin.decode() == raw
    assert check_streams(data, raw, b"") == 4


@given(any_raw(20_000), st.sampled_from([DType.U8, DType.BF16, DType.F32]))
def test_longer_objects(raw: bytes, dtype: DType) -> None:
    rng = np.random.default_rng(len(raw))
    base = (np.frombuffer(raw, np.uint8) + (rng.random(len(raw)) < 0.2)).astype(np.uint8).tobytes()
    data = _codec.encode(raw, dtype, encoded.TRANSFORM_DELTA, base, dtype, 0)
    assert Twin(data).decode(base) == raw
    check_streams(data, raw, base)
