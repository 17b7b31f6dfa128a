"""A forward reader over a range of a Source that holds a small window of it in memory."""

from __future__ import annotations

import struct

from moonclipfs import limits
from moonclipfs.errors import ParseError, TruncatedError
from moonclipfs.types import Source

_WINDOW_BYTES = 256 * limits.KIB
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Window:
    """Reads bytes `start` to `end` of `source` in order, all numbers little-endian.

    Every method raises ParseError when the range ends early: TruncatedError when that is the end of the file itself.
    """

    def __init__(self, source: Source, start: int, end: int) -> None:
        self._source = source
        self._end = min(end, source.size)
        self._data = b""
        self._data_start = start
        self._at = 0

    @property
    def position(self) -> int:
        """Offset in the file of the next byte."""
        return self._data_start + self._at

    @property
    def left(self) -> int:
        """Bytes up to the end of the range."""
        return self._end - self.position

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes; the caller has checked `count` against a limit."""
        end = self._at + count
        if end > len(self._data):
            self._fill(count)
            end = count
        data = self._data[self._at : end]
        self._at = end
        return data

    def skip(self, count: int) -> None:
        """Pass over `count` bytes without reading them."""
        if count > self.left:
            raise self._short(count)
        self._at += count
        if self._at > len(self._data):
            self._data_start += self._at
            self._data = b""
            self._at = 0

    def byte(self) -> int:
        """Return the next byte as a number."""
        if self._at >= len(self._data):
            self._fill(1)
        value = self._data[self._at]
        self._at += 1
        return value

    def u16(self) -> int:
        """Return the next 2 bytes as a number."""
        value: int = _U16.unpack(self.take(2))[0]
        return value

    def u32(self) -> int:
        """Return the next 4 bytes as a number."""
        value: int = _U32.unpack(self.take(4))[0]
        return value

    def u64(self) -> int:
        """Return the next 8 bytes as a number."""
        value: int = _U64.unpack(self.take(8))[0]
        return value

    def line(self, limit: int) -> bytes:
        """Return the bytes before the next newline, at most `limit`, and pass over the newline."""
        end = self._data.find(b"\n", self._at)
        if end < 0:
            wanted = min(limit + 1, self.left)
            self._fill(wanted)
            end = self._data.find(b"\n", 0, wanted)
            if end < 0 and wanted <= limit:
                raise self._short(wanted + 1)
        if end < 0 or end - self._at > limit:
            raise ParseError(f"no line end within {limit} bytes at byte {self.position}")
        data = self._data[self._at : end]
        self._at = end + 1
        return data

    def _fill(self, count: int) -> None:
        """Make at least `count` bytes from the current position available, at `_at` = 0."""
        if count > self.left:
            raise self._short(count)
        position = self.position
        length = min(max(count, _WINDOW_BYTES), self._end - position)
        self._data = bytes(self._source.read(position, length))
        self._data_start = position
        self._at = 0

    def _short(self, count: int) -> ParseError:
        where = f"at byte {self.position}"
        if self._end == self._source.size:
            return TruncatedError(f"data short by at least {count - self.left} bytes {where}")
        return ParseError(f"{count} bytes are announced {where}, {self.left} are left")
