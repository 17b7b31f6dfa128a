"""Small frozen value types that every room shares. Nothing here knows a file or a store."""

from __future__ import annotations

import enum
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
ObjectId: TypeAlias = bytes
"""32 bytes of BLAKE3, derived with a context per `Kind`."""

ID_BYTES = 32
NO_ID: ObjectId = bytes(ID_BYTES)
"""Stands where an object id is absent (a full encoding's base, for example)."""


class Kind(enum.IntEnum):
    """What the bytes of an object are."""

    DATA = 1
    RECIPE = 2
    DIRECTORY = 3


class DType(enum.IntEnum):
    """Element types by their code in the store format; sizes are in bits, since some are below a byte."""

    BYTES = 0
    BOOL = 1
    U8 = 2
    I8 = 3
    U16 = 4
    I16 = 5
    U32 = 6
    I32 = 7
    U64 = 8
    I64 = 9
    F16 = 10
    BF16 = 11
    F32 = 12
    F64 = 13
    F8_E4M3 = 14
    F8_E5M2 = 15
    F8_E8M0 = 16
    F8_E4M3FNUZ = 17
    F8_E5M2FNUZ = 18
    F4 = 19
    F6_E2M3 = 20
    F6_E3M2 = 21
    C64 = 22
    C128 = 23

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return _BITS[self]

    @property
    def width(self) -> int:
        """Bytes of the integer that the codec works on: 1, 2, 4 or 8. Complex numbers are two of their parts."""
        return _WIDTH[self]


_BITS = {
    DType.BYTES: 8, DType.BOOL: 8, DType.U8: 8, DType.I8: 8, DType.U16: 16, DType.I16: 16,
    DType.U32: 32, DType.I32: 32, DType.U64: 64, DType.I64: 64, DType.F16: 16, DType.BF16: 16,
    DType.F32: 32, DType.F64: 64, DType.F8_E4M3: 8, DType.F8_E5M2: 8, DType.F8_E8M0: 8,
    DType.F8_E4M3FNUZ: 8, DType.F8_E5M2FNUZ: 8, DType.F4: 4, DType.F6_E2M3: 6, DType.F6_E3M2: 6,
    DType.C64: 64, DType.C128: 128,
}  # fmt: skip
_WIDTH = {t: {4: 1, 6: 1, 8: 1, 16: 2, 32: 4, 64: 8}.get(bits, 0) for t, bits in _BITS.items()}
_WIDTH[DType.C64] = 4
_WIDTH[DType.C128] = 8


class Source(Protocol):
    """Random access to the bytes of one file; what a parser is given instead of a file."""

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        ...

    def read(self, offset: int, length: int) -> Buffer:
        """Return exactly `length` bytes at `offset`; the caller keeps inside `size`."""
        ...


class BytesSource:
    """A `Source` over bytes in memory."""

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data).cast("B")

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self._data)

    def read(self, offset: int, length: int) -> Buffer:
        """Return `length` bytes at `offset`; raises ValueError outside the buffer."""
        if offset < 0 or length < 0 or offset + length > len(self._data):
            raise ValueError(f"read of {length} bytes at {offset} outside a buffer of {len(self._data)}")
        return self._data[offset : offset + length]


class Extent(NamedTuple):
    """`length` bytes of a file: a range of an object, literal bytes, or a hole. They are in order, from offset 0."""

    length: int
    object_id: ObjectId | None = None
    object_offset: int = 0
    literal: bytes | None = None

    @property
    def is_hole(self) -> bool:
        """True when the bytes are zeros that are stored nowhere."""
        return self.object_id is None and self.literal is None


class EntryType(enum.IntEnum):
    """Type of a directory entry, by its code in the store format."""

    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3
    FIFO = 4
    SOCKET = 5

    @property
    def st_mode(self) -> int:
        """The S_IFMT bits of this type."""
        return _IFMT[self]


_IFMT = {
    EntryType.FILE: stat.S_IFREG, EntryType.DIRECTORY: stat.S_IFDIR, EntryType.SYMLINK: stat.S_IFLNK,
    EntryType.FIFO: stat.S_IFIFO, EntryType.SOCKET: stat.S_IFSOCK,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat and listxattr say of a file, times in nanoseconds, `mode` without the type bits."""

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory object.

    `child` is the recipe of a file or the directory object of a directory (`NO_ID` for the rest, and for a file
    of no bytes); `target` is a symlink's text; `size` is a file's length; entries with the same nonzero
    `link_group` inside one snapshot are hard links of each other.
    """

    name: bytes
    type: EntryType
    attributes: Attributes
    size: int = 0
    child: ObjectId = NO_ID
    target: bytes = b""
    link_group: int = 0


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a snapshot, as the log tells it.

    `number` counts from 1 for each name and is never used twice; `sequence` is the log record that bound it;
    `removed` is the log record that unbound it, or 0 while it is the bound or an earlier kept version; `removed_ns` is
    when, by the clock of who did that, or 0 where the record does not tell.
    """

    path: str
    number: int
    root: ObjectId
    sequence: int
    time_ns: int
    metadata: Mapping[str, object]
    removed: int = 0
    removed_ns: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Its place in its line: where it was bound, or what it stands in for, as a thinned one does."""
        earlier = self.metadata.get("in_place_of")
        return (earlier if isinstance(earlier, int) else self.sequence), self.sequence


_STEP = re.compile(r"(\d+)")


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which `step-2` comes before `step-10`."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in _STEP.split(name) if part)
