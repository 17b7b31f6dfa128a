"""The inodes of a tree of experts: a layer's directories once more, those of layers of a model, and experts."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import reduce
from stat import S_IFREG

from moonclipfs.errors import NotFoundError
from moonclipfs.layers.experttables import Expert
from moonclipfs.layers.inodes import Inode, inode_number
from moonclipfs.layers.lookup import Status
from moonclipfs.types import EntryType

_BLOCK = 512


class Kind(enum.Enum):
    """What an inode of this tree is."""

    MIRROR = enum.auto()
    """A directory of the layer."""
    LAYER = enum.auto()
    """The experts of one layer of the model in a directory."""
    EXPERT = enum.auto()
    """One of these."""


class ExpertInode(Inode):
    """A directory or file of this tree. `real` is the directory of the layer that it belongs to."""

    __slots__ = ("expert", "kind", "layer", "name", "real", "replaced")

    def __init__(self, number: int, kind: Kind, real: Inode, layer: bytes = b"", name: bytes = b"") -> None:
        super().__init__(number, EntryType.FILE if kind is Kind.EXPERT else EntryType.DIRECTORY, 0)
        self.kind = kind
        self.real = real
        self.layer = layer
        self.name = name
        self.expert: Expert | None = None
        self.replaced: set[int] = set()
        """Of a LAYER: numbers of the files whose bytes were replaced by a rename in it, and nobody was told yet."""


def mirror_number(layer_id: bytes, real: int, layer: bytes = b"") -> int:
    """The number of what mirrors a directory with the number `real`, or of the directory of a layer in it."""
    return inode_number(layer_id, b"experts", b"%d" % real, layer)


def directory_of(inode: Inode) -> ExpertInode:
    """`inode` as a directory of this tree. Raises NotFoundError for anything else."""
    if not isinstance(inode, ExpertInode) or inode.expert is not None:
        raise NotFoundError(f"{inode} is no directory of experts")
    return inode


def status_of(expert: Expert, sources: Sequence[Status]) -> Status:
    """Of what is made of several files: who may read, or write, all of them may do so; the latest times."""
    first = sources[0]
    mode = reduce(int.__and__, (source.mode for source in sources), 0o666 if expert.writable else 0o444)
    if any((source.uid, source.gid) != (first.uid, first.gid) for source in sources):
        mode = (mode & 0o006) * 0o111
    mtime, ctime = max(source.mtime_ns for source in sources), max(source.ctime_ns for source in sources)
    blocks = -(-expert.size // _BLOCK)
    return Status(S_IFREG | mode, 1, first.uid, first.gid, expert.size, mtime, ctime, mtime, blocks)
