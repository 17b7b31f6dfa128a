"""Many programs and commands make, use, move and discard the same overlays of one mount at the same time."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs.errors import BusyError, ExistsError, NotEmptyError, NotFoundError
from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.store.check import verify
from moonclipfs.store.store import Store
from tests.fuse.conftest import SMALL_FILES, Mounted, Mounter
from tests.layers.publish import publish

NAMES = [f"o{number}" for number in range(4)]
ALLOWED = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ESTALE, errno.EBUSY, errno.EISDIR, errno.ENOTDIR}
"""What a program may meet whose overlay goes away or comes meanwhile."""
TOLD = (BusyError, ExistsError, NotFoundError, NotEmptyError)


class Worker:
    """Does anything with the overlays of a mount, at random."""

    def __init__(self, mounted: Mounted, seed: int) -> None:
        self.root = str(mounted.path)
        self.overlays = mounted.path / "@overlays"
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.calls: list[Callable[[], object]] = [
            self.make, self.create, self.create_on_overlay, self.discard, self.force, self.move, self.rename,
            self.commit, self.rebase, self.remove, self.list, self.held, *[self.write, self.read] * 3,
        ]  # fmt: skip

    def run(self, until: float) -> None:
        """Until the monotonic clock says so."""
        while time.monotonic() < until:
            call = self.rng.choice(self.calls)
            try:
                call()
                self.done[call.__name__] += 1
            except OSError as error:
                assert error.errno in ALLOWED, (call.__name__, error)
            except TOLD:
                pass

    def name(self) -> str:
        return self.rng.choice(NAMES)

    def path(self) -> Path:
        return self.overlays / self.name()

    def verb(self, verb: str, **arguments: object) -> None:
        ask(self.root, f"overlay_{verb}", 60, **arguments)

    def make(self) -> None:
        self.path().mkdir()

    def create(self) -> None:
        self.verb("create", name=self.name(), base=self.rng.choice(["base", "base@1", ""]))

    def create_on_overlay(self) -> None:
        self.verb("create", name=self.name(), base=f"@overlays/{self.name()}")

    def discard(self) -> None:
        self.verb("discard", name=self.name())

    def force(self) -> None:
        self.verb("discard", name=self.name(), force=True)

    def move(self) -> None:
        os.rename(self.path(), self.path())

    def rename(self) -> None:
        self.verb("rename", name=self.name(), new=self.name())

    def commit(self) -> None:
        self.verb("commit", **{"name": self.name(), "as": f"kept/{self.name()}"})

    def rebase(self) -> None:
        self.verb("rebase", name=self.name(), base="base@2")

    def remove(self) -> None:
        self.path().rmdir()

    def write(self) -> None:
        path = self.path() / self.rng.choice(["config.json", "new", "sub/new"])
        path.write_bytes(b"w" * self.rng.choice([10, 200_000]))

    def read(self) -> None:
        data = (self.path() / "config.json").read_bytes()
        assert data in (SMALL_FILES["config.json"], b"second") or set(data) <= {ord("w")}

    def list(self) -> None:
        for directory, _, files in os.walk(self.overlays):
            for file in files:
                os.stat(os.path.join(directory, file))

    def held(self) -> None:
        with (self.path() / f"held{self.rng.random()}").open("x+b", buffering=0) as file:
            file.write(b"h" * 1000)
            time.sleep(0.01)
            assert os.pread(file.fileno(), 1000, 0) == b"h" * 1000


def stir(store: Store, mounter: Mounter, seconds: float, seed: int) -> None:
    publish(store, "base", SMALL_FILES)
    publish(store, "base", {"config.json": b"second", "sub": {"x": b"1"}})
    mounted = mounter(store.path, read_only=False, seal_after=None)
    workers, failures = [Worker(mounted, seed + number) for number in range(4)], []
    began = time.monotonic()

    def run(worker: Worker) -> None:
        try:
            worker.run(began + seconds)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        assert not thread.is_alive(), "it waits for ever"
    assert failures == []
    done = sum((worker.done for worker in workers), Counter[str]())
    assert done
    shown = {path.name: sorted(os.listdir(path)) for path in mounted.path.joinpath("@overlays").iterdir()}
    assert "unexpected error" not in mounted.log_text()
    unmount(mounted.path)
    again = mounter(store.path, read_only=False, seal_after=None)
    assert {path.name: sorted(os.listdir(path)) for path in again.path.joinpath("@overlays").iterdir()} == shown
    layers = [name for name in os.listdir(store.path / "layers") if name.startswith("overlay.")]
    assert len(layers) == len(shown)
    unmount(again.path)
    assert verify(store).problems == []


def test_overlays_come_and_go_under_those_who_use_them(store: Store, mounter: Mounter) -> None:
    """However overlays are made, used, moved and discarded at once, nobody waits for ever, and all are whole."""
    stir(store, mounter, 1.0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 103))
def test_overlays_come_and_go_for_long(store: Store, mounter: Mounter, seed: int) -> None:
    stir(store, mounter, 60.0, seed * 100)
