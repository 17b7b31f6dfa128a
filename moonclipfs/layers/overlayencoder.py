"""The encoder of an overlay: there while it is needed, so that an overlay at rest costs no process and no thread.

To others it looks as an `Encoder` does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from moonclipfs import limits
from moonclipfs.errors import BusyError
from moonclipfs.layers.encoder import Encoder
from moonclipfs.layers.inodes import Inode

if TYPE_CHECKING:
    from moonclipfs.layers.layer import Layer

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_SLOTS = threading.BoundedSemaphore(limits.OVERLAY_ENCODERS)
"""How many encoders of overlays work at once in this process."""


class OverlayEncoder:
    """Encodes what is staged in one overlay. Thread-safe."""

    def __init__(self, layer: Layer) -> None:
        """Nothing runs before it is needed."""
        self._layer = layer
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        """Held while an encoder is started or stopped."""
        self._users = 0
        self._encoder: Encoder | None = None
        self._failures = 0
        self._encoded_bytes = 0
        """By encoders that have ended."""
        self.wanted = False
        """Whether somebody waits for staged bytes to be encoded."""
        self.on_wake: Callable[[], None] = lambda: None
        """Lets whoever has the overlay look at it now."""
        self._ended = False
        self._again_at = 0.0
        """When what could not be encoded in the background is tried again."""

    @contextmanager
    def running(self) -> Iterator[Encoder]:
        """An encoder at work; it ends with the last who uses it."""
        with self._starting:
            self._require_going_on()
            encoder = self._encoder or self._start()
            with self._lock:
                self._users += 1
        try:
            yield encoder
        finally:
            with self._starting:
                with self._lock:
                    self._users -= 1
                    last = not self._users
                if last:
                    self._end(encoder)

    def _start(self) -> Encoder:
        """Wait for a turn, unless all ends meanwhile."""
        while not _SLOTS.acquire(timeout=_POLL_SECONDS):
            self._require_going_on()
        try:
            with self._lock:  # whoever ends it finds it, or is found
                self._require_going_on()
                encoder = self._encoder = Encoder(self._layer, self._layer.store.path)
            encoder.start()
        except BaseException:
            self._encoder = None
            _SLOTS.release()
            raise
        return encoder

    def _require_going_on(self) -> None:
        if self._ended:
            raise BusyError("the overlay was closed")

    def end(self) -> None:
        """Encode nothing more; whoever waits for that gets BusyError. What is not journalled yet stays staged."""
        with self._lock:
            self._ended, encoder = True, self._encoder
        if encoder is not None:
            encoder.stop()

    def resume(self) -> None:
        """Encode again: the overlay goes on after all."""
        self._ended = False

    def _end(self, encoder: Encoder) -> None:
        try:
            encoder.stop()
        finally:
            self._encoder = None
            self._failures = encoder.failures
            self._encoded_bytes += encoder.encoded_bytes
            self._layer.files.jobs.give_back()
            _SLOTS.release()

    def drain(
        self, inodes: Collection[Inode] | None = None, timeout: float | None = None, *, urgent: bool = True
    ) -> None:
        """See `Encoder.drain`. Starts nothing where nothing is staged."""
        if self._layer.files.jobs.has_work():
            with self.running() as encoder:
                encoder.drain(inodes, timeout, urgent=urgent)

    def call(self, op: str, **arguments: Any) -> Any:
        """See `Encoder.call`."""
        with self.running() as encoder:
            return encoder.call(op, **arguments)

    def wake(self) -> None:
        """See `Encoder.wake`."""
        self.wanted = True
        self.on_wake()

    def relieve(self, stopping: threading.Event) -> None:
        """Encode what is staged until there is room again and nobody asks for more; `stopping` ends it early. Raises
        what keeps some of it from that: then it is not due again for a while.
        """
        self._again_at = time.monotonic() + limits.ENCODE_RETRY_SECONDS
        with self.running() as encoder:
            until = time.monotonic() + limits.OVERLAY_ENCODER_LINGER_SECONDS
            while not stopping.is_set() and time.monotonic() < until:
                if self.wanted or (self.is_pressed() and not encoder.failures):
                    self.wanted = False
                    encoder.drain(urgent=False)  # what is open for writing it takes by itself when it has to
                    until = time.monotonic() + limits.OVERLAY_ENCODER_LINGER_SECONDS
                stopping.wait(_POLL_SECONDS)
        self._again_at = 0.0

    def is_due(self, now: float) -> bool:
        """Whether staged bytes are to be encoded in the background, at a time of the monotonic clock."""
        return (self.wanted or self.is_pressed()) and now >= self._again_at

    def is_pressed(self) -> bool:
        """Whether so much is staged that it is to be encoded without being asked for."""
        staging = self._layer.staging
        if staging.waiting > staging.limit * limits.STAGING_PRESSURE_SHARE:
            return True
        return staging.waiting > limits.OVERLAY_STAGED_BYTES and self._layer.files.jobs.has_work()

    @property
    def failures(self) -> int:
        """How many files could not be encoded yet."""
        encoder = self._encoder
        return self._failures if encoder is None else encoder.failures

    @property
    def encoded_bytes(self) -> int:
        """Staged bytes encoded so far."""
        encoder = self._encoder
        return self._encoded_bytes + (0 if encoder is None else encoder.encoded_bytes)

    def status(self) -> dict[str, Any]:
        """See `Encoder.status`; empty while none is at work."""
        encoder = self._encoder
        return {} if encoder is None else encoder.status()
