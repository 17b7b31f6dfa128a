"""Captures: the state of a directory at one moment, on its way to become a version.

A capture is taken under the layer's lock and journalled; from then on it survives whatever happens to the directory,
and a kill. Staged bytes that it needs are frozen: later writes go to new generations. When it is published, a record
says so, and what was not changed since counts as clean: it shows through from the new version.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgpack

from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.layers.captured import CapturedEntry, decode_tree, encode_tree, files_needed
from moonclipfs.layers.changes import Changes
from moonclipfs.layers.files import Files
from moonclipfs.layers.freezing import Builder
from moonclipfs.layers.inodes import Inode, Lower
from moonclipfs.layers.names import Area, join
from moonclipfs.layers.records import Captured, Dropped, Sealed
from moonclipfs.layers.staging import Generation
from moonclipfs.layers.writers import Writers
from moonclipfs.store.paths import check_path
from moonclipfs.types import NO_ID, Kind, ObjectId

Refs = list[tuple[Kind, ObjectId]]


@dataclass(slots=True)
class Capture:
    """One capture. `counter` is the layer's change counter at its moment, `directory` an inode number.

    `path` is where the directory was then. `tree` holds what had changed since its last seal.
    """

    number: int
    directory: int
    path: bytes
    counter: int
    metadata: dict[str, object]
    tree: CapturedEntry
    base: ObjectId = NO_ID
    """What was sealed of an earlier capture of the directory since this one was taken; NO_ID for none."""
    pinned: tuple[Generation, ...] = ()

    def generations(self) -> set[int]:
        """Numbers of the staging generations that it needs and that are in files."""
        return files_needed(self.tree)

    def record(self) -> tuple[Captured, Refs]:
        """As the journal has it."""
        refs = [*self.tree.refs(), (Kind.DIRECTORY, self.base)]
        metadata = bytes(msgpack.packb(self.metadata, use_bin_type=True, unicode_errors="surrogateescape"))
        tree = encode_tree(self.tree)
        stored = tuple((int(kind), object_id) for kind, object_id in refs)
        return Captured(self.number, self.directory, self.path, self.counter, metadata, tree, stored, self.base), refs


class Captures:
    """The captures of one layer that are not published yet, in order."""

    def __init__(self, layer: Changes, files: Files) -> None:
        """Applies the records of captures from here on."""
        self._layer = layer
        self._files = files
        self._pending: dict[int, Capture] = {}
        self._unsynced: list[Generation] = []
        """Of pending captures, those whose bytes may not be on the disk."""
        self.writers = Writers()
        """Where the contents of directories come from."""
        layer.state.handle(Captured, self._apply_captured)
        layer.state.handle(Sealed, self._apply_sealed)

    def __len__(self) -> int:
        return len(self._pending)

    def pending(self) -> list[Capture]:
        """The captures in their order."""
        with self._layer.lock:
            return [self._pending[number] for number in sorted(self._pending)]

    def generations(self) -> set[int]:
        """Numbers of the staging generations in files that pending captures need."""
        return {number for capture in self._pending.values() for number in capture.generations()}

    def records(self) -> Iterator[tuple[Captured, Refs]]:
        """What a journal that is written anew says of them, after all inodes; what they need is on the disk then.
        Raises NoSpaceError, BackendError.
        """
        self.before_commit()
        for capture in self.pending():
            yield capture.record()

    def recover(self) -> None:
        """After a replay: freeze and keep the staged bytes that captures need. Under the lock."""
        contents = [inode.content for inode in self._layer.state.own.values() if inode.content is not None]
        in_files = {generation.number for content in contents for generation in content.generations()}
        for capture in self._pending.values():
            generations = [self._layer.staging.open(number) for number in sorted(capture.generations())]
            self._pin(capture, generations)
            # What no file has any more goes with the capture.
            self._files.log.disposal.drop(one for one in generations if one.number not in in_files)

    def before_commit(self) -> bool:
        """For the journal: sync the staged bytes that captures need, before their records count. Returns whether there
        were any. Raises NoSpaceError, BackendError.
        """
        with self._layer.lock:
            unsynced, self._unsynced = self._unsynced, []
        try:
            for generation in unsynced:
                with suppress(CorruptError):  # lost: the capture is given up when it is to be published
                    generation.sync()
        except BaseException:
            with self._layer.lock:
                self._unsynced += unsynced
            raise
        return bool(unsynced)

    # Taking

    def take(self, directory: Inode, metadata: dict[str, object]) -> Capture:
        """Capture a directory as it is now; `metadata` goes into the log with its version.

        Raises UsageError for what cannot be a snapshot, LimitError for one that is too deep, NotFoundError for a
        directory that was removed, NoSpaceError, BackendError.
        """
        self._layer.adopt_links(directory)
        return self._layer.run(lambda: self._take(directory, metadata), wait=True)

    def _take(self, directory: Inode, metadata: dict[str, object]) -> Capture:
        layer = self._layer
        path = layer.path(directory)
        if not directory.is_directory or not path:
            raise UsageError(f"/{os.fsdecode(path)} cannot be a snapshot: only directories below the root can")
        check_path(os.fsdecode(path))
        layer.adopt_inside(directory)
        builder = Builder(layer, self._files)
        builder.settle(directory)
        tree = builder.directory(b"", directory, path)
        number = layer.state.captures + 1
        capture = Capture(number, directory.number, path, layer.counter, metadata, tree)
        if not tree.entries and tree.child == NO_ID and path in layer.view.area(Area.LIVE).directories:
            raise UsageError(f"/{os.fsdecode(path)} holds nothing but snapshots, which have names of their own")
        layer.record(*capture.record())
        self._pin(self._pending[number], builder.generations(capture.generations()))
        self._unsynced += self._pending[number].pinned
        return self._pending[number]

    def _pin(self, capture: Capture, generations: list[Generation]) -> None:
        for generation in generations:
            generation.frozen = True
        capture.pinned = tuple(generations)
        self._files.log.disposal.pin(generations)

    def give_up(self, capture: Capture) -> None:
        """A capture will never be a version: what it kept goes. Raises NoSpaceError, BackendError."""
        with self._layer.lock:
            self._layer.record(Sealed(capture.number, capture.path, 0, 0, NO_ID))

    # Records

    def _apply_captured(self, record: Captured) -> None:
        state = self._layer.state
        state.captures = max(state.captures, record.capture)
        # Records that did not survive a power failure counted too: what comes now was changed after the capture.
        state.change = max(state.change, record.counter)
        metadata = msgpack.unpackb(record.metadata, raw=False, unicode_errors="surrogateescape", strict_map_key=False)
        if not isinstance(metadata, dict):
            raise CorruptError(f"journal: capture {record.capture} has no metadata")
        self._pending[record.capture] = Capture(
            record.capture, record.directory, record.path, record.counter, metadata, decode_tree(record.tree),
            record.base,
        )  # fmt: skip
        state.captured[record.capture] = record.directory
        state.generations = max([state.generations, *self._pending[record.capture].generations()])

    def _apply_sealed(self, record: Sealed) -> None:
        state = self._layer.state
        capture = self._pending.pop(record.capture)
        del state.captured[record.capture]
        self._files.log.disposal.unpin(capture.pinned, after_commit=True)
        if not record.sequence:
            return
        for other in self._pending.values():
            if other.directory == capture.directory:
                other.base = record.ours
        top = state.own.get(capture.directory)
        if top is None:
            return
        anchor, above = (top.lower.anchor, top.lower.path) if top.lower else (b"%d" % record.sequence, b"")
        _Cleaner(capture, record).clean(top, anchor, above)
        for directory in _above(top):
            _count_below(directory)
        top.sealed = record.sequence
        state.names_version += 1

    def show_foreign(self, directory: Inode, paths: list[bytes]) -> None:
        """Under the lock, after a seal: let what others changed show, where nothing was changed here since."""
        top = self._layer.state.path(directory) or b""
        for path in paths:
            above, _, name = path.rpartition(b"/")
            inode: Inode | None = directory
            for part in above.split(b"/") if above else ():
                inode = inode.entries.get(part) if inode is not None else None
            child = inode.entries.get(name) if inode is not None else None
            if inode is not None and child is not None and not child.below:
                self._layer.record(Dropped(inode.number, name))
            self._layer.shows_another(join(top, above) if above else top, name)


class _Cleaner:
    """After a seal: what was not changed since its capture shows through from the new version, and counts as clean."""

    def __init__(self, capture: Capture, record: Sealed) -> None:
        self._counter = capture.counter
        self._directories = dict(record.directories)
        self._attributes = {given[0]: given for given in record.attributes}
        self._root = record.root

    def clean(self, directory: Inode, anchor: bytes, path: bytes) -> None:
        """Of one directory and all below that the version holds; `anchor` and `path` are for one without a lower."""
        counter = self._counter
        object_id = self._directories.get(directory.number)
        if object_id is not None:
            self._relower(directory, object_id, anchor, path)
        for name, child in directory.entries.items():
            if child.is_directory and (child.number in self._directories or not child.sealed):
                child.sealed = 0  # part of this version, and no longer one that others have unbound
                self.clean(child, anchor, join(path, name))
            elif not child.is_directory and child.changed <= counter:
                child.changed = child.below = 0
        if directory.changed <= counter:
            directory.changed = 0
            self._give_attributes(directory)
        _count_below(directory)

    def _give_attributes(self, directory: Inode) -> None:
        """What others made of a directory that was not changed here."""
        if directory.number in self._attributes:
            _, mode, uid, gid, mtime_ns, ctime_ns, xattrs = self._attributes[directory.number]
            directory.mode, directory.uid, directory.gid = mode, uid, gid
            directory.mtime_ns, directory.ctime_ns, directory.xattrs = mtime_ns, ctime_ns, dict(xattrs)

    def _relower(self, directory: Inode, object_id: ObjectId, anchor: bytes, path: bytes) -> None:
        lower = directory.lower or Lower(anchor, path, object_id, self._root)
        directory.lower = lower._replace(directory=object_id, root=self._root)
        later = {name: change for name, change in directory.names_changed.items() if change > self._counter}
        directory.names_changed = later
        directory.removed = {name for name in later if name not in directory.entries}
        directory.counted = 0


def _above(inode: Inode) -> Iterator[Inode]:
    """The directories above one, nearest first."""
    while inode.links:
        inode = next(iter(inode.links))[0]
        yield inode


def _count_below(directory: Inode) -> None:
    """Find the newest change of a directory's tree anew, after some were sealed."""
    children = (child.below for child in directory.entries.values())
    directory.below = max(directory.changed, max(children, default=0), max(directory.names_changed.values(), default=0))
