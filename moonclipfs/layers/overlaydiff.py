"""What a layer over a fixed base changed: names, attributes, and contents tensor by tensor.

It costs what was changed: a directory in which the layer has nothing of its own is not looked into, and bytes that the
layer takes from the objects of the base are not read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import CorruptError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.layerside import LayerFiles
from moonclipfs.layers.names import join
from moonclipfs.store.changes import differing_ranges
from moonclipfs.store.compare import Change, DiffReport, diff, tensor_json
from moonclipfs.store.sides import Side, SideFile, entry_side
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, ObjectId

ATTRIBUTES = "attributes"
"""The change of what differs in attributes alone."""


@dataclass(frozen=True, slots=True)
class PathChange:
    """A path that is not as in the base. `change` is "added", "removed", "changed" or "attributes"; `attributes` names
    those that differ: "mode", "owner", "xattrs", and "times" where nothing else is different."""

    path: bytes
    type: EntryType
    change: str
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """All that differs. `report` speaks of the tensors of changed files; those that are equal are in it, too."""

    paths: tuple[PathChange, ...]
    report: DiffReport

    @property
    def different(self) -> bool:
        """Whether anything differs."""
        return bool(self.paths)

    def as_json(self) -> dict[str, Any]:
        """JSON values: different, files (path, type, change, attributes), tensors as in `compare.tensor_json`."""
        changed = (found for found in self.report.tensors if found.change is not Change.UNCHANGED)
        return {
            "different": self.different,
            "files": [
                {
                    "path": os.fsdecode(one.path),
                    "type": one.type.name.lower(),
                    "change": one.change,
                    "attributes": list(one.attributes),
                }
                for one in self.paths
            ],
            "tensors": [tensor_json(found) for found in changed],
        }


def layer_diff(layer: Layer, base: ObjectId, *, progress: Callable[[int, int], None] | None = None) -> LayerDiff:
    """Compare the tree of a directory object with what a layer shows now; `progress` is told of tensors.

    Programs may go on writing: each file is compared as it is when its turn comes. Raises CorruptError, BusyError for
    a file that gets shorter meanwhile.
    """
    with LayerFiles(layer) as files:
        found = _Difference(layer, files)
        found.directory(base, layer.root, b"", 0)
        report = diff(Side(found.left), Side(found.right), progress=progress)
        return LayerDiff(tuple(sorted(found.paths, key=lambda one: one.path)), report)


@dataclass(slots=True)
class _Difference:
    """What is found on the way through both trees; `left` and `right` are the files to compare."""

    layer: Layer
    files: LayerFiles
    paths: list[PathChange] = field(default_factory=list)
    left: dict[bytes, SideFile] = field(default_factory=dict)
    right: dict[bytes, SideFile] = field(default_factory=dict)

    def directory(self, base: ObjectId, directory: Inode, path: bytes, depth: int) -> None:
        """Compare a directory that is there on both sides, without its own attributes."""
        if depth > limits.PATH_DEPTH:
            raise CorruptError(f"{os.fsdecode(path)}: deeper than {limits.PATH_DEPTH}")
        entries = _entries(self.layer.store, base)
        with self.layer.lock:
            same_lower = directory.lower is not None and directory.lower.directory == base
            names = {*directory.entries, *directory.removed} if same_lower else None
        if names is None:
            names = {*entries, *self.layer.names_in(directory)}
        ordered = sorted(names)
        for name, there in zip(ordered, self.layer.children(directory, ordered), strict=True):
            inode = None if there is None else there[0]
            self._entry(entries.get(name), inode, join(path, name), depth)

    def _entry(self, entry: Entry | None, inode: Inode | None, path: bytes, depth: int) -> None:
        if inode is None:
            if entry is not None:
                self._removed(entry, path)
        elif entry is None:
            self._added(inode, path, depth)
        elif inode.is_directory and entry.type is EntryType.DIRECTORY:
            if fields := _attributes(entry, inode):
                self.paths.append(PathChange(path, inode.type, ATTRIBUTES, fields))
            self.directory(entry.child, inode, path, depth + 1)
        elif inode.is_directory or entry.type is EntryType.DIRECTORY:
            self._removed(entry, path)
            self._added(inode, path, depth)
        else:
            self._file(entry, inode, path)

    def _file(self, entry: Entry, inode: Inode, path: bytes) -> None:
        fields = _attributes(entry, inode)
        if not self._is_untouched(entry, inode):
            old, new = entry_side(self.layer.store, entry), self.files.side(inode, path)
            if not _same(old, new):
                self.left[path], self.right[path] = old, new
                self.paths.append(PathChange(path, inode.type, Change.CHANGED.value, fields))
                return
        if not fields and entry.attributes.mtime_ns != inode.mtime_ns:
            fields = ("times",)
        if fields:
            self.paths.append(PathChange(path, inode.type, ATTRIBUTES, fields))

    def _is_untouched(self, entry: Entry, inode: Inode) -> bool:
        """Whether the contents are those of the base, by what names them."""
        with self.layer.lock:
            content = inode.content
            if content is not None and not content.exact:
                return False
            recipe = inode.child if content is None else content.recipe
            return (entry.type, entry.child, entry.target) == (inode.type, recipe, inode.target)

    def _removed(self, entry: Entry, path: bytes) -> None:
        for below, one in _walk(self.layer.store, entry, path):
            self.paths.append(PathChange(below, one.type, Change.REMOVED.value))
            if one.type is not EntryType.DIRECTORY:
                self.left[below] = entry_side(self.layer.store, one)

    def _added(self, inode: Inode, path: bytes, depth: int) -> None:
        self.paths.append(PathChange(path, inode.type, Change.ADDED.value))
        if inode.is_directory:
            self.directory(NO_ID, inode, path, depth + 1)
        else:
            self.right[path] = self.files.side(inode, path)


def _walk(store: Store, entry: Entry, path: bytes) -> Iterator[tuple[bytes, Entry]]:
    yield path, entry
    if entry.type is EntryType.DIRECTORY and entry.child != NO_ID:
        yield from store.walk_directory(entry.child, path + b"/")


def _entries(store: Store, object_id: ObjectId) -> Mapping[bytes, Entry]:
    return store.directory(object_id) if object_id != NO_ID else {}


def _attributes(entry: Entry, inode: Inode) -> tuple[str, ...]:
    """What differs of the attributes, but for times."""
    old: Attributes = entry.attributes
    pairs = {
        "mode": (old.mode, inode.mode),
        "owner": ((old.uid, old.gid), (inode.uid, inode.gid)),
        "xattrs": (dict(old.xattrs), dict(inode.xattrs)),
    }
    return tuple(name for name, (before, after) in pairs.items() if before != after)


def _same(old: SideFile, new: SideFile) -> bool:
    """Whether two files (links, ...) have the same contents; reads only as far as they are equal."""
    if old.type is not EntryType.FILE or new.type is not EntryType.FILE:
        return (old.type, old.target) == (new.type, new.target)
    assert old.recipe is not None and new.recipe is not None
    if old.recipe.size != new.recipe.size:
        return False
    step = limits.COMPARE_WINDOW_BYTES
    for offset, length in differing_ranges(old.recipe, 0, new.recipe, 0, old.recipe.size):
        for at in range(offset, offset + length, step):
            count = min(step, offset + length - at)
            if bytes(old.source.read(at, count)) != bytes(new.source.read(at, count)):
                return False
    return True
