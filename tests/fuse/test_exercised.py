"""A mount beside ext4 under the exercisers: the same random calls on both, compared after each."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs.fuse.control import ask
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, Overlaid
from tests.layers.exerciser import Exerciser, Side
from tests.layers.fsx import FileExerciser

SKIP = ("allocate",)
"""What the C library does instead, where the file system cannot, leaves times as they are."""
STEPS = 3000

Exercise = Callable[[int, int], None]


@pytest.fixture(params=["extension", "plain", "overlay"])
def exercised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    """A writable mount, greeted with and without the flags of the extension, and an overlay of one."""
    if request.param == "overlay":
        overlay: Mounted = request.getfixturevalue("empty_overlay")
        return overlay
    store: Store = request.getfixturevalue("store")
    mounter: Mounter = request.getfixturevalue("mounter")
    if request.param == "plain":
        monkeypatch.setenv("MOONCLIPFS_INIT_FLAGS", "0")
    mounted = mounter(store.path, read_only=False)
    assert bool(mounted.stats()["init_flags"]) == (request.param == "extension")
    return mounted


def exercise_tree(mounted: Mounted, plain: Path, seed: int, steps: int) -> None:
    (mounted.path / "tree").mkdir()
    plain.mkdir()
    Exerciser(mounted.path / "tree", plain, seed, skip=SKIP).run(steps)
    assert "ERROR" not in mounted.log_text()


@pytest.mark.parametrize("seed", range(2))
def test_a_mount_does_what_ext4_does(exercised: Mounted, tmp_path: Path, seed: int) -> None:
    """Random calls on a mount have the results, the errno and the effects that they have on ext4."""
    exercise_tree(exercised, tmp_path / "plain", seed, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10, 16))
def test_a_mount_does_what_ext4_does_for_long(exercised: Mounted, tmp_path: Path, seed: int) -> None:
    exercise_tree(exercised, tmp_path / "plain", seed, 20 * STEPS)


@pytest.mark.parametrize("seed", range(2))
def test_a_file_holds_what_was_written(exercised: Mounted, seed: int) -> None:
    """Reads, writes, cuts, maps and reopenings of one file agree, while it is encoded too."""
    FileExerciser(exercised.path / "file", seed).run(STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10, 16))
def test_a_file_holds_what_was_written_for_long(exercised: Mounted, seed: int) -> None:
    FileExerciser(exercised.path / "file", seed).run(20 * STEPS)


def exercise_overlays(overlay: Overlaid, plain: Path, seed: int, steps: int) -> None:
    """Go on in an overlay of what the one before shows, and in one of a snapshot of that, and so on."""
    (overlay.path / "tree").mkdir()
    plain.mkdir()
    exerciser, made = Exerciser(overlay.path / "tree", plain, seed, skip=SKIP), [overlay.path.name]
    root, snapshot = str(overlay.root), f"exercised/{overlay.path.name}"
    try:
        for base in ("", "overlay", "commit", "overlay", "commit"):
            if base == "commit":
                ask(root, "overlay_commit", None, **{"name": made[-1], "as": snapshot})
            if base:
                name = f"{overlay.path.name}.{len(made)}"
                ask(root, "overlay_create", None, name=name, base=snapshot if base == "commit" else made[-1])
                made.append(name)
                exerciser.left = Side(overlay.root / "@overlays" / name / "tree")
                part_links(os.fsencode(plain))
            exerciser.run(steps)
    finally:
        for name in made[1:]:
            ask(root, "overlay_discard", None, name=name, force=True)
    assert "ERROR" not in overlay.log_text()


def part_links(root: bytes) -> None:
    """In what is captured, hard links of symbolic links and of special files are files of their own."""
    for directory, names, files in os.walk(root):
        times = os.stat(directory)
        for name in [*names, *files]:
            path, status = os.path.join(directory, name), os.lstat(os.path.join(directory, name))
            if status.st_nlink == 1 or stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                continue
            if stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(path), root + b"/new")
            else:
                os.mknod(root + b"/new", status.st_mode)
                os.chmod(root + b"/new", stat.S_IMODE(status.st_mode))
            os.chown(root + b"/new", status.st_uid, status.st_gid, follow_symlinks=False)
            os.utime(root + b"/new", ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
            os.rename(root + b"/new", path)
        os.utime(directory, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_overlays_of_overlays_and_of_their_commits_do_what_ext4_does(empty_overlay: Overlaid, tmp_path: Path) -> None:
    """Random calls on what shows through in an overlay have the results, the errno and the effects of ext4."""
    exercise_overlays(empty_overlay, tmp_path / "plain", 0, STEPS // 8)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10, 16))
def test_overlays_of_overlays_do_what_ext4_does_for_long(empty_overlay: Overlaid, tmp_path: Path, seed: int) -> None:
    exercise_overlays(empty_overlay, tmp_path / "plain", seed, 4 * STEPS)
