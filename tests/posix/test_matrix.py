"""What ext4 says and does to every call, a mount says and does."""

from __future__ import annotations

import itertools
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonclipfs.fuse.control import ask
from tests.fuse.conftest import eventually
from tests.posix.conftest import Shared
from tests.posix.matrix import ONE_PATH, PATHS, SET_IDS, TWO_PATHS, Times, build, chown_nothing, listdir, look
from tests.posix.users import OWNER, ROOT, USERS, User, Worker

Case = tuple[Callable[..., Any], tuple[str, ...]]

TICK_SECONDS = 0.006
"""Longer than what the clock of times of changes stands still."""


class Beside:
    """The same calls in two trees by one user; the trees are made anew after a change."""

    def __init__(self, shared: Shared, user: User, kind: str = "live") -> None:
        """`kind` tells what the trees of the mount are: made there, unchanged snapshots (`clone`), or `overlay`s of
        one.
        """
        self.shared = shared
        self.worker = Worker(user)
        self.plain = shared.plain / "tree"
        self.mount = shared.mount / "tree"
        self.succeeded = 0
        self._kind = kind
        self._made = 0
        if kind == "clone":
            _build(shared.mount / "base")
            self._ask("seal", path="side/base")
        elif kind == "overlay":
            (shared.mount / "base").mkdir()
            (shared.mount / "base").chmod(0o1777)
            _build(shared.mount / "base/tree")
            self._ask("seal", path="side/base")
        self._make()

    def _ask(self, operation: str, **arguments: Any) -> None:
        ask(str(self.shared.mounted.path), operation, None, **arguments)

    def _make(self) -> None:
        _build(self.plain)
        before, now = f"tree{self._made}", f"tree{self._made + 1}"
        if self._kind == "clone":
            if self._made:
                shutil.rmtree(self.mount)
            self.mount = self.shared.mount / now
            self._ask("clone", source="side/base", target=f"side/{now}")
            eventually(self.mount.exists)
        elif self._kind == "overlay":
            if self._made:
                self._ask("overlay_discard", name=before)
            self.mount = self.shared.mounted.path / "@overlays" / now / "tree"
            self._ask("overlay_create", name=now, base="side/base")
        else:
            _build(self.mount)
        self._made += 1
        self.before = {root: look(root) for root in (self.plain, self.mount)}
        assert self.before[self.plain][0] == self.before[self.mount][0]
        time.sleep(TICK_SECONDS)

    def check(self, case: Case) -> str | None:
        """Make a call on both sides; returns what differs."""
        call, paths = case
        expected = self.worker.call(self.plain, call, *paths)
        got = self.worker.call(self.mount, call, *paths)
        title = f"{self.worker.user.name}: {call.__name__}{tuple(path[:30] for path in paths)}"
        if got != expected:
            self._make()
            return f"{title}: {got}, ext4 {expected}"
        if expected[0] == "error":
            return None
        self.succeeded += 1
        (plain, plain_times), (mount, mount_times) = look(self.plain), look(self.mount)
        moved = [_moved(self.before[self.plain][1], plain_times), _moved(self.before[self.mount][1], mount_times)]
        if plain != self.before[self.plain][0] or mount != self.before[self.mount][0] or any(moved):
            self._make()
        if mount != plain:
            wrong = {name for name in {*plain, *mount} if plain.get(name) != mount.get(name)}
            return f"{title}: {[(name[:30], mount.get(name), plain.get(name)) for name in wrong]}"
        if moved[0] != moved[1]:
            return f"{title}: times that changed: {moved[1]}, ext4 {moved[0]}"
        return None

    def check_all(self, cases: Iterable[Case]) -> None:
        """All of them are the same."""
        problems = [problem for case in cases if (problem := self.check(case)) is not None]
        assert not problems, f"{len(problems)}:\n" + "\n".join(problems[:200])
        assert self.succeeded


def _build(root: Path) -> None:
    if root.exists():
        shutil.rmtree(root)
    root.mkdir()
    build(root)


