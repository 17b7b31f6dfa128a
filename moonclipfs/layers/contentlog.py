"""What the journal knows of the contents of files, and what memory is ahead of it.

Contents are journalled when a file is closed, flushed, synced, renamed or captured, never at each write. A file has a
`Pending` while memory is ahead of the journal (`dirty`), or the journal is ahead of what a power failure leaves
(`unsynced`): then the generations of the earlier states are kept. A file that was cut to nothing to be written anew
keeps those states too, since a crash leaves the old content or the new one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError
from moonclipfs.layers.contents_records import Snapshot, content_of, contents_record, contents_refs, snapshot
from moonclipfs.layers.core import Core
from moonclipfs.layers.disposal import Disposal
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.records import Contents, Stored
from moonclipfs.layers.staging import Generation
from moonclipfs.types import NO_ID, Kind, ObjectId

_SYNC_ATTEMPTS = 16
_EMPTY = Snapshot(0, 0, 0, NO_ID, (), 0)


class Pending:
    """How far memory, the journal and the disk are apart for one file."""

    __slots__ = (
        "changes",
        "cleared",
        "held",
        "in_flight",
        "journalled",
        "journalled_state",
        "noted",
        "recorded",
        "serial",
        "since",
        "synced_state",
        "unsynced",
        "whole",
    )

    def __init__(self, held: set[Generation]) -> None:
        self.since = time.monotonic()
        self.changes = 0
        """Counts changes of the content in memory."""
        self.recorded = 0
        """Of these, how many the journal has."""
        self.noted = False
        """Whether the layer's change counter knows of a change since the last record."""
        self.cleared = 0
        """The last change that cut the content to nothing."""
        self.serial = 0
        """Counts records."""
        self.in_flight = 0
        """Syncs under way, which took what changed and have not journalled it yet."""
        self.whole = False
        """The next record has to say all: one that told of changes was not written."""
        self.unsynced = False
        """The last record does not count after a power failure."""
        self.held = held
        """Generations that the last synced state needs."""
        self.journalled: set[Generation] = set()
        """Those that the state needs which the journal has now, if it is unsynced."""
        self.synced_state: Snapshot | None = None
        """The last synced state, if memory does not go on from there."""
        self.journalled_state: Snapshot | None = None
        """The same for the state that the journal has, if that is unsynced."""

    @property
    def dirty(self) -> bool:
        """Whether memory is ahead of the journal."""
        return self.changes > self.recorded

    @property
    def replaced(self) -> bool:
        """Whether the content was cut to nothing since the last record."""
        return self.cleared > self.recorded

    @property
    def replaces(self) -> bool:
        """Whether there is something that a crash brings back instead of a half-written new content."""
        states = (self.journalled_state, self.synced_state)
        return self.replaced and any(state is not None and state.size for state in states)


