"""Real mounts of real stores, taken away whatever a test leaves."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moonclipfs.errors import FuseUnavailableError
from moonclipfs.fuse.control import ask, runtime_path, server_pid
from moonclipfs.fuse.mount import MountOptions, mount
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.fuse.prepare import check_device
from moonclipfs.store.store import Store
from tests.layers.publish import publish


@dataclass
class Mounted:
    """A mounted store. `log` is the server's log file; `stats` asks the server itself."""

    store: Path
    path: Path
    log: Path
    pid: int

    def stats(self) -> dict[str, Any]:
        """The server's counts."""
        return ask(str(self.path), "stats")

    def log_text(self) -> str:
        """What the server has logged so far."""
        return self.log.read_text() if self.log.exists() else ""

    def flush(self) -> None:
        """Return when all that was written is stored."""
        ask(str(self.path), "flush", None)


@dataclass
class Overlaid(Mounted):
    """An overlay of a mount at `root`, as a place to write to as any mount is; its log begins with it."""

    root: Path
    log_begins: int

    def stats(self) -> dict[str, Any]:
        return ask(str(self.root), "stats")

    def log_text(self) -> str:
        return super().log_text()[self.log_begins :]

    def flush(self) -> None:
        ask(str(self.root), "overlay_flush", None, name=self.path.name)


Mounter = Callable[..., Mounted]


@pytest.fixture(scope="session")
def fuse() -> None:
    """Skip where the FUSE device cannot be opened."""
    try:
        check_device()
    except FuseUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def mounter(fuse: None, tmp_path: Path) -> Iterator[Mounter]:
    """Mount a store at tmp_path/mnt (or `at`), read-only unless asked otherwise; options as in MountOptions."""
    mounted: list[Mounted] = []

    def make(store: Path, at: Path | None = None, **options: Any) -> Mounted:
        place = at or tmp_path / "mnt"
        if mount_at(str(place)) is None:
            place.mkdir(exist_ok=True)
        log = tmp_path / f"{place.name}.log"
        options.setdefault("read_only", True)
        assert mount(store, place, MountOptions(log=str(log), **options)) == 0
        pid = server_pid(str(place))
        assert pid is not None
        mounted.append(Mounted(store, place, log, pid))
        return mounted[-1]

    yield make
    for one in mounted:
        clear(one)
    for one in mounted:  # what encodes for a server ends by itself
        eventually(lambda store=one.store: not processes_of(store), 30)  # type: ignore[misc]


PATCHED_SERVER = """
import json, sys
sys.path.insert(0, sys.argv[4])
{patch}
from moonclipfs.fuse.prepare import MountOptions
from moonclipfs.fuse.server import serve
options = MountOptions(foreground=True, **json.loads(sys.argv[5]))
sys.exit(serve(sys.argv[1], sys.argv[2], options, lambda: open(sys.argv[3], "w").close()))
"""


@contextmanager
def patched_server(store: Path, place: Path, patch: str, *, ends: int = 0, **options: Any) -> Iterator[Mounted]:
    """Mount, read-only unless asked otherwise, with a server that runs the Python code `patch` first; it has to end
    with the exit code `ends` when told to stop.
    """
    options.setdefault("read_only", True)
    place.mkdir(exist_ok=True)
    ready = place.parent / "ready"
    code = PATCHED_SERVER.format(patch=patch)
    root = Path(__file__).parents[2]
    server = subprocess.Popen([sys.executable, "-c", code, store, place, ready, root, json.dumps(options)])
    try:
        eventually(ready.exists)
        yield Mounted(store, place, place.parent / "none", server.pid)
        server.terminate()
        assert server.wait(30) == ends
    finally:
        server.kill()
        server.wait()
        if mount_at(str(place)) is not None:
            subprocess.run(["fusermount3", "-uz", place], check=False)


