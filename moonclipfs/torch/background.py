"""Saves in flight: one thread for each, a bounded number, and what became of them."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable

log = logging.getLogger(__name__)


class Background:
    """Runs jobs one after the other, each on a thread that the end of the program waits for.

    A failure is kept until `failure` hands it out, once; if nobody asks before the program ends, the log tells it.
    """

    def __init__(self) -> None:
        self._done = threading.Condition()
        self._running = False
        self._failure: BaseException | None = None
        self.last_wait = 0.0
        """Seconds that the last save waited, as who waits notes it."""
        atexit.register(_tell, weakref.ref(self))

    def wait(self) -> float:
        """Return when nothing is in flight: the seconds that took."""
        began = time.perf_counter()
        with self._done:
            self._done.wait_for(lambda: not self._running)
        return time.perf_counter() - began

    def start(self, job: Callable[[], None], name: str) -> None:
        """Begin a job; nothing is in flight."""
        with self._done:
            self._running = True
        try:
            threading.Thread(target=self._run, args=(job, name), name=f"moonclipfs {name}", daemon=False).start()
        except BaseException:
            self._end(None)
            raise

    def failure(self) -> BaseException | None:
        """What the last jobs failed with, told once."""
        with self._done:
            failure, self._failure = self._failure, None
        return failure

    def _run(self, job: Callable[[], None], name: str) -> None:
        failure: BaseException | None = None
        try:
            job()
        except BaseException as error:
            failure = error
            if self._failure is not None:
                log.error("%s failed after another failure: %s", name, error)
        finally:
            self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._done:
            self._running = False
            self._failure = self._failure or failure
            self._done.notify_all()


def _tell(background: weakref.ref[Background]) -> None:
    """At the end of the program: a failure that nobody was told of."""
    found = background()
    failure = None if found is None else found.failure()
    if failure is not None:
        log.error("the last save failed, and nothing asked for it since: %s", failure)
