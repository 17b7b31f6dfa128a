"""Reading a file of a snapshot: its recipe resolved into objects, literal bytes and holes."""

from __future__ import annotations

from collections.abc import Callable

from moonclipfs.store.reader import ObjectReader
from moonclipfs.store.recipes import Recipe
from moonclipfs.types import Buffer, ObjectId


class FileReader:
    """The bytes of one file; a `types.Source`. Thread-safe, without state of its own, never needs closing."""

    __slots__ = ("_objects", "recipe", "size")

    def __init__(self, objects: ObjectReader, recipe: Recipe) -> None:
        self._objects = objects
        self.recipe = recipe
        self.size = recipe.size

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`. Raises ValueError outside the file, CorruptError."""
        if not 0 <= offset <= offset + length <= self.size:
            raise ValueError(f"read of {length} bytes at {offset} of a file of {self.size}")
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset` on, up to the end of the file; return the count of bytes. Raises CorruptError."""
        return self._fill(offset, out, self._objects.read_into)

    def stream_into(self, offset: int, out: memoryview) -> int:
        """As `read_into`, but past the cache of blocks: for bytes that are read once."""
        return self._fill(offset, out, self._objects.stream_into)

    def _fill(self, offset: int, out: memoryview, read: Callable[[ObjectId, int, memoryview], None]) -> int:
        at = 0
        for extent, inside, length in self.recipe.locate(offset, len(out)):
            part = out[at : at + length]
            if extent.object_id is not None:
                read(extent.object_id, extent.object_offset + inside, part)
            elif extent.literal is not None:
                part[:] = extent.literal[inside : inside + length]
            else:
                part[:] = bytes(length)
            at += length
        return at

    def cached(self, offset: int, length: int) -> Buffer | None:
        """Return what `read` would, clipped to the file, if that takes no I/O and no decoding; else None."""
        parts: list[Buffer] = []
        for extent, inside, count in self.recipe.locate(offset, length):
            if extent.object_id is not None:
                found = self._objects.cached(extent.object_id, extent.object_offset + inside, count)
                if found is None:
                    return None
                parts += found
            elif extent.literal is not None:
                parts.append(extent.literal[inside : inside + count])
            else:
                parts.append(bytes(count))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def prefetch(self, offset: int, length: int) -> None:
        """Decode a range, clipped to the file, into the cache of blocks. Raises CorruptError."""
        for extent, inside, count in self.recipe.locate(offset, length):
            if extent.object_id is not None:
                self._objects.prefetch(extent.object_id, extent.object_offset + inside, count)