def clear(mounted: Mounted) -> None:
    """Take a mount away by force."""
    while (found := mount_at(str(mounted.path))) is not None and found.is_ours:
        subprocess.run(["fusermount3", "-uz", str(mounted.path)], check=True)
    try:
        os.kill(mounted.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    runtime_path(str(mounted.path), "sock").unlink(missing_ok=True)


def processes_of(store: Path) -> list[int]:
    """The processes that serve a store, or encode for that."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(store) in line and entry.name != str(os.getpid()):
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    """False for a process that has ended, also when nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Fail unless `condition` comes true soon."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


@contextmanager
def kept_names(how: int = fcntl.LOCK_SH) -> Iterator[None]:
    """No test of another process makes the kernel forget names meanwhile: its caches are the whole machine's."""
    with (Path(tempfile.gettempdir()) / "moonclipfs-test-names.lock").open("a") as lock:
        fcntl.flock(lock, how)
        yield


def drop_names() -> None:
    """Make the kernel forget names and inodes that nobody uses."""
    try:
        with kept_names(fcntl.LOCK_EX):
            Path("/proc/sys/vm/drop_caches").write_text("2")
    except OSError as error:
        pytest.skip(f"the kernel's caches cannot be dropped: {error.strerror}")


SMALL_FILES = {
    "config.json": b'{"layers": 2}',
    "model.bin": os.urandom(300_000),
    "empty": b"",
    "latest": "model.bin",
    "sub": {"deep": {"x": b"deep"}, "y": b"y" * 513},
}


@pytest.fixture(scope="session")
def overlays(fuse: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount that overlays are made in, for all tests: each makes its own, on the snapshot `base` or on nothing."""
    directory = tmp_path_factory.mktemp("overlays")
    place, log = directory / "mnt", directory / "log"
    place.mkdir()
    Store.create(directory / "store").close()
    with Store.open(directory / "store", write=True, index_path=directory / "index.sqlite") as store:
        publish(store, "base", {"run1": {"a": SMALL_FILES}})
        assert mount(store.path, place, MountOptions(log=str(log))) == 0
        pid = server_pid(str(place))
        assert pid is not None
        mounted = Mounted(store.path, place, log, pid)
        yield mounted
        clear(mounted)
        eventually(lambda: not processes_of(store.path), 30)


def overlaid(overlays: Mounted, base: str) -> Iterator[Overlaid]:
    """A new overlay of a mount, thrown away behind the test."""
    name, begins = f"o{time.monotonic_ns()}", len(overlays.log_text())
    ask(str(overlays.path), "overlay_create", None, name=name, base=base)
    path = overlays.path / "@overlays" / name
    yield Overlaid(overlays.store, path, overlays.log, overlays.pid, overlays.path, begins)
    ask(str(overlays.path), "overlay_discard", None, name=name, force=True)


@pytest.fixture
def overlay(overlays: Mounted) -> Iterator[Overlaid]:
    """An overlay of a snapshot that holds run1/a, made of SMALL_FILES."""
    yield from overlaid(overlays, "base")


@pytest.fixture
def empty_overlay(overlays: Mounted) -> Iterator[Overlaid]:
    """An overlay of nothing."""
    yield from overlaid(overlays, "")


@pytest.fixture(params=["live", "overlay"])
def anywhere(request: pytest.FixtureRequest) -> Mounted:
    """Where programs write: a mount, or an overlay; both have run1/a, made of SMALL_FILES."""
    found: Mounted = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def small(store: Store, mounter: Mounter) -> Mounted:
    """A mount of a store with the snapshot run1/a, made of SMALL_FILES."""
    publish(store, "run1/a", SMALL_FILES)
    return mounter(store.path)


@pytest.fixture
def live(store: Store, mounter: Mounter) -> Mounted:
    """A mount that can be written to, of a store with the snapshot run1/a, made of SMALL_FILES."""
    publish(store, "run1/a", SMALL_FILES)
    return mounter(store.path, read_only=False)
