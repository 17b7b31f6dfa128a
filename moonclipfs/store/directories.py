"""Directory objects: the entries of one directory (byte layout in FORMAT.md)."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterable, Mapping

from moonclipfs import limits
from moonclipfs.errors import CorruptError, LimitError
from moonclipfs.types import ID_BYTES, Attributes, Buffer, Entry, EntryType

_MAGIC = b"MCDR"
_VERSION = 1
_HEAD = struct.Struct("<4sB3xI")
_ENTRY = struct.Struct("<BxHHHIIIIqqQ32s")
_FIRST_NS = -(1 << 63)
_TYPES = {int(kind): kind for kind in EntryType}
_NO_XATTRS: Mapping[bytes, bytes] = {}
"""Shared by most entries, of which there may be millions; it stays empty."""
_NAME = re.compile(rb"[^\0/.][^\0/]{0,%d}" % (limits.NAME_BYTES - 1))
"""What `check_name` allows, but for names that begin with a dot."""


def _encode_entry(entry: Entry) -> bytes:
    attributes = entry.attributes
    parts = [
        _ENTRY.pack(
            entry.type, len(entry.name), len(entry.target), len(attributes.xattrs),
            attributes.mode & 0o7777, entry.link_group, attributes.uid, attributes.gid,
            _within_times(attributes.mtime_ns), _within_times(attributes.ctime_ns), entry.size, entry.child,
        ),
        entry.name,
        entry.target,
    ]  # fmt: skip
    for name, value in sorted(attributes.xattrs.items()):
        parts += [struct.pack("<HI", len(name), len(value)), name, value]
    return b"".join(parts)


def _within_times(time_ns: int) -> int:
    """The nearest time that an entry can have: a file of some disk may be of the year 2400."""
    return min(max(time_ns, _FIRST_NS), limits.LAST_TIME_NS)


def check_name(name: bytes) -> None:
    """Raise LimitError for a name that cannot stand in a directory."""
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise LimitError(f"{name!r} cannot be the name of a file")
    if len(name) > limits.NAME_BYTES:
        raise LimitError(f"name of {len(name)} bytes: longer than {limits.NAME_BYTES}")


def encode_directory(entries: Iterable[Entry]) -> bytes:
    """Serialise entries, sorted by name; equal entries always give equal bytes. Raises LimitError for a bad name."""
    ordered = sorted(entries, key=lambda entry: entry.name)
    for entry, following in itertools.pairwise(ordered):
        if entry.name == following.name:
            raise LimitError(f"{entry.name!r} stands twice in one directory")
    for entry in ordered:
        check_name(entry.name)
    return _HEAD.pack(_MAGIC, _VERSION, len(ordered)) + b"".join(map(_encode_entry, ordered))


def decode_directory(data: Buffer) -> dict[bytes, Entry]:
    """Parse a directory object into its entries by name, in order. Raises CorruptError for any contradiction."""
    if not _HEAD.size <= len(data) <= limits.DIRECTORY_BYTES:
        raise CorruptError(f"directory of {len(data)} bytes: impossible length")
    magic, version, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptError(f"directory starts with {magic!r} version {version}, not {_MAGIC!r} version {_VERSION}")
    entries: dict[bytes, Entry] = {}
    raw, at = bytes(data), _HEAD.size
    for _ in range(count):
        entry, at = _decode_entry(raw, at)
        entries[entry.name] = entry
    if at != len(raw) or list(entries) != sorted(entries) or len(entries) != count:
        raise CorruptError("directory: entries are out of order, repeated, or do not fill it exactly")
    return entries


def directory_weight(entries: Mapping[bytes, Entry]) -> int:
    """What a cache counts for a directory: 1, and 1 for each entry, each xattr and each KiB of its texts."""
    weight = 1 + len(entries)
    for name, entry in entries.items():
        xattrs = entry.attributes.xattrs
        texts = len(name) + len(entry.target) + sum(map(len, xattrs)) + sum(map(len, xattrs.values()))
        weight += len(xattrs) + texts // limits.KIB
    return weight


def _decode_entry(raw: bytes, at: int) -> tuple[Entry, int]:
    try:
        kind, name_length, target_length, xattr_count, mode, group, uid, gid, mtime, ctime, size, child = (
            _ENTRY.unpack_from(raw, at)
        )
        entry_type = _TYPES[kind]
    except (struct.error, KeyError) as error:
        raise CorruptError(f"directory: broken entry at byte {at}") from error
    at += _ENTRY.size
    name, target = raw[at : at + name_length], raw[at + name_length : at + name_length + target_length]
    at += name_length + target_length
    xattrs = _NO_XATTRS
    if xattr_count:
        xattrs, at = _decode_xattrs(raw, at, xattr_count)
    if _NAME.fullmatch(name) is None:
        try:
            check_name(name)
        except LimitError as error:
            raise CorruptError(f"directory: {error}") from error
    attributes = Attributes(mode, uid, gid, mtime, ctime, xattrs)
    if len(child) != ID_BYTES or at > len(raw):
        raise CorruptError("directory: entry reaches past its end")
    return Entry(name, entry_type, attributes, size, child, target, group), at


def _decode_xattrs(raw: bytes, at: int, count: int) -> tuple[Mapping[bytes, bytes], int]:
    xattrs: dict[bytes, bytes] = {}
    for _ in range(count):
        if at + 6 > len(raw):
            raise CorruptError("directory: xattrs reach past its end")
        name_length, value_length = struct.unpack_from("<HI", raw, at)
        if value_length > limits.XATTR_BYTES:
            raise CorruptError(f"directory: xattr of {value_length} bytes")
        at += 6
        xattrs[raw[at : at + name_length]] = raw[at + name_length : at + name_length + value_length]
        at += name_length + value_length
    return xattrs, at
