"""A layer reduced to what an encoder sees of one: jobs with staged bytes, and what became of them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from moonclipfs.layers.content import Content, Part
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.staging import Generation, Staging
from moonclipfs.store.backend import FileOps
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, ObjectId


class Job(NamedTuple):
    """See `jobs.Job`."""

    number: int
    inode: int
    generation: int
    path: bytes
    size: int
    parts: tuple[Part, ...]
    recipe: ObjectId
    hint: ObjectId


class StubLayer:
    """Offers the jobs that a test adds, once each, and notes the answers."""

    name = "test"

    def __init__(self, store: Store, directory: Path, limit: int = 1 << 30) -> None:
        self.store = store
        directory.mkdir(exist_ok=True)
        self.staging = Staging(directory, limit, FileOps())
        self.lock = threading.RLock()
        self.files = SimpleNamespace(
            jobs=SimpleNamespace(is_wanted=self._is_wanted), log=SimpleNamespace(commit=self._commit)
        )
        self.jobs: list[Job] = []
        self.results: dict[int, tuple[ObjectId, int]] = {}
        self.messages: dict[int, str] = {}
        self.gone: set[int] = set()
        """Jobs whose file was deleted."""
        self.commits = 0
        self.taken: list[tuple[bool, bool]] = []
        self._next = 1

    def add(self, data: bytes, *, recipe: ObjectId = NO_ID, hint: ObjectId = NO_ID, path: bytes = b"f") -> Job:
        """A file whose bytes are all staged."""
        number = self._number()
        generation = self.staging.create(number)
        generation.write(0, data)
        content = Content(len(data), recipe)
        content.wrote(generation, 0, len(data))
        return self._add(number, path, content, hint)

    def add_edit(self, size: int, recipe: ObjectId, writes: Sequence[tuple[int, bytes]]) -> Job:
        """A stored file of which some bytes were written over."""
        number = self._number()
        generation = self.staging.create(number)
        content = Content(size, recipe)
        for offset, data in writes:
            generation.write(offset, data)
            content.wrote(generation, offset, len(data))
        return self._add(number, b"f", content, NO_ID)

    def _number(self) -> int:
        with self.lock:
            self._next += 1
            return self._next

    def _add(self, number: int, path: bytes, content: Content, hint: ObjectId) -> Job:
        parts = content.freeze()
        job = Job(number, number, number, path, content.size, parts, content.recipe, hint)
        with self.lock:
            self.jobs.append(job)
        return job

    def take_jobs(
        self, now: float, *, urgent: bool = False, inodes: Collection[Inode] | None = None, pressure: bool = False
    ) -> list[Job]:
        with self.lock:
            self.taken.append((urgent, pressure))
            jobs, self.jobs = self.jobs, []
            return jobs

    def stored(self, job: Job, recipe: ObjectId, size: int) -> None:
        with self.lock:
            assert size == job.size
            self.results[job.number] = recipe, size
            self.messages.pop(job.number, None)
            for generation in generations(job):
                self.staging.delete(generation)

    def _is_wanted(self, job: Job) -> bool:
        return job.number not in self.results and job.number not in self.gone

    def give_up(self, job: Job, message: str) -> None:
        with self.lock:
            self.messages[job.number] = message

    def _commit(self) -> None:
        self.commits += 1


def generations(job: Job) -> set[Generation]:
    """Those that a job's bytes come from."""
    return {part.generation for part in job.parts if part.generation is not None}


def entry(recipe: ObjectId, size: int) -> Entry:
    """A directory entry of a stored file."""
    return Entry(b"f", EntryType.FILE, Attributes(0o644), size, recipe)


def read(store: Store, recipe: ObjectId, size: int) -> bytes:
    """A stored file, whole."""
    return store.open_file(entry(recipe, size)).read(0, size)
