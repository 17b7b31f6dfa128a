"""A mount beside ext4 under the exercisers: the same random calls on both, compared after each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter
from tests.layers.exerciser import Exerciser
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
