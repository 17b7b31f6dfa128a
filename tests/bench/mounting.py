"""Mounts for the benchmarks, and what they cost: each beside the plain disk, or beside a server that does nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moonclipfs.errors import BusyError
from moonclipfs.fuse.control import server_pid
from moonclipfs.fuse.mount import MountOptions, mount, unmount
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.store.store import Store

_NANO = 1e-9
_SYNCS = ("fsync", "fdatasync", "sync_file_range", "syncfs", "msync")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and all its threads, to the nanosecond; threads that ended are left out."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total * _NANO


def load() -> str:
    """How many threads want a processor: the figures mean little without it."""
    return "load " + " ".join(f"{value:.1f}" for value in os.getloadavg()[:2])


@dataclass
class Place:
    """A directory to write to; `pid` is who serves it, 0 for the kernel itself."""

    name: str
    path: Path
    pid: int = 0

    def cpu(self) -> float:
        """Processor time of the server so far."""
        return cpu_seconds(self.pid) if self.pid else 0.0


@contextmanager
def writable(
    work: Path, name: str = "mount", *, flags: bool = True, seal_after: float | None = None
) -> Iterator[Place]:
    """A mount of a new store; see `served`."""
    store, path = work / f"store-{name}", work / f"mnt-{name}"
    if not store.exists():
        Store.create(store).close()
    with served(store, path, name, flags=flags) as place:
        yield place


@contextmanager
def served(store: Path, path: Path, name: str = "mount", *, flags: bool = True) -> Iterator[Place]:
    """A mount of a store; `flags` is whether the kernel is asked for what libfuse does not ask for."""
    path.mkdir(exist_ok=True)
    before = os.environ.pop("MOONCLIPFS_INIT_FLAGS", None)
    if not flags:
        os.environ["MOONCLIPFS_INIT_FLAGS"] = "0"
    try:
        mount(store, path, MountOptions(seal_after=None))
    finally:
        os.environ.pop("MOONCLIPFS_INIT_FLAGS", None)
        if before is not None:
            os.environ["MOONCLIPFS_INIT_FLAGS"] = before
    try:
        yield Place(name, path, server_pid(str(path)) or 0)
    finally:
        _unmount(path)


@contextmanager
def counted(work: Path) -> Iterator[tuple[Place, Callable[[], int | None]]]:
    """A mount of a new store, and what tells how often it and its encoder have synced so far; None without strace."""
    store, path, trace = work / "store-counted", work / "mnt-counted", work / "trace"
    path.mkdir()
    Store.create(store).close()
    arguments = ["mount", "--foreground", "--seal-after", "off", store, path]
    command = [sys.executable, "-c", "from moonclipfs.cli.main import main; raise SystemExit(main())", *arguments]
    strace = shutil.which("strace")
    if strace is not None:
        command = [strace, "-f", "--seccomp-bpf", "-qq", "-e", "trace=" + ",".join(_SYNCS), "-o", trace, *command]

    def syncs() -> int | None:
        lines = trace.read_text().splitlines() if strace is not None else []
        return sum(any(f" {call}(" in line for call in _SYNCS) for line in lines) if strace is not None else None

    with subprocess.Popen(command) as server:
        while mount_at(str(path)) is None or server_pid(str(path)) is None:
            assert server.poll() is None, "the mount ended"
            time.sleep(0.1)
        try:
            yield Place("mount", path, server_pid(str(path)) or 0), syncs
        finally:
            _unmount(path)


def _unmount(path: Path) -> None:
    """The kernel lets go of files a moment after they were closed."""
    for _ in range(50):
        try:
            return unmount(path)
        except BusyError:
            time.sleep(0.1)
    unmount(path, lazy=True)


@contextmanager
def trivial(work: Path, size: int = 0) -> Iterator[Place]:
    """A mount of the trivial server."""
    path = work / "mnt-trivial"
    path.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.bench.trivial_mount", str(path), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            yield Place("trivial server", path, server.pid)
        finally:
            server.terminate()
