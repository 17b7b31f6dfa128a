"""A captured directory becomes the next version of a snapshot: the half of a seal that needs the store alone.

What was changed here is applied onto the newest version of the name, so that two layers that wrote different files of
one directory end in one snapshot. A lost race is merged anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from moonclipfs.layers.assembly import Assembly
from moonclipfs.layers.captured import CapturedEntry
from moonclipfs.layers.merge import Merge
from moonclipfs.store.log import Names
from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, Entry, EntryType, Kind, ObjectId, Version


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


class _Publish(Assembly):
    """One seal."""

    def __init__(self, store: Store, ingest: Ingest, request: Mapping[str, Any]) -> None:
        super().__init__(store, ingest, request)
        self._path = os.fsdecode(request["path"])
        self._wanted: dict[str, object] = json.loads(request["metadata"])

    def run(self) -> dict[str, Any]:
        """Encode, merge and bind."""
        self.encode()
        base = self.request.get("base", self.tree.child)
        if (before := self._published()) is not None:
            return self._found_again(before, base)
        while True:
            newest = self.store.names().bound().get(self._path)
            self.number_groups(newest)
            ours = self.assemble()
            merge = Merge(self.directories)
            root = ours if newest is None else merge.merge(base, ours, newest.root)
            if newest is not None and self._is_known(newest, root):
                self.ingest.complete([(Kind.DIRECTORY, root), (Kind.DIRECTORY, ours)])
                return self._answer(newest, ours, merge, new=False)

            def unmoved(names: Names, newest: Version | None = newest) -> None:
                now = names.bound().get(self._path)
                if (now and now.sequence) != (newest and newest.sequence):
                    raise _MovedError

            try:
                version = self.ingest.publish(self._path, root, self.metadata(root, self._wanted), unmoved)
            except _MovedError:
                continue
            if self.request.get("gone"):
                self._withdraw(version)
            return self._answer(version, ours, merge, new=True)

    def _published(self) -> Version | None:
        """The version that this capture became already: the layer may have forgotten that in a crash."""
        mark = self._wanted.get("capture")
        found = [one for one in self.store.names().all_versions() if mark and one.metadata.get("capture") == mark]
        return min(found, key=lambda version: version.sequence, default=None)

    def _found_again(self, version: Version, base: ObjectId) -> dict[str, Any]:
        self.number_groups(version)
        ours, merge = self.assemble(), Merge(self.directories)
        merge.merge(base, ours, version.root)
        self.ingest.complete([(Kind.DIRECTORY, version.root), (Kind.DIRECTORY, ours)])
        if self.request.get("gone"):
            self._withdraw(version)
        return self._answer(version, ours, merge, new=False)

    def _is_known(self, newest: Version, root: ObjectId) -> bool:
        """Whether the newest version is what is to be sealed; an explicit seal of it counts more than another."""
        if newest.root != root or self.request.get("gone"):
            return False
        wanted, there = self._wanted, newest.metadata
        better = [mark for mark in ("automatic", "incomplete") if there.get(mark) and not wanted.get(mark)]
        return not better

    def _withdraw(self, version: Version) -> None:
        """The directory is gone: its last state is only kept. What others have bound there stays bound."""
        names = self.store.names()
        bound = names.bound().get(self._path)
        if bound is None or bound.sequence != version.sequence:
            return
        before = [one for one in names.versions(self._path) if one.sequence < version.sequence and not one.removed]
        if before:
            self.ingest.publish(self._path, before[-1].root, before[-1].metadata)
        else:
            self.store.log.unbind([self._path])

    def _answer(self, version: Version, ours: ObjectId, merge: Merge, *, new: bool) -> dict[str, Any]:
        top = Entry(b"", EntryType.DIRECTORY, self.tree.attributes, child=version.root)
        places = list(self._places(self.tree, top))
        return {
            "path": os.fsencode(version.path),
            "number": version.number,
            "sequence": version.sequence,
            "root": version.root,
            "new": new,
            "files": self.encoded(),
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
        known = self.directories.load(there.child)
        for entry in tree.entries:
            below = known.get(entry.name)
            if entry.is_directory and below is not None and below.type is EntryType.DIRECTORY:
                yield from self._places(entry, below)


def _fields(attributes: Attributes) -> tuple[int, int, int, int, int, tuple[tuple[bytes, bytes], ...]]:
    """As `records.Sealed` has them."""
    a = attributes
    return a.mode, a.uid, a.gid, a.mtime_ns, a.ctime_ns, tuple(sorted(a.xattrs.items()))
