"""However a mount that is written to ends, what was written is in the store; and the next mount comes up at once."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs.errors import BusyError
from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.layers.unfinished import unfinished
from moonclipfs.store.check import verify
from moonclipfs.store.export import export
from moonclipfs.store.gc import collect
from moonclipfs.store.layerdirs import layer_names
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually, is_running
from tests.layers.publish import publish
from tests.layers.sealkit import model

MIB = 1 << 20
CLEARED = "cleared a dead mount"

End = Callable[[Mounted], None]


def kill(mounted: Mounted) -> None:
    """kill -9 of the server."""
    os.kill(mounted.pid, signal.SIGKILL)
    eventually(lambda: not is_running(mounted.pid))


def save(place: Path) -> dict[str, bytes]:
    """A checkpoint of which some is synced, some is not, and some came through a map; what is in it."""
    files = {
        "model.safetensors": model(3, 3 * MIB),
        "optimizer.pt": b"PK" + os.urandom(MIB),
        "config.json": b'{"layers": 2}',
        "mapped.bin": os.urandom(16 * 4096),
    }
    place.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "config.json"):
        (place / name).write_bytes(files[name])
    with (place / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())
    descriptor = os.open(place / "mapped.bin", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 16 * 4096)
    with mmap.mmap(descriptor, 16 * 4096) as map_:
        map_[:] = files["mapped.bin"]
    os.close(descriptor)
    return files


def is_stored(store: Path, path: str, files: dict[str, bytes], to: Path) -> None:
    """Without a mount: nothing is staged, the snapshot is whole, and exports to what was written."""
    assert [unfinished(store, name).files for name in layer_names(store)] == [0]
    assert not [staged for staged in store.glob("layers/*/staging/*") if staged.is_file()]
    with Store.open(store) as opened:
        assert verify(opened).problems == []
        export(opened, opened.resolve(path), to)
    assert {name: (to / name).read_bytes() for name in os.listdir(to)} == files


def _signal(number: int) -> End:
    return lambda mounted: os.kill(mounted.pid, number)


def _fusermount(mounted: Mounted) -> None:
    subprocess.run(["fusermount3", "-u", mounted.path], check=True)


@pytest.mark.parametrize(
    "end",
    [
        _signal(signal.SIGTERM),
        pytest.param(_signal(signal.SIGINT), marks=pytest.mark.slow),
        pytest.param(lambda mounted: unmount(mounted.path), marks=pytest.mark.slow),
        _fusermount,
        lambda mounted: unmount(mounted.path, lazy=True),
    ],
    ids=["SIGTERM", "SIGINT", "umount", "fusermount3", "lazy"],
)
def test_however_a_mount_ends_everything_is_stored(live: Mounted, tmp_path: Path, end: End) -> None:
    """SIGTERM flushes and unmounts; `fusermount3 -u` is as safe as `umount`: all bytes are in the store afterwards."""
    files = save(live.path / "run/checkpoint-1")
    end(live)
    eventually(lambda: not is_running(live.pid), 60)
    assert mount_at(str(live.path)) is None
    assert "ERROR" not in live.log_text()
    is_stored(live.store, "run/checkpoint-1", files, tmp_path / "out")


def test_r097_a_busy_umount_of_a_writer_names_it_and_lazy_serves_it(live: Mounted, tmp_path: Path) -> None:
    """Who has a file open writes on after a lazy umount; after the close its bytes are stored, and the server ends."""
    files = save(live.path / "run/checkpoint-1")
    data = os.urandom(2 * MIB)
    with (live.path / "run/checkpoint-1/late.bin").open("wb", buffering=0) as file:
        file.write(data[:MIB])
        with pytest.raises(BusyError) as caught:
            unmount(live.path)
        assert f"pid {os.getpid()}" in str(caught.value)
        assert str(live.path / "run/checkpoint-1/late.bin") in str(caught.value)
        unmount(live.path, lazy=True)
        assert mount_at(str(live.path)) is None
        file.write(data[MIB:])
        assert is_running(live.pid)
    eventually(lambda: not is_running(live.pid), 60)
    is_stored(live.store, "run/checkpoint-1", {**files, "late.bin": data}, tmp_path / "out")


def test_r081_r095_a_mount_after_a_kill_comes_up_at_once(
    live: Mounted, mounter: Mounter, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    """Nobody has to wait for a lock, or to clear anything by hand; a live holder is still respected."""
    expect_log(CLEARED)
    files = save(live.path / "run/checkpoint-1")
    kill(live)
    began = time.monotonic()
    again = mounter(live.store, read_only=False)
    assert time.monotonic() - began < 5
    with pytest.raises(BusyError, match=f"{again.pid}"):
        mounter(live.store, tmp_path / "second", read_only=False)
    assert {name: (again.path / "run/checkpoint-1" / name).read_bytes() for name in files} == files
    unmount(again.path)
    is_stored(live.store, "run/checkpoint-1", files, tmp_path / "out")


@pytest.mark.slow
def test_r083_a_server_that_was_stopped_goes_on_with_what_gc_left(live: Mounted, tmp_path: Path) -> None:
    """A stopped server is not taken for dead on its host: gc beside it takes nothing that it needs."""
    first = save(live.path / "run/checkpoint-1")
    ask(str(live.path), "flush", None)
    os.kill(live.pid, signal.SIGSTOP)
    try:
        with Store.open(live.store, write=True) as other:
            report = collect(other, wait_seconds=0.5)
            assert report.deleted_packs == 0
    finally:
        os.kill(live.pid, signal.SIGCONT)
    second = save(live.path / "run/checkpoint-2")
    ask(str(live.path), "seal", None, path="run/checkpoint-1")
    unmount(live.path)
    assert "ERROR" not in live.log_text()
    is_stored(live.store, "run/checkpoint-1", first, tmp_path / "one")
    is_stored(live.store, "run/checkpoint-2", second, tmp_path / "two")


def test_r037_another_mount_sees_a_file_whole_or_not_at_all(live: Mounted, mounter: Mounter, tmp_path: Path) -> None:
    """From the first write to the seal and after, another mount never sees a short file, or one of other bytes."""
    other = mounter(live.store, tmp_path / "other", read_only=False, layer="other")
    data, seen, stop = os.urandom(MIB), set[bytes](), threading.Event()

    def poll() -> None:
        while not stop.is_set():
            try:
                seen.add((other.path / "run/__1_0.distcp").read_bytes())
            except FileNotFoundError:
                pass

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        (live.path / "run").mkdir()
        with (live.path / "run/__1_0.distcp").open("wb", buffering=0) as file:
            for at in range(0, MIB, MIB // 8):
                file.write(data[at : at + MIB // 8])
            os.fsync(file.fileno())
        ask(str(live.path), "seal", None, path="run")
        eventually(lambda: bool(seen))
    finally:
        stop.set()
        thread.join()
    assert seen == {data}


@pytest.mark.slow
def test_r071_r073_gc_is_killed_beside_a_mount_that_saves(
    store: Store, live: Mounted, mounter: Mounter, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    """A gc that was killed after it deleted something leaves no object that only an index knows: the same content,
    saved again, is read back exactly.
    """
    expect_log(CLEARED)
    files: dict[str, bytes] = {"model.safetensors": model(5, 3 * MIB), "optimizer.pt": b"PK" + os.urandom(MIB)}
    publish(store, "old/checkpoint-1", files)
    store.log.forget([("old/checkpoint-1", 1)])
    eventually(lambda: _killed_in_gc(store), 30)
    again = live.path / "run/checkpoint-2"
    again.mkdir(parents=True)
    for name, data in files.items():
        (again / name).write_bytes(data)
    ask(str(live.path), "seal", None, path="run/checkpoint-2")
    kill(live)
    after = mounter(live.store, read_only=False)
    assert {name: (after.path / "run/checkpoint-2" / name).read_bytes() for name in files} == files
    unmount(after.path)
    is_stored(live.store, "run/checkpoint-2", files, tmp_path / "out")


_GC = """
import os, sys
from pathlib import Path
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from tests.faults import PausingOps
with Store.open(Path(sys.argv[1]), write=True) as store:
    store.backend.ops = PausingOps("unlink", "/packs/", lambda: os._exit(86), late=True)
    collect(store, wait_seconds=1)
"""


def _killed_in_gc(store: Store) -> bool:
    """Run gc, which is killed right after it deleted a pack; False when it deleted none."""
    store.names()  # gc waits for all who have not seen the log
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _GC, store.path], cwd=root, check=False)
    return done.returncode == 86
