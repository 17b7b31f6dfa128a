"""Reclaiming space: what no kept version needs is found, announced in the log, and deleted when nobody can use it.

The order, which every step keeps when the process dies after it:

1. hold the log's state with our lease, so that nothing vanishes that we see from here on;
2. mark what all kept versions and the journals of all layers need, bases included;
3. copy what is needed out of packs that are mostly dead, each object decoded and hashed again, and store needed
   objects anew where their bases are dead otherwise (see `rebase.py`); publish both;
4. append a `condemn` record: it names packs of which, after this record and all before it, nothing is needed that has
   no copy in another pack; versions bound since the mark are marked before it is written;
5. let go of the hold; delete a condemned pack when every live lease has seen its record and holds nothing older.

A process that publishes after a condemn record has seen it, and has stored again what it needs of those packs. One that
puts objects for a layer binds no name: it appends a record to its journal, and only then lets go of its hold, and says
of later log records that it has seen them. So before anything is deleted the leases are looked at first, and what names
and journals need after that: what a lease does not claim any more is in a journal by then. What a journal needs of a
pack that is condemned already keeps it, until it is copied like everything that is needed.

What a killed run leaves (copies without a condemn record, condemned packs) the next run takes up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moonclipfs import limits
from moonclipfs.errors import MoonclipError, NoSpaceError, UsageError
from moonclipfs.store import reserve
from moonclipfs.store.backend import os_errors
from moonclipfs.store.families import affordable
from moonclipfs.store.leases import Lease, LeaseState, live_leases
from moonclipfs.store.log import Names
from moonclipfs.store.overlaydirs import sweep
from moonclipfs.store.packs import pack_key
from moonclipfs.store.reachable import PackTable, Rows
from moonclipfs.store.rebase import rebase
from moonclipfs.store.records import record_name
from moonclipfs.store.repack import copy_objects
from moonclipfs.store.store import Store
from moonclipfs.store.survey import Survey
from moonclipfs.store.waste import Waste
from moonclipfs.types import ObjectId

_POLL_SECONDS = 0.1
_OWNER_CHARACTERS = 32
"""A name in `tmp/` begins with that of its owner's lease."""


@dataclass(slots=True)
class GcReport:
    """What a run did, or (`dry_run`) would do; all sizes are bytes of pack files.

    `dead_bytes` is what no kept version needs, before the run. `waiting` packs are condemned, and go in a later run:
    `waiting_for` says what they wait for. `rebased` objects were stored anew, since their bases were needed by nothing
    else. `problems` are packs that were left alone, and why.
    """

    dry_run: bool = False
    live_objects: int = 0
    live_bytes: int = 0
    dead_bytes: int = 0
    deleted_packs: int = 0
    deleted_bytes: int = 0
    copied_bytes: int = 0
    rebased_objects: int = 0
    rebased_bytes: int = 0
    waiting_packs: int = 0
    waiting_bytes: int = 0
    waiting_for: list[str] = field(default_factory=list)
    leftovers: int = 0
    log_records: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        """Bytes that packs take less than before."""
        return self.deleted_bytes - self.copied_bytes - self.rebased_bytes


def collect(
    store: Store,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dry_run: bool = False,
    repack: bool = True,
    pressed: bool = False,
    wait_seconds: float = limits.GC_WAIT_SECONDS,
) -> GcReport:
    """Delete what no kept version needs; `progress` is told the bytes of objects copied.

    Without `repack`, nothing is copied; `pressed`, packs with little that is dead are repacked too. Waits for
    `wait_seconds` at most for other processes to see what was condemned. On a full disk the store's reserve is given
    back first, and taken again at the end. Raises CorruptError when it cannot be known what is needed, as when a kept
    version lacks an object (MissingObjectError), NoSpaceError when not even the reserve lets it write, UsageError for a
    store that is open for reading only, LeaseLostError, BackendError.
    """
    if dry_run:
        return preview(store, pressed=pressed)
    if store.lease is None or not store.write:
        raise UsageError(f"{store.path} is open for reading only")
    run = _Run(store, store.lease, progress, repack, _share(pressed))
    run.sweep()
    try:
        try:
            return run.run(wait_seconds)
        except NoSpaceError:
            reserve.release(store.path)
            run.reserve_released = True
            return run.run(wait_seconds)
    finally:
        _take_reserve(store)


