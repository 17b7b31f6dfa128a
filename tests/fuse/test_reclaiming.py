"""Space without cron, on mounts of small disks: what was removed makes room by itself, and only then."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moonclipfs.errors import NoSpaceError
from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.store.check import verify
from moonclipfs.store.forget import forget
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from tests.formats.samples import entry, safetensors
from tests.fuse.conftest import Mounted, Mounter, eventually
from tests.store.kit import noise, publish

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128m", "moonclipfs-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root and CAP_SYS_ADMIN")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def free(place: Path) -> int:
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


def mounted(disk: Path, mounter: Mounter, **options: object) -> Mounted:
    Store.create(disk / "store").close()
    return mounter(disk / "store", read_only=False, seal_after=None, **options)


def save(live: Mounted, name: str, seed: int, length: int) -> None:
    """A checkpoint, sealed."""
    place = live.path / name
    place.mkdir(parents=True)
    with (place / "model.pt").open("wb") as file:
        for at in range(0, length, MIB):
            file.write(noise(seed + at, MIB))
    ask(str(live.path), "seal", path=name)


def whole(live: Mounted, name: str, seed: int, length: int) -> bool:
    data = (live.path / name / "model.pt").read_bytes()
    return data == b"".join(noise(seed + at, MIB) for at in range(0, length, MIB))


def versions(live: Mounted) -> list[str]:
    """Every version that is kept, removed ones too."""
    with Store.open(live.store) as store:
        return [version.path for version in store.names().all_versions()]


def end(live: Mounted) -> None:
    unmount(live.path)
    with Store.open(live.store) as store:
        assert verify(store).problems == []


def test_what_was_removed_long_ago_goes_by_itself(disk: Path, mounter: Mounter) -> None:
    """What was removed longer ago than --keep-deleted is reclaimed by the mount itself."""
    live = mounted(disk, mounter, keep_deleted=1.0)
    save(live, "run/a", 1, 16 * MIB)
    save(live, "run/b", 1000, 4 * MIB)
    eventually(lambda: free(disk) < 90 * MIB)
    before, version = free(disk), live.path / "@versions/run/b/1/model.pt"
    eventually(version.exists)
    # What is open all the time keeps nothing but itself.
    with (
        (live.path / "run/b/model.pt").open("rb") as file,
        version.open("rb") as old,
    ):
        shutil.rmtree(live.path / "run/a")
        eventually(lambda: versions(live) == ["run/b"], 40)
        eventually(lambda: free(disk) > before + 15 * MIB, 40)
        assert file.read() == old.read()
    assert whole(live, "run/b", 1000, 4 * MIB)
    end(live)


def test_what_was_removed_stays_while_there_is_room(disk: Path, mounter: Mounter) -> None:
    """What was removed stays in @versions while there is room."""
    live = mounted(disk, mounter)
    save(live, "run/a", 1, 16 * MIB)
    save(live, "run/b", 1000, 4 * MIB)
    shutil.rmtree(live.path / "run/a")
    eventually(lambda: ask(str(live.path), "status")["reclaimable"] > 15 * MIB, 40)
    assert free(live.path) > free(disk) + 15 * MIB
    assert sorted(versions(live)) == ["run/a", "run/b"]
    assert whole(live, "@versions/run/a/1", 1, 16 * MIB)
    end(live)


@pytest.mark.slow
def test_a_trainer_that_keeps_two_never_meets_a_full_disk(disk: Path, mounter: Mounter) -> None:
    """When the disk is needed, what was removed first goes first, and no writer meets a full disk.

    400 MiB are saved on a disk of 128 MiB.
    """
    live = mounted(disk, mounter)
    length = 10 * MIB
    for number in range(40):
        save(live, f"run/checkpoint-{number}", number * length, length)
        if number >= 2:
            shutil.rmtree(live.path / f"run/checkpoint-{number - 2}")
    kept = versions(live)
    assert {"run/checkpoint-38", "run/checkpoint-39"} < set(kept)
    assert all(int(name.rpartition("-")[2]) > 25 for name in kept), "the first removed go first"
    for number in (38, 39):
        assert whole(live, f"run/checkpoint-{number}", number * length, length)
    assert "ERROR" not in live.log_text()
    end(live)


@pytest.mark.slow
def test_a_model_that_drifts_takes_no_more_on_a_full_disk_than_elsewhere(
    disk: Path, mounter: Mounter, tmp_path: Path
) -> None:
    """Its first checkpoint, of which the others are deltas, is not kept for ever, nor are they lost with it."""
    live = mounted(disk, mounter)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(2 * MIB).astype(np.float32)
    kept: dict[str, bytes] = {}
    for number in range(40):
        name = f"run/checkpoint-{number}"
        (live.path / name).mkdir(parents=True)
        kept[name] = safetensors({"w": entry("F32", [len(values)], 0, values.nbytes)}, values.tobytes())
        (live.path / name / "model.safetensors").write_bytes(kept[name])
        ask(str(live.path), "seal", 60.0, path=name)
        if number >= 3:
            oldest = next(iter(kept))
            del kept[oldest]
            shutil.rmtree(live.path / oldest)
        values = values * (1 + rng.standard_normal(len(values)).astype(np.float32) * np.float32(1e-5))
    assert all((live.path / name / "model.safetensors").read_bytes() == data for name, data in kept.items())
    assert set(kept) < set(versions(live))
    assert "ERROR" not in live.log_text()
    end(live)
    plain = sum(len(data) for data in kept.values())
    with Store.open(live.store, write=True) as store:
        forget(store, [one for one in store.names().all_versions() if one.removed])
        collect(store, pressed=True)
        assert verify(store).problems == []
        names = list(kept)
        stored = sum(path.stat().st_size for path in (live.store / "packs").iterdir())
    Store.create(tmp_path / "fresh").close()
    with Store.open(tmp_path / "fresh", write=True) as store:
        for name in names:
            publish(store, name, {"model.safetensors": kept[name]})
    fresh = sum(path.stat().st_size for path in (tmp_path / "fresh/packs").iterdir())
    assert stored < 1.3 * fresh < 0.9 * plain


def test_a_disk_that_is_full_of_what_is_kept(disk: Path, mounter: Mounter) -> None:
    """What stands at its path is never given up for room: the writer gets ENOSPC."""
    live = mounted(disk, mounter)
    length, number = 10 * MIB, 0
    with pytest.raises((OSError, NoSpaceError)) as told:
        while True:
            save(live, f"run/{number}", number * length, length)
            number += 1
    assert isinstance(told.value, NoSpaceError) or told.value.errno == errno.ENOSPC
    assert number >= 6
    for one in range(number):
        assert whole(live, f"run/{one}", one * length, length)
    shutil.rmtree(live.path / f"run/{number}")
    shutil.rmtree(live.path / "run/0")
    shutil.rmtree(live.path / "run/1")
    save(live, "after", 7, length)
    for one in range(2, number):
        assert whole(live, f"run/{one}", one * length, length)
    assert whole(live, "after", 7, length)
    end(live)
