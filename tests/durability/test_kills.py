"""The server of a mount is killed again and again under load: every promise that was given holds at the next mount."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonclipfs.fuse.control import ask
from moonclipfs.fuse.killed import abort, killed_server
from moonclipfs.fuse.mount import unmount
from moonclipfs.fuse.mounts import mount_at
from moonclipfs.layers.unfinished import check_layers
from moonclipfs.store.check import verify
from moonclipfs.store.health import State, check_store
from moonclipfs.store.store import Store
from tests.durability.load import ROLES
from tests.durability.promises import Promises, everything
from tests.fuse.conftest import Mounted, Mounter, eventually, is_running

SLOW = (pytest.mark.slow, pytest.mark.timeout(1800))
CHECKOUT = Path(__file__).parents[2]


WRITERS = tuple(role for role in ROLES if role not in ("checkpoints", "flushing"))
"""Those that ask nothing of the server but system calls."""


@contextmanager
def programs(roles: Sequence[str], place: Path, logs: Path, seed: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Programs of `load.py` at work; at the end they have found the server gone."""
    arguments = [sys.executable, "-m", "tests.durability.load"]
    running = [
        subprocess.Popen(
            [*arguments, role, str(place), str(logs / role), str(seed)], cwd=CHECKOUT, stderr=subprocess.PIPE
        )
        for role in roles
    ]
    try:
        yield running
        for role, program in zip(roles, running, strict=True):
            _, errors = program.communicate(timeout=30)
            # Who touches a map without a server gets SIGBUS.
            assert program.returncode in (0, -signal.SIGBUS), f"{role}: {errors.decode()}"
    finally:
        for program in running:
            program.kill()
            program.communicate()


class Loop:
    """A store that is mounted, written to and looked at, over and over."""

    def __init__(
        self, store: Store, mounter: Mounter, tmp_path: Path, seed: int, roles: Sequence[str] = ROLES, below: str = ""
    ) -> None:
        """`below` is where the programs write, in the mount."""
        self.roles = roles
        self.below = below
        self.store = store
        self.mounter = mounter
        self.logs = tmp_path / "logs"
        self.logs.mkdir()
        self.rng = random.Random(seed)
        self.promises = Promises()
        self.seed = 0

    def mount(self) -> Mounted:
        return self.mounter(self.store.path, read_only=False, seal_after=0.5)

    def round(self, mounted: Mounted, seconds: float) -> None:
        """Write until the server is killed."""
        self.seed += 1_000_000
        telling = len(set(self.roles) - {"flushing"})
        with programs(self.roles, mounted.path / self.below, self.logs, self.seed) as running:
            eventually(lambda: sum(log.stat().st_size > 0 for log in self.logs.iterdir()) == telling, 60)
            time.sleep(seconds)
            assert [one.poll() for one in running] == [None] * len(running), "a program ended before the kill"
            os.kill(mounted.pid, signal.SIGKILL)
            time.sleep(0.5)
            # A thread of it may wait for a program that waits for its answer: the next mount would end that, but here
            # the programs are to end first.
            mount = mount_at(str(mounted.path))
            if mount is not None and (pid := killed_server(mount)) is not None:
                assert abort(mount, pid)
            eventually(lambda: not is_running(mounted.pid))
        for log in self.logs.iterdir():
            self.promises.read(log)

    def look(self, mounted: Mounted, *, thorough: bool) -> None:
        """Everything that was promised is there, and what is left over is cleared away."""
        assert self.promises.broken(mounted.path / self.below) == []
        if not thorough:
            return
        ask(str(mounted.path), "flush", None)
        eventually(lambda: ask(str(mounted.path), "status")["captures"] == 0, 30)
        status = ask(str(mounted.path), "status")
        assert (status["failed_files"], status["troubles"], status["conflicts"]) == ({}, [], [])
        assert self.promises.broken_versions(self.store) == []
        assert self.promises.broken(mounted.path) == []
        assert verify(self.store).problems == []
        findings = [*check_store(self.store.path), *check_layers(self.store.path)]
        assert [str(finding) for finding in findings if finding.state is State.PROBLEM] == []
        eventually(lambda: not staged_files(self.store.path), 30)

    def stack(self, mounted: Mounted) -> str:
        """Go on in an overlay of what the one so far shows; returns where that is kept."""
        place = str(mounted.path)
        number = ask(place, "overlay_commit", None, name="work")["number"]
        ask(place, "overlay_discard", None, name="work")
        ask(place, "overlay_create", None, name="work", base=f"work@{number}")
        base = f"@versions/work/{number}"
        eventually((mounted.path / base).exists)
        self.look(mounted, thorough=False)
        return base

    def end(self, mounted: Mounted) -> None:
        """After a clean end everything is in the store."""
        self.look(mounted, thorough=True)
        unmount(mounted.path)
        assert not staged_files(self.store.path)
        text = mounted.log_text()
        assert "ERROR" not in text and "WARNING" not in text, text


def staged_files(store: Path) -> list[Path]:
    """The staging files of all layers."""
    return [path for path in store.glob("layers/*/staging/*") if path.is_file()]


@pytest.mark.parametrize(("kills", "seed"), [(2, 1), pytest.param(50, 2, marks=SLOW), pytest.param(50, 3, marks=SLOW)])
def test_every_promise_survives_kills_under_load(
    store: Store, mounter: Mounter, tmp_path: Path, expect_log: Callable[[str], None], kills: int, seed: int
) -> None:
    expect_log("cleared a dead mount")
    loop = Loop(store, mounter, tmp_path, seed)
    mounted = loop.mount()
    for number in range(kills):
        loop.round(mounted, loop.rng.uniform(0.5, 1.5 if kills < 10 else 4.0))
        mounted = loop.mount()
        loop.look(mounted, thorough=number % 5 == 4)
    loop.end(mounted)
    assert loop.promises.told > 100 * kills


@pytest.mark.parametrize(("kills", "seed"), [(2, 4), pytest.param(50, 5, marks=SLOW)])
def test_every_promise_survives_kills_in_an_overlay(
    store: Store, mounter: Mounter, tmp_path: Path, expect_log: Callable[[str], None], kills: int, seed: int
) -> None:
    """What was promised in an overlay is there after a kill, and its base is as it was, whatever the server was at."""
    expect_log("cleared a dead mount")
    loop = Loop(store, mounter, tmp_path, seed, WRITERS, "@overlays/work")
    mounted, bases = loop.mount(), dict[str, dict[str, object]]()
    (mounted.path / loop.below).mkdir()
    for number in range(kills):
        loop.round(mounted, loop.rng.uniform(0.2, 0.5 if kills < 10 else 4.0))
        mounted = loop.mount()
        loop.look(mounted, thorough=False)
        for base, before in bases.items():
            assert dict(everything(mounted.path / base)) == before
        if number % 2 == 0:
            base = loop.stack(mounted)
            bases = {**dict(list(bases.items())[-1:]), base: dict(everything(mounted.path / base))}
    ask(str(mounted.path), "overlay_flush", None, name="work")
    unmount(mounted.path)
    loop.look(loop.mount(), thorough=False)
    assert verify(store).problems == []
    assert loop.promises.told > 100 * kills
