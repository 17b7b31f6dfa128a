"""The bytes of a pack: a header, records, a footer that lists them, a trailer (byte layout in FORMAT.md)."""

from __future__ import annotations

import hashlib
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.codec.checks import xxh3_64
from moonclipfs.errors import CorruptError
from moonclipfs.types import Buffer, DType, Kind

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
        ("generation", "u1"),
        ("check", "<u4"),
    ]
)
"""One object of a pack. `offset` is where its encoded bytes begin in the pack; the record header stands just before.
`check` is the low half of the XXH3 of the encoded bytes, `generation` the object's place in its line of deltas."""

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


def check_of(encoded: Buffer) -> int:
    """The `check` of an entry for these encoded bytes."""
    return xxh3_64(encoded) & 0xFFFFFFFF


def parse_trailer(data: Buffer, pack_length: int) -> tuple[int, int, bytes]:
    """Return (footer offset, entries, SHA-256 of the footer). Raises CorruptError unless it fits the pack's length."""
    if len(data) != TRAILER.size:
        raise CorruptError("pack is too short for a trailer")
    offset, count, digest, magic = TRAILER.unpack(data)
    if magic != TRAILER_MAGIC:
        raise CorruptError("pack has no trailer: it was cut off or never finished")
    if count > limits.PACK_ENTRIES or offset + count * ENTRY.itemsize + TRAILER.size != pack_length:
        raise CorruptError("pack trailer does not fit the pack's length")
    return offset, count, digest


def parse_footer(table: Buffer, count: int, digest: bytes, footer_offset: int) -> NDArray[np.void]:
    """Return the ENTRY array of a footer. Raises CorruptError when the digest or an entry is wrong."""
    if hashlib.sha256(table).digest() != digest:
        raise CorruptError("pack footer: SHA-256 does not match")
    entries = np.frombuffer(table, ENTRY, count)
    check_entries(entries, footer_offset)
    return entries


def check_entries(entries: NDArray[np.void], end: int) -> None:
    """Raise CorruptError unless every entry lies in the records, which end at `end`, and is of known kind and type."""
    offset, length = entries["offset"], entries["encoded_length"]
    # Each bound by itself first: a sum of two unchecked 64-bit numbers may wrap around.
    inside = (offset >= HEADER.size + RECORD_BYTES) & (offset <= end) & (length <= end)
    if not bool((inside & (length <= end - np.minimum(offset, end))).all()):
        raise CorruptError("pack: an entry lies outside the records")
    known = np.isin(entries["kind"], list(Kind)) & np.isin(entries["dtype"], list(DType))
    if not bool((known & (entries["raw_length"] <= limits.FILE_BYTES)).all()):
        raise CorruptError("pack: an entry of unknown kind or type, or of an impossible length")
