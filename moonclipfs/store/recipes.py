"""Recipes: the extents of one file as an object (byte layout in FORMAT.md)."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from moonclipfs import limits
from moonclipfs.errors import CorruptError, LimitError
from moonclipfs.types import ID_BYTES, Buffer, Extent, ObjectId

_HEAD = struct.Struct("<4sB3xQIII")
_MAGIC = b"MCRC"
_VERSION = 1
_EXTENT = np.dtype([("length", "<u8"), ("source", "<u4"), ("object_offset", "<u8")])
_HOLE = 0xFFFFFFFF
_LITERAL = 0xFFFFFFFE


class Recipe:
    """The extents of one file, in order, covering it from 0 to `size`."""

    __slots__ = ("_ends", "extents", "size")

    def __init__(self, extents: Sequence[Extent]) -> None:
        """Take extents in file order. Raises LimitError past the longest file."""
        self.extents = tuple(extents)
        self._ends = list(accumulate(extent.length for extent in self.extents))
        self.size = self._ends[-1] if self._ends else 0
        if self.size > limits.FILE_BYTES:
            raise LimitError(f"a file of {self.size} bytes is longer than the limit of {limits.FILE_BYTES}")

    def object_ids(self) -> list[ObjectId]:
        """The distinct objects referred to, in order of first use."""
        return list(dict.fromkeys(e.object_id for e in self.extents if e.object_id is not None))

    def locate(self, offset: int, length: int) -> Iterator[tuple[Extent, int, int]]:
        """Yield (extent, offset inside the extent, length) for each part of a range, clipped to the file's size."""
        end = min(offset + length, self.size)
        index = bisect_right(self._ends, offset)
        while offset < end:
            extent = self.extents[index]
            inside = offset - (self._ends[index] - extent.length)
            part = min(extent.length - inside, end - offset)
            yield extent, inside, part
            offset += part
            index += 1


def encode_recipe(recipe: Recipe) -> bytes:
    """Serialise a recipe; equal extents always give equal bytes."""
    ids = {object_id: number for number, object_id in enumerate(recipe.object_ids())}
    table = np.zeros(len(recipe.extents), _EXTENT)
    literals = bytearray()
    for row, extent in zip(table, recipe.extents, strict=True):
        row["length"] = extent.length
        if extent.literal is not None:
            row["source"], row["object_offset"] = _LITERAL, len(literals)
            literals += extent.literal
        elif extent.object_id is None:
            row["source"] = _HOLE
        else:
            row["source"], row["object_offset"] = ids[extent.object_id], extent.object_offset
    head = _HEAD.pack(_MAGIC, _VERSION, recipe.size, len(ids), len(table), len(literals))
    return b"".join([head, *ids, table.tobytes(), literals])


def decode_recipe(data: Buffer) -> Recipe:
    """Parse a recipe. Raises CorruptError when lengths, indexes or the size contradict each other."""
    if len(data) < _HEAD.size or len(data) > limits.RECIPE_BYTES:
        raise CorruptError(f"recipe of {len(data)} bytes: impossible length")
    magic, version, size, id_count, extent_count, literal_length = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise CorruptError(f"recipe starts with {magic!r} version {version}, not with {_MAGIC!r} version {_VERSION}")
    table_at = _HEAD.size + id_count * ID_BYTES
    literals_at = table_at + extent_count * _EXTENT.itemsize
    if literals_at + literal_length != len(data):
        raise CorruptError("recipe: its tables do not fill it exactly")
    view = memoryview(data)
    ids = [bytes(view[at : at + ID_BYTES]) for at in range(_HEAD.size, table_at, ID_BYTES)]
    table = np.frombuffer(view[table_at:literals_at], _EXTENT)
    if int(table["length"][table["source"] == _LITERAL].astype(object).sum()) > literal_length:
        raise CorruptError("recipe: two extents share literal bytes")  # in memory each has its own
    extents = []
    for length, source, offset in table.tolist():
        if source == _HOLE:
            extents.append(Extent(length))
        elif source == _LITERAL:
            if offset + length > literal_length:
                raise CorruptError("recipe: literal outside its literal bytes")
            start = literals_at + offset
            extents.append(Extent(length, literal=bytes(view[start : start + length])))
        elif source < id_count:
            extents.append(Extent(length, ids[source], offset))
        else:
            raise CorruptError("recipe: extent of an object that is not in its table")
    recipe = Recipe(extents)
    if recipe.size != size:
        raise CorruptError(f"recipe: extents cover {recipe.size} bytes of a file of {size}")
    return recipe
