"""Overlays and dry runs from Python, in a mount and without one: the same program, and the same that is left of it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import moonclipfs
from moonclipfs.cli.main import main
from moonclipfs.errors import BusyError, ExistsError, FuseUnavailableError, NotFoundError, UsageError
from moonclipfs.fuse.mount import mount, unmount
from moonclipfs.fuse.mounts import find_mounts
from moonclipfs.fuse.prepare import check_device
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.store.gc import collect
from moonclipfs.store.overlaydirs import overlay_names
from moonclipfs.store.store import Store
from tests.cli.conftest import checkpoint, safetensors, weights

Place = Path | LayerPath


_SLOW_MOUNT = pytest.param("mount", marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "r").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))
    monkeypatch.delenv("MOONCLIPFS_STORE", raising=False)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    source = checkpoint(root / "src", 2)
    for words in (["init", root / "store"], ["add", root / "store", source, "--as", "model"]):
        assert main([str(word) for word in words]) == 0
    return root


@pytest.fixture
def store(tmp_path: Path, template: Path) -> Path:
    """A store of the snapshot model, whose source is in src/ beside it."""
    shutil.copytree(template, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path / "store"


@pytest.fixture
def fuse() -> None:
    try:
        check_device()
    except FuseUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def mounted(fuse: None, store: Path, tmp_path: Path) -> Iterator[Path]:
    """The store at a mount."""
    place = tmp_path / "mnt"
    place.mkdir()
    mount(store, place)
    yield place
    unmount(place)


def bound(store: Path) -> dict[str, tuple[int, bytes]]:
    with Store.open(store) as opened:
        return {name: (version.number, version.root) for name, version in opened.names().bound().items()}


def program(path: Place) -> None:
    """Reads, trains a little, saves over, deletes and makes new: through nothing but what pathlib offers."""
    assert sorted(one.name for one in path.iterdir()) == ["config.json", "latest", "model.safetensors", "notes"]
    changed = weights(2)
    changed["head"][5] += np.float32(0.25)
    temporary = path / ".model.safetensors.tmp"
    temporary.write_bytes(safetensors(changed))
    temporary.replace(path / "model.safetensors")
    (path / "config.json").unlink()
    (path / "experts").mkdir()
    with (path / "experts" / "e00001").open("wb") as file:
        file.write(b"expert")
    assert (path / "latest").read_bytes() == safetensors(changed)


def left(run: moonclipfs.DryRun) -> tuple[dict[str, str], dict[str, int]]:
    """What it tells that it changed."""
    found = run.diff()
    files = {one["path"]: one["change"] for one in found["files"]}
    return files, {one["name"]: one["values"]["changed"] for one in found["tensors"]}


CHANGED = (
    {"config.json": "removed", "experts": "added", "experts/e00001": "added", "model.safetensors": "changed"},
    {"head": 256},
)


@pytest.fixture(params=["mount", "private mount", "no mount"])
def way(request: pytest.FixtureRequest, store: Path) -> tuple[Path, bool | None]:
    """Where a dry run is asked for, and what to say of a mount."""
    if request.param == "mount":
        return request.getfixturevalue("mounted"), None
    if request.param == "private mount":
        request.getfixturevalue("fuse")
        return store, True
    return store, False


def test_a_dry_run_leaves_nothing(way: tuple[Path, bool | None], store: Path) -> None:
    """Whatever way it is done: the program sees its changes, everybody else the base, and then they are gone."""
    where, mounting = way
    before = bound(store)
    run = moonclipfs.dry_run(where, "model", mount=mounting)
    with run as path:
        assert isinstance(path, LayerPath if mounting is False else Path)
        program(path)
        assert left(run) == CHANGED
        assert moonclipfs.is_dry_run(path) and moonclipfs.is_dry_run(path / "not" / "there")
        assert [one["name"] for one in moonclipfs.overlays(store)] == [run.name]
        with pytest.raises(UsageError, match="dry run"):
            run.commit("kept")
        if isinstance(path, Path):
            with pytest.raises(UsageError, match="dry run"):
                moonclipfs.seal(path)
            with pytest.raises(UsageError, match="dry run"):
                moonclipfs.flush(path)
    assert not path.exists() if isinstance(path, Path) else True
    assert bound(store) == before and overlay_names(store) == [] and run.version is None
    with pytest.raises(UsageError, match="ended"):
        run.diff()


@pytest.mark.parametrize("way", ["private mount", "no mount", _SLOW_MOUNT], indirect=True)
def test_a_dry_run_can_be_kept(way: tuple[Path, bool | None], store: Path) -> None:
    """With commit, it is saved to as any directory, and its snapshot holds exactly what it showed."""
    where, mounting = way
    run = moonclipfs.dry_run(where, "model", commit="kept", mount=mounting)
    with run as path:
        program(path)
        assert not moonclipfs.is_dry_run(path)
        assert run.commit("early") == "early@1" == run.commit("early")
        shown = {name: (path / name).read_bytes() for name in ("model.safetensors", "experts/e00001", "notes/a b.txt")}
    assert run.version == "kept@1"
    with moonclipfs.open(store, "kept") as kept:
        assert kept.files() == sorted(shown) and {name: kept.read(name) for name in shown} == shown
        assert kept.entry("latest", follow=False).target == b"model.safetensors"
    assert bound(store)["kept"][1] == bound(store)["early"][1]
    assert overlay_names(store) == []


def test_a_live_directory_as_the_base(mounted: Path, store: Path) -> None:
    """What is not sealed yet is in its mount only, so that is where the dry run is, also when the store is named."""
    (mounted / "live").mkdir()
    (mounted / "live" / "f").write_bytes(b"live")
    with moonclipfs.dry_run(store, mounted / "live") as path:
        assert path.parent == mounted / "@overlays" and (path / "f").read_bytes() == b"live"
    assert overlay_names(store) == []


def test_an_error_keeps_nothing(store: Path) -> None:
    before = bound(store)
    run = moonclipfs.dry_run(store, "model", commit=True, mount=False)
    with pytest.raises(RuntimeError), run as path:
        (path / "new").write_bytes(b"new")
        raise RuntimeError
    assert (run.version, bound(store), overlay_names(store)) == (None, before, [])


def test_without_a_device_it_needs_no_mount(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that has no /dev/fuse: a path that this process alone can use, unless a mount is insisted on."""

    def absent() -> None:
        raise FuseUnavailableError("no /dev/fuse")

    monkeypatch.setattr("moonclipfs.dryrun.check_device", absent)
    run = moonclipfs.dry_run(store, "model")
    with run as path:
        assert isinstance(path, LayerPath)
        program(path)
        assert left(run) == CHANGED
    with pytest.raises(FuseUnavailableError), moonclipfs.dry_run(store, "model", mount=True):
        pass
    assert overlay_names(store) == []


