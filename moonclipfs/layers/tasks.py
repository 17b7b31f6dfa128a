"""Files on their way through the encoder: what has become of each so far."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from moonclipfs.errors import MoonclipError, StagingLostError
from moonclipfs.layers.lost import ADVICE, lost_bytes
from moonclipfs.layers.records import PART_STAGED
from moonclipfs.types import NO_ID, ObjectId

if TYPE_CHECKING:
    from moonclipfs.layers.jobs import Job
    from moonclipfs.layers.workerprocess import WorkerProcess


class Task:
    """A job of a layer. Changed under the encoder's lock."""

    __slots__ = ("attempts", "crashes", "done", "due", "error", "job", "recipe", "size", "staged_bytes")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.staged_bytes = sum(part.length for part in job.parts if part.kind == PART_STAGED)
        self.crashes = 0
        """How often the process died when it had this one."""
        self.attempts = 0
        self.due = 0.0
        """When it is tried again after a failure, by the monotonic clock."""
        self.error: MoonclipError | None = None
        """Why it failed last; None again once it is on its way."""
        self.done = False
        """It is stored, durable and journalled, or not wanted any more."""
        self.recipe: ObjectId = NO_ID
        self.size = 0

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.job.path.decode(errors="replace") or f"inode {self.job.inode:x}"

    def describe(self) -> dict[str, Any]:
        """For the status: JSON values."""
        return {"path": self.name, "message": str(self.error), "attempts": self.attempts}

    def message(self) -> dict[str, Any]:
        """The job as `worker.py` gets it: bytes in memory go along, those in staging files are read there.

        Raises StagingLostError, CorruptError, BackendError when staged bytes cannot be read.
        """
        job = self.job
        if lost := lost_bytes((part.offset, part.length, part.generation) for part in job.parts):
            raise StagingLostError(f"{self.name}: {lost}; {ADVICE}")
        parts, data, files = [], [], {}
        for offset, length, kind, generation in job.parts:
            if kind != PART_STAGED or generation is None:
                parts.append((offset, length, kind, 0))
                continue
            parts.append((offset, length, kind, generation.number))
            path = generation.path
            if path is not None:
                files[generation.number] = os.path.abspath(path)
            else:
                staged = bytearray(length)
                generation.read_into(offset, memoryview(staged))
                data.append((generation.number, offset, bytes(staged)))
        return {
            "number": job.number,
            "path": job.path,
            "size": job.size,
            "parts": parts,
            "data": data,
            "files": files,
            "recipe": job.recipe,
            "hint": job.hint,
        }


class Batch:
    """Encoded files that become durable together. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.bytes = 0
        """Staged bytes of them."""
        self.process: WorkerProcess | None = None
        """Which has them."""
        self.began = self.grew = 0.0
        self.failing = False
        """Something went wrong, perhaps with its pack: then it can only be ended, and another one begun."""