@contextmanager
def open_to_reclaim(path: Path, purpose: str) -> Iterator[Store]:
    """Open a store for writing even on a full disk, where a lease needs space that only the reserve has."""
    try:
        store = Store.open(path, write=True, purpose=purpose)
    except NoSpaceError:
        reserve.release(path)
        store = Store.open(path, write=True, purpose=purpose)
    try:
        with store:
            yield store
    finally:
        _take_reserve(store)


def _take_reserve(store: Store) -> None:
    if store.base is None:  # a private store has none
        reserve.take(store.path)


def preview(store: Store, without: Collection[tuple[str, int]] = (), *, pressed: bool = False) -> GcReport:
    """What `collect` would do if the versions `without` (path, number) were forgotten, and nobody used the store.

    What storing objects anew takes is a guess.
    """
    survey = Survey(store)
    survey.mark(without=without)
    table = survey.footers.table()
    report = GcReport(dry_run=True)
    _count(report, table, survey.measure(table))
    anew = [one for one in survey.families(table) if one.expected <= one.taken * limits.REBASE_SHARE]
    report.rebased_objects = sum(len(one.hanging) for one in anew)
    report.rebased_bytes = sum(one.expected for one in anew)
    replaced = [row for one in anew for row in (*one.hanging, *one.bearing)]
    waste = survey.measure(table, share_dead=_share(pressed), without=replaced)
    condemned = [number for number, flag in enumerate(table.mask(survey.condemned)) if flag]
    gone = [*waste.whole, *waste.partial, *condemned]
    report.deleted_packs = len(gone)
    report.deleted_bytes = int(table.sizes[gone].sum())
    copied = waste.needed & np.isin(table.pack, [*waste.partial, *condemned])
    report.copied_bytes = int(table.stored[copied].sum())
    report.problems = list(survey.footers.damaged.values())
    return report


def _share(pressed: bool) -> float:
    return limits.REPACK_PRESSED_SHARE if pressed else limits.REPACK_DEAD_SHARE


def _count(report: GcReport, table: PackTable, waste: Waste) -> None:
    report.live_objects = int(waste.needed.sum())
    report.live_bytes = int(table.stored[waste.needed].sum())
    report.dead_bytes = int(waste.dead.sum())


