"""Where the time of a save goes, told on standard error when $MOONCLIPFS_PROFILE is 1."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moonclipfs.store.backend import FileOps
from moonclipfs.store.publish import Ingest
from moonclipfs.torch.console import tell
from moonclipfs.types import Buffer

PHASES = ("wait", "copy", "hash", "encode", "write", "sync")


def wanted() -> bool:
    """Whether $MOONCLIPFS_PROFILE asks for it."""
    return os.environ.get("MOONCLIPFS_PROFILE") == "1"


class Profile:
    """The seconds that one save spent in each phase; those of several threads count one by one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds to a phase. Thread-safe."""
        with self._lock:
            self.seconds[phase] += seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is done inside to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def take_in(self, ingest: Ingest) -> None:
        """Count what an ingest tells, once at its end: what it wrote has been counted already."""
        self.add("hash", ingest.hash_seconds)
        self.add("encode", max(0.0, ingest.put_seconds - self.seconds["write"]))

    def tell(self, size: int, stored: int) -> None:
        """Write a line to standard error."""
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.seconds.items())
        tell(
            f"moonclipfs: {self._name}: {phases} s; durable after {time.perf_counter() - self._began:.3f} s, "
            f"{size / 1e6:.1f} MB in {stored / 1e6:.1f} MB",
            sys.stderr,
        )


class TimedOps(FileOps):
    """System calls that count into a profile while there is one."""

    def __init__(self, ops: FileOps) -> None:
        self._ops = ops
        self.profile: Profile | None = None

    def write(self, fd: int, data: Buffer) -> int:
        """See `FileOps.write`."""
        began = time.perf_counter()
        try:
            return self._ops.write(fd, data)
        finally:
            self._count("write", began)

    def fsync(self, fd: int) -> None:
        """See `FileOps.fsync`."""
        began = time.perf_counter()
        try:
            self._ops.fsync(fd)
        finally:
            self._count("sync", began)

    def _count(self, phase: str, began: float) -> None:
        if self.profile is not None:
            self.profile.add(phase, time.perf_counter() - began)
