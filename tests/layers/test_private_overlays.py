"""Overlays whose state lies in a private store, over a base store that is only read."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moonclipfs.errors import UsageError
from moonclipfs.layers.carrying import commit_into
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.alternates import make_private_store
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID
from tests.store.kit import contents, noise, publish, series
from tests.store.test_alternates import digests

STEPS = series(3)
BASE = {"m.safetensors": STEPS[0], "n": noise(1), "gone": noise(2)}
SHOWN = {"m.safetensors": STEPS[1], "n": noise(1), "new": noise(3)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache directory, where the index of a base store lies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base store with one snapshot."""
    with Store.create(tmp_path / "base") as store:
        publish(store, "run/1", BASE)
    return tmp_path / "base"


@contextmanager
def overlays(state: Path, base: Path) -> Iterator[Overlays]:
    """The overlays of a private store over a base store."""
    with make_private_store(state, base) as private, Overlays(private) as found:
        yield found


def work(overlay: Overlay) -> None:
    """Change, remove and add a file, so that `SHOWN` is there."""
    path = LayerPath(overlay)
    (path / "m.safetensors").write_bytes(STEPS[1])
    (path / "gone").unlink()
    (path / "new").write_bytes(noise(3))


def shown(overlay: Overlay) -> dict[str, bytes]:
    """The files of an overlay."""
    return {path.name: path.read_bytes() for path in LayerPath(overlay).iterdir()}


def test_an_overlay_over_a_base_store_that_is_only_read(tmp_path: Path, base: Path) -> None:
    """An overlay in a private store costs what changed; of the base store no byte, mode or time changes."""
    before = digests(base)
    with overlays(tmp_path / "state", base) as found:
        overlay = found.create("x", "run/1")
        assert shown(overlay) == BASE
        work(overlay)
        assert shown(overlay) == SHOWN
        overlay.flush()
        deltas = [one for one in overlay.store.index.iterate() if one.base != NO_ID]
        assert len(deltas) == 1, "the tensor is a delta against the base store, made by the encoder's process"
        assert not any(one.object_id == deltas[0].base for one in overlay.store.index.iterate())
    with overlays(tmp_path / "state", base) as found:
        overlay = found.get("x")
        assert shown(overlay) == SHOWN, "what was removed does not come back"
        collect(overlay.store)
        assert shown(overlay) == SHOWN
        version = overlay.commit("mine")
        assert contents(overlay.store, "mine") == SHOWN
        assert overlay.commit("mine") == version, "nothing new"
        (LayerPath(overlay) / "n").write_bytes(noise(4))
        found.create("y", "@overlays/x")
        assert shown(found.get("y")) == {**SHOWN, "n": noise(4)}
        assert verify(overlay.store).problems == []
        found.discard("x")
        found.discard("y")
        assert contents(found.store, "mine") == SHOWN
    assert digests(base) == before


def test_an_overlay_is_committed_into_the_base_store_and_stands_alone_there(tmp_path: Path, base: Path) -> None:
    """Committing into a store copies what it lacks, and nothing the second time; the overlay stays usable."""
    with overlays(tmp_path / "state", base) as found:
        overlay = found.create("x", "run/1")
        work(overlay)
        with Store.open(base, write=True) as target:
            version = commit_into(overlay, target, "run/mine")
            assert contents(target, "run/mine") == SHOWN
            assert version.metadata["files"] == 3 and version.metadata["base"] == f"run/1@1 of {base}"
            records, packs = target.log.refresh().sequence, set((base / "packs").iterdir())
            assert commit_into(overlay, target, "run/mine") == version
            assert target.log.refresh().sequence == records, "nothing new"
            assert set((base / "packs").iterdir()) == packs
        assert shown(overlay) == SHOWN
        assert not overlay.store.names().bound(), "nothing is bound here"
        (LayerPath(overlay) / "new").write_bytes(noise(5))
        assert shown(overlay)["new"] == noise(5), "it stays usable"
    shutil.rmtree(tmp_path / "state")
    with Store.open(base, write=True) as alone:
        collect(alone)
        assert contents(alone, "run/mine") == SHOWN
        assert verify(alone).problems == []


def test_an_overlay_is_committed_into_a_store_that_knows_nothing(tmp_path: Path, base: Path) -> None:
    with overlays(tmp_path / "state", base) as found, Store.create(tmp_path / "other") as target:
        work(found.create("x", "run/1"))
        commit_into(found.get("x"), target)
        assert contents(target, "x") == SHOWN
        assert verify(target).problems == []


def test_a_dry_run_is_not_committed_into_a_store_by_accident(tmp_path: Path, base: Path) -> None:
    """A dry run is not committed into another store by accident."""
    with overlays(tmp_path / "state", base) as found, Store.create(tmp_path / "other") as target:
        overlay = found.create("x", "run/1", dry_run=True)
        work(overlay)
        with pytest.raises(UsageError, match="dry run"):
            commit_into(overlay, target)
        assert not target.names().bound()
        commit_into(overlay, target, allow=True)
        assert contents(target, "x") == SHOWN


