"""A private pool of threads for hashing, encoding and decoding, which leaves the application's threads alone."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from moonclipfs.errors import UsageError
from moonclipfs.store.cores import usable_cores

T = TypeVar("T")
THREADS = "MOONCLIPFS_THREADS"


def thread_count() -> int:
    """$MOONCLIPFS_THREADS, else this process's share of the cores: they are divided by $LOCAL_WORLD_SIZE.

    Raises UsageError for what is no number above 0.
    """
    wanted = os.environ.get(THREADS, "")
    if wanted:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise UsageError(f"${THREADS} is {wanted!r}: it must be a number of threads, 1 or more")
        return int(wanted)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cores() // max(1, int(ranks) if ranks.isdecimal() else 1))


class Workers(Executor):
    """Daemon threads. Unlike those of `ThreadPoolExecutor` they take work while the interpreter waits for others.

    So a save that is in flight when the program ends is finished. Before the interpreter goes they are waited for:
    one that gives a tensor back while it goes would take the process down.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._todo: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started: list[threading.Thread] = []
        self._closed = False
        atexit.register(_end, weakref.ref(self))

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these workers are closed")
            if len(self._started) < self.threads:
                thread = threading.Thread(target=self._work, name=f"moonclipfs-{len(self._started)}", daemon=True)
                thread.start()
                self._started.append(thread)
        self._todo.put((future, lambda: function(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when they have done what is queued; nobody waits for them before the program ends."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._started:
                    self._todo.put(None)

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del future, call, item


def _end(workers: weakref.ref[Workers]) -> None:
    """At the end of the program, when every other thread is done."""
    found = workers()
    if found is not None:
        found.shutdown()
        for thread in found._started:
            thread.join()
