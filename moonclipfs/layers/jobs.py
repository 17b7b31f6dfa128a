"""What is to be encoded: files whose writers are gone get frozen and handed out, and what they became is journalled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from moonclipfs import limits
from moonclipfs.layers.content import Part
from moonclipfs.layers.contentlog import ContentLog
from moonclipfs.layers.contents_records import content_of, contents_refs
from moonclipfs.layers.hints import Hints, Lines
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.lookup import Lookup
from moonclipfs.layers.records import Record, Stored
from moonclipfs.layers.staging import Generation
from moonclipfs.store.cache import BoundedCache
from moonclipfs.types import NO_ID, ObjectId


class Job(NamedTuple):
    """One file to encode. `parts` never change; their bytes are at the file's own offsets.

    `generation` is the number of its freeze, `recipe` what PART_RECIPE means, `hint` the recipe of the file that was
    there before, or of its like in the directory's line: its bases. Both NO_ID for none. `size` in bytes.
    """

    number: int
    inode: int
    generation: int
    path: bytes
    size: int
    parts: tuple[Part, ...]
    recipe: ObjectId
    hint: ObjectId


class Jobs:
    """The files of one layer that are staged. Thread-safe."""

    def __init__(self, layer: Lookup, log: ContentLog) -> None:
        self._layer = layer
        self._log = log
        self._hints = Hints(layer)
        self._numbers = itertools.count(1)
        self._waiting: dict[Inode, float] = {}
        """Staged files, with the time at which their last writer went, by the monotonic clock."""
        self._writing: dict[Inode, None] = {}
        """Files that are open for writing."""
        self._taken: dict[int, tuple[Inode, Job]] = {}
        """Jobs that were handed out, by number."""
        self._busy: dict[Inode, int] = {}
        """The job of each file that has one."""
        self._failures: dict[int, str] = {}
        self.charges: Callable[[Inode, int], Iterable[Record]] = lambda inode, generation: ()
        """What is to be journalled before a file is said to be encoded up to a generation."""
        self.dropped = 0
        """Bytes of stored files that went or changed, about: the journal names them until it is written anew."""

    # Under the lock

    def opened(self, inode: Inode) -> None:
        """Somebody has a file open for writing."""
        self._writing[inode] = None
        self._waiting.pop(inode, None)

    def closed(self, inode: Inode) -> None:
        """Nobody has a file open for writing any more, or it was changed by somebody who never had."""
        self._writing.pop(inode, None)
        content = inode.content
        if content is not None and content.size and not content.exact:
            self._waiting[inode] = time.monotonic()
        elif content is not None:
            self._forget_content(inode)

    def replaces(self, inode: Inode, recipe: ObjectId) -> None:
        """A file takes the place of what `recipe` is."""
        if recipe != NO_ID:
            self.dropped += _size(inode)
            self._hints.replaced(inode, recipe)

    def gone(self, inode: Inode) -> None:
        """A file has no names and no handles any more."""
        self.dropped += _size(inode)
        self._waiting.pop(inode, None)
        self._writing.pop(inode, None)
        number = self._busy.pop(inode, None)
        if number is not None and number in self._failures:
            self._end(self._taken[number][1])

    # For whoever encodes

    def take(
        self, now: float, *, urgent: bool = False, inodes: Collection[Inode] | None = None, pressure: bool = False
    ) -> list[Job]:
        """Freeze and hand out files that are staged, have no writers and were left alone for a while.

        `now` is of the monotonic clock. `urgent` takes them at once, `inodes` only these; `pressure`, when staging
        is nearly full, those that are open for writing too, the longest first.
        """
        jobs = []
        with self._layer.lock:
            found = self._open_files() if pressure else []
            found += [inode for inode, since in self._waiting.items() if urgent or now - since >= _delay()]
            if inodes is not None:
                wanted = set(inodes)
                found = [inode for inode in found if inode in wanted]
            for inode in found:
                job = self._take(inode, pressure)
                if job is not None:
                    jobs.append(job)
        lines: Lines = BoundedCache(limits.HINTS)
        return [
            job._replace(hint=self._hints.find(job.path, job.size, lines)) if job.hint == NO_ID else job for job in jobs
        ]

    def stored(self, job: Job, recipe: ObjectId, size: int) -> None:
        """A job is stored durably as `recipe`, of `size` bytes: its staging is freed. Harmless for one that is gone.

        Raises NoSpaceError, BackendError; then the file stays staged, and the same may be called again.
        """
        with self._layer.lock:
            if job.number not in self._taken:
                return
            inode = self._taken[job.number][0]
            self.encoded(inode, job.generation, job.recipe, recipe, size)
            self._end(job)
            if inode.content is not None and inode.links and not inode.writers:
                self.closed(inode)

    def encoded(self, inode: Inode, generation: int, before: ObjectId, recipe: ObjectId, size: int) -> None:
        """Under the lock: the content that a file had at the freeze `generation`, when its recipe was `before`, is
        stored durably as `recipe`. Of no use when something newer was stored since. Raises as `stored`.
        """
        content = inode.content
        if content is None or not inode.links or content.recipe != before:
            return
        self.dropped += 0 if before == NO_ID else size
        for charged in self.charges(inode, generation):
            self._layer.record(charged)
        record = Stored(inode.number, generation, recipe, size)
        self._layer.record(record, contents_refs(record))
        pending = self._log.pending(inode)
        durable = pending is None
        self._log.changing(inode, same=True)
        self._replace(inode, generation, recipe, size)
        pending = self._log.pending(inode)
        if pending is not None and not (inode.writers and pending.replaces):
            self._log.journal(inode, whole=True, durable=durable)
        if inode not in self._busy and not inode.writers:
            self.closed(inode)

    def give_up(self, job: Job, message: str) -> None:
        """A job failed; whoever has it may try it again. Its file stays staged and readable."""
        with self._layer.lock:
            if job.number not in self._taken:
                return
            self._failures[job.number] = message
            if not self.is_wanted(job):
                inode = self._taken[job.number][0]
                self._end(job)
                if inode.content is not None and inode.links and not inode.writers:
                    self.closed(inode)

    def give_back(self) -> None:
        """Whoever had jobs is gone: their files wait to be taken again."""
        with self._layer.lock:
            for inode, job in list(self._taken.values()):
                self._end(job)
                if inode.content is not None and inode.links and not inode.writers:
                    self.closed(inode)

    def has_work(self) -> bool:
        """Whether files wait to be encoded, or are being encoded."""
        with self._layer.lock:
            return bool(self._waiting or self._taken)

    def is_wanted(self, job: Job) -> bool:
        """Whether the file of a job is there still, and some of it as it was: not when it was written anew since."""
        with self._layer.lock:
            inode = self._taken[job.number][0] if job.number in self._taken else None
            if inode is None or self._busy.get(inode) != job.number or not inode.links:
                return False
            content = inode.content
            if content is None or content.recipe != job.recipe:
                return False
            generations = _generations(job.parts)
            return not generations or not set(generations).isdisjoint(content.generations())

    def staged(self) -> dict[str, Any]:
        """What is staged: counts of files waiting, taken and failed, and bytes."""
        with self._layer.lock:
            failed = {self._taken[number][1].path.decode("utf-8", "replace"): why for number, why in self._failed()}
            return {
                "staged_files": sum(inode not in self._busy for inode in self._waiting),
                "encoding_files": len(self._busy) - len(failed),
                "failed_files": failed,
                "staged_bytes": self._layer.staging.used,
            }

    def _failed(self) -> list[tuple[int, str]]:
        return [(number, why) for number, why in self._failures.items() if number in self._taken]

    # Under the lock

    def _open_files(self) -> list[Inode]:
        """Staged files that are open for writing, the longest first."""
        files = [inode for inode in self._writing if inode.content is not None and inode.content.is_staged]
        return sorted(files, key=_staged_bytes, reverse=True)

    def _take(self, inode: Inode, pressure: bool) -> Job | None:
        content = inode.content
        if content is None or content.exact or not content.size:
            self._waiting.pop(inode, None)
            return None
        if inode in self._busy or not inode.links or (inode.writers and not pressure):
            return None
        self._waiting.pop(inode, None)
        state = self._layer.state
        state.generations += 1
        parts = content.freeze(state.generations)
        path = state.path(inode) or b""
        hint = self._hints.of(inode)
        job = Job(next(self._numbers), inode.number, state.generations, path, content.size, parts, content.recipe, hint)
        self._log.disposal.pin(_generations(parts))
        self._taken[job.number] = (inode, job)
        self._busy[inode] = job.number
        return job

    def _end(self, job: Job) -> None:
        inode = self._taken.pop(job.number)[0]
        self._failures.pop(job.number, None)
        if self._busy.get(inode) == job.number:
            del self._busy[inode]
        self._log.disposal.unpin(_generations(job.parts))

    def _replace(self, inode: Inode, generation: int, recipe: ObjectId, size: int) -> None:
        """Let a content come from what was stored, and let go of what it needs no more, if no record names that."""
        content = content_of(inode)
        freed = set(content.stored(generation, recipe, size))
        self._log.freed(inode, freed - set(content.generations()))

    def _forget_content(self, inode: Inode) -> None:
        """A file that is its recipe and nothing else needs no content in memory."""
        content = content_of(inode)
        busy = inode in self._busy  # what comes of that job has to be told from this content
        if self._log.pending(inode) is None and not (inode.handles or busy or content.generations()):
            inode.child = content.recipe if content.size else NO_ID
            inode.size, inode.content = content.size, None


def _delay() -> float:
    return limits.ENCODE_DELAY_SECONDS


def _generations(parts: Collection[Part]) -> list[Generation]:
    return list(dict.fromkeys(part.generation for part in parts if part.generation is not None))


def _size(inode: Inode) -> int:
    return inode.size if inode.content is None else inode.content.size


def _staged_bytes(inode: Inode) -> int:
    return sum(generation.bytes for generation in content_of(inode).generations())
