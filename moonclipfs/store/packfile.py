"""The bytes of a pack: a header, records, a footer that lists them, a trailer (byte layout in FORMAT.md)."""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.errors import CorruptError
from moonclipfs.types import Buffer

PACK_MAGIC = b"MCPK"
RECORD_MAGIC = b"MCOB"
TRAILER_MAGIC = b"MCPKEND\n"
VERSION = 1

HEADER = struct.Struct("<4sHH8x")
TRAILER = struct.Struct("<QQ32s8s")

ENTRY = np.dtype(
    [
        ("id", "V32"),
        ("base", "V32"),
        ("sketch", "V32"),
        ("label", "<u8"),
        ("offset", "<u8"),
        ("encoded_length", "<u8"),
        ("raw_length", "<u8"),
        ("base_start", "<u8"),
        ("kind", "u1"),
        ("dtype", "u1"),
        ("depth", "u1"),
        ("flags", "u1"),
        ("reserved", "<u4"),
    ]
)
"""One object of a pack. `offset` is where its encoded bytes begin in the pack; the record header stands just before."""

RECORD_BYTES = 4 + 4 + ENTRY.itemsize
"""A record header: magic, CRC-32 of the entry, the entry."""


def pack_header() -> bytes:
    """The first 16 bytes of every pack."""
    return HEADER.pack(PACK_MAGIC, VERSION, 0)


def record_header(entry: NDArray[np.void]) -> bytes:
    """The bytes before an object's encoding; `entry` is one ENTRY with every field set."""
    raw = entry.tobytes()
    return RECORD_MAGIC + struct.pack("<I", zlib.crc32(raw)) + raw


def parse_record_header(data: Buffer) -> NDArray[np.void]:
    """Return the ENTRY of a record header. Raises CorruptError when magic or CRC do not fit."""
    if len(data) != RECORD_BYTES or bytes(data[:4]) != RECORD_MAGIC:
        raise CorruptError("no record starts here")
    raw = bytes(data[8:])
    if zlib.crc32(raw) != struct.unpack_from("<I", data, 4)[0]:
        raise CorruptError("record header: CRC does not match")
    return np.frombuffer(raw, ENTRY)


def footer(entries: NDArray[np.void], offset: int) -> bytes:
    """The footer and trailer of a pack whose records end at `offset`."""
    table = entries.tobytes()
    digest = hashlib.sha256(table).digest()
    return table + TRAILER.pack(offset, len(entries), digest, TRAILER_MAGIC)


def parse_trailer(data: Buffer, pack_length: int) -> tuple[int, int, bytes]:
    """Return (footer offset, entries, SHA-256 of the footer). Raises CorruptError unless it fits a pack of this length."""
    if len(data) != TRAILER.size:
        raise CorruptError("pack is too short for a trailer")
    offset, count, digest, magic = TRAILER.unpack(data)
    if magic != TRAILER_MAGIC:
        raise CorruptError("pack has no trailer: it was cut off or never finished")
    if count > limits.PACK_ENTRIES or offset + count * ENTRY.itemsize + TRAILER.size != pack_length:
        raise CorruptError("pack trailer does not fit the pack's length")
    return offset, count, digest


def parse_footer(table: Buffer, count: int, digest: bytes, footer_offset: int) -> NDArray[Any]:
    """Return the ENTRY array of a footer. Raises CorruptError when the digest or an entry's range is wrong."""
    if hashlib.sha256(table).digest() != digest:
        raise CorruptError("pack footer: SHA-256 does not match")
    entries = np.frombuffer(table, ENTRY, count)
    ends = entries["offset"] + entries["encoded_length"]
    if count and (int(ends.max()) > footer_offset or int(entries["offset"].min()) < HEADER.size + RECORD_BYTES):
        raise CorruptError("pack footer: an entry lies outside the records")
    return entries