def test_a_quota(store: Path) -> None:
    """Changes past it are EDQUOT, and what is deleted counts no more."""
    with moonclipfs.dry_run(store, quota=1 << 20, mount=False) as path:
        assert list(path.iterdir()) == []
        with pytest.raises(OSError) as caught:
            (path / "big").write_bytes(os.urandom(2 << 20))
        assert caught.value.errno == errno.EDQUOT
        (path / "big").unlink()
        (path / "small").write_bytes(os.urandom(900_000))


_KILLED = """
import moonclipfs, sys, time
with moonclipfs.dry_run(sys.argv[1], "model", mount=sys.argv[2] == "mount") as path:
    (path / "new").write_bytes(bytes(500_000))
    print(path, flush=True)
    time.sleep(60)
"""


@contextmanager
def started(script: str, *arguments: object, **variables: object) -> Iterator[str]:
    """Run a script, which is killed in the end; gives the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent.parent),
            **{k: str(v) for k, v in variables.items()},
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("mounting", ["mount", "none"])
def test_a_process_that_is_killed_leaves_nothing(
    store: Path, tmp_path: Path, mounting: str, fuse: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9: its mount ends with it, and whoever works with the store next finds nothing of the dry run."""
    (tmp_path / "temporary").mkdir()
    before = bound(store)
    with started(_KILLED, store, mounting, TMPDIR=tmp_path / "temporary") as said:
        assert "model-" in said
    deadline = time.monotonic() + 30
    while any(Path(one.mountpoint).is_relative_to(tmp_path) for one in find_mounts()):
        assert time.monotonic() < deadline, "the mount is left"
        time.sleep(0.05)
    while mounting == "mount" and overlay_names(store) and time.monotonic() < deadline:
        time.sleep(0.05)  # its server, which nobody waits for, discards it
    while mounting == "mount" and list((tmp_path / "temporary").iterdir()):
        assert time.monotonic() < deadline, "its directory is left"
        time.sleep(0.05)
    assert moonclipfs.overlays(store) == []
    with Store.open(store, write=True) as opened:
        collect(opened)
    assert overlay_names(store) == [] and not list((store / "layers").glob("overlay.*"))
    assert bound(store) == before


