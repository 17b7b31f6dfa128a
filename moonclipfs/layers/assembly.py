"""A captured directory as objects of the store: its files are encoded, its changes applied to what it was changed from.

Runs in the encoder's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonclipfs.layers.captured import CapturedEntry, decode_tree
from moonclipfs.layers.merge import Directories
from moonclipfs.layers.stagedsource import StagedSource, kept_parts
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.ingest import IngestStats
from moonclipfs.store.publish import Ingest
from moonclipfs.store.recipes import decode_recipe
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.types import NO_ID, Entry, EntryType, Kind, ObjectId, Version


class Assembly:
    """One captured directory on its way. `request` has the captured `tree`, and in `staged` the path of the staging
    file of each generation that is in one.
    """

    def __init__(self, store: Store, ingest: Ingest, request: Mapping[str, Any]) -> None:
        self.store = store
        self.ingest = ingest
        self.request = request
        self.tree = decode_tree(request["tree"])
        self.directories = Directories(store, ingest)
        self._files: dict[int, tuple[ObjectId, int, int]] = {}
        """Recipe, size and number of the freeze of each file that is encoded here, by inode."""
        self._next_group = 0
        self._groups: dict[tuple[bytes, int], int] = {}
        """Numbers given out to groups of hard links; see `_group`."""
        self._links: dict[int, int] = {}
        """Group of each inode with several names that was in none."""

    def metadata(self, root: ObjectId, wanted: Mapping[str, object]) -> dict[str, object]:
        """What the log keeps of a version whose root is `root`, with what is `wanted` in it."""
        files, size = 0, 0
        todo = [root]
        while todo:
            for entry in self.directories.load(todo.pop()).values():
                if entry.type is EntryType.DIRECTORY:
                    todo.append(entry.child)
                elif entry.type is EntryType.FILE:
                    files, size = files + 1, size + entry.size
        attributes = root_metadata(self.tree.attributes)
        return {**wanted, "attributes": attributes, "files": files, "bytes": size}

    # Contents

    def encode(self) -> None:
        """Store the files that were still staged when the request was made; each once, whatever its names are."""
        for entry in self.tree.walk():
            if not entry.parts or entry.inode in self._files:
                continue
            before = self._before(entry)
            source = StagedSource(entry.size, entry.parts, entry.data, self.request["staged"], before)
            try:
                kept = kept_parts(self.store.config.cut, entry.parts, before)
                recipe, _ = self.ingest.put_contents(source, before, kept=kept)
                self._files[entry.inode] = self.ingest.put_recipe(recipe, IngestStats()), recipe.size, entry.freeze
            finally:
                source.close()

    def _before(self, entry: CapturedEntry) -> FileReader | None:
        """The file as it was when it was encoded last."""
        if entry.child == NO_ID:
            return None
        return FileReader(self.store.objects, decode_recipe(self.store.objects.load(entry.child, Kind.RECIPE)))

    def encoded(self) -> list[tuple[int, int, ObjectId, int]]:
        """(inode, number of the freeze, recipe, size) of each file that was encoded here."""
        return [(inode, freeze, recipe, size) for inode, (recipe, size, freeze) in self._files.items()]

    # The tree as it is here

    def number_groups(self, newest: Version | None) -> None:
        """Give groups of hard links that are new, or come from another tree, numbers that no other group has."""
        self._groups = {}
        files = [entry for entry in self.tree.walk() if entry.type == EntryType.FILE]
        names = Counter(entry.inode for entry in files)
        several = {entry.inode for entry in files if names[entry.inode] > 1 and not entry.group}
        moved = any(entry.child != NO_ID and self._is_moved(entry) for entry in self.tree.walk())
        self._next_group = 0
        if several or moved:
            roots = [self.tree.child] + ([newest.root] if newest is not None else [])
            self._next_group = 1 + max(map(self.directories.highest_group, roots))
        self._links = {inode: self._group(b"", inode) for inode in sorted(several)}

    def _is_moved(self, entry: CapturedEntry) -> bool:
        """Whether the group numbers of an entry are those of another tree than the one that is sealed."""
        return (entry.is_directory or entry.group > 0) and entry.anchor != self.tree.anchor

    def _group(self, anchor: bytes, identity: int) -> int:
        """The number here of a group of another tree, or (no anchor) of an inode."""
        key = anchor, identity
        if key not in self._groups:
            self._groups[key] = self._next_group
            self._next_group += 1
        return self._groups[key]

    def assemble(self) -> ObjectId:
        """The directory object of the captured directory: its base with the changes. After `number_groups`."""
        return self._assemble(self.tree)

    def _assemble(self, tree: CapturedEntry) -> ObjectId:
        """The directory object of a captured directory: its base with the changes."""
        entries = dict(self.directories.load(tree.child))
        if self._is_moved(tree) and self.directories.highest_group(tree.child):
            entries = {name: self._renumbered(entry, tree.anchor) for name, entry in entries.items()}
        for name in tree.removed:
            entries.pop(name, None)
        for entry in tree.entries:
            entries[entry.name] = self._entry(entry)
        return self.directories.put(entries.values())

    def _renumbered(self, entry: Entry, anchor: bytes) -> Entry:
        if entry.type is EntryType.DIRECTORY:
            below = self.directories.load(entry.child).values()
            return replace(entry, child=self.directories.put(self._renumbered(one, anchor) for one in below))
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
