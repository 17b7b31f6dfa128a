"""Saves in flight: one thread for each, a bounded number, and what became of them."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


class Background:
    """Runs jobs one after the other, each on a thread that the end of the program waits for.

    A failure is kept until `failure` hands it out, once; if nobody asks before the program ends, the log tells it.
    """

    def __init__(self) -> None:
        self._done = threading.Condition()
        self._running: _Task | None = None
        self._failure: BaseException | None = None
        self.last_wait = 0.0
        """Seconds that the last save waited, as who waits notes it."""
        atexit.register(_tell, weakref.ref(self))

    def wait(self) -> float:
        """Return when nothing is in flight: the seconds that took."""
        began = time.perf_counter()
        with self._done:
            self._done.wait_for(lambda: self._running is None)
        return time.perf_counter() - began

    def start(self, job: Callable[[], None], name: str) -> None:
        """Begin a job; nothing is in flight.

        Interrupted (Ctrl-C) while its thread starts, the job either runs, and is in flight, or never will: so nobody
        reuses its memory under it.
        """
        task = _Task(job, name)
        try:
            with self._done:
                self._running = task
            threading.Thread(target=self._run, args=(task,), name=f"moonclipfs {name}", daemon=False).start()
        except BaseException:
            with self._done:
                if not task.begun and self._running is task:
                    self._running = None
                    self._done.notify_all()
            raise

    def failure(self) -> BaseException | None:
        """What the last jobs failed with, told once."""
        with self._done:
            failure, self._failure = self._failure, None
        return failure

    def _run(self, task: _Task) -> None:
        with self._done:
            if self._running is not task:
                return  # given up before it began
            task.begun = True
        failure: BaseException | None = None
        try:
            task.job()
        except BaseException as error:
            failure = error
            if self._failure is not None:
                log.error("%s failed after another failure: %s", task.name, error)
        finally:
            with self._done:
                self._running = None
                self._failure = self._failure or failure
                self._done.notify_all()


@dataclass(slots=True, eq=False)
class _Task:
    """One job: `begun` once its thread is at it."""

    job: Callable[[], None]
    name: str
    begun: bool = False


def _tell(background: weakref.ref[Background]) -> None:
    """At the end of the program: a failure that nobody was told of."""
    found = background()
    failure = None if found is None else found.failure()
    if failure is not None:
        log.error("the last save failed, and nothing asked for it since: %s", failure)