def test_a_base_store_that_vanished_is_named_and_an_eio(
    tmp_path: Path, base: Path, expect_log: Callable[[str], None]
) -> None:
    """A base store that vanished is EIO, and named; what does not need it is read on."""
    with overlays(tmp_path / "state", base) as found:
        overlay = found.create("x", "run/1")
        (LayerPath(overlay) / "new").write_bytes(noise(3))
        overlay.store.packs.close()
        assert overlay.store.base is not None
        overlay.store.base.packs.close()
        base.rename(tmp_path / "away")
        with pytest.raises(OSError, match=str(base)) as caught:
            (LayerPath(overlay) / "n").read_bytes()
        assert caught.value.errno == 5
        assert (LayerPath(overlay) / "new").read_bytes() == noise(3)
        expect_log(f"its base store {base} cannot be read")
        (tmp_path / "away").rename(base)
        assert (LayerPath(overlay) / "n").read_bytes() == noise(1)


def test_a_base_version_that_was_forgotten_is_reported_not_read_as_empty(tmp_path: Path, base: Path) -> None:
    """A base version that was forgotten in the base store is reported, not read as empty.

    A private store cannot pin: what was forgotten there, and collected, is an error that names it.
    """
    with overlays(tmp_path / "state", base) as found:
        found.create("x", "run/1")
    with Store.open(base, write=True) as other:
        other.log.forget([("run/1", 1)])
        collect(other)
    with overlays(tmp_path / "state", base) as found, pytest.raises(OSError, match=str(base)) as caught:
        list(LayerPath(found.get("x")).iterdir())
    assert caught.value.errno == 5


CHILD = """
import os, sys
from pathlib import Path
from tests.layers.test_private_overlays import overlays, work
with overlays(Path(sys.argv[1]), Path(sys.argv[2])) as found:
    overlay = found.create("x", "run/1")
    work(overlay)
    overlay.layer.sync_all()
    if sys.argv[3] == "stored":
        overlay.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["staged", "stored"])
def test_a_kill_leaves_the_base_store_as_it_was_and_the_overlay_as_it_was_synced(
    tmp_path: Path, base: Path, when: str
) -> None:
    """A kill at any moment leaves the base store as it was, and the overlay as it was synced."""
    before = digests(base)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "state"), str(base), when]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.kill()
    assert digests(base) == before
    with overlays(tmp_path / "state", base) as found:
        assert shown(found.get("x")) == SHOWN
        found.get("x").commit("mine")
        assert contents(found.store, "mine") == SHOWN
        assert verify(found.store).problems == []
    assert digests(base) == before


BOUND = """
import os, sys
from pathlib import Path
from tests.layers.test_private_overlays import SHOWN, overlays, shown, work
from tests.store.kit import contents
base = Path(sys.argv[2])
try:
    (base / "x").touch()
    sys.exit("the directory can be written to")
except PermissionError:
    pass
with overlays(Path(sys.argv[1]), base) as found:
    overlay = found.create("x", "run/1")
    work(overlay)
    overlay.flush()
    assert shown(overlay) == SHOWN
    overlay.commit("mine")
    assert contents(found.store, "mine") == SHOWN
"""


def _give_up_override() -> None:
    """Let permission bits bind this process and what it starts, also where it is root's."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        if os.geteuid() == 0 and libc.prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
            raise OSError(ctypes.get_errno(), "prctl")


def test_a_base_store_of_mode_0500(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a user whom permissions bind, and who has no cache directory either."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    for path in (base, *base.rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    before = digests(base)
    command = [sys.executable, "-c", BOUND, str(tmp_path / "state"), str(base)]
    try:
        done = subprocess.run(command, preexec_fn=_give_up_override, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        assert digests(base) == before
    finally:
        for path in (base, *base.rglob("*")):
            path.chmod(0o700)
    assert list((tmp_path / "state").glob("base-*.sqlite")), "the index of the base store lies here, then"


def test_an_overlay_is_rebased_onto_a_newer_version_in_the_base_store(tmp_path: Path, base: Path) -> None:
    with overlays(tmp_path / "state", base) as found:
        work(found.create("x", "run/1"))
        with Store.open(base, write=True) as other:
            publish(other, "run/1", {**BASE, "n": noise(6), "m.safetensors": STEPS[2]})
        before = digests(base)
        conflicts = found.rebase("x")
        assert [(path, place) for path, _, place in conflicts] == [
            ("m.safetensors", "@versions/run/1/2/m.safetensors")
        ], "where the base store keeps it"
        assert shown(found.get("x")) == {**SHOWN, "n": noise(6)}
        assert found.get("x").info.base == f"run/1@2 of {base}"
        collect(found.store)
        assert not (tmp_path / "state/reserve").exists()
        assert digests(base) == before
    with overlays(tmp_path / "state", base) as found:
        assert shown(found.get("x")) == {**SHOWN, "n": noise(6)}