def test_an_overlay_of_a_mount_goes_with_the_process_that_made_it(mounted: Path, store: Path) -> None:
    with started(_KILLED.replace(', mount=sys.argv[2] == "mount"', ""), mounted) as said:
        path = Path(said)
        assert path.parent == mounted / "@overlays" and (path / "new").exists()
    deadline = time.monotonic() + 20
    while (overlay_names(store) or path.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert overlay_names(store) == [] and not path.exists()


# Overlay objects


@pytest.fixture(params=[_SLOW_MOUNT, "store"])
def where(request: pytest.FixtureRequest, store: Path) -> Path:
    return request.getfixturevalue("mounted") if request.param == "mount" else store


def test_the_life_of_an_overlay(where: Path, store: Path) -> None:
    with moonclipfs.create_overlay(where, "arm1", "model") as arm:
        program(arm.path)
        assert {one["path"]: one["change"] for one in arm.diff()["files"]} == CHANGED[0]
        assert arm.status()["base"] == "model@1" and not moonclipfs.is_dry_run(arm.path)
        arm.flush()
        assert arm.status()["staged_bytes"] == 0
        assert arm.commit() == "arm1@1" == arm.commit("arm1")
        arm.rename("arm2")
        assert arm.name == "arm2"
    with moonclipfs.overlay(where, "arm2") as again:
        assert (again.path / "experts" / "e00001").read_bytes() == b"expert"
        assert again.rebase("arm1") == []
        assert again.diff()["files"] == []
        again.discard()
    assert moonclipfs.overlays(where) == []
    with pytest.raises(NotFoundError):
        moonclipfs.overlay(where, "arm2")


def test_a_rebase_tells_conflicts(store: Path, tmp_path: Path) -> None:
    with moonclipfs.create_overlay(store, "arm", "model") as arm:
        (arm.path / "config.json").write_bytes(b"ours")
        (tmp_path / "src" / "config.json").write_bytes(b"theirs")
        (tmp_path / "src" / "more").write_bytes(b"more")
        assert main(["add", str(store), str(tmp_path / "src"), "--as", "model"]) == 0
        assert arm.rebase() == [
            {"path": "config.json", "what": "both changed it", "base": "@versions/model/2/config.json"}
        ]
        assert (arm.path / "config.json").read_bytes() == b"ours" and (arm.path / "more").read_bytes() == b"more"


def test_what_goes_wrong(store: Path) -> None:
    with moonclipfs.create_overlay(store, "arm", "model") as arm:
        with pytest.raises(BusyError, match=f"process {os.getpid()}"):
            moonclipfs.overlay(store, "arm")
        with pytest.raises(IsADirectoryError):
            arm.path.write_bytes(b"x")
    for call, error in (
        (lambda: moonclipfs.create_overlay(store, "arm"), ExistsError),
        (lambda: moonclipfs.create_overlay(store, "brm", "nothing"), NotFoundError),
        (lambda: moonclipfs.overlay(store), UsageError),
        (lambda: moonclipfs.overlay(store / "absent", "arm"), NotFoundError),
    ):
        with pytest.raises(error):
            call()
    assert [one["name"] for one in moonclipfs.overlays(store)] == ["arm"]


def test_a_path_in_an_overlay_means_it(mounted: Path) -> None:
    with moonclipfs.create_overlay(mounted, "arm", "model") as arm:
        assert moonclipfs.overlay(arm.path / "notes").name == "arm"
        with pytest.raises(UsageError, match="overlay commit"):
            moonclipfs.seal(arm.path)
        with pytest.raises(UsageError, match="among overlays"):
            moonclipfs.open(arm.path)