def _moved(before: Times, after: Times) -> dict[str, tuple[bool, bool]]:
    """Of each inode that was there already and has changed: whether its mtime and its ctime have."""
    moved = {}
    for number, (name, mtime, ctime) in before.items():
        _, *now = after.get(number, (name, mtime, ctime))
        if now != [mtime, ctime]:
            moved[name] = (now[0] != mtime, now[1] != ctime)
    return moved


@pytest.fixture(params=USERS, ids=lambda user: user.name)
def beside(request: pytest.FixtureRequest, shared: Shared) -> Iterator[Beside]:
    both = Beside(shared, request.param)
    yield both
    both.worker.close()


@pytest.fixture(params=USERS, ids=lambda user: user.name)
def beside_stored(request: pytest.FixtureRequest, shared: Shared) -> Iterator[Beside]:
    both = Beside(shared, request.param, "clone")
    yield both
    both.worker.close()


@pytest.fixture(params=USERS, ids=lambda user: user.name)
def beside_overlay(request: pytest.FixtureRequest, shared: Shared) -> Iterator[Beside]:
    both = Beside(shared, request.param, "overlay")
    yield both
    both.worker.close()


def singles(user: User) -> list[Case]:
    cases = [(call, (path,)) for call in ONE_PATH for path in PATHS]
    if user in (ROOT, OWNER):
        return cases
    # The kernel asks the same before a write of another user, which is allowed: nothing changes, but it is no error.
    return [(call, paths) for call, paths in cases if call is not chown_nothing or paths[0] not in SET_IDS]


def inside(cases: list[Case]) -> list[Case]:
    """Without the listing of the directory above, where trees that are clones have other names."""
    return [(call, paths) for call, paths in cases if (call, paths) != (listdir, ("..",))]


def pairs() -> list[Case]:
    return [(call, both) for call in TWO_PATHS for both in itertools.product(PATHS, PATHS)]


def test_some_calls_do_what_they_do_on_ext4(beside: Beside) -> None:
    """Every call has the errno and the effects of ext4, whoever makes it: a sample."""
    rng = random.Random(0)
    beside.check_all(rng.sample(singles(beside.worker.user), 80) + rng.sample(pairs(), 60))


def test_calls_change_a_snapshot_as_they_change_ext4(beside_stored: Beside) -> None:
    """Calls on what is stored, and was not changed before, have the errno and the effects of ext4."""
    rng = random.Random(2)
    beside_stored.check_all(rng.sample(inside(singles(beside_stored.worker.user)), 80) + rng.sample(pairs(), 60))


def test_calls_change_an_overlay_as_they_change_ext4(beside_overlay: Beside) -> None:
    """Calls on what shows through in an overlay have the errno and the effects of ext4."""
    rng = random.Random(3)
    beside_overlay.check_all(rng.sample(inside(singles(beside_overlay.worker.user)), 40) + rng.sample(pairs(), 40))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_call_of_one_path_changes_an_overlay_as_it_changes_ext4(beside_overlay: Beside) -> None:
    beside_overlay.check_all(inside(singles(beside_overlay.worker.user)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", TWO_PATHS, ids=lambda call: call.__name__)
def test_calls_of_two_paths_change_an_overlay_as_they_change_ext4(
    beside_overlay: Beside, call: Callable[..., Any]
) -> None:
    beside_overlay.check_all(random.Random(4).sample([case for case in pairs() if case[0] is call], 300))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_call_of_one_path_changes_a_snapshot_as_it_changes_ext4(beside_stored: Beside) -> None:
    beside_stored.check_all(inside(singles(beside_stored.worker.user)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_call_of_one_path_does_what_it_does_on_ext4(beside: Beside) -> None:
    beside.check_all(singles(beside.worker.user))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", TWO_PATHS, ids=lambda call: call.__name__)
def test_calls_of_two_paths_do_what_they_do_on_ext4(beside: Beside, call: Callable[..., Any]) -> None:
    cases = [case for case in pairs() if case[0] is call]
    beside.check_all(random.Random(1).sample(cases, 700))
