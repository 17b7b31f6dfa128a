"""After a crash or an error at any point of its life, an overlay is as before or as after, and its base as it was."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import MoonclipError, NotFoundError
from moonclipfs.layers.basing import BaseOf, held
from moonclipfs.layers.overlay import Overlay
from moonclipfs.store.backend import FileOps, LocalBackend
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.layerdirs import layer_names
from moonclipfs.store.overlaydirs import overlay_names, sweep
from moonclipfs.store.store import Store
from moonclipfs.types import ObjectId
from tests import faults
from tests.faults import FaultyOps, KillingOps, RecordingOps, UnsyncedOps, crash_states, kill_states
from tests.layers.overlaykit import LocalOverlayEncoder, create, everything
from tests.layers.publish import Files, publish
from tests.layers.sealkit import put, stored, tree

BASE: Files = {"f": b"hello" * 30, "d": {"x": b"1"}}
OWN = {"f": b"changed" * 40, "new": b"n" * 300}
SHOWN = {**OWN, "d/x": b"1"}
Work = Callable[[Store, Overlay | None, FileOps], object]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.layers.overlay.OverlayEncoder", LocalOverlayEncoder)
    monkeypatch.setattr(limits, "INLINE_BYTES", 64)
    monkeypatch.setattr(faults, "EVERY_CUT", 2)
    monkeypatch.setattr(faults, "CUTS", 2)


@contextmanager
def opened(root: Path, ops: FileOps | None = None) -> Iterator[Store]:
    """The store in `root`, with an index of its own that comes and goes with it."""
    with Store.open(root, write=True, index_path=root.with_name(root.name + ".sqlite")) as store:
        store.backend.ops = ops or UnsyncedOps()
        yield store


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A store with a snapshot, and an overlay `one` over it with changes."""
    Store.create(tmp_path / "template").close()
    with opened(tmp_path / "template") as store:
        publish(store, "base", BASE)
        with create(store, "one", "base") as overlay:
            for path, data in OWN.items():
                put(overlay.layer, path, data)
    return tmp_path / "template"


def make(store: Store, overlay: Overlay | None, ops: FileOps) -> None:
    create(store, "two", "base", ops=ops).close()


def discard(store: Store, overlay: Overlay | None, ops: FileOps) -> None:
    assert overlay is not None
    overlay.discard()


def rename(store: Store, overlay: Overlay | None, ops: FileOps) -> None:
    assert overlay is not None
    overlay.rename("other")


def commit(store: Store, overlay: Overlay | None, ops: FileOps) -> None:
    assert overlay is not None
    overlay.commit("result")


def move(store: Store, overlay: Overlay | None, ops: FileOps) -> None:
    """Onto an empty base."""
    assert overlay is not None

    def merge(before: ObjectId, ours: ObjectId) -> ObjectId:
        return ours

    with held(store):
        overlay.rebase(BaseOf(), merge)


def look(store: Store) -> str:
    """What there is, after checking that it is whole: the overlays with what they show, and `result`."""
    sweep(store.backend)
    found = []
    for name in overlay_names(store.path):
        with Overlay.open(store, name) as overlay:
            shows = tree(overlay.layer)
            assert shows == (SHOWN if name != "two" else {"f": BASE["f"], "d/x": b"1"}), name
            found.append(f"{name} on {overlay.info.base or 'nothing'}")
            assert overlay.commit("probe").path == "probe"
    bound = store.names().bound()
    if "result" in bound:
        assert stored(store, bound["result"]) == SHOWN
        found.append("result")
    assert len(layer_names(store.path)) == len(overlay_names(store.path))
    assert stored(store, bound["base"]) == {"f": BASE["f"], "d/x": b"1"}
    collect(store)
    assert verify(store).problems == []
    return ", ".join(found)


CASES: list[tuple[Work, str]] = [
    (make, "one on base@1, two on base@1"),
    (discard, ""),
    (rename, "other on base@1"),
    (commit, "one on base@1, result"),
    (move, "one on nothing"),
]
BEFORE = "one on base@1"


def attempt(root: Path, work: Work, ops: KillingOps | FaultyOps | FileOps) -> None:
    """Do it, with all that was open before opened without faults."""
    with opened(root) as store:
        overlay = None if work is make else Overlay.open(store, "one", ops=ops)
        store.backend.ops = ops
        if isinstance(ops, KillingOps):
            ops.count = 0
        if isinstance(ops, FaultyOps):
            ops.at += ops.count
        try:
            work(store, overlay, ops)
        finally:
            if isinstance(ops, FaultyOps):
                ops.at, ops.lasting = 1 << 30, False
            store.backend.ops = UnsyncedOps()
            if overlay is not None:
                overlay.layer.journal.close()
                overlay.layer._lock_file.release()


