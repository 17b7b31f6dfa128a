"""Encoding in the background: what is staged in a layer becomes objects of its store, in a process of its own.

This half, in the mount, decides what is encoded when, and journals what became of it; it touches no file's bytes but
those that are staged in memory. A file goes through: taken from the layer, encoded, durable with its batch, journalled,
released. Until it is journalled, its staged bytes are the truth.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonclipfs import limits
from moonclipfs.errors import BackendError, BusyError, LeaseLostError, MoonclipError, StagingLostError, UsageError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.tasks import Batch, Task
from moonclipfs.layers.wire import error_of
from moonclipfs.layers.workerprocess import WorkerDiedError, WorkerProcess
from moonclipfs.store.leases import Hold

if TYPE_CHECKING:
    from moonclipfs.layers.layer import Layer

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_ALONE = frozenset({"reclaim"})
"""Operations during which nothing is encoded, unless they are to tell only what they would do (`preview`): the hold of
a batch would keep gc from deleting."""
_CRASHES = 2
"""A file at which the process died so often, the last time alone, is not tried again before somebody waits for it."""


class Encoder:
    """Encodes what is staged in a layer. Thread-safe."""

    def __init__(self, layer: Layer, store_path: Path) -> None:
        """Nothing happens before `start`."""
        self._layer = layer
        self._store_path = store_path
        self._changed = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._failed: list[Task] = []
        self._working: list[Task] = []
        self._stepping = False
        """Whether the thread is at work, without the lock."""
        self._batch = Batch()
        self._waited = 0
        """How many callers wait for files."""
        self._urgent = 0
        """How many of them want all cores."""
        self._alone = 0
        """How many callers want nothing to be encoded."""
        self._stopping = threading.Event()
        self._encoded_bytes = 0
        self._process: WorkerProcess | None = None
        self._started = False
        """Whether the process was started early: it takes a while, and something is staged that will need it."""
        self._trouble = ""
        self._process_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="moonclipfs encoder", daemon=True)

    def start(self) -> None:
        """Begin to encode. The process is started once something is staged."""
        self._thread.start()

    def stop(self) -> None:
        """End, and leave no process. What is not journalled yet stays staged. Harmless when repeated."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        self._discard_process()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """Look for work now: staging may be nearly full. Waits for nothing."""
        if self._changed.acquire(blocking=False):  # else the thread, or who waits for it, is at it anyway
            try:
                self._hurry()
                self._changed.notify_all()
            finally:
                self._changed.release()

    def drain(
        self, inodes: Collection[Inode] | None = None, timeout: float | None = None, *, urgent: bool = True
    ) -> None:
        """Return when all that is staged now, or of these files, is stored, durable and journalled.

        Takes all cores meanwhile if `urgent`. Files that are open for writing are left out. Raises the first error of
        a file that cannot be stored, BusyError after `timeout` seconds.
        """
        numbers = None if inodes is None else {inode.number for inode in inodes}
        with self._changed:
            if self._stopping.is_set():
                raise BusyError("encoding was stopped")
            self._waited += 1
            self._urgent += urgent
            try:
                self._hurry()
                self._changed.wait_for(lambda: self._stopping.is_set() or not self._is_failing(), timeout)
                self._take(urgent=True, inodes=inodes)
                tasks = [one for one in self._all() if numbers is None or one.job.inode in numbers]
                self._retry([one for one in tasks if one in self._failed])
                self._changed.notify_all()
                ended = self._changed.wait_for(
                    lambda: self._stopping.is_set() or all(one.done or one.error for one in tasks), timeout
                )
            finally:
                self._waited -= 1
                self._urgent -= urgent
        for error in (one.error for one in tasks if one.error is not None):
            raise type(error)(*error.args)
        if not all(one.done for one in tasks):
            left = sum(not one.done for one in tasks)
            why = f"after {timeout:.0f} s" if timeout is not None and not ended else "when encoding was stopped"
            raise BusyError(f"{left} files were not stored {why}; their bytes stay staged")

    def call(self, op: str, **arguments: Any) -> Any:
        """Let the process do an operation of `worker.OPERATIONS`, and return what it returns.

        Raises its errors, and BackendError (WorkerDiedError) when it died: try again.
        """
        request = {"name": op, "arguments": arguments, "polite": op in _ALONE and not self._is_urgent()}
        if op not in _ALONE or arguments.get("preview"):
            return self._running().ask("call", **request)["value"]
        with self._nothing_else():
            return self._running(reclaims=True).ask("call", **request)["value"]

    def status(self) -> dict[str, Any]:
        """Counts of files waiting, being encoded and encoded but not durable; staged bytes encoded so far; failures."""
        with self._changed:
            process = self._process
            return {
                "waiting": len(self._waiting),
                "encoding": len(self._working),
                "finishing": len(self._batch.tasks),
                "encoded_bytes": self._encoded_bytes,
                "failed": [one.describe() for one in self._failed[: limits.HOLDERS_NAMED]],
                "failures": len(self._failed),
                "pid": process.pid if process is not None and process.death is None else None,
                "urgent": self._is_urgent(),
            }

    @property
    def failures(self) -> int:
        """How many files could not be encoded yet. Waits for nothing."""
        return len(self._failed)

    @property
    def encoded_bytes(self) -> int:
        """Staged bytes encoded so far. Waits for nothing."""
        return self._encoded_bytes

    # What to do next; under the lock.

    def _all(self) -> Iterator[Task]:
        yield from self._batch.tasks
        yield from self._working
        yield from self._waiting
        yield from self._failed

    def _is_failing(self) -> bool:
        """Whether the thread has files that have failed: it lets go of them when its step ends."""
        return any(one.error is not None for one in (*self._working, *self._batch.tasks))

    def _is_urgent(self) -> bool:
        return self._urgent > 0 or self._has_pressure()

    def _has_pressure(self) -> bool:
        staging = self._layer.staging
        return staging.refuses or staging.waiting > staging.limit * limits.STAGING_PRESSURE_SHARE

    def _take(self, *, urgent: bool = False, inodes: Collection[Inode] | None = None) -> None:
        """Take over what the layer has for us."""
        pressure = inodes is None and self._has_pressure()
        jobs = self._layer.take_jobs(time.monotonic(), urgent=urgent or pressure, inodes=inodes, pressure=pressure)
        self._waiting.extend(Task(job) for job in jobs)

    def _retry(self, tasks: Collection[Task]) -> None:
        for task in tasks:
            task.error = None
            self._failed.remove(task)
            self._waiting.append(task)

    def _hurry(self) -> None:
        """Let what is being encoded go on with all cores."""
        if self._process is not None and self._is_urgent():
            self._process.tell("urgent", urgent=True)

    def _chunk(self) -> list[Task]:
        """The files to encode next. One at which the process may have died goes alone."""
        chunk: list[Task] = []
        size, most = 0, min(limits.ENCODE_CHUNK_BYTES, self._room())
        while self._waiting and len(chunk) < limits.ENCODE_CHUNK_FILES:
            task = self._waiting[0]
            if self._is_gone(task):
                self._waiting.popleft()
                continue
            if chunk and (task.crashes or size + task.staged_bytes > most):
                break
            chunk.append(self._waiting.popleft())
            size += task.staged_bytes
            if task.crashes:
                break
        return chunk

    def _is_gone(self, task: Task) -> bool:
        """Whether the file of a task was deleted meanwhile, or stored otherwise: then nothing is left to do for it."""
        if self._layer.files.jobs.is_wanted(task.job):
            return False
        self._give_up(task, "the file is gone")
        task.error, task.done = None, True
        self._changed.notify_all()
        return True

    def _give_up(self, task: Task, message: str) -> None:
        try:
            self._layer.give_up(task.job, message)
        except MoonclipError as error:
            log.warning("%s: its staging cannot be given back: %s", task.name, error)

    def _batch_is_due(self) -> bool:
        batch, now = self._batch, time.monotonic()
        if batch.failing:
            return True
        if not batch.tasks:
            return False
        if batch.bytes >= min(limits.ENCODE_BATCH_BYTES, self._room()) or self._alone:
            return True
        if not self._waiting and (self._waited or self._has_pressure()):
            return True
        return now - batch.began > limits.ENCODE_BATCH_SECONDS or now - batch.grew > limits.ENCODE_IDLE_SECONDS

    def _room(self) -> int:
        """How much may be stored before what was staged of it is deleted: the disk may be nearly full."""
        try:
            disk = os.statvfs(self._store_path)
        except OSError:
            return limits.ENCODE_BATCH_BYTES  # what is wrong is told when the store is opened
        return disk.f_bavail * disk.f_frsize // 2

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopping.is_set():
                    return
                step = self._next()
                if step is None:
                    self._changed.wait(_TICK_SECONDS)
                    continue
                self._stepping = True
            try:
                step()
            except WorkerDiedError as error:
                self._after_death(error)
            except Exception as error:
                if self._stopping.is_set():
                    return
                if not isinstance(error, MoonclipError):
                    log.exception("encoding failed by an unexpected error")
                self._fail(
                    [*self._working, *self._take_batch().tasks],
                    error if isinstance(error, MoonclipError) else MoonclipError(repr(error)),
                )
            with self._changed:
                self._working, self._stepping = [], False
                self._changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        """What to do next, without the lock; None for nothing. What goes wrong here is tried again, whatever it is."""
        try:
            step = self._choose()
            self._trouble = ""
            return step
        except Exception as error:
            if str(error) != self._trouble:
                ours = isinstance(error, MoonclipError)
                log.warning("cannot tell what is to be encoded: %s", error, exc_info=not ours)
            self._trouble = str(error)
            return None

    def _choose(self) -> Callable[[], object] | None:
        """End the batch, encode a chunk, or start the process."""
        self._take()
        process, now = self._batch.process, time.monotonic()
        if process is not None and process.death is not None:
            self._begin_again(self._take_batch().tasks, process.death)
        self._failed = [one for one in self._failed if not self._is_gone(one)]
        self._retry([one for one in self._failed if one.due <= now])
        if self._batch_is_due():
            return self._complete
        self._working = [] if self._alone else self._chunk()
        if self._working:
            return partial(self._encode, self._working)
        if self._started or not self._layer.staging.used:
            return None
        self._started = True
        return self._running

    def _encode(self, chunk: list[Task]) -> None:
        messages = []
        for task in chunk:
            try:
                messages.append(task.message())
            except MoonclipError as error:
                self._fail([task], error)
        if not messages:
            return
        with self._changed:
            urgent = self._is_urgent()
        process = self._batch.process or self._running()
        answer = process.ask("encode", jobs=messages, urgent=urgent)
        by_number = {task.job.number: task for task in chunk}
        failures: dict[tuple[str, str], list[Task]] = {}
        with self._changed:
            batch, now = self._batch, time.monotonic()
            batch.process = process
            batch.began = batch.began or now
            for number, *result in answer["results"]:
                task = by_number[number]
                if isinstance(result[0], str):
                    failures.setdefault((result[0], result[1]), []).append(task)
                    continue
                task.recipe, task.size = result
                task.crashes = 0
                batch.tasks.append(task)
                batch.bytes += task.staged_bytes
                self._encoded_bytes += task.staged_bytes
            batch.grew = now
        for (kind, text), tasks in failures.items():
            failure = error_of({"error": kind, "message": text})
            if isinstance(failure, LeaseLostError):
                raise failure
            batch.failing = True
            self._fail(tasks, failure)

    def _complete(self) -> None:
        """Make the batch durable, journal what became of each file, and let the process go on."""
        batch, process = self._batch, self._batch.process
        assert process is not None
        with self._hold():
            process.ask("complete")
            stored = self._journal(batch.tasks)
        with self._changed:
            self._batch = Batch()
            for task in stored:
                task.done = True
        process.ask("release")

    def _hold(self) -> Hold:
        """Keeps from gc what the process makes durable, even if it dies before that is journalled."""
        lease = self._layer.store.lease
        if lease is None:
            raise LeaseLostError(f"{self._layer.store.path} is not open for writing any more")
        return lease.hold(self._layer.store.log.names.sequence)

    def _journal(self, tasks: Iterable[Task]) -> list[Task]:
        """Journal what became of files, durably; returns those for which that was possible."""
        stored = []
        for task in tasks:
            try:
                self._layer.stored(task.job, task.recipe, task.size)
                stored.append(task)
            except MoonclipError as error:
                self._fail([task], error)
        self._layer.files.log.commit()
        return stored

    def _take_batch(self) -> Batch:
        with self._changed:
            batch, self._batch = self._batch, Batch()
            return batch

    def _begin_again(self, tasks: list[Task], death: WorkerDiedError) -> None:
        """Encode these again before all others: the process that did so is gone, and with it what was not durable."""
        log.warning("%s; %d files are encoded again", death, len(tasks))
        with self._changed:
            self._waiting.extendleft(reversed(tasks))

    def _fail(self, tasks: Iterable[Task], error: MoonclipError, *, again: bool = True) -> None:
        """Keep files staged, and try again later."""
        with self._changed:
            failed = [task for task in tasks if not task.done and task.error is None and not self._is_gone(task)]
            for task in failed:
                self._give_up(task, str(error))
                wait = limits.ENCODE_RETRY_SECONDS * 2 ** min(task.attempts, 16)
                task.attempts += 1
                task.due = time.monotonic() + min(wait, limits.ENCODE_RETRY_MOST_SECONDS) if again else float("inf")
                task.error = error.with_traceback(None)  # it may be kept for long, and its frames hold buffers
            self._failed += failed
            self._changed.notify_all()
        if failed and isinstance(error, StagingLostError):
            log.error("cannot be encoded: %s", error)
        elif failed:
            names = failed[0].name + (f" and {len(failed) - 1} other files" if failed[1:] else "")
            log.warning("not encoded yet, but safe in staging: %s: %s", names, error)
        if isinstance(error, LeaseLostError):
            self._discard_process()

    def _after_death(self, error: WorkerDiedError) -> None:
        """Encode again, in a new process, what was not durable."""
        with self._changed:
            if self._stopping.is_set():
                return
            working = [task for task in self._working if task.error is None and not task.done]
            alone = len(working) == 1
            for task in working:
                task.crashes += 1
            killers = [task for task in working if task.crashes >= _CRASHES and alone]
            again = [task for task in [*self._take_batch().tasks, *working] if task not in killers]
        self._begin_again(again, error)
        for task in killers:
            self._fail([task], BackendError(f"{task.name}: {error}, each time it was encoded"), again=False)

    # The process

    def _running(self, *, reclaims: bool = False) -> WorkerProcess:
        """The process, started if need be."""
        with self._process_lock:
            if self._stopping.is_set():
                raise BusyError("encoding was stopped")
            if self._process is not None and self._process.death is not None:
                self._process.stop()
                self._process = None
            if self._process is None:
                purpose = f"encoder of layer {self._layer.name}"
                self._process = WorkerProcess(self._store_path, purpose, reclaims=reclaims)
            return self._process

    def _discard_process(self) -> None:
        with self._process_lock:
            process, self._process = self._process, None
        if process is not None:
            process.stop()

    @contextmanager
    def _nothing_else(self) -> Iterator[None]:
        """Wait until nothing is being encoded and the batch is durable; keep it so."""
        if not self._thread.is_alive():
            raise UsageError("the encoder was not started, or has been stopped")
        with self._changed:
            self._alone += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopping.is_set() or not (self._stepping or self._batch.tasks))
        try:
            yield
        finally:
            with self._changed:
                self._alone -= 1
                self._changed.notify_all()
