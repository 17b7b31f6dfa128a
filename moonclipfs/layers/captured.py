"""What a capture holds: the changes of a directory's tree at one moment, as values that a journal record can carry.

Only what changed since the tree was last sealed is in it, with all that leads there: `lower` tells the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

from moonclipfs.errors import CorruptError
from moonclipfs.types import Attributes, EntryType, Kind, ObjectId


class CapturedEntry(NamedTuple):
    """A changed file, symlink, special file or directory. Times in nanoseconds; `inode` is its number in the layer.

    For a file, `child` is its recipe; with staged bytes, `parts` says where each byte comes from (see
    `records.Contents`), `data` holds those that are staged in memory, and `freeze` is the number of the freeze. For a
    directory, `child` is the directory object that shows through it, less the names in `removed`. `anchor` tells link
    groups of one tree from those of another.
    """

    name: bytes
    type: int
    inode: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    ctime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...]
    size: int
    child: ObjectId
    target: bytes = b""
    group: int = 0
    parts: tuple[tuple[int, int, int, int], ...] = ()
    data: tuple[tuple[int, int, bytes], ...] = ()
    freeze: int = 0
    anchor: bytes = b""
    removed: tuple[bytes, ...] = ()
    entries: tuple[CapturedEntry, ...] = ()

    @property
    def attributes(self) -> Attributes:
        """As a directory object keeps them."""
        return Attributes(self.mode, self.uid, self.gid, self.mtime_ns, self.ctime_ns, dict(self.xattrs))

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return self.type == EntryType.DIRECTORY

    def walk(self) -> Iterator[CapturedEntry]:
        """This entry and all captured below it."""
        yield self
        for entry in self.entries:
            yield from entry.walk()

    def refs(self) -> list[tuple[Kind, ObjectId]]:
        """The objects that it needs, all below included."""
        return [(Kind.DIRECTORY if entry.is_directory else Kind.RECIPE, entry.child) for entry in self.walk()]


def files_needed(tree: CapturedEntry) -> set[int]:
    """Numbers of the staging generations that a captured directory needs and that are in files."""
    needed: set[int] = set()
    for entry in tree.walk():
        memory = {generation for generation, *_ in entry.data}
        needed |= {generation for *_, generation in entry.parts if generation} - memory
    return needed


def encode_tree(tree: CapturedEntry) -> bytes:
    """Serialise a captured directory."""
    return bytes(msgpack.packb(tree, use_bin_type=True))


def decode_tree(data: bytes) -> CapturedEntry:
    """Parse a captured directory. Raises CorruptError."""
    try:
        return _entry(msgpack.unpackb(data, raw=False, use_list=False, strict_map_key=False))
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise CorruptError(f"journal: not a captured tree ({error!r})") from error


def _entry(fields: tuple[Any, ...]) -> CapturedEntry:
    *rest, entries = fields
    entry = CapturedEntry._make([*rest, tuple(map(_entry, entries))])
    EntryType(entry.type)
    return entry
