"""Waiting for room, for those who write to a layer from a thread of their own: a full staging area, or a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from moonclipfs import limits
from moonclipfs.errors import NoSpaceError, QuotaError, StagingFullError
from moonclipfs.layers.layer import Layer

T = TypeVar("T")
_FIRST_WAIT_SECONDS = 0.001
_LONGEST_WAIT_SECONDS = 0.1


class Encoding(Protocol):
    """What encodes the staged bytes of a layer."""

    @property
    def failures(self) -> int:
        """How many files could not be encoded yet."""

    def wake(self) -> None:
        """Look for work now."""


class Holder(Protocol):
    """Who has a layer at work: the live layer, or an overlay."""

    @property
    def layer(self) -> Layer:
        """The layer."""

    @property
    def encoder(self) -> Encoding:
        """What encodes in the background."""

    def make_room(self, length: int, /) -> int:
        """Free about so many bytes of the disk; returns how many."""


def with_room(holder: Holder, work: Callable[[], T], length: int = 0) -> T:
    """Do something that needs about `length` bytes of room: wait while too much is staged, reclaim when the disk is
    full, as long as there is anything. Raises NoSpaceError; QuotaError at once.
    """
    seconds, reclaimed = _FIRST_WAIT_SECONDS, False
    staging = holder.layer.staging
    staged, since = staging.used, time.monotonic()
    while True:
        try:
            return work()
        except StagingFullError as error:
            used, now = staging.used, time.monotonic()
            if used < staged:
                staged, since = used, now
            elif now - since > limits.STAGING_PATIENCE_SECONDS and holder.encoder.failures:
                raise NoSpaceError(f"nothing that is staged can be stored: {error}") from error
            holder.encoder.wake()
            time.sleep(seconds)
            seconds = min(2 * seconds, _LONGEST_WAIT_SECONDS)
        except QuotaError:
            raise
        except NoSpaceError:
            freed = holder.make_room(length)
            if reclaimed and not freed:
                raise
            reclaimed = True