@pytest.mark.parametrize(("work", "after"), CASES, ids=lambda case: getattr(case, "__name__", ""))
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_step(template: Path, tmp_path: Path, work: Work, after: str, every: int) -> None:
    """kill -9 at any point of create, discard, rename, commit and rebase leaves before or after."""
    counter = KillingOps(1 << 30)
    shutil.copytree(template, tmp_path / "count")
    attempt(tmp_path / "count", work, counter)
    with opened(tmp_path / "count") as store:
        assert look(store) == after
    seen = set()
    for at in range(0, counter.count, every):
        root = tmp_path / f"at{at}"
        shutil.copytree(template, root)
        child = os.fork()
        if child == 0:
            attempt(root, work, KillingOps(at))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 86
        with opened(root) as store:
            seen.add(look(store))
        shutil.rmtree(root)
    assert seen <= {BEFORE, after} and BEFORE in seen


@pytest.mark.parametrize(("work", "after"), CASES, ids=lambda case: getattr(case, "__name__", ""))
@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.ENOSPC, False), pytest.param(errno.EIO, False, marks=pytest.mark.slow)],
    ids=["full", "io"],
)
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_failing_call_changes_all_or_nothing(
    template: Path, tmp_path: Path, work: Work, after: str, code: int, lasting: bool, every: int,
    expect_log: Callable[[str], None], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Whatever call fails, the error is told, and the overlay is as before or as after; the base is as it was."""
    for at in range(0, 1000, every):
        root = tmp_path / f"at{at}"
        shutil.copytree(template, root)
        ops, failed = FaultyOps(at, code, lasting=lasting), False
        try:
            attempt(root, work, ops)
        except MoonclipError:
            failed = True
        with opened(root) as store:
            found = look(store)
        shutil.rmtree(root)
        assert found in (BEFORE, after), (at, ops.failed)
        if not ops.failed:
            assert at and found == after
            if "cannot delete" in caplog.text:
                expect_log("staging: cannot delete .*nobody needs it")
            return
        assert failed or found == after, (at, ops.failed)
    pytest.fail("the calls never end")


@pytest.mark.parametrize(("work", "after"), [CASES[0], CASES[3]], ids=["make", "commit"])
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_power_failure(
    template: Path, tmp_path: Path, work: Work, after: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What create and commit have returned from is there after a power failure, whole; before that it may be."""
    shutil.copytree(template, tmp_path / "life")
    recorder = RecordingOps(tmp_path / "life")
    recorder.start |= {"overlays/one": (template / "overlays" / "one").read_bytes()}
    attempt(tmp_path / "life", work, recorder)
    recorder.mark("done")
    monkeypatch.setattr("moonclipfs.store.store.LocalBackend", functools.partial(LocalBackend, ops=UnsyncedOps()))
    seen = set()
    for states, boot in ((crash_states, b"other".ljust(16)), (kill_states, None)):
        for state in itertools.islice(states(recorder), 0, None, every):
            root = state.write(tmp_path / "state")
            with monkeypatch.context() as patch:
                if boot is not None:
                    patch.setattr("moonclipfs.layers.journal.this_boot", lambda boot=boot: boot)
                with opened(root) as store:
                    found = look(store)
            shutil.rmtree(root)
            (tmp_path / "state.sqlite").unlink()
            assert found == after if state.marks else found in (BEFORE, after), state.at
            seen.add(found)
    assert seen == {BEFORE, after}


def test_the_base_is_untouched_by_a_life_and_a_kill(template: Path, tmp_path: Path) -> None:
    """Digests, sizes, modes, link counts, mtime and ctime of the base are the same, also when the server is killed."""
    with opened(template) as store:
        publish(store, "base", {**BASE, "more": {"y": b"2"}})
        probe = create(store, "probe", "base")
        before, root = everything(probe.layer), store.resolve("base").root
        probe.close()
    child = os.fork()
    if child == 0:
        with opened(template) as store:
            overlay = create(store, "victim", "base")
            layer = overlay.layer
            put(layer, "more/y", b"other")
            layer.unlink(layer.resolve(b"d"), b"x", 5)
            layer.rmdir(layer.root, b"d", 6)
            layer.set_attributes(layer.resolve(b"f"), now_ns=7, mode=0o4711, uid=1, gid=1, mtime_ns=1)
            overlay.commit("elsewhere")
            put(layer, "f", b"again")
            os._exit(86)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 86
    with opened(template) as store:
        with Overlay.open(store, "victim") as overlay:
            assert tree(overlay.layer) == {"f": b"again", "more/y": b"other"}
            overlay.commit("elsewhere")
        assert store.resolve("base").root == root
        with Overlay.open(store, "probe") as probe:
            assert everything(probe.layer) == before
        with pytest.raises(NotFoundError):
            store.resolve("base@3")
        assert verify(store).problems == []
