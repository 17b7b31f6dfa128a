"""Damaged and hostile encoded objects: an error that names the place, never a crash, a hang or wrong bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonclipfs import _codec
from moonclipfs.codec import choose, encoded
from moonclipfs.codec.choose import Base
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.limits import BLOCK_ELEMENTS, RAW_BYTES
from moonclipfs.types import DType
from tests.codec.samples import any_case, available_kernels, updated, weights
from tests.codec.twin import EXPONENTS
from tests.codec.twin_hash import xxh3_64


def sealed(data: bytearray) -> bytes:
    """The same object with the checksum of its head made right again, so that what lies behind it is reached."""
    length = min(struct.unpack_from("<I", data, 24)[0], len(data))
    if length >= 32:
        struct.pack_into("<I", data, 28, xxh3_64(bytes(data[:28] + data[32:length])) & 0xFFFFFFFF)
    return bytes(data)


def decodes_or_says_why(data: bytes, base: bytes | None, raw: bytes) -> None:
    try:
        out = encoded.decode(data, base)
    except (CorruptError, UsageError) as error:
        assert str(error)
    else:
        assert out == raw


@given(any_case(), st.data())
@settings(max_examples=200)
def test_any_damage(case: tuple[bytes, DType, list[Base]], data: st.DataObject) -> None:
    raw, dtype, bases = case
    encoding = choose.encode(raw, dtype, bases)
    base = None if encoding.base is None else bytes(bases[encoding.base].raw)
    damaged = bytearray(encoding.data)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(len(damaged) - 3, len(damaged)))]
    decodes_or_says_why(bytes(damaged), base, raw)
    decodes_or_says_why(sealed(damaged), base, raw)


@pytest.mark.parametrize("models", [True, False])
def test_every_byte_matters(models: bool, kernel: str) -> None:
    before, after = updated(700, DType.BF16, scale=1e-3)
    data = _codec.encode(after, DType.BF16, encoded.TRANSFORM_DELTA, before, DType.BF16, 0, models)
    for at in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            if models or at < 56:
                with pytest.raises(CorruptError):
                    encoded.decode(bytes(damaged), before)
            else:  # zstd frames have bits that decoders must ignore
                decodes_or_says_why(bytes(damaged), before, after)
            # Some bytes do not matter to this object: its own type, for one, when the widths are the same.
            decodes_or_says_why(sealed(damaged), before, after)
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            encoded.decode(data[:length], before)


@pytest.mark.parametrize("dtype", [DType.F32, DType.U8, DType.BYTES])
def test_damage_in_a_later_block_names_it_and_leaves_the_others(dtype: DType) -> None:
    raw = np.random.default_rng(2).integers(0, 9, 3 * 4 * BLOCK_ELEMENTS, dtype=np.uint8).tobytes()
    data = bytearray(choose.encode(raw, dtype).data)
    parsed = encoded.parse(data[: encoded.head_length(data[: encoded.PREFIX_BYTES])], len(data))
    data[parsed.offsets[2] - 40] ^= 1
    with pytest.raises(CorruptError, match="block 1"):
        encoded.decode(bytes(data))
    head = bytes(data[: parsed.head_length])
    for block in (0, 2):
        out = bytearray(parsed.raw_bytes(block, 1))
        encoded.decode_blocks(parsed, head, block, 1, data[parsed.offsets[block] : parsed.offsets[block + 1]], out)
        assert out == raw[block * parsed.block_bytes : (block + 1) * parsed.block_bytes]
    payload = bytes(data[parsed.head_length :])
    with pytest.raises(CorruptError, match="block 1"):
        encoded.decode_each(parsed, head, 0, parsed.blocks, payload)


@pytest.mark.parametrize(("first", "count", "cut"), [(0, 4, 0), (3, 1, 0), (1 << 63, 1, 0), (0, 1 << 63, 0), (0, 3, 1)])
def test_blocks_that_are_not_there_are_refused_before_anything_is_decoded(first: int, count: int, cut: int) -> None:
    raw = np.random.default_rng(2).integers(0, 9, 3 * 4 * BLOCK_ELEMENTS, dtype=np.uint8).tobytes()
    data = choose.encode(raw, DType.F32).data
    parsed = encoded.parse(data[: encoded.head_length(data[: encoded.PREFIX_BYTES])], len(data))
    payload = data[parsed.head_length : len(data) - cut]
    with pytest.raises(UsageError):
        encoded.decode_each(parsed, data[: parsed.head_length], first, count, payload)


def prefix(dtype: int = 12, base: int = 255, transform: int = 2, packed: int = 0, raw: int = 4, start: int = 0,
           head: int = 100) -> bytes:  # fmt: skip
    return struct.pack("<4s4BQQII", b"MCE\x01", dtype, base, transform, packed, raw, start, head, 0)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"MCE\x02" + prefix()[4:], "newer version"),
        (b"\0" * 32, "not an encoded object"),
        (prefix(packed=2), "not an encoded object"),
        (prefix()[:31], "cut short"),
        (prefix(dtype=24), "element type"),
        (prefix(base=12), "element type"),
        (prefix(transform=3), "element type"),
        (prefix(transform=3, base=24), "element type"),
        (prefix(transform=3, base=10, dtype=9), "element type"),
        (prefix(transform=3, base=0), "element type"),
        (prefix(transform=4), "transform"),
        (prefix(dtype=0), "transform"),
        (prefix(raw=RAW_BYTES + 1), "limit"),
        (prefix(raw=(1 << 64) - 1), "limit"),
        (prefix(start=1 << 63), "limit"),
        (prefix(head=43), "head length"),
        (prefix(head=(1 << 32) - 1), "head length"),
        (prefix(raw=RAW_BYTES, head=100), "head length"),
    ],
)
def test_prefixes_that_contradict_themselves(bad: bytes, says: str) -> None:
    with pytest.raises(CorruptError, match=says):
        encoded.head_length(bad)
    with pytest.raises(CorruptError):
        encoded.decode(bad + bytes(200))


def test_a_head_that_is_right_in_itself_but_not_for_the_object() -> None:
    data = choose.encode(weights(1000, DType.F32), DType.F32).data
    for wrong in (data + b"x", data[:-1]):
        with pytest.raises(CorruptError, match="add up"):
            encoded.decode(wrong)


def shared_only(shared: bytes, block: bytes, raw: bytes) -> bytes:
    """A rotated U8 object of one block with these models and this encoded block."""
    head = 32 + 12 + len(shared)
    body = prefix(dtype=2, transform=2, raw=len(raw), head=head) + struct.pack("<IQ", len(block), xxh3_64(raw))
    return sealed(bytearray(body + shared + block))


TABLE = bytes([1, 8, 1, 0x0A, 0x75, 0x0A, 0x75])  # one table of 8 bits: symbols 0 and 1, 128 of 256 each


@pytest.mark.parametrize(
    "shared",
    [
        b"",
        b"\0",
        b"\0\0",
        b"\0\0\0\0",
        b"\0\0" + TABLE + b"\0",
        b"\0\0" + TABLE[:-1],
        b"\0\0" + b"\x11" + TABLE[1:],  # 17 tables
        b"\0\0" + bytes([1, 7]) + TABLE[2:],  # 7 bits
        b"\0\0" + bytes([1, 13]) + TABLE[2:],
        b"\0\0" + bytes([1, 9]) + TABLE[2:],  # adds up to half of 2^9
        b"\0\0" + bytes([1, 8, 0, 0x0A, 0xF5]),  # one symbol has all
        b"\0\0" + bytes([1, 8, 1, 0x0A, 0x75, 0x0A, 0x76]),
        b"\0\0" + bytes([1, 8, 1, 0x0F, 0, 0, 0x0F, 0, 1]),  # a frequency of 0
        b"\0\0" + bytes([1, 8, 1, 0xFA, 0xFF, 0x75, 0x0A, 0x75]),  # a symbol past 255
        b"\0\0" + bytes([1, 8, 255]) + bytes(256 * 2),
        b"\0\0" + bytes([2, 8, 8]) + bytes(200),  # unknown shape
        b"\0\0" + bytes([2, 8, 1, 0x20]) + bytes(7) + TABLE[2:] + TABLE[2:],  # the map names a third table
        b"\0\0" + bytes([2, 8, 7]) + bytes(100),  # a map that is cut off
    ],
)
def test_models_that_contradict_themselves(shared: bytes) -> None:
    with pytest.raises(CorruptError, match="table"):
        encoded.decode(shared_only(shared, b"\x01" + bytes(40), bytes(40)))


def stream(words: bytes = b"", state: int = 1 << 15) -> bytes:
    return struct.pack("<32I", *[state] * 32) + words


@pytest.mark.parametrize(
    ("shared", "block", "says"),
    [
        (b"\0\0\0", b"", "cut short"),
        (b"\0\0\0", b"\x00", "cut short"),
        (b"\0\0\0", b"\x01" + bytes(39), "cut short"),
        (b"\0\0\0", b"\x01" + bytes(41), "nothing uses"),
        (b"\0\0\0", b"\x00\x00\x00", "nothing uses"),
        (b"\0\0\0", b"\x02\x00", "cut short"),
        (b"\0\0\0", b"\x02\xff\xff\xff", "cut short"),
        (b"\0\0\0", b"\x02\x04\x00\x00junk", "zstd"),
        (b"\0\0\0", b"\x02\x00\x00\x00", "zstd"),
        (b"\0\0\0", b"\x03" + stream(), "method"),
        (b"\0\0\0", b"\x04", "method"),
        (b"\0\0" + TABLE, b"\x03" + stream()[:-1], "cut short"),
        (b"\0\0" + TABLE, b"\x03" + stream(state=(1 << 15) - 1), "stream"),
        (b"\0\0" + TABLE, b"\x03" + stream(state=1 << 31), "stream"),
        (b"\0\0" + TABLE, b"\x03" + stream(), "stream"),
        (b"\0\0" + TABLE, b"\x03" + stream(b"\0" * 100), "stream"),
        (b"\0\0" + TABLE, b"\x03" + stream(b"\0" * 1000), "stream"),
        (b"\0\0" + TABLE, b"\x03" + stream(b"\0"), "stream"),
    ],
)
def test_blocks_that_contradict_themselves(shared: bytes, block: bytes, says: str, kernel: str) -> None:
    with pytest.raises(CorruptError, match=f"block 0.*{says}"):
        encoded.decode(shared_only(shared, block, bytes(40)))


def test_a_frame_that_decodes_to_more_or_less_than_the_plane() -> None:
    import zstandard

    for length in (39, 41, 1 << 20):
        frame = zstandard.compress(bytes(length))
        block = b"\x02" + len(frame).to_bytes(3, "little") + frame
        with pytest.raises(CorruptError, match="zstd"):
            encoded.decode(shared_only(b"\0\0\0", block, bytes(40)))


def test_packed_models_that_cannot_be_unpacked() -> None:
    import zstandard

    for shared in (b"", b"junk", zstandard.compress(bytes(1 << 20)), zstandard.compress(b"\0\0\0") + b"x"):
        data = bytearray(shared_only(shared, b"\x01" + bytes(40), bytes(40)))
        data[7] = 1
        with pytest.raises(CorruptError, match="table"):
            encoded.decode(sealed(data))
    data = bytearray(shared_only(zstandard.compress(b"\0\0\0"), b"\x01" + bytes(40), bytes(40)))
    data[7] = 1
    assert encoded.decode(sealed(data)) == bytes(40)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BYTES], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("transform", [encoded.TRANSFORM_PLAIN, encoded.TRANSFORM_ROTATED, encoded.TRANSFORM_DELTA])
def test_a_shared_exponent_that_the_type_has_not(dtype: DType, transform: int) -> None:
    raw = bytes(range(100)) * 8
    data = bytearray(_codec.encode(raw, dtype, transform, raw, dtype, models=False))
    most = EXPONENTS[dtype][1] if transform == encoded.TRANSFORM_DELTA and dtype in EXPONENTS else 0
    struct.pack_into("<H", data, 44, most)
    assert encoded.decode(sealed(data), raw) == raw
    for top in (most + 1, most + 256, 0xFFFF):
        struct.pack_into("<H", data, 44, top)
        with pytest.raises(CorruptError, match="exponent"):
            encoded.decode(sealed(data), raw)


def with_plain_models(data: bytes) -> bytearray:
    """The same object of one block with its models unpacked."""
    import zstandard

    length = encoded.head_length(data[: encoded.PREFIX_BYTES])
    shared = data[44:length]
    if data[7]:
        shared = zstandard.ZstdDecompressor().decompress(shared, max_output_size=1 << 18)
    plain = bytearray(data[:44] + shared + data[length:])
    plain[7] = 0
    struct.pack_into("<I", plain, 24, 44 + len(shared))
    return plain


@pytest.mark.parametrize("dtype", [DType.F8_E4M3, DType.BF16, DType.F32, DType.F64], ids=lambda dtype: dtype.name)
def test_all_kernels_agree_on_damaged_models(dtype: DType) -> None:
    """What one processor reads, every other one reads."""

    def outcome(name: str, damaged: bytes) -> bytes | None:
        _codec.use_kernel(name)
        try:
            return encoded.decode(damaged, before)
        except CorruptError:
            return None

    before, after = updated(1536, dtype, scale=1e-2 if dtype is DType.F8_E4M3 else 1e-4)  # whole groups
    data = with_plain_models(_codec.encode(after, dtype, encoded.TRANSFORM_DELTA, before, dtype))
    used, head = _codec.kernel(), encoded.head_length(data[: encoded.PREFIX_BYTES])
    assert head > 60, "no models to damage"
    try:
        for at in range(44, min(head, 200)):
            for flip in (1, 2, 0x80):
                damaged = bytearray(data)
                damaged[at] ^= flip
                outcomes = {outcome(name, sealed(damaged)) for name in available_kernels()}
                assert len(outcomes) == 1, f"byte {at} with {flip:#x} flipped"
    finally:
        _codec.use_kernel(used)


def test_a_claim_of_much_raw_data_allocates_nothing() -> None:
    blocks = RAW_BYTES // BLOCK_ELEMENTS
    with pytest.raises(CorruptError):
        encoded.decode(sealed(bytearray(prefix(dtype=2, raw=RAW_BYTES, head=32 + 12 * blocks) + bytes(100))))
