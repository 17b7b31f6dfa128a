"""Units of a layer that have unsealed changes: where they are, and what they lack."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moonclipfs.formats.layout import Layout
from moonclipfs.formats.sniff import parse
from moonclipfs.layers.completeness import missing
from moonclipfs.layers.freezing import own_files
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.names import Area, join
from moonclipfs.layers.siblings import sibling_files
from moonclipfs.layers.units import units
from moonclipfs.types import EntryType, Source, Version, natural_key

if TYPE_CHECKING:
    from moonclipfs.layers.layer import Layer as WritableLayer


class LayerBranch:
    """A directory of a layer under the rule of units. Those without changes below are not gone into."""

    def __init__(self, layer: WritableLayer, inode: Inode, path: bytes) -> None:
        self._layer = layer
        self.inode = inode
        self.path = path
        self._types: dict[bytes, EntryType] | None = None

    @property
    def is_top(self) -> bool:
        """The root of the mount can be no snapshot."""
        return not self.path

    def files(self) -> list[bytes]:
        """The names of its regular files."""
        return [name for name, type_ in self._all().items() if type_ is EntryType.FILE]

    def folders(self) -> list[bytes]:
        """The names of its directories."""
        return [name for name, type_ in self._all().items() if type_ is EntryType.DIRECTORY]

    def has_snapshots_below(self) -> bool:
        """Whether a name that is shown is bound below it."""
        return bool(self._bound())

    def open(self, name: bytes) -> LayerBranch | None:
        """A directory in it that has changes."""
        child = self.inode.entries.get(name)
        return LayerBranch(self._layer, child, join(self.path, name)) if child is not None and child.below else None

    def _all(self) -> dict[bytes, EntryType]:
        if self._types is None:
            self._types = self._layer.run(self._find, wait=True)
        return self._types

    def _find(self) -> dict[bytes, EntryType]:
        """The types of all names, without making inodes of them."""
        found: dict[bytes, EntryType] = {}
        lower = self.inode.lower
        if lower is not None:
            entries = self._layer.base.entries(lower.directory)
            found = {name: entry.type for name, entry in entries.items() if name not in self.inode.removed}
        found |= dict.fromkeys(self._bound(), EntryType.DIRECTORY)
        return found | {name: child.type for name, child in self.inode.entries.items()}

    def _bound(self) -> list[bytes]:
        """Names in it at or below which a snapshot is bound."""
        gone, found = self._layer.state.unbinding, []
        leaves = self._layer.view.area(Area.LIVE).directories
        for name in leaves.get(self.path, ()):
            todo = [join(self.path, name)]
            while todo:
                place = todo.pop()
                above, _, last = place.rpartition(b"/")
                leaf = leaves.get(above, {}).get(last)
                if isinstance(leaf, Version) and leaf.sequence not in gone:
                    found.append(name)
                    break
                todo += [join(place, below) for below in leaves.get(place, ())]
        return found


def open_units(layer: WritableLayer) -> list[LayerBranch]:
    """The units with changes, in the natural order of their paths. Costs what has changed."""
    found = units(LayerBranch(layer, layer.root, b""))
    return sorted(found, key=lambda branch: natural_key(os.fsdecode(branch.path)))


def has_new_contents(directory: Inode) -> bool:
    """Whether more than deletions happened below a directory since it was sealed. Under the layer's lock."""
    todo = [directory]
    while todo:
        inode = todo.pop()
        if any(name in inode.entries for name in inode.names_changed):
            return True
        for child in inode.entries.values():
            if child.is_directory and child.below and not child.sealed:
                todo.append(child)
            elif not child.is_directory and child.changed:
                return True
    return False


def open_for_writing(directory: Inode) -> list[Inode]:
    """The files below a directory that somebody may write to. Under the layer's lock."""
    return [inode for inode in own_files(directory) if inode.writers]


class _Files:
    """The files of a directory of a layer, for `completeness.missing`."""

    def __init__(self, layer: WritableLayer, directory: Inode) -> None:
        self._layer = layer
        self._files: dict[str, Inode] = {}
        self._collect(directory, b"")

    def paths(self) -> Iterable[str]:
        return self._files

    def layout(self, path: str) -> Layout:
        return parse(self.source(path))

    def source(self, path: str) -> Source:
        return _Source(self._layer, self._files[path])

    def _collect(self, directory: Inode, prefix: bytes) -> None:
        names = self._layer.names_in(directory)
        for name, found in zip(names, self._layer.children(directory, names), strict=True):
            if found is None:
                continue
            inode = found[0]
            if inode.is_directory:
                self._collect(inode, prefix + name + b"/")
            elif inode.is_file:
                self._files[os.fsdecode(prefix + name)] = inode


class _Source:
    """A file of a layer, opened for each read, so that any number of these may exist."""

    def __init__(self, layer: WritableLayer, inode: Inode) -> None:
        self._layer = layer
        self._inode = inode
        self.size = layer.stat(inode).size

    def read(self, offset: int, length: int) -> bytes:
        file = self._layer.open_file(self._inode, write=False)
        try:
            return bytes(file.read(offset, length))
        finally:
            file.close()


def what_is_missing(layer: WritableLayer, path: bytes, directory: Inode) -> list[str]:
    """What keeps a unit from being sealed by itself, one line each. Raises CorruptError and so on."""
    return missing(_Files(layer, directory), sibling_files(layer.store, path))
