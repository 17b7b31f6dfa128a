"""The log: which snapshot each path leads to, as numbered records that are created exclusively and never change.

Rules that keep it whole: a record is created only when all records before it are durable, and every pack that was
published before it as well, so after a crash the log has no gap and refers to nothing that is lost. A checkpoint
record holds the whole state, so opening reads the newest checkpoint that is whole and the records after it.

A damaged or missing record is reported and named by `Names.damaged`: what the others say can still be read, and
nothing can be appended. A damaged checkpoint costs nothing while an earlier one, or all records from the first, are
there.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    MoonclipError,
    NotFoundError,
    UsageError,
)
from moonclipfs.store.backend import Backend
from moonclipfs.store.packs import pack_of_key
from moonclipfs.store.paths import check_path
from moonclipfs.store.records import decode_record, encode_record, record_name, record_sequence, record_type
from moonclipfs.store.replay import State, is_at_or_below
from moonclipfs.types import ObjectId, Version

log = logging.getLogger(__name__)

_RELOADS = 10
_SPEC = re.compile(r"(.+)@(\d{1,18})", re.DOTALL)


def parse_spec(text: str) -> tuple[str, int | None]:
    """Split `NAME@NUMBER` into name and version number; the number is None when there is none.

    A name that itself ends in `@` and digits is written with its version behind.
    """
    match = _SPEC.fullmatch(text)
    return (match[1], int(match[2])) if match else (text, None)


class Names:
    """The names after log record `sequence`; never changes.

    `damaged` has a line for each record that is missing or damaged: what it said is not in these names.
    """

    def __init__(self, state: State, damaged: tuple[str, ...] = ()) -> None:
        self._state = state
        self.damaged = damaged

    @property
    def sequence(self) -> int:
        """Number of the last log record that these names take in."""
        return self._state.sequence

    def bound(self) -> Mapping[str, Version]:
        """The current version of each bound path."""
        return self._bound

    @cached_property
    def _bound(self) -> Mapping[str, Version]:
        newest = (versions[-1] for versions in self._state.versions.values())
        return MappingProxyType({version.path: version for version in newest if not version.removed})

    def versions(self, path: str) -> tuple[Version, ...]:
        """All kept versions of a path, the oldest first, removed ones too."""
        return self._state.versions.get(path, ())

    def all_versions(self) -> Iterator[Version]:
        """All kept versions of all paths, removed ones too."""
        for versions in self._state.versions.values():
            yield from versions

    def highest(self, path: str) -> int:
        """The last version number that a path ever used, 0 for none."""
        return self._state.highest.get(path, 0)

    def pins(self) -> Mapping[tuple[str, int], tuple[str, ...]]:
        """Why versions, by path and number, are never forgotten: see `pins.py`."""
        return MappingProxyType(self._state.pins)

    def condemned(self) -> Mapping[str, int]:
        """Packs that gc is about to delete, and the log record that says so."""
        return MappingProxyType(self._state.condemned)


class Log:
    """Reads and appends log records. Thread-safe; any number of processes may append at the same time."""

    def __init__(self, backend: Backend) -> None:
        """Nothing is read yet."""
        self._backend = backend
        self._names = Names(State())
        self._swap = threading.Lock()
        self._appending = threading.Lock()
        self._durable = 0

    @property
    def names(self) -> Names:
        """The names as last seen; no I/O. Empty before the first `refresh`."""
        return self._names

    def refresh(self) -> Names:
        """Read what is new and return the names. Raises BackendError; damage is told by `Names.damaged`."""
        names = self._read_on(self._names) if self._names.sequence else self._load()
        with self._swap:
            if names.sequence > self._names.sequence:
                self._names = names
            return self._names

    def append(self, type_: str, body: Callable[[Names], Mapping[str, object]]) -> int:
        """Append one record and return its number.

        `body` makes its content from the newest names; it is called again each time another process was faster, and
        may raise to give up. Raises CorruptError when the log is damaged, BusyError when others are always faster,
        NoSpaceError, BackendError; after any of these but CorruptError and BusyError the record may still be there.
        """
        return self._append(type_, body).sequence

    def bind(
        self,
        path: str,
        root: ObjectId,
        metadata: Mapping[str, object],
        *,
        check: Callable[[Names], None] | None = None,
    ) -> Version:
        """Make `root` the next version of `path`. `check` sees the names that the record will follow, each time
        that it is tried, and may raise, or publish what is missing. Its objects must be in published packs.
        """
        check_path(path)

        def body(names: Names) -> Mapping[str, object]:
            if check is not None:
                check(names)
            # Objects may lie in packs that another process has named, but not made durable yet.
            self._backend.settle("packs/")
            number, now = names.highest(path) + 1, time.time_ns()
            return {"path": path, "number": number, "root": root.hex(), "time_ns": now, "metadata": metadata}

        return self._append("bind", body).versions(path)[-1]

    def unbind(self, paths: Sequence[str]) -> int:
        """Remove bound paths; their versions are kept as removed. Raises NotFoundError for one that is not bound."""

        def body(names: Names) -> Mapping[str, object]:
            for path in paths:
                _require_bound(names, path)
            return {"paths": list(dict.fromkeys(paths)), "time_ns": time.time_ns()}

        return self.append("unbind", body)

    def move(self, old: str, new: str) -> int:
        """Call `old`, and everything bound below it, `new` from now on; kept versions of bound paths go along.

        They keep their numbers unless `new` has used these before. Raises NotFoundError when nothing is there,
        ExistsError when something is bound at or below `new`, UsageError when `new` lies below `old`.
        """
        check_path(new)
        if is_at_or_below(new, old):
            raise UsageError(f"cannot move {old!r} to {new!r}: that is itself, or below it")

        def body(names: Names) -> Mapping[str, object]:
            for path in names.bound():
                if is_at_or_below(path, new):
                    raise ExistsError(f"cannot move {old!r} to {new!r}: {path!r} is there already")
            versions = names._state.moves(old, new)
            if not versions:
                raise NotFoundError(f"cannot move {old!r}: no snapshot is there or below it")
            for _, _, path, _ in versions:
                check_path(path)
            return {"old": old, "new": new, "versions": versions}

        return self.append("move", body)

    def forget(self, versions: Sequence[tuple[str, int]]) -> int:
        """Drop versions for good. A path whose current version is dropped is unbound; its other versions are kept
        as removed. Raises NotFoundError for a version that is not kept, UsageError for one that is pinned.
        """

        def body(names: Names) -> Mapping[str, object]:
            for path, number in versions:
                if number not in [version.number for version in names.versions(path)]:
                    raise NotFoundError(f"{path!r} has no version {number}")
                if (path, number) in names.pins():
                    raise UsageError(f"{path}@{number} is pinned: unpin it before it is forgotten")
            return {"versions": list(dict.fromkeys(versions)), "time_ns": time.time_ns()}

        return self.append("forget", body)

    def condemn(self, packs: Sequence[str]) -> int:
        """Announce that packs are going to be deleted."""
        return self.append("condemn", lambda names: {"packs": sorted(set(packs))})

    def settle(self, names: Names) -> None:
        """Make the records that `names` take in durable, also those that others have not finished making so: before
        anything is deleted because of what they say. Raises BackendError.
        """
        if names.sequence > self._durable:
            self._backend.settle("log/")
            self._durable = names.sequence

    def trim(self) -> int:
        """Delete the records before the last two whole checkpoints, oldest first. Returns how many."""
        checkpoints = 0
        numbers = self._numbers()
        for index in range(len(numbers) - 1, -1, -1):
            try:
                record = self._read(numbers[index])
            except (CorruptError, NotFoundError):
                continue
            checkpoints += record["type"] == "checkpoint"
            if checkpoints == 2:  # this one is durable: another was created after it
                for number in numbers[:index]:
                    self._backend.delete(record_name(number))
                return index
        return 0

    # Reading

    def _numbers(self) -> list[int]:
        numbers = (record_sequence(info.key) for info in self._backend.list("log/"))
        return sorted(number for number in numbers if number)

    def _read(self, sequence: int) -> dict[str, Any]:
        """Raises NotFoundError, or CorruptError: of the class `_DamagedCheckpoint` when that is what it is."""
        key = record_name(sequence)
        value = self._backend.open(key)
        size = value.size()
        if size > limits.LOG_RECORD_BYTES:
            raise CorruptError(f"log record {sequence}: {size} bytes, longer than {limits.LOG_RECORD_BYTES}")
        data = value.read(0, size)
        try:
            return decode_record(data, sequence)
        except CorruptError as error:
            kind = _DamagedCheckpoint if record_type(data) == "checkpoint" else CorruptError
            raise kind(f"{self._backend.path(key)}: {error}") from error

    def _read_on(self, names: Names) -> Names:
        """Take in the records after `names`. Looks for the next number, not into a listing, which may miss one."""
        state, damaged = None, list(names.damaged)
        sequence = names.sequence
        while True:
            sequence += 1
            try:
                record = self._read(sequence)
            except NotFoundError:
                break
            except CorruptError as error:
                record = None
                _report(error, damaged)
            state = state or names._state.copy()
            _apply(state, sequence, record, damaged)
        if state is not None:
            return Names(state, tuple(damaged))
        try:
            self._backend.size(record_name(names.sequence))
        except NotFoundError:
            return self._load()  # old records were trimmed, and newer ones with them, while we looked away
        return names

    def _load(self) -> Names:
        for _ in range(_RELOADS):
            names = self._load_listed(self._numbers())
            if names is not None:
                return self._read_on(names) if names.sequence else names
        raise BusyError("the log changes faster than it can be read")

    def _load_listed(self, numbers: list[int]) -> Names | None:
        """The names of the records listed, or None when records were trimmed meanwhile."""
        damaged: list[str] = []
        tail: list[tuple[int, dict[str, Any] | None]] = []
        first, last = (numbers[0], numbers[-1]) if numbers else (1, 0)
        for sequence in range(last, first - 1, -1):
            record: dict[str, Any] | None = None
            try:
                record = self._read(sequence)
            except NotFoundError as error:
                if sequence in numbers:
                    return None
                _report(CorruptError(f"log record {sequence} is missing: {error}"), damaged)
            except CorruptError as error:
                _report(error, damaged)
            tail.append((sequence, record))
            if record is not None and record["type"] == "checkpoint":
                break
        else:
            if first > 1:
                _report(CorruptError(f"log records 1 to {first - 1} are missing, without a whole checkpoint"), damaged)
        state = State()
        for sequence, record in reversed(tail):
            _apply(state, sequence, record, damaged)
        return Names(state, tuple(damaged))

    # Appending

    def _append(self, type_: str, body: Callable[[Names], Mapping[str, object]]) -> Names:
        with self._appending:
            for attempt in range(limits.COMMIT_ATTEMPTS):
                names = self.refresh()
                if names.damaged:
                    raise CorruptError(f"{names.damaged[0]}: restore it from a copy before you change this store")
                content = body(names)
                try:
                    names = self._create(names, type_, content)
                except ExistsError:
                    if self.refresh().sequence == names.sequence:
                        # A record without bytes: its maker is about to fill it, or died and leaves it to the next.
                        time.sleep(random.uniform(0, min(0.05, 0.001 * 2 ** min(attempt, 6))))
                    continue
                if names.sequence - names._state.checkpoint >= limits.LOG_CHECKPOINT_EVERY:
                    self._append_checkpoint(names)
                return names
        raise BusyError(f"gave up after {limits.COMMIT_ATTEMPTS} attempts to append to the log: others are faster")

    def _create(self, names: Names, type_: str, body: Mapping[str, object]) -> Names:
        """Create the record after `names`. Raises ExistsError when another process did."""
        sequence = names.sequence + 1
        data = encode_record(sequence, type_, body)
        # Else a crash might keep our record and lose one before it.
        self.settle(names)
        self._backend.create(record_name(sequence), data)
        self._durable = sequence
        state = names._state.copy()
        state.apply(decode_record(data, sequence))
        appended = Names(state)
        with self._swap:
            if sequence > self._names.sequence:
                self._names = appended
        return appended

    def _append_checkpoint(self, names: Names) -> None:
        try:
            packs = [pack for info in self._backend.list("packs/") if (pack := pack_of_key(info.key))]
            # A pack whose deletion is not durable may come back after a crash: then it must still be condemned.
            self._backend.settle("packs/")
            self._create(names, "checkpoint", names._state.to_checkpoint(packs))
        except ExistsError:
            return  # another process went on: the next record that is appended brings a checkpoint
        except MoonclipError as error:
            log.warning("cannot write a checkpoint of the log (%s): opening the store takes longer meanwhile", error)


class _DamagedCheckpoint(CorruptError):
    """A checkpoint that does not pass its digest: the records before it say the same."""


def _report(error: CorruptError, damaged: list[str]) -> None:
    if isinstance(error, _DamagedCheckpoint):
        log.warning("%s; an earlier checkpoint is used", error)
    else:
        log.error("%s; what it says is left out", error)
        damaged.append(str(error))


def _apply(state: State, sequence: int, record: dict[str, Any] | None, damaged: list[str]) -> None:
    state.sequence = sequence
    if record is not None:
        try:
            state.apply(record)
        except CorruptError as error:
            _report(error, damaged)


def _require_bound(names: Names, path: str) -> None:
    if path not in names.bound():
        raise NotFoundError(f"no snapshot {path!r}")
