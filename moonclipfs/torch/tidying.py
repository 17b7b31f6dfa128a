"""Space that a manager's rules have freed is given back by a thread beside the saves: none of them waits for it."""

from __future__ import annotations

import logging
import threading
import time

from moonclipfs.errors import MoonclipError
from moonclipfs.store.gc import collect
from moonclipfs.torch.place import Place

log = logging.getLogger(__name__)

_REST = 20
"""A gc that took a second is followed by another one after so many seconds at the earliest."""


class Tidying:
    """Runs gc now and then. Thread-safe; the store stays open while one is at work."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._due = False
        """Whether something was dropped, or had to wait for somebody, since gc ran last."""
        self._rest_until = 0.0

    def dropped(self, count: int) -> None:
        """After a save: `count` snapshots were forgotten. Begins a gc when it is time for one, and returns."""
        with self._lock:
            self._due |= count > 0
            idle = self._thread is None or not self._thread.is_alive()
            if self._due and idle and time.monotonic() >= self._rest_until:
                self._thread = threading.Thread(target=self._run, name="moonclipfs gc", daemon=False)
                self._thread.start()

    def wait(self) -> None:
        """Return when no gc is at work."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """Wait for a gc at work, and run one if it is due."""
        self.wait()
        if self._due:
            self._run()

    def _run(self) -> None:
        began = time.monotonic()
        self._due = False
        try:
            self._due = collect(self._place.for_saving(), wait_seconds=0).waiting_packs > 0
        except MoonclipError as error:
            log.warning("the space of dropped snapshots cannot be given back: %s", error)
        self._rest_until = time.monotonic() + _REST * (time.monotonic() - began)
