"""Overlays by commands, in a mount: asked at its control socket, also by who names the store, and seen at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moonclipfs.errors import FuseUnavailableError
from moonclipfs.fuse.mount import mount, unmount
from moonclipfs.fuse.prepare import MountOptions, check_device
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.sides import mounted_recipes, path_side
from moonclipfs.store.store import Store
from tests.cli.conftest import Run, safetensors, weights


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Path:
    """A store for all tests here, each of which has overlays of its own names."""
    root = tmp_path_factory.mktemp("overlays")
    shutil.copytree(template, root, symlinks=True, dirs_exist_ok=True)
    return root / "store"


@pytest.fixture(scope="module")
def mounted(filled: Path) -> Iterator[Path]:
    try:
        check_device()
    except FuseUnavailableError as error:
        pytest.skip(str(error))
    place, runtime = filled.parent / "mnt", filled.parent / "r"
    place.mkdir()
    runtime.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        mount(filled, place)
        yield place
        unmount(place)


def test_the_life_of_an_overlay(run: Run, mounted: Path, filled: Path) -> None:
    """What a command did is seen in the mount when it has ended; the store may be named instead of the mount."""
    path = mounted / "@overlays" / "arm1"
    assert run("overlay", "create", mounted, "arm1", "--base", "run1/step-1") == (0, f"{path}\n", "")
    changed = weights(1)
    changed["head"][0, 0] += 1
    (path / "model.safetensors").write_bytes(safetensors(changed))
    (path / "new").write_bytes(b"new")
    for where in ([mounted, "arm1"], [path], [path / "notes"], [filled, "arm1"]):
        told = run("overlay", "diff", *where)
        assert told.code == 1 and "~ model.safetensors" in told.out and "+ new" in told.out, told
    assert run("overlay", "status", "--json", filled, "arm1").json["path"] == str(path)
    assert f"mounted at {mounted}" in run("overlay", "list", filled).out

    assert run("overlay", "commit", path, "--as", "run1/arm1").out.startswith("run1/arm1@1: 4 files")
    assert (mounted / "run1" / "arm1" / "new").read_bytes() == b"new"
    assert run("diff", path, f"{filled}:run1/arm1").code == 0
    assert run("diff", path, mounted / "run1" / "step-1").code == 1
    assert run("overlay", "commit", path, "--as", "run1/arm1").out == "run1/arm1@1: nothing new\n"

    assert run("overlay", "rename", path, "arm2").code == 0
    assert "arm2" in os.listdir(mounted / "@overlays") and not path.exists()
    run("add", filled, filled.parent / "src" / "step-10", "--as", "run1/step-1")
    rebased = run("overlay", "rebase", mounted, "arm2")
    theirs = mounted / "@versions" / "run1" / "step-1" / "2" / "model.safetensors"
    assert rebased.code == 1 and rebased.out.splitlines() == [
        "arm2 stands on run1/step-1@2",
        f"conflict: model.safetensors: both changed it; the base's is {theirs}",
    ]
    moved = mounted / "@overlays" / "arm2"
    assert (moved / "config.json").read_text() == '{"step": 10}' and (moved / "new").read_bytes() == b"new"
    assert (moved / "model.safetensors").read_bytes() == safetensors(changed)
    assert run("overlay", "discard", mounted, "arm2").code == 0
    assert "arm2" not in os.listdir(mounted / "@overlays")


def test_bases_in_a_mount(run: Run, mounted: Path, filled: Path) -> None:
    """A live directory is captured as of that moment, a version and another overlay are meant by their paths."""
    (mounted / "live").mkdir()
    (mounted / "live" / "f").write_bytes(b"before")
    assert run("overlay", "create", mounted, "of-live", "--base", mounted / "live").code == 0
    (mounted / "live" / "f").write_bytes(b"after")
    assert (mounted / "@overlays" / "of-live" / "f").read_bytes() == b"before"
    made = run("overlay", "create", filled, "of-live-too", "--base", mounted / "live")
    assert made == (0, f"{mounted}/@overlays/of-live-too\n", "")
    assert (mounted / "@overlays" / "of-live-too" / "f").read_bytes() == b"after"
    sealed = run("overlay", "create", "--json", mounted, "of-sealed", "--base", mounted / "run1" / "step-2").json
    assert sealed["base"] == "run1/step-2@1"
    version = mounted / "@versions" / "run1" / "step-2" / "1"
    assert run("overlay", "create", "--json", mounted, "of-version", "--base", version).json["base"] == "run1/step-2@1"
    (mounted / "@overlays" / "of-version" / "new").write_bytes(b"new")
    nested = run("overlay", "create", "--json", mounted, "nested", "--base", mounted / "@overlays" / "of-version").json
    assert nested["base"] == "overlay of-version"
    assert (mounted / "@overlays" / "nested" / "new").read_bytes() == b"new"
    assert run("overlay", "create", mounted, "of-latest", "--base", mounted / "@latest").code == 2


def test_what_is_aimed_at_an_overlay_by_mistake(run: Run, mounted: Path, filled: Path) -> None:
    run("overlay", "create", mounted, "aimed", "--base", "run1/step-2")
    run("overlay", "create", mounted, "aimed-dry", "--base", "run1/step-2", "--dry-run")
    kept, dry = mounted / "@overlays" / "aimed", mounted / "@overlays" / "aimed-dry"
    for words, says in (
        (("seal", kept), "overlay commit"),
        (("seal", dry), "dry run"),
        (("flush", dry), "dry run"),
        (("add", filled, dry, "--as", "x"), "dry run"),
        (("add", dry, filled.parent / "src" / "step-2"), "dry run"),
        (("watch", "--once", dry, filled), "dry run"),
        (("forget", kept), "among overlays"),
        (("ls", kept), "among overlays"),
        (("overlay", "commit", dry), "dry run"),
    ):
        found = run(*words)
        assert found.code == 2 and says in found.err and found.err.count("\n") == 1, found
    (kept / "new").write_bytes(b"new")
    assert run("flush", kept) == (0, "", "")
    assert run("overlay", "status", "--json", kept).json["staged_bytes"] == 0
    assert "overlays that are open:" in run("status", mounted).out
    names = run("ls", filled).out
    assert "x " not in names and "run1/step-2" in names


def test_an_overlay_in_use_is_discarded_only_by_force(run: Run, mounted: Path) -> None:
    run("overlay", "create", mounted, "used")
    path = mounted / "@overlays" / "used" / "f"
    with suppress(OSError), path.open("wb") as file:  # which is stale when it is closed
        file.write(b"x")
        busy = run("overlay", "discard", mounted, "used")
        assert busy.code == 8 and "f" in busy.err
        assert run("overlay", "rebase", mounted, "used", "--onto", "run1/step-2").code == 8
        assert run("overlay", "discard", "--force", mounted, "used").code == 0
    assert not path.exists()


def test_one_that_belongs_to_a_process_ends_with_it(run: Run, mounted: Path) -> None:
    """`--owner PID`: discarded when that process ends, however it ends, though the mount goes on."""
    process = subprocess.Popen(["sleep", "60"])
    made = run("overlay", "create", mounted, "owned", "--base", "run1/step-2", "--owner", process.pid, "--json").json
    assert made["ephemeral"] and made["owner"]["pid"] == process.pid
    (mounted / "@overlays" / "owned" / "new").write_bytes(b"new")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while "owned" in os.listdir(mounted / "@overlays") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "owned" not in run("overlay", "list", mounted).out
    assert run("overlay", "create", mounted, "owned2", "--owner", process.pid).code == 3


def test_one_that_another_process_has_is_told(run: Run, mounted: Path, filled: Path) -> None:
    run("overlay", "create", filled, "other")
    with Store.open(filled, write=True) as opened, Overlays(opened) as overlays:
        overlays.get("other")
        found = run("overlay", "diff", mounted, "other")
        assert found.code == 8 and f"process {os.getpid()}" in found.err


def test_a_mount_that_only_reads_stands_for_its_store(run: Run, filled: Path, tmp_path: Path, mounted: Path) -> None:
    place = tmp_path / "ro"
    place.mkdir()
    mount(filled, place, MountOptions(read_only=True))
    try:
        assert run("overlay", "create", place, "read", "--base", "run1/step-2").out.startswith("read on run1/step-2@1")
        assert run("overlay", "diff", place, "read").code == 0
        assert (mounted / "@overlays" / "read" / "config.json").exists()
    finally:
        unmount(place)


def test_what_an_overlay_has_of_its_base_is_not_read_to_compare_it(run: Run, mounted: Path, filled: Path) -> None:
    run("overlay", "create", mounted, "same", "--base", "run1/step-2")
    path = mounted / "@overlays" / "same"
    with (path / "config.json").open("ab") as file:
        file.write(b" ")
    with Store.open(filled) as store:
        files = path_side(path, mounted_recipes(store)).files
        recipe = files[b"model.safetensors"].recipe
        assert recipe is not None and recipe.size == files[b"model.safetensors"].source.size
        assert files[b"config.json"].recipe is None
    assert run("diff", path, f"{filled}:run1/step-2").out.splitlines()[0] == "changed  file config.json"
