"""Work that is repeated on a thread of its own, for as long as a layer is open."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from moonclipfs.errors import MoonclipError

log = logging.getLogger(__name__)


class Periodic:
    """Calls a function every so many seconds. What goes wrong is logged once, and tried again."""

    def __init__(self, name: str, work: Callable[[], object], seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._stop = threading.Event()
        self._wake = threading.Event()
        self.trouble = ""
        """What went wrong in the last call; empty when nothing did."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wake(self) -> None:
        """Call the function now."""
        self._wake.set()

    def stop(self) -> None:
        """Return when the call under way, if any, has ended, and there will be no other. Harmless when repeated."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self._seconds)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._work()
                self.trouble = ""
            except Exception as error:
                if str(error) != self.trouble:
                    log.warning("%s: %s", self._thread.name, error, exc_info=not isinstance(error, MoonclipError))
                self.trouble = str(error) or type(error).__name__
