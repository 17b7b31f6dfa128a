"""The members of a zip archive by its central directory, with zip64 and data descriptors.

The central directory and each member's own header are two accounts of the same thing: where they disagree, the archive
is refused, since another reader may see other bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from moonclipfs import limits
from moonclipfs.errors import ParseError, TruncatedError
from moonclipfs.formats.layout import RegionKind, quoted
from moonclipfs.formats.window import Window
from moonclipfs.types import Source

MAGIC = b"PK\x03\x04"

_END = struct.Struct("<4s4H2IH")
_END_MAGIC = b"PK\x05\x06"
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR = struct.Struct("<4sIQI")
_LOCATOR_MAGIC = b"PK\x06\x07"
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_CENTRAL_MAGIC = b"PK\x01\x02"
_LOCAL = struct.Struct("<4s5H3I2H")
_COMMENT_BYTES = 0xFFFF
_ZIP64_EXTRA = 1
_IN_EXTRA = 0xFFFFFFFF
"""A 32-bit size or offset that stands in the zip64 extra field instead."""
_FLAG_ENCRYPTED = 0x1
_FLAG_DESCRIPTOR = 0x8
_STORED = 0


@dataclass(frozen=True, slots=True)
class Member:
    """One file in the archive: `length` bytes at `offset`, compressed or encrypted unless `stored`."""

    name: str
    offset: int
    length: int
    stored: bool

    @property
    def kind(self) -> RegionKind:
        """The kind of region of a member that is no tensor."""
        return RegionKind.HEADER if self.stored else RegionKind.OPAQUE


@dataclass(frozen=True, slots=True)
class _Entry:
    """One record of the central directory."""

    name: bytes
    flags: int
    method: int
    crc: int
    compressed: int
    length: int
    header: int


def read(source: Source) -> list[Member]:
    """Return the members in the order of their bytes, which do not overlap.

    Raises ParseError, TruncatedError when the end of the archive is missing.
    """
    start, count, end = _directory(source)
    window = Window(source, start, end)
    entries = [_central(window) for _ in range(count)]
    if window.left:
        raise ParseError(f"{window.left} bytes follow the last entry of the central directory")
    members = []
    names = set()
    position = 0
    for entry in sorted(entries, key=lambda entry: entry.header):
        member = _member(source, entry)
        if entry.header < position or member.offset + member.length > start:
            raise ParseError(f"{quoted(member.name)} overlaps another member or the central directory")
        if member.name in names:
            raise ParseError(f"{quoted(member.name)} is in the archive twice")
        names.add(member.name)
        members.append(member)
        position = member.offset + member.length
    return members


def last_length(source: Source) -> int:
    """Return the length of the archive that ends `source`, which may begin with others; raises ParseError.

    It must have no comment. What it holds is for `read`.
    """
    directory_end = source.size - _END.size
    if directory_end < 0:
        raise ParseError("no archive ends here")
    magic, _, _, _, _, length, start, comment = _END.unpack(source.read(directory_end, _END.size))
    if magic != _END_MAGIC or comment:
        raise ParseError("no archive ends here")
    tail = _END64.size + _LOCATOR.size
    if directory_end >= tail:
        end64 = bytes(source.read(directory_end - tail, tail))
        if end64.startswith(_END64_MAGIC) and end64.startswith(_LOCATOR_MAGIC, _END64.size):
            length, start = _END64.unpack_from(end64)[-2:]
            directory_end -= tail
    found = int(start) + int(length) + source.size - directory_end
    if found > source.size:
        raise ParseError("an archive begins before the file does")
    return found


def _directory(source: Source) -> tuple[int, int, int]:
    """Return the start, the number of entries and the end of the central directory."""
    end_at, end = _find_end(source)
    _, disk, start_disk, here, count, length, start, _ = end
    locator_at = end_at - _LOCATOR.size
    directory_end = end_at
    if locator_at >= 0 and bytes(source.read(locator_at, 4)) == _LOCATOR_MAGIC:
        _, disk64, directory_end, disks = _LOCATOR.unpack(source.read(locator_at, _LOCATOR.size))
        if disk64 or disks > 1 or directory_end + _END64.size > locator_at:
            raise ParseError("the zip64 locator points outside the archive")
        magic, _, _, _, disk64, start_disk64, here, count64, length64, start64 = _END64.unpack(
            source.read(directory_end, _END64.size)
        )
        if magic != _END64_MAGIC:
            raise ParseError("the zip64 locator does not point at a zip64 end record")
        if count not in (count64, 0xFFFF) or length not in (length64, _IN_EXTRA) or start not in (start64, _IN_EXTRA):
            raise ParseError("the zip64 end record disagrees with the end record")
        disk, start_disk = disk | disk64, start_disk | start_disk64
        count, length, start = count64, length64, start64
    if disk or start_disk or here != count:
        raise ParseError("the archive spans several disks")
    if count > limits.ZIP_ENTRIES or length > limits.HEADER_BYTES:
        raise ParseError(f"a central directory of {count} entries in {length} bytes is over the limit")
    if start + length != directory_end:
        raise ParseError("the central directory does not end where its end record starts")
    return start, count, directory_end


def _find_end(source: Source) -> tuple[int, tuple[bytes, int, int, int, int, int, int, int]]:
    """Return the offset and the fields of the end record, the last one whose comment ends the file."""
    tail_at = max(0, source.size - _END.size - _COMMENT_BYTES)
    tail = bytes(source.read(tail_at, source.size - tail_at))
    at = tail.rfind(_END_MAGIC)
    while at >= 0:
        if at + _END.size <= len(tail):
            fields = _END.unpack_from(tail, at)
            if at + _END.size + fields[-1] == len(tail):
                return tail_at + at, fields
        at = tail.rfind(_END_MAGIC, 0, at)
    raise TruncatedError("the central directory is missing at the end of the file")


def _central(window: Window) -> _Entry:
    """Read one entry of the central directory."""
    (
        magic, _, _, flags, method, _, _, crc, compressed, length,
        name_length, extra_length, comment_length, disk, _, _, header,
    ) = _CENTRAL.unpack(window.take(_CENTRAL.size))  # fmt: skip
    if magic != _CENTRAL_MAGIC:
        raise ParseError(f"no entry of the central directory at byte {window.position - _CENTRAL.size}")
    name = window.take(name_length)
    numbers = _zip64(window.take(extra_length), [length, compressed, header])
    window.skip(comment_length)
    if disk:
        raise ParseError("the archive spans several disks")
    return _Entry(name, flags, method, crc, numbers[1], numbers[0], numbers[2])


def _zip64(extra: bytes, numbers: list[int]) -> list[int]:
    """Return `numbers` with each saturated one replaced from the zip64 extra field, in order."""
    if _IN_EXTRA not in numbers:
        return numbers
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _ZIP64_EXTRA:
            wanted = numbers.count(_IN_EXTRA)
            if length < 8 * wanted or at + 4 + length > len(extra):
                raise ParseError("a zip64 extra field is too short")
            full = iter(struct.unpack_from(f"<{wanted}Q", extra, at + 4))
            return [next(full) if number == _IN_EXTRA else number for number in numbers]
        at += 4 + length
    return numbers


def _member(source: Source, entry: _Entry) -> Member:
    """Compare `entry` with the member's own header and return where its bytes are."""
    name = entry.name.decode("utf-8", "surrogateescape")
    if entry.header + _LOCAL.size + len(entry.name) > source.size:
        raise ParseError(f"{quoted(name)} starts outside the file")
    head = bytes(source.read(entry.header, _LOCAL.size + len(entry.name)))
    magic, _, flags, method, _, _, crc, compressed, length, name_length, extra_length = _LOCAL.unpack_from(head)
    if magic != MAGIC or head[_LOCAL.size : _LOCAL.size + name_length] != entry.name or name_length != len(entry.name):
        raise ParseError(f"{quoted(name)}: no header of that name at byte {entry.header}")
    offset = entry.header + _LOCAL.size + name_length + extra_length
    if offset + entry.compressed > source.size:
        raise ParseError(f"{quoted(name)} ends outside the file")
    agree = method == entry.method and flags == entry.flags
    if not flags & _FLAG_DESCRIPTOR:
        extra = bytes(source.read(offset - extra_length, extra_length)) if _IN_EXTRA in (compressed, length) else b""
        length, compressed = _zip64(extra, [length, compressed])
        agree = agree and (crc, compressed, length) == (entry.crc, entry.compressed, entry.length)
    if not agree:
        raise ParseError(f"{quoted(name)}: its header disagrees with the central directory")
    stored = method == _STORED and not flags & _FLAG_ENCRYPTED
    if stored and entry.compressed != entry.length:
        raise ParseError(f"{quoted(name)} is stored, but its two lengths differ")
    return Member(name, offset, entry.compressed, stored)