class _Run:
    """Cycles of copying, condemning and deleting, until there is nothing more to condemn."""

    def __init__(
        self, store: Store, lease: Lease, progress: Callable[[int, int], None], repack: bool, share_dead: float
    ) -> None:
        self._store = store
        self._lease = lease
        self._progress = progress
        self._repack = repack
        self._share_dead = share_dead
        self._rebased: set[ObjectId] = set()
        """Families that need no second look in this run: see `Rebased.tried`."""
        self._survey = Survey(store)
        self._report = GcReport()
        self._counted = False
        self._copied = self._to_copy = 0
        self._at_once = limits.REPACK_BYTES
        self._full = False
        """Whether not even the smallest copies fit on the disk."""
        self.reserve_released = False
        """Whether there is nothing left to give back when the disk is full."""

    def run(self, wait_seconds: float) -> GcReport:
        """Do all that can be done. After NoSpaceError it may be called again, and goes on."""
        report = self._report
        while self._cycle():
            self._delete(0.0)
        self._delete(wait_seconds)
        report.leftovers = self._remove_leftovers()
        report.log_records = self._store.log.trim()
        report.problems += [*self._survey.footers.damaged.values(), *self._survey.left_alone.values()]
        return report

    def sweep(self) -> None:
        """Clear away ephemeral overlays of dead processes: what they refer to is needed by nobody. What cannot be
        cleared away, as while one is damaged or on a full disk, is only kept.
        """
        try:
            sweep(self._store.backend)
        except MoonclipError as error:
            self._report.problems.append(f"nothing of overlays is cleared away: {error}")

    # Deciding

    def _cycle(self) -> bool:
        """Condemn some packs, after copying what is needed of them; False when there are none."""
        young = self._young_ns()
        self._store.names()
        with self._lease.hold(self._store.log.names.sequence):
            self._survey.mark()
            table = self._survey.footers.table()
            waste = self._survey.measure(table, young, self._share_dead)
            if not self._counted:
                _count(self._report, table, waste)
                self._counted = True
            if not len(waste.stranded) and not waste.whole and self._rebase(table):
                return True
            rows, victims = self._choose(table, waste)
            if not len(rows) and not victims:
                return False
            if len(rows):
                before = self._state()
                victims = self._copy(table, rows, victims)
                if not victims:
                    # Go on if stranded objects are safe by now, or if it is known what to leave alone.
                    return self._state() != before
            return self._condemn(victims)

    def _state(self) -> tuple[object, ...]:
        """What a choice depends on beside the packs."""
        return len(self._survey.left_alone), self._report.copied_bytes, self._at_once, self._full

    def _young_ns(self) -> int | None:
        """Packs stored since then may belong to an ingest that has not published yet; None when there is none.

        To condemn these would be safe, since the publisher looks, but make it store everything again; and they
        could not be deleted before its hold ends anyway. The times come from one file system, and only spare work.
        """
        holds = [lease.hold for lease in live_leases(self._store.path) if lease.hold is not None]
        if not holds:
            return None
        times = {info.key: info.modified_ns for info in self._store.backend.list("log/")}
        return times.get(record_name(min(holds)), 0)

    def _choose(self, table: PackTable, waste: Waste) -> tuple[Rows, list[str]]:
        """Rows to copy, and packs to condemn after that: whole dead packs first, since they need no space."""
        nothing = np.zeros(0, np.int64)
        if len(waste.stranded) and not self._full:
            return waste.stranded, []
        if waste.whole:
            return nothing, [table.names[number] for number in waste.whole]
        if not self._repack or self._full:
            return nothing, []
        stored = np.bincount(table.pack[waste.needed], table.stored[waste.needed], len(table.names))
        room = self._room()
        partial = waste.partial
        if stored[partial].sum() > room:
            # Each that goes makes room for a larger one.
            partial = sorted(partial, key=lambda number: float(stored[number]))
        chosen: list[int] = []
        for number in partial:
            if chosen and stored[chosen].sum() + stored[number] > min(room, self._at_once):
                break
            chosen.append(number)
        self._to_copy = max(self._to_copy, self._copied + int(stored[partial].sum()))
        rows = np.flatnonzero(waste.needed & np.isin(table.pack, chosen))
        return rows, [table.names[number] for number in chosen]

    def _room(self) -> int:
        """Bytes that copies may take before anything that they replace is deleted."""
        disk = os.statvfs(self._store.path)
        return disk.f_bavail * disk.f_frsize // 2

    def _rebase(self, table: PackTable) -> bool:
        """Store objects anew whose bases nothing else needs; False when there is nothing, or no room, for that."""
        if not self._repack or self._full:
            return False
        families = self._survey.families(table)
        left = [one for one in families if table.location(one.hanging[0]).object_id not in self._rebased]
        room = min(self._room(), limits.REPACK_BYTES)
        left = affordable(table, left, room)
        if not left:
            return False
        try:
            done = rebase(self._store, table, left, room, self._tell)
        except NoSpaceError as error:
            if not self.reserve_released:
                raise
            self._rebased.update(table.location(one.hanging[0]).object_id for one in left)
            self._report.problems.append(f"too little space to store objects against other bases: {error}")
            return False
        self._rebased |= done.tried
        self._report.rebased_objects += done.objects
        self._report.rebased_bytes += done.bytes
        return done.objects > 0

    def _tell(self, count: int) -> None:
        self._copied += count
        self._progress(self._copied, max(self._to_copy, self._copied))

    def _copy(self, table: PackTable, rows: Rows, victims: list[str]) -> list[str]:
        """Copy the objects of `rows`; returns the packs of `victims` of which everything was copied."""
        # In the order in which they lie in the old packs, which is that of files and tensors.
        rows = rows[np.lexsort((table.entries["offset"][rows], table.pack[rows]))]
        try:
            copied = copy_objects(self._store, (table.location(int(row)) for row in rows), self._tell)
        except NoSpaceError as error:
            if not self.reserve_released:
                raise
            if len(victims) > 1:
                self._at_once = 1  # byte: one pack at a time
            else:
                self._full = True
                self._report.problems.append(f"too little space to repack: {error}")
            return []
        self._report.copied_bytes += copied.bytes
        self._survey.left_alone |= copied.broken
        return [pack for pack in victims if pack not in copied.broken]

    def _condemn(self, victims: list[str]) -> bool:
        """Append the record. What is needed is looked at again against the names that it will follow."""

        def body(names: Names) -> Mapping[str, object]:
            self._lease.check()
            self._survey.mark(names)
            condemned = self._survey.condemned
            left = [pack for pack in victims if pack not in condemned]
            # Read again: what the versions bound meanwhile need may lie in packs that are new.
            going = self._survey.removable(self._survey.footers.table(), condemned, left)
            if not going:
                raise _NothingLeftError
            return {"packs": going}

        try:
            self._store.log.append("condemn", body)
        except _NothingLeftError:
            return False
        return True

    # Deleting

    def _delete(self, wait_seconds: float) -> None:
        """Delete the condemned packs that nobody can use any more."""
        deadline = time.monotonic() + wait_seconds
        waiting, blockers = self._delete_free()
        while waiting and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            waiting, blockers = self._delete_free()
        if waiting and wait_seconds:
            # Takes long only where a process of another host may be dead, which must be watched to be known.
            waiting, blockers = self._delete_free(limits.LEASE_SILENCE_SECONDS + 1)
        self._report.waiting_packs = len(waiting)
        self._report.waiting_bytes = sum(waiting.values())
        self._report.waiting_for = [_describe(lease) for lease in blockers.values()]

    def _delete_free(self, patience: float = 0.0) -> tuple[dict[str, int], dict[str, LeaseState]]:
        """Delete what can go now; returns the sizes of packs that cannot, and the leases in the way."""
        # In this order: what none of these leases claims any more is named by now. First of all, our own has to know.
        self._store.names()
        leases = live_leases(self._store.path, patience)
        # A crash must not undo a `forget` of another process because of which something is deleted here.
        self._store.log.settle(self._survey.mark())
        table = self._survey.footers.table()
        condemned = {pack: record for pack, record in self._survey.condemned.items() if pack in table.numbers}
        free = self._survey.removable(table, (), list(condemned))
        waiting: dict[str, int] = {}
        blockers: dict[str, LeaseState] = {}
        for pack, record in condemned.items():
            size = int(table.sizes[table.numbers[pack]])
            against = [lease for lease in leases if not lease.allows(record)]
            blockers |= {lease.name: lease for lease in against}
            if against or pack not in free:
                waiting[pack] = size
                continue
            self._store.backend.delete(pack_key(pack))
            self._store.index.drop_pack(pack)
            self._report.deleted_packs += 1
            self._report.deleted_bytes += size
        return waiting, blockers

    def _remove_leftovers(self) -> int:
        """Remove what dead processes left half written, empty files too. Returns how many."""
        directory = self._store.path / "tmp"
        with os_errors(f"list {directory}"):
            names = os.listdir(directory)
        # The names first: an owner that is not among the leases after that is dead, or has published.
        alive = {lease.name for lease in live_leases(self._store.path)}
        dead = [name for name in names if name[:_OWNER_CHARACTERS] not in alive]
        for name in dead:
            self._store.backend.delete(f"tmp/{name}")
        return len(dead)


class _NothingLeftError(Exception):
    """Meanwhile everything that was to be condemned has been, or is needed after all."""


def _describe(lease: LeaseState) -> str:
    doing = f" ({lease.purpose})" if lease.purpose else ""
    return f"process {lease.pid} on {lease.host}{doing}"