class ContentLog:
    """Keeps the journal informed of the contents of files. Thread-safe."""

    def __init__(self, layer: Core) -> None:
        self._layer = layer
        self.disposal = Disposal(layer.staging)
        self._pending: dict[Inode, Pending] = {}
        self._ordered: dict[Inode, None] = {}
        """Files whose unsynced contents replaced another file by rename: they go to the disk before the rename does."""

    # Under the lock

    @property
    def is_behind(self) -> bool:
        """Whether there are contents that are not on the disk, or not in the journal."""
        return bool(self._pending)

    def pending(self, inode: Inode) -> Pending | None:
        """How far memory and disk are apart for a file; None for not at all."""
        return self._pending.get(inode)

    def changing(self, inode: Inode, *, same: bool = False) -> Pending:
        """Note that the content of an own file is about to change; `same` when only where its bytes come from does."""
        pending = self._pending.get(inode)
        if pending is None:
            content = content_of(inode)
            pending = self._pending[inode] = Pending(set(content.generations()))
            if not content.size:
                pending.synced_state = _EMPTY
        if not (same or pending.noted):
            pending.noted = True
            self._layer.state.change += 1
            self._layer.state.changed(inode)
        pending.changes += 1
        return pending

    def clearing(self, inode: Inode) -> None:
        """Note that the content of an own file is about to be cut to nothing."""
        pending = self.changing(inode)
        now = snapshot(inode)
        if now.size and not pending.replaced:
            if pending.unsynced:
                pending.journalled_state = now
                pending.journalled |= now.generations
            elif pending.synced_state is None:
                pending.synced_state = now
                pending.held |= now.generations
        pending.cleared = pending.changes

    def cleared(self, inode: Inode) -> int:
        """What `undone` needs to know of a file from before a change."""
        pending = self._pending.get(inode)
        return 0 if pending is None else pending.cleared

    def undone(self, inode: Inode, cleared: int) -> None:
        """The content of a file is again what it was when `cleared` was asked for: the next record tells all of it."""
        pending = self._pending.get(inode)
        if pending is not None:
            pending.cleared, pending.whole = cleared, True

    def journal(self, inode: Inode, *, whole: bool = False, durable: bool = False) -> None:
        """Journal what changed of a file, or all with `whole`. `durable` says that its staged bytes are on the disk.

        Harmless when nothing changed, and for a file that has no name any more. Raises NoSpaceError, BackendError;
        then the file stays dirty.
        """
        pending = self._pending.get(inode)
        if pending is None or not inode.links or not (pending.dirty or whole):
            return
        generations = set(content_of(inode).generations())
        synced = durable or all(generation.path is None for generation in generations)
        record = self._take(inode, pending, synced=synced, whole=whole)
        self._write(inode, pending, record, generations, pending.changes)

    def before_rename(self, inode: Inode, replaced: Inode | None) -> None:
        """A file is about to be renamed, over another one or not. Raises as `journal` does."""
        self.journal(inode)
        pending = self._pending.get(inode)
        if replaced is not None and pending is not None and pending.unsynced:
            self._ordered[inode] = None

    def gone(self, inode: Inode) -> None:
        """A file has no names and no handles any more: its staged bytes go."""
        pending = self._pending.pop(inode, None)
        self._ordered.pop(inode, None)
        if inode.content is None:
            return
        needed = {*inode.content.generations(), *inode.content.unused()}
        held = needed if pending is None else pending.held
        if pending is not None:
            needed |= pending.held | pending.journalled
        self.disposal.drop_after_commit(needed & held)
        self.disposal.drop(needed - held)
        inode.content = None

    def freed(self, inode: Inode, generations: set[Generation]) -> None:
        """A content that changes needs these no more: they go, unless some record names them."""
        pending = self._pending[inode]
        self.disposal.drop(generations - pending.held - pending.journalled)

    def replayed(self, inode: Inode, held: set[Generation]) -> None:
        """A replayed file whose last record counts for this boot only; its synced state may need any of `held`."""
        pending = self._pending[inode] = Pending(held | set(content_of(inode).generations()))
        pending.unsynced = True

    def records(self, inode: Inode) -> Iterator[tuple[Contents | Stored, list[tuple[Kind, ObjectId]]]]:
        """What a journal that is written anew says of the content of a file, which `settle` was called for."""
        pending = self._pending.get(inode)
        states: list[Snapshot | None] = [] if pending is None else [pending.synced_state, pending.journalled_state]
        if pending is None or not pending.replaced:
            states.append(snapshot(inode))
        synced = True
        for state in states:
            if state is not None:
                record = contents_record(inode.number, state, whole=True, synced=synced)
                yield record, contents_refs(record)
                synced = False
        if pending is not None and pending.replaced and content_of(inode).recipe != NO_ID:
            # Part of a content that is being written is stored already: that must not be reclaimed.
            stored = Stored(inode.number, 0, content_of(inode).recipe, 0)
            yield stored, contents_refs(stored)

    def settle(self) -> None:
        """Before a journal is written anew: sync what was written since the last sync, so that it may say all.

        Called without the lock first, and then under it, when that is little.
        """
        generations: set[Generation] = set()
        with self._layer.lock:
            for inode, pending in self._pending.items():
                if pending.synced_state is None and not pending.replaced:
                    generations.update(content_of(inode).generations())
                else:
                    generations |= _generations(pending.synced_state or pending.journalled_state)
        for generation in generations:
            generation.sync()

    def rewritten(self) -> None:
        """The journal was written anew with `records` of every file."""
        for inode, pending in list(self._pending.items()):
            if not pending.replaced:
                content, synced = content_of(inode), pending.synced_state is None
                content.changes(synced=synced)
                self._recorded(inode, pending, synced, set(content.generations()), pending.changes)
                continue
            pending.serial += 1
            if pending.synced_state is None:
                pending.synced_state, pending.journalled_state = pending.journalled_state, None
                pending.held |= pending.journalled
                pending.journalled, pending.unsynced = set(), False

    # Making durable, without the lock

    def sync(self, inode: Inode) -> None:
        """Put the staged bytes of a file on the disk, and say so in the journal; `commit` makes that count.

        Raises NoSpaceError, BackendError.
        """
        for _ in range(_SYNC_ATTEMPTS):
            if self._sync(inode):
                return
        with self._layer.lock:
            self._sync(inode)

    def before_commit(self) -> bool:
        """For the journal: sync what replaced other files by rename. Returns whether there was something."""
        with self._layer.lock:
            ordered, self._ordered = self._ordered, {}
        try:
            for inode in ordered:
                with suppress(CorruptError):  # lost: `sync_all` tells it, and what others sync must not wait for it
                    self.sync(inode)
        except BaseException:
            with self._layer.lock:
                self._ordered.update(ordered)
            raise
        return bool(ordered)

    def commit(self) -> None:
        """Make all that the journal has durable. Raises NoSpaceError, BackendError."""
        with self._layer.lock:
            ready = self.disposal.begin()
        try:
            self._layer.journal.commit()
        except BaseException:
            with self._layer.lock:
                self.disposal.failed(ready)
            raise
        with self._layer.lock:
            self.disposal.drop(ready)

    def sync_all(self) -> None:
        """Journal and sync what was closed, and commit.

        A file that is being written is journalled too, unless it replaces an older content, which a crash brings back
        until it is complete; and synced, when it was not for `limits.OPEN_SYNC_SECONDS`. Raises the first error,
        after having tried all.
        """
        failure: MoonclipError | None = None
        now = time.monotonic()
        with self._layer.lock:
            pending = list(self._pending)
        for inode in pending:
            try:
                self._sync_in_turn(inode, now)
            except MoonclipError as error:
                failure = failure or error
        try:
            self.commit()
        finally:
            self._layer.staging.close_deleted()  # on a full disk this makes the room that the journal lacks
        if failure is not None:
            raise failure

    def _sync_in_turn(self, inode: Inode, now: float) -> None:
        with self._layer.lock:
            pending = self._pending.get(inode)
            if pending is None or (inode.writers and pending.replaces):
                return
            if inode.writers and now - pending.since < limits.OPEN_SYNC_SECONDS:
                self.journal(inode)
                return
        self.sync(inode)

    def _sync(self, inode: Inode) -> bool:
        """One attempt; False when somebody else journalled the file meanwhile, and not all may be on the disk."""
        with self._layer.lock:
            pending = self._pending.get(inode)
            if pending is None or not inode.links:
                return True
            generations = set(content_of(inode).generations())
            record = self._take(inode, pending, synced=True, whole=False)
            changes, serial = pending.changes, pending.serial
            pending.in_flight += 1
        try:
            for generation in generations:
                generation.sync()
        except BaseException:
            with self._layer.lock:
                pending.whole = True
            raise
        finally:
            with self._layer.lock:
                pending.in_flight -= 1
        with self._layer.lock:
            if not inode.links:
                return True
            if pending.serial != serial:
                pending.whole = True
                return False
            self._write(inode, pending, record, generations, changes)
            return True

    # Writing records

    def _take(self, inode: Inode, pending: Pending, *, synced: bool, whole: bool) -> Contents:
        """The record of what changed; from here on it is not told again."""
        content = content_of(inode)
        all_, changed = content.changes(synced=synced)
        if (whole or pending.whole or pending.in_flight) and not all_:
            all_, changed = True, content.parts(0, content.size)
        now = Snapshot(content.size, inode.mtime_ns, inode.ctime_ns, content.recipe, tuple(changed), inode.changed)
        try:
            return contents_record(inode.number, now, whole=all_, synced=synced)
        except BaseException:
            pending.whole = True
            raise

    def _write(
        self, inode: Inode, pending: Pending, record: Contents, generations: set[Generation], changes: int
    ) -> None:
        # Attributes may have been set, and a seal journalled, since the record was made: it must not undo that.
        now = (inode.mtime_ns, inode.ctime_ns, inode.changed)
        if now != (record.mtime_ns, record.ctime_ns, record.change):
            record = record._replace(mtime_ns=now[0], ctime_ns=now[1], change=now[2])
        try:
            self._layer.journal.append(record, contents_refs(record))
        except BaseException:
            pending.whole = True
            raise
        self._layer.state.change += 1
        pending.whole = False
        self._recorded(inode, pending, record.synced, generations, changes)

    def _recorded(
        self, inode: Inode, pending: Pending, synced: bool, generations: set[Generation], changes: int
    ) -> None:
        """The journal has the state with the first `changes` changes, which needs `generations`."""
        content = content_of(inode)
        before = pending.held | pending.journalled | set(content.unused())
        pending.serial += 1
        pending.recorded = changes
        pending.noted = False
        if not pending.replaced:
            pending.journalled_state = None
            pending.synced_state = None if synced else pending.synced_state
        elif synced:
            pending.synced_state = pending.journalled_state or pending.synced_state
            pending.journalled_state = None
        held, journalled = pending.held, generations | _generations(pending.journalled_state)
        if synced:
            held, journalled = generations | _generations(pending.synced_state), set()
        gone = before and before - held - journalled - set(content.generations())
        self.disposal.drop_after_commit(gone & pending.held)
        self.disposal.drop(gone - pending.held)
        pending.held, pending.journalled, pending.unsynced = held, journalled, not synced
        pending.since = time.monotonic() if synced else pending.since
        if synced and not pending.dirty:
            del self._pending[inode]
            self._ordered.pop(inode, None)


def _generations(state: Snapshot | None) -> set[Generation]:
    return set() if state is None else state.generations
