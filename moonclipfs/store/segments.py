"""Segments: the files of a layer's journal, as whoever writes them and whoever deletes from the store must read them.

`journal/%016d.log` begins with a header frame; records and commit marks follow. A segment either begins a journal
(`whole`: what stood before it does not count) or goes on with the one before. Names are given to segments that are
durable, so the newest whole one and all behind it are the journal.

A commit mark says up to where the segment was durable before it was written. A place without a whole frame in front
of that is damage; behind it, it is what a power failure left of a tail that nobody was promised.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgpack

from moonclipfs.errors import CorruptError, FormatVersionError
from moonclipfs.store.backend import os_errors
from moonclipfs.store.frames import Frame, encode_frame, find_frames, is_blank, read_frame, read_frames
from moonclipfs.types import ID_BYTES, Kind, ObjectId

MAGIC = b"MCJOURNL"
VERSION = 1
RECORD = b"R"
MARK = b"C"
"""First byte of a frame's payload: what it is. The header frame begins with the magic."""
_HEADER = struct.Struct("<8sHHI16s16sQ")
_MARK = struct.Struct("<Q")
_WHOLE = 1
_NAME = re.compile(r"(\d{16})\.log")
NO_BOOT = bytes(16)
"""Of a writer that cannot tell which start of its kernel it runs under: no two of them agree."""


class Header(NamedTuple):
    """What a segment says of itself. `boot` is the start of the kernel under which it was written, `salt` goes into the
    checks of its frames.
    """

    whole: bool
    salt: int
    layer: bytes
    boot: bytes
    number: int


def encode_header(header: Header) -> bytes:
    """The header frame of a segment."""
    flags = _WHOLE if header.whole else 0
    return encode_frame(_HEADER.pack(MAGIC, VERSION, flags, header.salt, header.layer, header.boot, header.number), 0)


def decode_header(payload: bytes) -> Header:
    """Parse the payload of a header frame. Raises CorruptError, FormatVersionError."""
    if len(payload) < _HEADER.size or payload[:8] != MAGIC:
        raise CorruptError("it is no segment of a journal")
    _, version, flags, salt, layer, boot, number = _HEADER.unpack_from(payload)
    if version != VERSION:
        raise FormatVersionError(f"it is of version {version}, and this moonclipfs reads {VERSION}")
    return Header(bool(flags & _WHOLE), salt, layer, boot, number)


def encode_mark(durable: int) -> bytes:
    """The payload of a commit mark: the segment was durable up to `durable` before."""
    return MARK + _MARK.pack(durable)


def decode_mark(payload: bytes) -> int:
    """How far the segment was durable before this commit mark. Raises CorruptError."""
    if len(payload) != 1 + _MARK.size:
        raise CorruptError("a commit mark of a wrong length")
    return int(_MARK.unpack_from(payload, 1)[0])


def segment_name(number: int) -> str:
    """The file name of a segment."""
    return f"{number:016d}.log"


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the segments in a journal's directory, in order; none when there is no directory."""
    with os_errors(f"list {directory}"):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


@dataclass(frozen=True, slots=True)
class Extent:
    """What is whole of a segment: its frames end at `end`, the last commit mark at `committed`, the first at `first`.
    Up to `durable` it is known to be on the disk. With `torn`, something else than zeros lies behind `end`; with
    `broken`, whole frames are among that.
    """

    header: Header
    first: int
    committed: int
    durable: int
    end: int
    torn: bool
    broken: bool


def measure_segment(file: BinaryIO, path: Path, before: Extent | None = None) -> Extent:
    """Read a whole segment, or what came behind what was found `before`.

    Raises CorruptError, naming file and offset, for damage, FormatVersionError.
    """
    found = before or _begin(file, path)
    header, first, committed, durable, end = found.header, found.first, found.committed, found.durable, found.end
    for frame in read_frames(file, end, header.salt):
        end = frame.end
        if frame.payload.startswith(MARK):
            first = first or end
            durable = max(durable, first, decode_mark(frame.payload))
            committed = end
    torn = not is_blank(file, end)
    broken = False
    for frame in find_frames(file, end, header.salt) if torn else ():
        broken = True
        if not first or (frame.payload.startswith(MARK) and decode_mark(frame.payload) > end):
            raise CorruptError(f"{path}: damaged at offset {end}, and more that was durable stands behind it")
    if not first:
        raise CorruptError(f"{path}: damaged at offset {end}: the state that it begins with is not whole")
    return Extent(header, first, committed, durable, end, torn, broken)


def _begin(file: BinaryIO, path: Path) -> Extent:
    frame = read_frame(file, 0)
    if frame is None:
        raise CorruptError(f"{path}: its header is damaged, at offset 0")
    try:
        header = decode_header(frame.payload)
    except (CorruptError, FormatVersionError) as error:
        raise type(error)(f"{path}: {error}") from error
    return Extent(header, 0, 0, 0, frame.end, False, False)


def record_payloads(file: BinaryIO, extent: Extent, start: int = 0) -> Iterator[Frame]:
    """Yield the frames of records from `start`, where a frame begins, to the end of a segment as it was measured.

    Their payloads without the first byte are records.
    """
    frame = None if start else read_frame(file, 0)
    for found in read_frames(file, frame.end if frame else start, extent.header.salt):
        if found.end > extent.end:
            return
        if found.payload.startswith(RECORD):
            yield found


def record_refs(payload: bytes) -> list[tuple[Kind, ObjectId]]:
    """The objects that a record needs, whatever its type. Raises CorruptError for what is no record."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(memoryview(payload)[1:])
    try:
        if unpacker.read_array_header() < 2:
            raise ValueError("too short")
        unpacker.skip()
        found = unpacker.unpack()
        if any(len(one) != 1 + ID_BYTES for one in found):
            raise ValueError("an id of a wrong length")
        return [(Kind(one[0]), one[1:]) for one in found]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptError(f"a record whose objects cannot be read ({error!r})") from error
