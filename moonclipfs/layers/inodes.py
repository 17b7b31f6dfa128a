"""Inodes of a layer: what a writable tree consists of, in memory.

An inode is `own` once anything about it was changed or made through the layer: then the journal knows it, and it stays
in memory. One that is not own stands for what the base shows; it exists while the kernel or a child refers to it, and
is made again with the same number when it is looked up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from moonclipfs.types import NO_ID, EntryType, ObjectId

if TYPE_CHECKING:
    from moonclipfs.layers.content import Content

ROOT_NUMBER = 1
"""Of the root of a live layer; that of an overlay has one of its own (`root_number`): many share a mount."""
_OWN_BIT = 1 << 62
"""Numbers of layers have this bit, those of read-only trees (`tree.inode_number`) do not."""


class Lower(NamedTuple):
    """What shows through a directory: the directory object `directory`, found at `path` inside the tree of the
    directory object `root`.

    `anchor` and `path` make the numbers of what is in it (`inode_number`). The anchor stays the same when the tree is
    sealed, renamed or moved, and is another one for a new version that somebody else published.
    """

    anchor: bytes
    path: bytes
    directory: ObjectId
    root: ObjectId


_NO_XATTRS: Mapping[bytes, bytes] = {}
# What is no directory shares these, which stay empty: there may be millions.
_NO_ENTRIES: dict[bytes, Inode] = {}
_NO_NAMES: set[bytes] = set()
_NO_CHANGES: dict[bytes, int] = {}


class Inode:
    """One file, directory, symlink or special file. Everything here is changed under the layer's lock only."""

    __slots__ = (
        "__weakref__",
        "atime_ns",
        "below",
        "changed",
        "child",
        "content",
        "counted",
        "ctime_ns",
        "entries",
        "gid",
        "group",
        "handles",
        "links",
        "lookups",
        "lower",
        "mode",
        "mtime_ns",
        "names_changed",
        "number",
        "own",
        "removed",
        "sealed",
        "size",
        "subdirectories",
        "target",
        "type",
        "uid",
        "writers",
        "xattrs",
    )

    def __init__(self, number: int, type_: EntryType, mode: int, uid: int = 0, gid: int = 0, time_ns: int = 0) -> None:
        self.number = number
        self.type = type_
        self.mode = mode
        """Without the type bits."""
        self.uid = uid
        self.gid = gid
        self.atime_ns = self.mtime_ns = self.ctime_ns = time_ns
        self.xattrs: Mapping[bytes, bytes] = _NO_XATTRS
        """Never changed in place."""
        self.target = b""
        self.own = False
        self.links: set[tuple[Inode, bytes]] = set()
        """(directory, name) of every name that the layer knows; a directory has at most one."""
        self.lookups = 0
        """Mentions to the kernel that it has not forgotten."""
        self.handles = 0
        self.writers = 0
        """Of the handles, those that may write."""
        # Change counters of the layer: 0 means not changed since the last seal.
        self.changed = 0
        """When attributes or contents changed last."""
        self.below = 0
        """The largest counter of anything in this directory's tree, itself included."""
        # Files
        self.size = 0
        """Of a file that was not opened or changed yet; else `content.size` counts."""
        self.child: ObjectId = NO_ID
        """Recipe of a file without `content`."""
        self.content: Content | None = None
        self.group = 0
        """Group of hard links in the base."""
        # Directories
        is_directory = type_ is EntryType.DIRECTORY
        self.entries: dict[bytes, Inode] = {} if is_directory else _NO_ENTRIES
        """Own entries: they win over bound names, and these over what shows through."""
        self.removed: set[bytes] = set() if is_directory else _NO_NAMES
        """Whiteouts: names of `lower` that do not show through."""
        self.lower: Lower | None = None
        """What shows through; of a file with a `group`, where that group is."""
        self.subdirectories = 0
        """How many directories there are in this one, if that was `counted`."""
        self.counted = 0
        """The state of the names of the log (`state.State.names_version`) for which they were counted, 0 for none."""
        self.names_changed: dict[bytes, int] = {} if is_directory else _NO_CHANGES
        """Names that came, went or changed their inode since the last seal, and the change counter of that."""
        self.sealed = 0
        """Of a directory that is the root of a snapshot: the log record that bound the version that it showed, or was
        sealed as, last. 0 for any other.
        """

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return self.type is EntryType.DIRECTORY

    @property
    def is_file(self) -> bool:
        """True for a regular file."""
        return self.type is EntryType.FILE

    def __repr__(self) -> str:
        return f"<inode {self.number:x} {self.type.name.lower()} own={self.own}>"


def root_number(layer_id: bytes) -> int:
    """The number of the root of an overlay."""
    return inode_number(layer_id, b"root")


def inode_number(layer_id: bytes, *identity: bytes) -> int:
    """A number from 2**62 to 2**63 - 1 that follows from what makes an inode the same: two may, very rarely, agree."""
    text = b"".join([piece for part in identity for piece in (len(part).to_bytes(4, "little"), part)])
    digest = blake2b(text, digest_size=8, key=layer_id[:64])
    return _OWN_BIT | (int.from_bytes(digest.digest(), "little") >> 2)
