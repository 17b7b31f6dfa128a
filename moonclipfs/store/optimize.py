"""Chains of the newest snapshots made short: each of their objects one link from a full encoding, at most.

A delta saved late in a line has up to three links behind it. The newest snapshot of a line is the one that is read the
most, so its objects are stored anew against the full encoding at the end of their chain, or in full where that is
smaller, and gc takes what nothing needs after that. What was stored plain is encoded first (`tighten.py`). Snapshots do
not change by this: an object is its bytes, however it is stored. So what a model gained or lost since, and who reads or
saves meanwhile, here or in other processes, sees no difference.

Nothing is deleted for a copy that was not proved: the old encoding is decoded and compared with its id before, the new
one after it was written, from the disk. What does not decode is reported and left as it is. A new copy leans on a full
encoding alone, so no chain gets longer, and none leads back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moonclipfs import limits
from moonclipfs._codec import can_predict
from moonclipfs.codec.choose import Base, encode
from moonclipfs.errors import CorruptError, NotFoundError, UsageError
from moonclipfs.store.audit import audit_all
from moonclipfs.store.bases import NEAR, QUICK
from moonclipfs.store.cores import usable_cores
from moonclipfs.store.gc import GcReport, collect
from moonclipfs.store.log import Names
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location, PackWriter
from moonclipfs.store.pools import submit
from moonclipfs.store.reachable import OBJECT_OVERHEAD, Choice, Needed, PackTable, Rows
from moonclipfs.store.replay import is_at_or_below
from moonclipfs.store.retention import line_of
from moonclipfs.store.store import Store
from moonclipfs.store.survey import Survey
from moonclipfs.store.tighten import Tightened, plain_objects, tighten
from moonclipfs.types import NO_ID, Kind, ObjectId, Version

LINKS = 1
"""Links behind an object of a newest snapshot, at most."""
_COST = 4
"""Bytes of memory that one byte of an object in work takes: itself, its base, its encoding, the check."""


@dataclass(slots=True)
class OptimizeReport:
    """`snapshots` are the newest ones, `links` the most that were behind any object of theirs. `objects` were stored
    anew, or would be in a dry run, in `bytes` of packs; `problems` say what was left as it is, and why. `gc` is what
    was freed after that, None in a dry run and where nothing was to be done.
    """

    snapshots: list[Version] = field(default_factory=list)
    links: int = 0
    objects: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    gc: GcReport | None = None
    dry_run: bool = False


def optimize(
    store: Store,
    names: Sequence[str] = (),
    *,
    dry_run: bool = False,
    core_share: float = 1.0,
    wait_seconds: float = limits.GC_WAIT_SECONDS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> OptimizeReport:
    """Bring the newest snapshot of each line to one link, and free what that leaves.

    `names` limits it to snapshots at or below them; `core_share` of the cores encode; gc waits `wait_seconds` for other
    processes, as in `gc.collect`. `progress` is told bytes of objects. May be called beside any reader, saver and gc,
    of this process too. Raises NotFoundError for a name that no snapshot has, CorruptError when a copy does not read
    back, UsageError for a store that is open for reading only, NoSpaceError, LeaseLostError, BackendError: whatever was
    written until then is copies that the next run takes up.
    """
    if not dry_run and (store.lease is None or not store.write):
        raise UsageError(f"{store.path} is open for reading only")
    work = _Work(store, names, core_share, progress)
    report = work.report
    report.dry_run = dry_run
    if dry_run or store.lease is None:
        work.look()
        report.objects += len(plain_objects(store, [*work.older(), *report.snapshots]))
        return report
    encoded = work.encode_plain()
    if encoded.objects:
        report.gc = collect(store, wait_seconds=wait_seconds)
    while True:
        store.names()
        with store.lease.hold(store.log.names.sequence):
            tasks = work.look()
            if not tasks:
                report.objects += encoded.objects
                report.bytes += encoded.bytes
                return report
            work.store_anew(tasks)
        report.gc = _added(report.gc, collect(store, wait_seconds=wait_seconds))


def newest_of_lines(names: Names, wanted: Iterable[str] = ()) -> list[Version]:
    """The newest bound version of each line, by binding; with `wanted`, the snapshots called so, and the newest of
    each line below them.

    Raises NotFoundError for a name at or below which nothing is bound.
    """
    bound = names.bound()
    newest = {line_of(one.path): one for one in sorted(bound.values(), key=lambda one: one.order)}
    chosen = {} if (asked := list(wanted)) else {version.path: version for version in newest.values()}
    for name in asked:
        if not any(is_at_or_below(path, name) for path in bound):
            raise NotFoundError(f"no snapshot is called {name!r}; `moonclipfs ls` lists them")
        chosen |= {one.path: one for one in newest.values() if is_at_or_below(one.path, name)}
        chosen |= {name: bound[name]} if name in bound else {}
    return [chosen[path] for path in sorted(chosen)]


@dataclass(frozen=True, slots=True)
class _Task:
    """An object to be stored anew, the full encoding behind it, and the element of that which faces its first."""

    location: Location
    base: Location
    start: int


class _Work:
    """Rounds of looking for long chains and storing their first objects anew."""

    def __init__(
        self, store: Store, names: Sequence[str], core_share: float, progress: Callable[[int, int], None]
    ) -> None:
        self._store = store
        self._names = names
        self._threads = max(1, int(usable_cores() * core_share))
        self._progress = progress
        self._tried: set[ObjectId] = set()
        """Objects that were stored anew once, or cannot be."""
        self._done = self._total = 0
        self.report = OptimizeReport()

    def look(self) -> list[_Task]:
        """What is to be stored anew in this round: as much as there is room for."""
        survey = Survey(self._store)
        names = survey.mark()
        self.report.snapshots = newest_of_lines(names, self._names)
        needed = Needed()
        for version in self.report.snapshots:
            needed.add_version(self._store, version)
        table = survey.footers.table()
        found, links = _deep(table, survey.choose(table), needed.data)
        if not self._tried:
            self.report.links = links
        tasks = [task for task in found if task.location.object_id not in self._tried]
        self._total = self._done + sum(task.location.raw_length for task in tasks)
        if not self._tried:
            self.report.objects = len(tasks)
        return self._affordable(tasks)

    def older(self) -> list[Version]:
        """The versions that are optimized but for the newest: no links are counted there."""
        newest = {(one.path, one.number) for one in newest_of_lines(self._store.names(), self._names)}
        versions = () if self._names else self._store.names().all_versions()
        return [one for one in versions if (one.path, one.number) not in newest]

    def encode_plain(self) -> Tightened:
        """Encode what was stored plain, the newest snapshots last."""
        done = Tightened()
        with ThreadPoolExecutor(self._threads, "optimize") as pool:
            for versions, effort in (
                (self.older(), QUICK),
                (newest_of_lines(self._store.names(), self._names), NEAR),
            ):
                one = tighten(self._store, partial(plain_objects, self._store, versions), pool, effort)
                done.objects += one.objects
                done.bytes += one.bytes
        return done

    def _affordable(self, tasks: list[_Task]) -> list[_Task]:
        """As many as copies may take room before anything that they replace is deleted; one at least."""
        disk = os.statvfs(self._store.path)
        room = min(limits.REPACK_BYTES, disk.f_bavail * disk.f_frsize // 2)
        lengths = np.cumsum([task.location.raw_length for task in tasks])
        return tasks[: max(1, int((lengths <= room).sum()))]

    def store_anew(self, tasks: Sequence[_Task]) -> None:
        """Write and prove the copies; with what cannot be read a problem is noted. Raises CorruptError for a copy that
        does not read back."""
        if not self._tried:
            self.report.objects = 0
        written: list[Location] = []
        writer = PackWriter(self._store.backend, self._store.index.add_pack)
        try:
            for task, outcome in self._encode_all(writer, tasks):
                self._tried.add(task.location.object_id)
                if isinstance(outcome, Location):
                    written.append(outcome)
                    self.report.objects += 1
                    self.report.bytes += outcome.encoded_length + OBJECT_OVERHEAD
                else:
                    self.report.problems.append(str(outcome))
                self._done += task.location.raw_length
                self._progress(self._done, self._total)
            writer.flush()
        finally:
            writer.abort()
        for copy in audit_all(written, self._store.packs, self._store.objects):
            if copy.error is not None:
                raise CorruptError(f"what was stored anew does not read back, so nothing is deleted: {copy.error}")

    def _encode_all(
        self, writer: PackWriter, tasks: Sequence[_Task]
    ) -> Iterable[tuple[_Task, Location | CorruptError]]:
        """Each task with where it is stored now, or why it is not. Holds about `limits.INGEST_BYTES` in memory."""
        working: deque[tuple[_Task, Future[Location | CorruptError]]] = deque()
        in_work = 0
        pool = ThreadPoolExecutor(self._threads, "optimize")
        try:
            for task in tasks:
                cost = _COST * task.location.raw_length
                while working and in_work + cost > limits.INGEST_BYTES:
                    done, future = working.popleft()
                    in_work -= _COST * done.location.raw_length
                    yield done, future.result()
                working.append((task, submit(pool, self._encode, writer, task)))
                in_work += cost
            while working:
                done, future = working.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _encode(self, writer: PackWriter, task: _Task) -> Location | CorruptError:
        old = task.location
        try:
            raw = self._load(old)
            base = self._load(task.base)
        except CorruptError as error:
            return CorruptError(f"left as it is, since it cannot be read: {error}")
        offered = [Base(base, task.base.dtype, task.start)] if can_predict(old.dtype, task.base.dtype) else []
        encoding = encode(raw, old.dtype, offered)
        delta = encoding.base is not None
        return writer.add(
            encoding.data,
            object_id=old.object_id,
            kind=old.kind,
            raw_length=old.raw_length,
            dtype=old.dtype,
            depth=int(delta),
            base=task.base.object_id if delta else NO_ID,
            base_start=task.start if delta else 0,
            label=old.label,
            sketch=old.sketch,
            generation=old.generation if delta else 0,
        )

    def _load(self, location: Location) -> bytes:
        raw = self._store.objects.load(location.object_id, Kind.DATA)
        if object_id(Kind.DATA, raw) != location.object_id:
            raise CorruptError(f"{location}: its bytes do not have its id")
        return raw


def _deep(table: PackTable, choice: Choice, ids: Iterable[ObjectId]) -> tuple[list[_Task], int]:
    """The objects of `ids` with more than `LINKS` links behind them, in the order of their packs, and the most links
    of any. What has no chain to its end is left out: `verify` tells of it. So is what ends in the base store of a
    private one, which is none of ours to count."""
    bases = table.base_numbers(choice.rows)
    behind = np.where(bases >= 0, bases, np.arange(len(bases)))
    starts = np.where(bases >= 0, table.entries["base_start"][choice.rows].astype(np.int64), 0)
    depths = np.zeros(len(bases), np.int64)
    roots, sums = np.arange(len(bases)), np.zeros(len(bases), np.int64)
    for _ in range(limits.CHAIN_READ_DEPTH):
        sums += starts[roots]
        depths += bases[roots] >= 0
        roots = behind[roots]
    # What hangs on an object of a base store cannot be brought nearer to it here.
    wanted = table.flags(ids) & choice.resolved & (table.depths_elsewhere(choice.rows)[roots] == 0)
    numbers: Rows = np.flatnonzero(wanted & (depths > LINKS))
    rows = choice.rows[numbers]
    order = np.lexsort((table.entries["offset"][rows], table.pack[rows]))
    tasks = [
        _Task(table.location(int(row)), table.location(int(choice.rows[roots[number]])), int(sums[number]))
        for number, row in zip(numbers[order].tolist(), rows[order].tolist(), strict=True)
    ]
    tasks = [task for task in tasks if task.base.base == NO_ID]
    return tasks, int(depths[wanted].max(initial=0))


def _added(before: GcReport | None, report: GcReport) -> GcReport:
    """The reports of two runs of gc as one: what the last one waits for counts."""
    if before is not None:
        for name in ("deleted_packs", "deleted_bytes", "copied_bytes", "rebased_objects", "rebased_bytes", "leftovers"):
            setattr(report, name, getattr(report, name) + getattr(before, name))
    return report
