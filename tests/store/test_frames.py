"""Frames and segments: what is whole is found, and nothing else passes for it."""

from __future__ import annotations

import io
from pathlib import Path

import hypothesis
import msgpack
import pytest
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import CorruptError, FormatVersionError
from moonclipfs.store import segments
from moonclipfs.store.frames import HEADER, MAGIC, encode_frame, find_frames, is_blank, read_frame, read_frames
from moonclipfs.store.segments import (
    Header,
    decode_header,
    decode_mark,
    encode_header,
    encode_mark,
    measure_segment,
    record_refs,
)
from moonclipfs.types import Kind

PAYLOADS = st.lists(st.binary(min_size=1, max_size=60), max_size=8)


def join(payloads: list[bytes], salt: int = 0) -> bytes:
    data = b""
    for payload in payloads:
        data += encode_frame(payload, len(data), salt)
    return data


def payloads(data: bytes, salt: int = 0) -> list[bytes]:
    return [frame.payload for frame in read_frames(io.BytesIO(data), 0, salt)]


@hypothesis.given(PAYLOADS, st.integers(0, 2**32 - 1), st.integers(0, 100))
def test_frames_are_read_back(wanted: list[bytes], salt: int, zeros: int) -> None:
    data = join(wanted, salt)
    assert payloads(data + bytes(zeros), salt) == wanted
    assert is_blank(io.BytesIO(data + bytes(zeros)), len(data))
    assert is_blank(io.BytesIO(data), 0) == (not wanted)


@hypothesis.given(PAYLOADS, st.data())
def test_a_cut_or_changed_byte_ends_the_reading_in_front_of_it(wanted: list[bytes], data: st.DataObject) -> None:
    whole = join([*wanted, b"last"])
    at = data.draw(st.integers(0, len(whole) - 1))
    before = [frame.payload for frame in read_frames(io.BytesIO(whole)) if frame.end <= at]
    assert payloads(whole[:at]) == before
    bit = 1 << data.draw(st.integers(0, 7))
    assert payloads(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]) == before


def test_a_copy_at_another_place_or_with_another_salt_is_no_frame() -> None:
    inner = join([b"one"], 7)
    outer = join([b"first", inner + inner, b"two"], 7)
    assert payloads(outer, 7) == [b"first", inner + inner, b"two"]
    start = outer.index(inner)
    assert [frame.payload for frame in find_frames(io.BytesIO(outer), start - 1, 7)] == [b"two"]
    assert payloads(outer, 8) == []


def test_frames_behind_a_gap_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.store.frames._READ_BYTES", 5)
    data = join([b"one", b"two" * 9, b"three"])
    first = read_frame(io.BytesIO(data), 0)
    assert first is not None
    torn = data[: first.end] + bytes([data[first.end] ^ 1]) + data[first.end + 1 :] + b"MCFR" + b"\xff" * 20 + b"MCF"
    assert payloads(torn) == [b"one"]
    assert [frame.payload for frame in find_frames(io.BytesIO(torn), first.end)] == [b"three"]


