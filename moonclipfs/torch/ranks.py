"""Saves of several ranks: each stores its part side by side, and rank 0 makes one snapshot of them.

What all ranks brought alike (a model that is replicated) stands in the snapshot once, as a single process would have
saved it. The rest is each rank's own, in `rank-00000/`, `rank-00001/` and so on, under the same names.

    run/step-000500/model.safetensors, state.json
    run/step-000500/rank-00001/optimizer.safetensors, state.json
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moonclipfs.errors import CorruptError, RanksError
from moonclipfs.store import ranks as notes
from moonclipfs.store.census import new_objects
from moonclipfs.store.store import Store
from moonclipfs.torch.parts import STATE_FILE
from moonclipfs.torch.place import Place
from moonclipfs.torch.saving import Job, Published, Writing, files_of, ingesting
from moonclipfs.torch.topology import agreed, group_name, wait_seconds
from moonclipfs.types import BytesSource, Entry, Kind, ObjectId

RANKED = "ranked"
"""Key of a snapshot's `state.json`: the parts that are each rank's own."""
WORLD_SIZE = "world_size"


def directory_of(rank: int) -> str:
    """Where a rank's own files are in a snapshot."""
    return f"rank-{rank:05}"


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank brought: the recipe and the size of each of its files, and its `state.json`."""

    files: dict[str, tuple[ObjectId, int]]
    state: dict[str, Any]

    def files_of(self, part: str) -> dict[str, tuple[ObjectId, int]]:
        """The files of a part of the state, its index too."""
        names = [*self.state["parts"][part]["files"], f"{part}.safetensors.index.json"]
        return {name: self.files[name] for name in names if name in self.files}

    def to_note(self, path: str) -> dict[str, Any]:
        """The body of the note that tells rank 0."""
        files = [[name, recipe, size] for name, (recipe, size) in self.files.items()]
        return {"path": path, "files": files, "state": json.dumps(self.state)}

    @classmethod
    def from_note(cls, body: Mapping[str, Any]) -> RankPart:
        """What a note tells. Raises CorruptError."""
        try:
            files = {str(name): (bytes(recipe), int(size)) for name, recipe, size in body["files"]}
            return cls(files, dict(json.loads(body["state"])))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"the part of a rank is not understood ({error!r})") from error


class Ranks:
    """This process's share in the saves of one run. One thread uses it at a time."""

    def __init__(self, place: Place, run: str, size: int, rank: int) -> None:
        """Nothing is looked for yet. Raises UsageError for a bad number of seconds to wait."""
        self.size = size
        self.rank = rank
        self._place = place
        self._name = group_name(run)
        self._wait = wait_seconds()
        self._group: notes.Group | None = None
        self._number = 0
        self._taken_up = True

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around all that comes before a save is stored: when it fails, the others do not wait for this rank."""
        self._number += 1
        self._taken_up = False
        try:
            self._join()
            yield
        except BaseException as error:
            if not self._taken_up and self._group is not None:
                self._group.cannot(self._number, error)
            raise

    def take_up(self) -> int:
        """The number of the save that is prepared. From here on `store_job` tells the others when it fails."""
        self._taken_up = True
        return self._number

    def about(self) -> dict[str, Any]:
        """What the log is to say of the save that is prepared."""
        return {notes.ATTEMPT: self._joined().name_of(self._number), WORLD_SIZE: self.size}

    def _join(self) -> None:
        """Meet the others, at the first save."""
        if self._group is None:
            if self.rank:
                self._place.await_store(self._wait)
            store = self._place.for_saving()
            attempt = agreed(secrets.token_hex(8), self.size, self.rank)
            self._group = notes.Group(store, self._name, self.rank, self.size, self._wait, attempt)

    def _joined(self) -> notes.Group:
        assert self._group is not None
        return self._group

    def store_job(self, number: int, store: Store, job: Job, pool: Executor, most_bytes: int) -> Published:
        """Store this rank's part of a save; the snapshot is there, and durable, when this returns.

        Raises RanksError, which says which rank did not bring its part, and whatever storing raises: there is no
        snapshot then.
        """
        group = self._joined()
        try:
            return _Save(store, job, group, number, pool, most_bytes).run()
        except BaseException as error:
            # Who waits for rank 0 in vain has nothing to tell it.
            if self.rank == 0 or not isinstance(error, RanksError):
                group.cannot(number, error)
            raise

    def close(self) -> None:
        """Take back what was left for the others."""
        if self._group is not None:
            self._group.close()


class _Save:
    """One save of this rank."""

    def __init__(
        self, store: Store, job: Job, group: notes.Group, number: int, pool: Executor, most_bytes: int
    ) -> None:
        self._store = store
        self._job = job
        self._group = group
        self._number = number
        self._pool = pool
        self._most_bytes = most_bytes

    def run(self) -> Published:
        files, plain = files_of(self._job, self._most_bytes)
        state = json.loads(plain.pop(STATE_FILE))
        group, number, job = self._group, self._number, self._job
        with ingesting(self._store, job, self._pool) as ingest:
            # Its hold keeps what it stores until the snapshot is there, or is known not to come.
            writing = Writing(self._store, ingest, job, directory_of(group.rank))
            try:
                self._share_out(writing, files, plain)
                entries = writing.put(files, plain)
                ingest.hand_over()
                mine = RankPart({entry.name.decode(): (entry.child, entry.size) for entry in entries}, state)
                recipes = {name: mine.files[name][0] for name in files}
                if group.rank == 0:
                    return writing.publish(self._assembled(writing, mine), recipes)
                group.hand_in(number, mine.to_note(job.path))
                version = group.await_version(number, job.path)
                return Published(version, ingest.stats.stored_bytes, recipes)
            finally:
                group.forget(number)

    def _share_out(self, writing: Writing, files: Mapping[str, Any], plain: Mapping[str, bytes]) -> None:
        """Leave to other ranks what they store as well."""
        sources = [(file, writing.kept(name, file)) for name, file in files.items()]
        new = new_objects(self._store, [*sources, *((BytesSource(one), None) for one in plain.values())], self._pool)
        self._group.tell_list(self._number, new)
        writing.ingest.leave_out(self._group.others_store(self._number, new))

    def _assembled(self, writing: Writing, mine: RankPart) -> list[Entry]:
        """On rank 0: the entries of the snapshot, of the parts of all ranks."""
        told = self._group.gather(self._number, self._job.path)
        ranks = [mine, *map(RankPart.from_note, told)]
        recipes = {recipe for one in ranks for recipe, _ in one.files.values()}
        writing.ingest.take_over((Kind.RECIPE, recipe) for recipe in recipes)
        return _entries(writing, ranks)


def _entries(writing: Writing, ranks: Sequence[RankPart]) -> list[Entry]:
    first = ranks[0]
    common = [part for part in first.state["parts"] if all(_is_same(one, first, part) for one in ranks[1:])]
    ranked = sorted({part for one in ranks for part in one.state["parts"]} - set(common))
    of_parts = {name for one in ranks for part in one.state["parts"] for name in one.files_of(part)}
    top = {name for name in first.files if name not in of_parts}
    for part in common:
        top |= first.files_of(part).keys()
    whole = {**_state_of(first.state, common), WORLD_SIZE: len(ranks), RANKED: ranked}
    entries = [writing.entry(name, *first.files[name]) for name in sorted(top)]
    entries += writing.put({}, {STATE_FILE: encoded(whole)})
    for rank, one in enumerate(ranks):
        own = [part for part in one.state["parts"] if part not in common]
        theirs = {name: file for name, file in one.files.items() if name not in top or file != first.files[name]}
        if not ranked and not theirs:
            continue
        below = [writing.entry(name, *file) for name, file in theirs.items()]
        below += writing.put({}, {STATE_FILE: encoded({**_state_of(one.state, own), WORLD_SIZE: len(ranks)})})
        entries.append(writing.directory(directory_of(rank), below))
    return entries


def _is_same(one: RankPart, other: RankPart, part: str) -> bool:
    """Whether two ranks brought the same of a part: structure and bytes."""
    return (
        part in one.state["parts"]
        and one.state["parts"][part] == other.state["parts"][part]
        and one.files_of(part) == other.files_of(part)
        and _groups(one.state, [part]) == _groups(other.state, [part])
    )


def _state_of(state: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """A `state.json` of some of the parts alone."""
    return {**state, "parts": {part: state["parts"][part] for part in parts}, "shared": _groups(state, parts)}


def _groups(state: Mapping[str, Any], parts: Sequence[str]) -> list[Any]:
    """The tensors that share memory within some parts, the same on all ranks: the order of addresses is not."""
    return sorted((one for one in state["shared"] if {str(member[0]) for member in one} <= set(parts)), key=repr)


def encoded(state: Mapping[str, Any]) -> bytes:
    """The bytes of a `state.json`."""
    return json.dumps(state, separators=(",", ":"), allow_nan=False).encode()
