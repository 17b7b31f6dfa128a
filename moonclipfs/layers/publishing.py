"""A captured directory becomes the next version of a snapshot: the half of a seal that needs the store alone.

What was changed here is applied onto the newest version of the name, so that two layers that wrote different files of
one directory end in one snapshot. A lost race is merged anew.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from moonclipfs.layers.captured import CapturedEntry, decode_tree
from moonclipfs.layers.merge import Directories, Merge
from moonclipfs.layers.stagedsource import StagedSource, kept_parts
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.ingest import IngestStats
from moonclipfs.store.log import Names
from moonclipfs.store.publish import Ingest
from moonclipfs.store.recipes import decode_recipe
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, Kind, ObjectId, Version


class _MovedError(Exception):
    """Somebody else published under this name meanwhile."""


def publish(store: Store, request: Mapping[str, Any]) -> dict[str, Any]:
    """Bind what a request of `seal.py` captured, unless the newest version is the same; runs in the worker process.

    `path` is the name, as bytes; `tree` the captured directory; `base` what it was changed from, unless that is what
    showed through it; `staged` the path of the staging file of each generation that is in one; `metadata`, JSON, goes
    into the log; with `gone`, the directory was removed since, so that the version is removed at once, and kept.

    Answers with the version (`path`, `number`, `sequence`, `root`), whether it is `new`, `files` (inode, freeze,
    recipe, size) that were encoded here, `directories` (inode, object) as they are in the version, `attributes` of
    those to which others gave some, the paths of what others changed, `foreign`, and the directory without these,
    `ours`. Raises what `Ingest.publish` raises.
    """
    with store.ingest() as ingest:
        return _Publish(store, ingest, request).run()


class _Publish:
    """One seal."""

    def __init__(self, store: Store, ingest: Ingest, request: Mapping[str, Any]) -> None:
        self._store = store
        self._ingest = ingest
        self._request = request
        self._path = os.fsdecode(request["path"])
        self._tree = decode_tree(request["tree"])
        self._wanted: dict[str, object] = json.loads(request["metadata"])
        self._directories = Directories(store, ingest)
        self._files: dict[int, tuple[ObjectId, int, int]] = {}
        """Recipe, size and number of the freeze of each file that is encoded here, by inode."""
        self._next_group = 0
        self._groups: dict[tuple[bytes, int], int] = {}
        """Numbers given out to groups of hard links; see `_group`."""
        self._links: dict[int, int] = {}
        """Group of each inode with several names that was in none."""

    def run(self) -> dict[str, Any]:
        """Encode, merge and bind."""
        self._encode()
        base = self._request.get("base", self._tree.child)
        if (before := self._published()) is not None:
            return self._found_again(before, base)
        while True:
            newest = self._store.names().bound().get(self._path)
            self._number_groups(newest)
            ours = self._assemble(self._tree)
            merge = Merge(self._directories)
            root = ours if newest is None else merge.merge(base, ours, newest.root)
            if newest is not None and self._is_known(newest, root):
                self._ingest.complete([(Kind.DIRECTORY, root), (Kind.DIRECTORY, ours)])
                return self._answer(newest, ours, merge, new=False)

            def unmoved(names: Names, newest: Version | None = newest) -> None:
                now = names.bound().get(self._path)
                if (now and now.sequence) != (newest and newest.sequence):
                    raise _MovedError

            try:
                version = self._ingest.publish(self._path, root, self._metadata(root), unmoved)
            except _MovedError:
                continue
            if self._request.get("gone"):
                self._withdraw(version)
            return self._answer(version, ours, merge, new=True)

    def _published(self) -> Version | None:
        """The version that this capture became already: the layer may have forgotten that in a crash."""
        mark = self._wanted.get("capture")
        found = [one for one in self._store.names().all_versions() if mark and one.metadata.get("capture") == mark]
        return min(found, key=lambda version: version.sequence, default=None)

    def _found_again(self, version: Version, base: ObjectId) -> dict[str, Any]:
        self._number_groups(version)
        ours, merge = self._assemble(self._tree), Merge(self._directories)
        merge.merge(base, ours, version.root)
        self._ingest.complete([(Kind.DIRECTORY, version.root), (Kind.DIRECTORY, ours)])
        if self._request.get("gone"):
            self._withdraw(version)
        return self._answer(version, ours, merge, new=False)

    def _is_known(self, newest: Version, root: ObjectId) -> bool:
        """Whether the newest version is what is to be sealed; an explicit seal of it counts more than another."""
        if newest.root != root or self._request.get("gone"):
            return False
        wanted, there = self._wanted, newest.metadata
        better = [mark for mark in ("automatic", "incomplete") if there.get(mark) and not wanted.get(mark)]
        return not better

    def _withdraw(self, version: Version) -> None:
        """The directory is gone: its last state is only kept. What others have bound there stays bound."""
        names = self._store.names()
        bound = names.bound().get(self._path)
        if bound is None or bound.sequence != version.sequence:
            return
        before = [one for one in names.versions(self._path) if one.sequence < version.sequence and not one.removed]
        if before:
            self._ingest.publish(self._path, before[-1].root, before[-1].metadata)
        else:
            self._store.log.unbind([self._path])

    def _metadata(self, root: ObjectId) -> dict[str, object]:
        files, size = 0, 0
        todo = [root]
        while todo:
            for entry in self._directories.load(todo.pop()).values():
                if entry.type is EntryType.DIRECTORY:
                    todo.append(entry.child)
                elif entry.type is EntryType.FILE:
                    files, size = files + 1, size + entry.size
        attributes = root_metadata(self._tree.attributes)
        return {**self._wanted, "attributes": attributes, "files": files, "bytes": size}

    def _answer(self, version: Version, ours: ObjectId, merge: Merge, *, new: bool) -> dict[str, Any]:
        top = Entry(b"", EntryType.DIRECTORY, self._tree.attributes, child=version.root)
        places = list(self._places(self._tree, top))
        return {
            "path": os.fsencode(version.path),
            "number": version.number,
            "sequence": version.sequence,
            "root": version.root,
            "new": new,
            "files": [(inode, freeze, recipe, size) for inode, (recipe, size, freeze) in self._files.items()],
            "directories": [(tree.inode, entry.child) for tree, entry in places],
            "attributes": [
                (tree.inode, *_fields(entry.attributes))
                for tree, entry in places
                if entry.attributes != tree.attributes
            ],
            "foreign": sorted(merge.foreign),
            "ours": ours,
        }

    def _places(self, tree: CapturedEntry, there: Entry) -> Iterator[tuple[CapturedEntry, Entry]]:
        """Yield each captured directory with what it is in the version."""
        yield tree, there
        known = self._directories.load(there.child)
        for entry in tree.entries:
            below = known.get(entry.name)
            if entry.is_directory and below is not None and below.type is EntryType.DIRECTORY:
                yield from self._places(entry, below)

    # Contents

    def _encode(self) -> None:
        """Store the files that were still staged when the request was made; each once, whatever its names are."""
        for entry in self._tree.walk():
            if not entry.parts or entry.inode in self._files:
                continue
            before = self._before(entry)
            source = StagedSource(entry.size, entry.parts, entry.data, self._request["staged"], before)
            try:
                kept = kept_parts(self._store.config.cut, entry.parts, before)
                recipe, _ = self._ingest.put_contents(source, before, kept=kept)
                self._files[entry.inode] = self._ingest.put_recipe(recipe, IngestStats()), recipe.size, entry.freeze
            finally:
                source.close()

    def _before(self, entry: CapturedEntry) -> FileReader | None:
        """The file as it was when it was encoded last."""
        if entry.child == NO_ID:
            return None
        return FileReader(self._store.objects, decode_recipe(self._store.objects.load(entry.child, Kind.RECIPE)))

    # The tree as it is here

    def _number_groups(self, newest: Version | None) -> None:
        """Give groups of hard links that are new, or come from another tree, numbers that no other group has."""
        self._groups = {}
        files = [entry for entry in self._tree.walk() if entry.type == EntryType.FILE]
        names = Counter(entry.inode for entry in files)
        several = {entry.inode for entry in files if names[entry.inode] > 1 and not entry.group}
        moved = any(entry.child != NO_ID and self._is_moved(entry) for entry in self._tree.walk())
        self._next_group = 0
        if several or moved:
            roots = [self._tree.child] + ([newest.root] if newest is not None else [])
            self._next_group = 1 + max(map(self._directories.highest_group, roots))
        self._links = {inode: self._group(b"", inode) for inode in sorted(several)}

    def _is_moved(self, entry: CapturedEntry) -> bool:
        """Whether the group numbers of an entry are those of another tree than the one that is sealed."""
        return (entry.is_directory or entry.group > 0) and entry.anchor != self._tree.anchor

    def _group(self, anchor: bytes, identity: int) -> int:
        """The number here of a group of another tree, or (no anchor) of an inode."""
        key = anchor, identity
        if key not in self._groups:
            self._groups[key] = self._next_group
            self._next_group += 1
        return self._groups[key]

    def _assemble(self, tree: CapturedEntry) -> ObjectId:
        """The directory object of a captured directory: its base with the changes."""
        entries = dict(self._directories.load(tree.child))
        if self._is_moved(tree) and self._directories.highest_group(tree.child):
            entries = {name: self._renumbered(entry, tree.anchor) for name, entry in entries.items()}
        for name in tree.removed:
            entries.pop(name, None)
        for entry in tree.entries:
            entries[entry.name] = self._entry(entry)
        return self._directories.put(entries.values())

    def _renumbered(self, entry: Entry, anchor: bytes) -> Entry:
        if entry.type is EntryType.DIRECTORY:
            below = self._directories.load(entry.child).values()
            return replace(entry, child=self._directories.put(self._renumbered(one, anchor) for one in below))
        return replace(entry, link_group=self._group(anchor, entry.link_group)) if entry.link_group else entry

    def _entry(self, entry: CapturedEntry) -> Entry:
        type_, child, size, group = EntryType(entry.type), NO_ID, 0, 0
        if type_ is EntryType.DIRECTORY:
            child = self._assemble(entry)
        elif type_ is EntryType.FILE:
            child, size, _ = self._files.get(entry.inode, (entry.child, entry.size, 0))
            group = self._links.get(entry.inode, entry.group)
            if self._is_moved(entry):
                group = self._group(entry.anchor, entry.group)
        return Entry(entry.name, type_, entry.attributes, size, child, entry.target, group)


def _fields(attributes: Attributes) -> tuple[int, int, int, int, int, tuple[tuple[bytes, bytes], ...]]:
    """As `records.Sealed` has them."""
    a = attributes
    return a.mode, a.uid, a.gid, a.mtime_ns, a.ctime_ns, tuple(sorted(a.xattrs.items()))
