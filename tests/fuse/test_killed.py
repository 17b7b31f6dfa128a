"""A mount whose server was killed, but cannot end: it neither answers nor fails until its connection is aborted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs.fuse.killed import killed_server
from moonclipfs.fuse.mount import unmount
from moonclipfs.fuse.mounts import mount_at, mount_source
from moonclipfs.fuse.prepare import check_mountpoint
from moonclipfs.store.store import Store
from tests.fuse.conftest import eventually

if not os.path.exists("/dev/fuse") or os.geteuid() != 0:
    pytest.skip("needs /dev/fuse and root, to mount without a server's help", allow_module_level=True)

SERVER = """
import ctypes, os, sys, threading
from moonclipfs.store.store import Store
store, place, source = sys.argv[1:]
opened = Store.open(store, purpose=f"mount, control socket none, at {place}")
fuse = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0"
assert libc.mount(source.encode(), place.encode(), b"fuse.moonclipfs", 0, options.encode()) == 0

def serve():
    try:
        while True:
            os.read(fuse, 1 << 21)  # and no answer, ever
    except OSError:
        os._exit(0)

threading.Thread(target=serve).start()
print("mounted", flush=True)
if sys.stdin.readline():
    libc.pthread_exit(None)  # the process counts as dead from here on, and has a thread in the kernel
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    Store.create(tmp_path / "store").close()
    (tmp_path / "mnt").mkdir()
    # From here on, whatever looks at the mountpoint itself waits for ever.
    place, store = str(tmp_path / "mnt"), str(tmp_path / "store")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, store, place, mount_source(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "mounted\n"
        yield process
        if mount_at(place) is not None:
            subprocess.run(["umount", "--force", "--lazy", place], check=True)
        process.kill()


def test_a_killed_server_that_cannot_end_is_in_the_way_of_nobody(
    server: subprocess.Popen[str], tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    expect_log("cleared a dead mount")
    assert server.stdin is not None
    print("die", file=server.stdin, flush=True)
    place = str(tmp_path / "mnt")
    mount = mount_at(place)
    assert mount is not None
    assert check_mountpoint(str(tmp_path / "store"), place) == place
    assert mount_at(place) is None
    assert server.wait(10) == 0
    assert killed_server(mount) is None


def test_umount_of_one_ends_who_waits_for_it(server: subprocess.Popen[str], tmp_path: Path) -> None:
    assert server.stdin is not None
    mount = mount_at(str(tmp_path / "mnt"))
    assert mount is not None
    print("die", file=server.stdin, flush=True)
    eventually(lambda: killed_server(mount) is not None)  # it takes a moment to die
    with subprocess.Popen(["stat", str(tmp_path / "mnt" / "file")], stderr=subprocess.DEVNULL) as waiting:
        unmount(str(tmp_path / "mnt"), lazy=True)
        assert waiting.wait(10) != 0
    assert server.wait(10) == 0


def test_a_server_that_lives_is_not_taken_for_a_killed_one(server: subprocess.Popen[str], tmp_path: Path) -> None:
    mount = mount_at(str(tmp_path / "mnt"))
    assert mount is not None and killed_server(mount) is None