def test_what_others_choose_does_not_look_like_a_frame() -> None:
    """A torn tail full of magics, each with a length to its end, is searched without reading all behind each."""
    asked = 0

    class Counting(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal asked
            found = super().read(size)
            asked += len(found)
            return found

    hostile = b"torn" + HEADER.pack(MAGIC, 1 << 20, 0) * 100_000
    assert list(find_frames(Counting(hostile), 0, 12345)) == []
    assert asked <= 2 * len(hostile)


def test_a_length_is_checked_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.append(size)
            return super().read(size)

    assert read_frame(Watched(HEADER.pack(MAGIC, limits.RECORD_BYTES + 1, 0)), 0) is None
    assert read_frame(Watched(HEADER.pack(MAGIC, 0, 0)), 0) is None
    assert asked == [HEADER.size, HEADER.size]


# Segments

START = Header(True, 99, b"l" * 16, b"b" * 16, 3)


def segment(*frames: bytes, header: Header = START) -> bytes:
    data = encode_header(header)
    for payload in frames:
        data += encode_frame(payload, len(data), header.salt)
    return data


def test_headers_and_marks_are_read_back() -> None:
    for whole in (True, False):
        header = START._replace(whole=whole)
        frame = read_frame(io.BytesIO(encode_header(header)), 0)
        assert frame is not None and decode_header(frame.payload) == header
    assert decode_mark(encode_mark(2**40)) == 2**40
    with pytest.raises(CorruptError):
        decode_mark(encode_mark(1) + b"x")
    with pytest.raises(CorruptError):
        decode_header(b"MCJOURNL")
    with pytest.raises(FormatVersionError, match="version 9"):
        decode_header(b"MCJOURNL" + (9).to_bytes(2, "little") + bytes(100))


def test_what_is_behind_the_durable_part_is_a_tail_and_what_is_in_it_is_not() -> None:
    path = Path("journal/1.log")
    record = segments.RECORD + b"some record"
    begun = segment(encode_mark(0))
    data = segment(encode_mark(0), record, encode_mark(len(begun)), record)
    found = measure_segment(io.BytesIO(data + bytes(500)), path)
    assert (found.header, found.first, found.end) == (START, len(begun), len(data))
    assert (found.durable, found.torn, found.broken) == (len(begun), False, False)
    torn = data[: len(begun) + 20] + b"\xff" + data[len(begun) + 21 :]
    found = measure_segment(io.BytesIO(torn), path)
    assert (found.end, found.committed, found.torn, found.broken) == (len(begun), len(begun), True, True)
    proven = segment(encode_mark(0), record, encode_mark(len(begun)), record, encode_mark(len(data)))
    torn = proven[: len(begun) + 20] + b"\xff" + proven[len(begun) + 21 :]
    with pytest.raises(CorruptError, match=rf"1\.log: damaged at offset {len(begun)}"):
        measure_segment(io.BytesIO(torn), path)


@pytest.mark.parametrize("data", [b"", b"x" * 100, segment(), segment(segments.RECORD + b"x"), encode_frame(b"x", 0)])
def test_a_segment_without_a_whole_beginning_is_damaged(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"1\.log: "):
        measure_segment(io.BytesIO(data), Path("journal/1.log"))


def test_the_objects_of_a_record_of_any_type_are_read() -> None:
    refs = [b"\x02" + b"r" * 32, b"\x03" + b"d" * 32]
    record = msgpack.packb([250, refs, "fields of", {b"a": [type(None).__name__]}, 2**40])
    assert record_refs(segments.RECORD + record) == [(Kind.RECIPE, b"r" * 32), (Kind.DIRECTORY, b"d" * 32)]


@pytest.mark.parametrize(
    "value",
    [[], [1], 7, [1, 2], [1, [b"\x02short"]], [1, [b"\x09" + bytes(32)]], [1, ["text" * 9]], {1: 2}, [1, None]],
)
def test_a_record_whose_objects_cannot_be_read_is_damage(value: object) -> None:
    with pytest.raises(CorruptError):
        record_refs(segments.RECORD + msgpack.packb(value))


@hypothesis.given(st.binary(max_size=80))
def test_any_bytes_are_refs_or_damage(data: bytes) -> None:
    try:
        assert all(isinstance(kind, Kind) and len(one) == 32 for kind, one in record_refs(segments.RECORD + data))
    except CorruptError:
        pass


@hypothesis.given(st.data())
def test_a_segment_that_was_changed_anywhere_is_damaged_or_ends_there(data: st.DataObject) -> None:
    """Nothing but the two errors comes of it, and no frame that was not written."""
    frames = [encode_mark(0)]
    for payload in data.draw(st.lists(st.binary(max_size=30), max_size=5)):
        frames += [segments.RECORD + payload, encode_mark(data.draw(st.integers(0, 300)))]
    whole = segment(*frames)
    changed = bytearray(whole + bytes(data.draw(st.integers(0, 40))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        piece = data.draw(st.binary(min_size=1, max_size=12))
        changed[at : at + len(piece)] = piece
    file = io.BytesIO(bytes(changed[: data.draw(st.integers(0, len(changed)))]))
    try:
        found = measure_segment(file, Path("journal/1.log"))
    except (CorruptError, FormatVersionError) as error:
        assert "1.log" in str(error)
        return
    records = [frame.payload for frame in segments.record_payloads(file, found)]
    written = [payload for payload in frames if payload.startswith(segments.RECORD)]
    assert records == written[: len(records)] and found.committed <= found.end
