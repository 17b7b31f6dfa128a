"""Several processes that save one snapshot together: what they tell each other, through the store alone.

Each leaves notes in `tmp/`, whose names begin with that of its lease, so that they count for as long as it lives and
are cleared away with what else the dead leave there. All belong to one attempt, a name that rank 0 makes up:

    LEASE.GROUP.meet            rank 0: here is the attempt of this group
    LEASE.ATTEMPT.here.R        rank R takes part
    LEASE.ATTEMPT.list.N.R      in save N it is about to store these new objects
    LEASE.ATTEMPT.part.N.R      it has stored its part, or could not
    LEASE.ATTEMPT.fail.N        rank 0: there is no snapshot, and why

That there is one, the log tells. A note is msgpack, written once, and never empty.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError, NotFoundError, RanksError
from moonclipfs.store.leases import live_leases
from moonclipfs.store.store import Store
from moonclipfs.types import ObjectId, Version

log = logging.getLogger(__name__)

T = TypeVar("T")
ATTEMPT = "attempt"
"""Key, in what the log says of a version, of the attempt and the save that made it."""


@dataclass(frozen=True, slots=True)
class Note:
    """One note: the lease of its writer, and the rest of its name."""

    lease: str
    what: str

    @property
    def key(self) -> str:
        """Its key in the store."""
        return f"tmp/{self.lease}.{self.what}"


class Group:
    """This process's seat among the ranks that save into one store. One thread uses it at a time."""

    def __init__(self, store: Store, group: str, rank: int, size: int, wait_seconds: float, attempt: str = "") -> None:
        """`group` is the same for all ranks, letters and digits, and `attempt` where they have agreed on it elsewhere.

        Raises RanksError when rank 0 does not come, or is one of another number of ranks.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._wait = wait_seconds
        self._mine: dict[str, Note] = {}
        self._leases: dict[int, str] = {}
        self._looked = 0.0
        self.attempt = attempt or secrets.token_hex(8)
        if not attempt:
            meet = f"{group}.meet"
            if rank == 0:
                self._write(meet, {"attempt": self.attempt})
            else:
                self.attempt = str(self._await(lambda: self._met(meet), "has not begun", (0,))["attempt"])
        self._write(self._named("here", rank), {"size": size})

    def name_of(self, number: int) -> str:
        """What the log calls save `number` of this attempt."""
        return f"{self.attempt}.{number}"

    # Every rank

    def tell_list(self, number: int, objects: Collection[ObjectId]) -> None:
        """Tell the others which objects this rank is about to store."""
        self._write(self._named("list", number, self.rank), {"objects": b"".join(objects)})

    def others_store(self, number: int, objects: Collection[ObjectId]) -> set[ObjectId]:
        """Those of `objects` that another rank stores. Waits a little for the others; nothing is left to one who did
        not say by then that it stores it, so each is stored by somebody, and by one alone if all are in time.
        """
        missing = {rank for rank in range(self.size) if rank != self.rank}
        found: set[ObjectId] = set()
        deadline = time.monotonic() + min(limits.RANKS_LIST_SECONDS, self._wait)
        pause = _Pause()
        while objects and missing and time.monotonic() < deadline:
            notes = self._notes()
            for rank in sorted(missing):
                note = notes.get(self._named("list", number, rank))
                if note is not None and (body := self._read(note)) is not None:
                    missing.discard(rank)
                    theirs = _ids(body["objects"])
                    found |= {one for one in objects if one in theirs and self._first(one, rank)}
                elif self._named("part", number, rank) in notes:
                    missing.discard(rank)  # it could not take part
            if missing:
                pause.rest()
        return found

    def hand_in(self, number: int, body: Mapping[str, Any]) -> None:
        """Tell rank 0 of this rank's part, which is stored."""
        self._write(self._named("part", number, self.rank), body)

    def cannot(self, number: int, error: BaseException) -> None:
        """Tell the others that this rank has no part, and why: nobody waits for it then."""
        body = {"failed": str(error) or repr(error)}
        with suppress(MoonclipError):  # it is `error` that the caller has to hear of
            self._write(self._named("fail", number) if self.rank == 0 else self._named("part", number, self.rank), body)

    def await_version(self, number: int, path: str) -> Version:
        """Return the version that rank 0 made of save `number`. Raises RanksError, which says why there is none."""

        def look() -> Version | None:
            for version in self._store.log.refresh().versions(path):
                about = version.metadata.get("manager")
                if isinstance(about, Mapping) and about.get(ATTEMPT) == self.name_of(number):
                    return version
            note = self._notes().get(self._named("fail", number))
            body = None if note is None else self._read(note)
            if body is not None:
                raise RanksError(f"there is no snapshot {path}: {body['failed']}")
            return None

        # Rank 0 is to give up first, since it knows who is missing.
        return self._await(look, f"has not made the snapshot {path}", (0,), 2 * self._wait)

    def forget(self, number: int) -> None:
        """Take back this rank's notes of a save that is over."""
        for what in (self._named("list", number, self.rank), self._named("part", number, self.rank)):
            self._erase(what)

    def close(self) -> None:
        """Leave: take all notes back."""
        for what in list(self._mine):
            self._erase(what)

    # Rank 0

    def gather(self, number: int, path: str) -> list[dict[str, Any]]:
        """The parts of all other ranks, in their order. Each of them lived when all parts were there.

        Raises RanksError that names the ranks which did not bring theirs.
        """
        others = range(1, self.size)
        wanted = {rank: self._named("part", number, rank) for rank in others}

        def look() -> dict[int, Note] | None:
            notes = self._notes()
            found = {rank: notes[what] for rank, what in wanted.items() if what in notes}
            for rank, note in found.items():
                self._leases[rank] = note.lease
            self._missing = [rank for rank in others if rank not in found]
            return None if self._missing else found

        found = self._await(look, "has not brought its part", others)
        self._check_alive(others)
        parts = []
        for rank in others:
            body = self._read(found[rank])
            if body is None:
                raise RanksError(f"rank {rank} of {self.size} took back its part of {path}")
            if "failed" in body:
                raise RanksError(f"rank {rank} of {self.size} could not save its part: {body['failed']}")
            if body["path"] != path:
                raise RanksError(
                    f"rank {rank} of {self.size} saves {body['path']}, and rank 0 {path}: all ranks have to make the "
                    "same saves in the same order"
                )
            parts.append(body)
        return parts

    # Waiting

    _missing: list[int]

    def _await(self, look: Callable[[], T | None], what: str, ranks: Collection[int], seconds: float = 0.0) -> T:
        """Return what `look` finds. Raises RanksError when a rank that it is to come from is dead, or time is up."""
        self._missing = list(ranks)
        seconds = seconds or self._wait
        deadline = time.monotonic() + seconds
        pause = _Pause()
        while True:
            found = look()
            if found is not None:
                return found
            now = time.monotonic()
            if now - self._looked > limits.RANKS_LOOK_SECONDS:
                self._looked = now
                dead = self._dead(self._missing)
                if dead and (found := look()) is not None:
                    return found  # it came, and its rank has ended since
                self._raise_dead(dead)
            if now > deadline:
                named = ", ".join(map(str, self._missing))
                raise RanksError(
                    f"rank {named} of {self.size} {what} within {seconds:g} seconds: it may have ended, or hang, or "
                    "be one that does not save; every rank has to make each save"
                )
            pause.rest()

    def _check_alive(self, ranks: Collection[int]) -> None:
        self._raise_dead(self._dead(ranks))

    def _raise_dead(self, dead: list[int]) -> None:
        if dead:
            raise RanksError(
                f"rank {', '.join(map(str, dead))} of {self.size} ended before the snapshot was whole; start all ranks "
                "again"
            )

    def _dead(self, ranks: Collection[int]) -> list[int]:
        """Those of some ranks that took part in this attempt, and do not live any more."""
        for what, note in self._notes().items():
            kind, _, rank = what.removeprefix(self.attempt + ".").partition(".")
            if kind == "here" and rank.isdecimal():
                self._check_size(int(rank), note)
        alive = {lease.name for lease in live_leases(self._store.path)}
        return [rank for rank in ranks if rank in self._leases and self._leases[rank] not in alive]

    def _check_size(self, rank: int, note: Note) -> None:
        if self._leases.get(rank) == note.lease:
            return
        self._leases.setdefault(rank, note.lease)
        body = self._read(note)
        if body is not None and body["size"] != self.size:
            raise RanksError(
                f"rank {rank} says that there are {body['size']} ranks, and rank {self.rank} that there are {self.size}"
            )

    def _met(self, meet: str) -> dict[str, Any] | None:
        """The note of a rank 0 that lives: others are of attempts that are over. Of several the newest: the wrong one
        would have us wait in vain, no more.
        """
        infos = [info for info in self._store.backend.list("tmp/") if info.key.endswith("." + meet)]
        alive = {lease.name for lease in live_leases(self._store.path)} if infos else set()
        for info in sorted(infos, key=lambda info: info.modified_ns, reverse=True):
            note = _note(info.key)
            if note.lease in alive:
                return self._read(note)
        return None

    # Notes

    def _named(self, kind: str, *numbers: int) -> str:
        return ".".join((self.attempt, kind, *map(str, numbers)))

    def _first(self, object_id: ObjectId, other: int) -> bool:
        """Whether another rank comes before this one for an object that both bring; another one for each object."""
        start = int.from_bytes(object_id[:4], "little")
        return (other - start) % self.size < (self.rank - start) % self.size

    def _notes(self) -> dict[str, Note]:
        """The notes of this attempt by name."""
        start = self.attempt + "."
        infos = self._store.backend.list("tmp/")
        return {note.what: note for info in infos if (note := _note(info.key)).what.startswith(start)}

    def _write(self, what: str, body: Mapping[str, Any]) -> None:
        assert self._store.lease is not None
        note = Note(self._store.lease.name, what)
        self._store.backend.create(note.key, msgpack.packb(dict(body)))
        self._mine[what] = note

    def _read(self, note: Note) -> dict[str, Any] | None:
        """What a note says; None when it is gone."""
        try:
            data = self._store.backend.read(note.key, 0, limits.RANK_NOTE_BYTES)
        except NotFoundError:
            return None
        try:
            body = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise CorruptError(f"{self._store.backend.path(note.key)} is no note of a rank ({error!r})") from error
        return dict(body)

    def _erase(self, what: str) -> None:
        note = self._mine.pop(what, None)
        if note is not None:
            self._store.backend.delete(note.key)


class _Pause:
    """Rests between two looks, longer and longer."""

    def __init__(self) -> None:
        self._seconds = 0.002

    def rest(self) -> None:
        time.sleep(self._seconds)
        self._seconds = min(limits.RANKS_POLL_SECONDS, self._seconds * 1.5)


def _note(key: str) -> Note:
    lease, _, what = key.removeprefix("tmp/").partition(".")
    return Note(lease, what)


def _ids(joined: bytes) -> frozenset[ObjectId]:
    return frozenset(joined[at : at + 32] for at in range(0, len(joined), 32))
