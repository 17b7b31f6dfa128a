"""Frames: pieces of bytes one behind the other in a file that only grows, each with its length and a check.

A frame is a 12-byte header (u32 magic, u32 length of the payload, u32 check) and the payload. The check is the CRC-32
of the frame's offset in the file, the length and the payload, with a salt of the file in front: a copy of a frame that
lies inside the payload of another, or at another place, passes for none. The salt is in the magic too, so that payloads
which others choose do not look like frames to who searches for them. Zeros behind the last frame are the end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from moonclipfs import limits
from moonclipfs.types import Buffer

MAGIC = int.from_bytes(b"MCFR", "little")
"""Exclusive-or with the salt."""
HEADER = struct.Struct("<III")
_PLACE = struct.Struct("<QI")
_READ_BYTES = limits.MIB


class Frame(NamedTuple):
    """A whole frame, from `offset` to `end` of its file."""

    offset: int
    end: int
    payload: bytes


def encode_frame(payload: Buffer, offset: int, salt: int = 0) -> bytes:
    """The bytes of a frame that stands at `offset` of its file. `payload` is not empty."""
    length = len(payload)
    return HEADER.pack(MAGIC ^ salt, length, _check(payload, offset, salt)) + payload


def _check(payload: Buffer, offset: int, salt: int) -> int:
    return zlib.crc32(payload, zlib.crc32(_PLACE.pack(offset, len(payload)), salt))


def read_frame(file: BinaryIO, offset: int, salt: int = 0) -> Frame | None:
    """The frame at `offset`, None when there is no whole one."""
    file.seek(offset)
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    magic, length, check = HEADER.unpack(header)
    if magic != MAGIC ^ salt or not 0 < length <= limits.RECORD_BYTES:
        return None
    payload = file.read(length)
    if len(payload) < length or _check(payload, offset, salt) != check:
        return None
    return Frame(offset, offset + HEADER.size + length, payload)


def read_frames(file: BinaryIO, offset: int = 0, salt: int = 0) -> Iterator[Frame]:
    """Yield the whole frames from `offset` on; ends in front of the first place where none stands."""
    while (frame := read_frame(file, offset, salt)) is not None:
        yield frame
        offset = frame.end


def is_blank(file: BinaryIO, offset: int) -> bool:
    """Whether nothing but zeros lies from `offset` on."""
    file.seek(offset)
    while data := file.read(_READ_BYTES):
        if data.count(0) != len(data):
            return False
    return True


def find_frames(file: BinaryIO, offset: int, salt: int = 0) -> Iterator[Frame]:
    """Yield every whole frame that stands anywhere behind `offset`, whatever lies between them."""
    magic = (MAGIC ^ salt).to_bytes(4, "little")
    while (at := _find(file, magic, offset)) is not None:
        frame = read_frame(file, at, salt)
        if frame is not None:
            yield frame
        offset = frame.end if frame is not None else at + 1


def _find(file: BinaryIO, magic: bytes, offset: int) -> int | None:
    file.seek(offset)
    kept = b""
    while data := file.read(_READ_BYTES):
        window = kept + data
        if (found := window.find(magic)) >= 0:
            return offset - len(kept) + found
        offset += len(data)
        kept = window[-(len(magic) - 1) :]
    return None
