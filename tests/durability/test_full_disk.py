"""A full disk, and kills on it: what was accepted is there, names change as ever, and room makes all work again."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.store.check import verify
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually, is_running

MIB = 1 << 20
CLEARED = "cleared a dead mount"
ROOM = (errno.ENOSPC, errno.EDQUOT)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 96 MiB."""
    place, image = tmp_path / "disk", tmp_path / "image"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(96 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    mount = ["mount", "-o", "loop", str(image), str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root and a loop device")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


class Full:
    """A mount whose store is on a small disk, and what was accepted there."""

    def __init__(self, disk: Path, mounter: Mounter, seed: int) -> None:
        Store.create(disk / "store").close()
        self.mounter = mounter
        self.store = disk / "store"
        self.rng = random.Random(seed)
        self.synced: dict[str, bytes] = {}
        self.number = 0
        self.live = self.mount()

    def mount(self) -> Mounted:
        self.live = self.mounter(self.store, read_only=False, seal_after=None)
        return self.live

    def kill(self) -> None:
        os.kill(self.live.pid, signal.SIGKILL)
        eventually(lambda: not is_running(self.live.pid))

    def save(self, *, sync: bool = True) -> int:
        """A new file; returns the errno of what failed, 0 when nothing did."""
        self.number += 1
        name, data = f"f{self.number}", self.rng.randbytes(self.rng.choice([3000, MIB, 2 * MIB]))
        try:
            with (self.live.path / name).open("wb", buffering=0) as file:
                for at in range(0, len(data), MIB):
                    file.write(data[at : at + MIB])
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            return error.errno or -1
        self.synced[name] = data
        return 0

    def fill(self) -> None:
        """Until there is no room."""
        while (code := self.save(sync=self.number % 3 != 0)) == 0:
            assert self.number < 1000
        assert code in ROOM, os.strerror(code)

    def change_names(self) -> None:
        """What must work on a full disk: each of these changes names or attributes only."""
        root = self.live.path
        (root / "d").mkdir(exist_ok=True)
        for step in range(200):
            (root / "L.tmp").unlink(missing_ok=True)
            os.symlink(f"step_{step}", root / "L.tmp")
            os.replace(root / "L.tmp", root / "LATEST")
            assert os.readlink(root / "LATEST") == f"step_{step}"
        name = next(iter(self.synced))
        os.rename(root / name, root / "d/moved")
        os.chmod(root / "d/moved", 0o600)
        os.utime(root / "d/moved", (1, 1))
        os.setxattr(root / "d/moved", "user.x", b"y")
        os.link(root / "d/moved", root / "d/link")
        os.unlink(root / "d/link")
        os.rename(root / "d", root / "e")
        os.rename(root / "e/moved", root / name)
        os.rmdir(root / "e")

    def check(self) -> None:
        """Everything that was accepted is there, byte for byte."""
        for name, data in self.synced.items():
            assert (self.live.path / name).read_bytes() == data, name

    def remove(self, count: int) -> None:
        """Also what could not be written to its end."""
        for name in os.listdir(self.live.path):
            if name.startswith("f") and name not in self.synced:
                (self.live.path / name).unlink()
        for name in self.rng.sample(sorted(self.synced), count):
            (self.live.path / name).unlink()
            del self.synced[name]

    def works_again(self) -> None:
        """Some room was made."""
        eventually(lambda: self.save() == 0, 60)
        self.check()
        ask(str(self.live.path), "flush", None)
        self.check()

    def end(self) -> None:
        unmount(self.live.path)
        with Store.open(self.store) as store:
            assert verify(store).problems == []
        assert not [path for path in self.store.glob("layers/*/staging/*") if path.is_file()]


def test_r039_r043_a_full_disk_and_a_kill_on_it(
    disk: Path, mounter: Mounter, expect_log: Callable[[str], None]
) -> None:
    """ENOSPC comes from write, fsync or close; names and attributes change on it, before and after a kill."""
    expect_log(CLEARED)
    full = Full(disk, mounter, 1)
    full.fill()
    full.change_names()
    full.check()
    full.kill()
    full.mount()
    full.check()
    full.change_names()
    full.remove(len(full.synced) // 2)
    full.works_again()
    full.end()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_while_the_disk_is_full(disk: Path, mounter: Mounter, expect_log: Callable[[str], None]) -> None:
    expect_log(CLEARED)
    full = Full(disk, mounter, 2)
    for _ in range(12):
        full.fill()
        if full.rng.random() < 0.5:
            full.change_names()
        full.kill()
        full.mount()
        full.check()
        full.remove(full.rng.randrange(3, len(full.synced)))
        eventually(lambda: full.save() == 0, 60)
        full.check()
    full.remove(len(full.synced) // 2)
    full.works_again()
    full.end()
