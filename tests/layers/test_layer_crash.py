"""After a crash at any point, files of a layer are what was promised: after a kill what was accepted, after a power
failure what was synced or something newer; never zeros, never a mixture of a replaced content and its successor.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from moonclipfs import limits
from moonclipfs.errors import BackendError, MoonclipError, NoSpaceError, NotFoundError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.store.backend import FileOps, LocalBackend
from moonclipfs.store.store import Store
from tests import faults
from tests.faults import CrashState, FaultyOps, RecordingOps, UnsyncedOps, crash_states, kill_states
from tests.layers.filekit import encode, make_file, overwrite, read_all, write_file

Content: TypeAlias = "bytes | None"
Allowed: TypeAlias = "set[Content]"
BIG = 150
"""Bytes of a file that is staged in a file, here."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INLINE_BYTES", 64)
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", 256)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", 128)
    monkeypatch.setattr(faults, "EVERY_CUT", 8)
    monkeypatch.setattr(faults, "CUTS", 3)


def noise(size: int = BIG) -> bytes:
    """Bytes without zeros."""
    return bytes(byte or 1 for byte in os.urandom(size))


def prefixes(data: bytes) -> set[Content]:
    """What may be left of a new file that was not synced."""
    return {None}.union(data[:end] for end in range(len(data) + 1))


def mixtures(old: bytes, new: bytes) -> set[Content]:
    """What may be left of a write in place, which is shorter than a page: one end of it, or the other."""
    cuts = range(len(new) + 1)
    found: set[Content] = set()
    return found.union(*((new[:cut] + old[cut:], old[:cut] + new[cut:]) for cut in cuts))


