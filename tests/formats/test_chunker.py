"""Content-defined chunks against a twin, cut into pieces in any way, and around an insertion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs._codec import Chunker
from moonclipfs.errors import UsageError
from moonclipfs.limits import CHUNK_AVERAGE, CHUNK_MAX, CHUNK_MIN

_M64 = (1 << 64) - 1


def gear() -> list[int]:
    """The first 256 outputs of splitmix64 from the seed 0."""
    state, table = 0, []
    for _ in range(256):
        state = (state + 0x9E3779B97F4A7C15) & _M64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _M64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _M64
        table.append(z ^ z >> 31)
    return table


def twin(data: bytes, minimum: int, average: int, maximum: int) -> list[int]:
    table, bits, lengths, start = gear(), average.bit_length() - 1, [], 0
    while start < len(data):
        value, length = 0, min(minimum, len(data) - start)
        while start + length < len(data) and length < maximum:
            value = (value << 1) + table[data[start + length]] & _M64
            zero_bits = bits + 2 if length < average else bits - 2
            length += 1
            if value >> 64 - zero_bits == 0:
                break
        lengths.append(length)
        start += length
    return lengths


def cut(data: bytes, sizes: tuple[int, int, int], pieces: list[int] | None = None) -> list[int]:
    chunker, lengths, at = Chunker(*sizes), [], 0
    for piece in pieces or []:
        lengths += chunker.push(data[at : at + piece])
        at += piece
    lengths += chunker.push(data[at:])
    return lengths + chunker.finish()


def test_the_gear_table_begins_as_published() -> None:
    assert gear()[0] == 0xE220A8397B1DCDAF


@given(
    st.binary(max_size=5000),
    st.lists(st.integers(0, 700), max_size=20),
    st.sampled_from([(64, 128, 512), (64, 64, 64), (100, 256, 300)]),
)
def test_chunks_are_the_twin_s_however_the_stream_is_cut(
    data: bytes, pieces: list[int], sizes: tuple[int, int, int]
) -> None:
    want = twin(data, *sizes)
    assert cut(data, sizes) == want
    assert cut(data, sizes, pieces) == want
    assert sum(want) == len(data)
    assert all(sizes[0] <= length <= sizes[2] for length in want[:-1])


def test_sizes_on_real_constants() -> None:
    data = np.random.default_rng(1).bytes(24 << 20)
    lengths = cut(data, (CHUNK_MIN, CHUNK_AVERAGE, CHUNK_MAX))
    assert lengths == Chunker(CHUNK_MIN, CHUNK_AVERAGE, CHUNK_MAX).push(data) + lengths[-1:]
    assert all(CHUNK_MIN <= length <= CHUNK_MAX for length in lengths[:-1])
    assert CHUNK_AVERAGE // 2 < len(data) / len(lengths) < CHUNK_AVERAGE * 2


def test_borders_come_back_after_an_insertion() -> None:
    data = np.random.default_rng(2).bytes(8 << 20)
    other = data[: 1 << 20] + b"inserted" + data[1 << 20 :]

    def chunks(bytes_: bytes) -> set[bytes]:
        ends = np.cumsum(cut(bytes_, (CHUNK_MIN, CHUNK_AVERAGE, CHUNK_MAX)))
        return {bytes_[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)}

    new = chunks(other) - chunks(data)
    assert sum(len(chunk) for chunk in new) <= 3 * CHUNK_MAX


def test_a_chunker_begins_anew_after_finish() -> None:
    data = np.random.default_rng(3).bytes(3000)
    chunker = Chunker(64, 128, 512)
    first = chunker.push(data) + chunker.finish()
    assert chunker.push(data) + chunker.finish() == first
    assert chunker.finish() == []


def test_sizes_out_of_order_are_refused() -> None:
    for sizes in ((63, 128, 256), (128, 64, 256), (64, 512, 256)):
        with pytest.raises(UsageError):
            Chunker(*sizes)