class Life:
    """A layer at work while everything is recorded, and what each file may be after each step.

    `kill` and `power` hold what a killed process and a power failure may leave, by mark and name.
    """

    def __init__(self, root: Path, ops: Callable[[Path], RecordingOps] = RecordingOps) -> None:
        Store.create(root).close()
        with Store.open(root, write=True, index_path=root.with_name("index.sqlite")) as store:
            Layer.open(store, "test").close()
        self.recorder = ops(root)
        self.kill: list[dict[bytes, Allowed]] = []
        self.power: list[dict[bytes, Allowed]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moonclipfs.store.store.LocalBackend", functools.partial(LocalBackend, ops=self.recorder))
            self.store = Store.open(root, write=True, index_path=root.with_name("index.sqlite"))
        self.layer = Layer.open(self.store, "test", ops=self.recorder)
        self.now_kill: dict[bytes, Allowed] = {}
        self.now_power: dict[bytes, Allowed] = {}
        self._mark()

    def close(self) -> None:
        self.layer.journal.close()
        self.layer._lock_file.release()
        self.store.close()

    def _mark(self) -> None:
        self.recorder.mark(str(len(self.kill)))
        self.kill.append({name: set(allowed) for name, allowed in self.now_kill.items()})
        self.power.append({name: set(allowed) for name, allowed in self.now_power.items()})

    def may(self, name: bytes, *contents: Content, power: Iterable[Content] = ()) -> None:
        """From here on, a file may also be one of these."""
        self.now_kill.setdefault(name, {None}).update(contents)
        self.now_power.setdefault(name, {None}).update(contents, power)
        self._mark()

    def is_accepted(self, name: bytes, content: Content) -> None:
        """A killed process leaves this now."""
        self.now_kill[name] = {content}
        self._mark()

    def is_durable(self, name: bytes, content: Content) -> None:
        """Whatever happens leaves this now."""
        self.now_kill[name] = {content}
        self.now_power[name] = {content}
        self._mark()

    # Steps

    def create(self, name: bytes, data: bytes) -> Inode:
        self.may(name, *prefixes(data))
        inode = make_file(self.layer, name)
        overwrite(self.layer, inode, data)
        self.is_accepted(name, data)
        return inode

    def replace(self, name: bytes, data: bytes) -> None:
        self.may(name, data)
        overwrite(self.layer, self.layer.resolve(name), data)
        self.is_accepted(name, data)

    def edit(self, name: bytes, offset: int, data: bytes, *, sync: bool) -> None:
        inode = self.layer.resolve(name)
        old = read_all(self.layer, inode)
        new = old[:offset] + data + old[offset + len(data) :]
        self.may(name, *mixtures(old, new))
        file = self.layer.open_file(inode, write=True)
        file.write(offset, data, 4)
        if sync:
            file.sync()
            self.is_durable(name, new)
        file.close()
        self.is_accepted(name, new)

    def fsync(self, name: bytes) -> None:
        file = self.layer.open_file(self.layer.resolve(name), write=False)
        data = file.read(0, file.size)
        file.sync()
        file.close()
        self.is_durable(name, data)

    def rename_over(self, old: bytes, new: bytes) -> None:
        data = read_all(self.layer, self.layer.resolve(old))
        self.may(old, None)
        self.may(new, data)
        self.layer.rename(self.layer.root, old, self.layer.root, new, 5)
        self.is_accepted(old, None)
        self.is_accepted(new, data)

    def encode(self) -> None:
        """Store all that is staged."""
        encode(self.layer, *self.layer.take_jobs(0.0, urgent=True))

    def remove(self, name: bytes) -> None:
        self.may(name, None)
        self.layer.unlink(self.layer.root, name, 6)
        self.is_accepted(name, None)

    def commit(self, *durable: bytes) -> None:
        """Make names durable, and of these files the contents too."""
        self.layer.sync_directory(self.layer.root)
        for name in durable:
            self.is_durable(name, self.now_content(name))

    def sync_all(self) -> None:
        self.layer.sync_all()
        for name in list(self.now_kill):
            self.is_durable(name, self.now_content(name))

    def now_content(self, name: bytes) -> Content:
        try:
            return read_all(self.layer, self.layer.resolve(name))
        except MoonclipError:
            return None


def contents_of(layer: Layer) -> dict[bytes, bytes]:
    return {name: read_all(layer, layer.resolve(name)) for name in layer.names_in(layer.root)}


@contextmanager
def opened(root: Path, boot: bytes | None, ops: FileOps | None = None) -> Iterator[Layer]:
    """The layer as the next process finds it, which never waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        if boot is not None:
            patch.setattr("moonclipfs.layers.journal.this_boot", lambda: boot)
        patch.setattr("moonclipfs.store.store.LocalBackend", functools.partial(LocalBackend, ops=UnsyncedOps()))
        patch.setattr("moonclipfs.store.store.default_index_path", lambda *arguments, **options: None)
        with Store.open(root, write=True) as store:
            layer = Layer.open(store, "test", ops=ops or UnsyncedOps())
            try:
                yield layer
            finally:
                layer.close()


def found_in(root: Path, boot: bytes | None) -> dict[bytes, bytes]:
    """What the next process finds, and goes on finding after it worked with it."""
    with opened(root, boot) as layer:
        found = contents_of(layer)
        make_file(layer, b"after")
        layer.sync_all()
        after = contents_of(layer)
    assert after == {**found, b"after": b""}
    with opened(root, b"third".ljust(16)) as layer:
        assert contents_of(layer) == after
    return found


def broken(state: CrashState, root: Path, promises: list[dict[bytes, Allowed]], boot: bytes | None) -> str:
    """What is wrong with a state; empty when nothing is."""
    if not state.marks:
        return ""
    allowed: Mapping[bytes, Allowed] = promises[int(state.marks[-1])]
    state.write(root)
    try:
        found = found_in(root, boot)
    except MoonclipError as error:
        return f"{state.at}, after mark {state.marks[-1]}: {error}"
    finally:
        shutil.rmtree(root)
    for name in allowed.keys() | found.keys():
        if found.get(name) not in allowed.get(name, {None}):
            return f"{state.at}, after mark {state.marks[-1]}: {name!r} is {found.get(name)!r}"
    return ""


def check(life: Life, tmp_path: Path) -> int:
    life.close()
    total = 0
    for state in crash_states(life.recorder):
        assert broken(state, tmp_path / "state", life.power, b"other".ljust(16)) == ""
        total += 1
    for state in kill_states(life.recorder):
        assert broken(state, tmp_path / "state", life.kill, None) == ""
        total += 1
    return total


def test_a_new_file(tmp_path: Path) -> None:
    """At every system call that a crash can cut short, files are what was promised."""
    life = Life(tmp_path / "store")
    life.create(b"a", noise())
    life.fsync(b"a")
    life.create(b"b", noise(20))
    life.commit(b"a", b"b")
    assert check(life, tmp_path) > 50


@pytest.mark.slow
def test_a_replaced_content(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    life.create(b"a", noise())
    life.fsync(b"a")
    life.replace(b"a", noise())
    life.commit()
    life.replace(b"a", noise())
    life.sync_all()
    life.replace(b"a", noise(20))
    life.commit(b"a")
    assert check(life, tmp_path) > 50


@pytest.mark.slow
def test_a_rename_over(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    life.create(b"a", noise())
    life.sync_all()
    life.create(b"tmp", noise())
    life.rename_over(b"tmp", b"a")
    life.commit(b"tmp", b"a")
    life.create(b"tmp", noise(20))
    life.rename_over(b"tmp", b"a")
    life.commit(b"tmp", b"a")
    assert check(life, tmp_path) > 50


def test_writes_in_place(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    life.create(b"a", noise())
    life.fsync(b"a")
    life.edit(b"a", 10, noise(30), sync=True)
    life.edit(b"a", 100, noise(30), sync=False)
    life.sync_all()
    assert check(life, tmp_path) > 50


@pytest.mark.slow
def test_removal_and_what_was_removed_before(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    life.create(b"a", noise())
    life.fsync(b"a")
    life.remove(b"a")
    life.create(b"a", noise())
    life.sync_all()
    life.remove(b"a")
    life.commit(b"a")
    assert check(life, tmp_path) > 50


@pytest.mark.slow
def test_what_is_encoded(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    life.create(b"a", noise())
    life.fsync(b"a")
    life.replace(b"a", noise())
    life.encode()
    life.commit(b"a")
    life.edit(b"a", 10, noise(20), sync=True)
    assert check(life, tmp_path) > 50


@pytest.mark.slow
def test_the_journal_written_anew(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    life.create(b"a", noise())
    life.create(b"b", noise(30))
    life.sync_all()
    life.replace(b"a", noise())
    life.layer.files.checkpoint()
    life.is_durable(b"a", life.now_content(b"a"))
    life.edit(b"a", 10, noise(30), sync=True)
    assert check(life, tmp_path) > 50


class _Reckless(RecordingOps):
    """Forgets the syncs of staging files, or of their directory."""

    omitted = ""

    def after(self, name: str, arguments: tuple[object, ...], result: object) -> None:
        super().after(name, arguments, result)
        last = self.events[-1] if self.events else None
        if last is not None and last.name == self.omitted and "staging" in last.path:
            self.events.pop()


@pytest.mark.parametrize("omitted", ["sync", "sync_directory"])
def test_the_crash_test_finds_a_missing_sync(tmp_path: Path, omitted: str, expect_log: Callable[[str], None]) -> None:
    class Recorder(_Reckless):
        pass

    Recorder.omitted = omitted
    life = Life(tmp_path / "store", Recorder)
    life.create(b"a", noise())
    life.fsync(b"a")
    life.close()
    states = crash_states(life.recorder)
    assert any(broken(state, tmp_path / "state", life.power, b"other".ljust(16)) for state in states)


@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, False)],
    ids=["full", "stays full", "io"],
)
def test_a_failing_call_loses_nothing(
    tmp_path: Path, code: int, lasting: bool, expect_log: Callable[[str], None]
) -> None:
    """Whatever call fails, for want of space or an error of the disk, nothing that was accepted is lost.

    Whoever asked gets an error of the project's, and each file is as before or as after, for the next process too.
    """
    if code == errno.EIO:
        expect_log("staging: cannot delete .*nobody needs it")
    failed = 0
    for at in range(400):
        ops = FaultyOps(1 << 30, code, lasting=lasting)
        reached, errors, expected, before = eventful(tmp_path / "state", ops, at)
        failed += len(errors)
        assert all(isinstance(error, NoSpaceError if code == errno.ENOSPC else BackendError) for error in errors), (
            errors
        )
        found = found_in(tmp_path / "state", None)
        for name in expected.keys() | found.keys():
            assert found.get(name) in expected.get(name, {None}), f"call {at} ({ops.failed}): {name!r}"
        assert before == found or errors, f"call {at} ({ops.failed})"
        shutil.rmtree(tmp_path / "state")
        if not reached:
            assert failed > 10
            return
    pytest.fail("the calls never end")


def eventful(
    root: Path, ops: FaultyOps, at: int
) -> tuple[bool, list[MoonclipError], dict[bytes, Allowed], dict[bytes, bytes]]:
    """Work with a layer whose call `at` fails: whether there was one, the errors, what each file may be, and what it is
    for this process.
    """
    Store.create(root).close()
    expected: dict[bytes, Allowed] = {}
    errors: list[MoonclipError] = []
    with opened(root, None, ops) as layer:
        ops.at = ops.count + at

        def attempt(name: bytes, after: Content, work: Callable[[], object], part: Iterable[Content] = ()) -> None:
            try:
                work()
                expected[name] = {after}
            except NotFoundError:
                pass  # what was to be changed could not be made
            except MoonclipError as error:
                errors.append(error)
                expected.setdefault(name, {None}).update({after, *part})

        for name, size in ((b"a", BIG), (b"b", BIG), (b"small", 30)):
            data = noise(size)
            attempt(name, data, functools.partial(write_file, layer, name, data), prefixes(data))
            try:
                layer.sync_all()
            except MoonclipError as error:
                errors.append(error)
            data = noise(size)
            attempt(name, data, functools.partial(_replace, layer, name, data), prefixes(data))
        attempt(b"a", None, lambda: layer.unlink(layer.root, b"a", 1))
        reached, ops.lasting, ops.at = ops.reached, False, 1 << 30
        try:
            layer.sync_all()
        except MoonclipError as error:
            errors.append(error)
        return reached, errors, expected, contents_of(layer)


def _replace(layer: Layer, name: bytes, data: bytes) -> None:
    overwrite(layer, layer.resolve(name), data)
