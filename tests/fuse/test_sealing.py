"""Seals on real mounts: by themselves, told to, seen by other mounts, over kills and unmounts."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.store.check import verify
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually
from tests.layers.sealkit import model, stored

SECONDS = 0.5


def save(place: Path, seed: int, *, optimizer: bool = True) -> None:
    """A checkpoint."""
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(model(seed, 200_000))
    (place / "config.json").write_text("{}")
    if optimizer:
        (place / "optimizer.pt").write_bytes(b"PK" + bytes([seed]) * 70_000)


def bound(store: Store) -> dict[str, int]:
    return {path: version.number for path, version in store.names().bound().items()}


def picture(place: Path) -> dict[str, tuple[int, ...]]:
    """What a seal never changes."""
    found: dict[str, tuple[int, ...]] = {}
    for path in [place, *sorted(place.rglob("*"))]:
        status = path.lstat()
        found[str(path)] = (
            status.st_ino, status.st_mode, status.st_nlink, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )  # fmt: skip
    return found


def no_trouble(mounted: Mounted) -> None:
    text = mounted.log_text()
    assert "WARNING" not in text and "ERROR" not in text, text


def test_a_checkpoint_on_a_mount_seals_itself(store: Store, mounter: Mounter) -> None:
    live = mounter(store.path, read_only=False, seal_after=SECONDS)
    place = live.path / "run/checkpoint-5"
    save(place, 5)
    os.link(place / "config.json", place / "same.json")
    before = picture(place)
    with (place / "model.safetensors").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as map_:
        eventually(lambda: bound(store) == {"run/checkpoint-5": 1})
        time.sleep(1)
        assert bytes(map_) == model(5, 200_000) == file.read()
    assert picture(place) == before
    version = store.names().bound()["run/checkpoint-5"]
    assert set(stored(store, version)) == {"model.safetensors", "config.json", "same.json", "optimizer.pt"}
    kept = live.path / "@versions/run/checkpoint-5/1"
    assert (kept / "model.safetensors").read_bytes() == model(5, 200_000)
    assert os.readlink(live.path / "@latest/run") == "../run/checkpoint-5"
    provenance = version.metadata["provenance"]
    assert isinstance(provenance, dict) and Path(sys.executable).name in provenance["command"]
    (place / "config.json").write_text('{"changed": 1}')
    eventually(lambda: bound(store) == {"run/checkpoint-5": 2})
    assert (place / "same.json").read_text() == '{"changed": 1}'
    assert (kept / "config.json").read_text() == "{}"
    unmount(live.path)
    no_trouble(live)


def test_an_open_file_and_a_missing_one_keep_a_checkpoint_open(store: Store, mounter: Mounter) -> None:
    live = mounter(store.path, read_only=False, seal_after=SECONDS)
    save(live.path / "run/checkpoint-1", 1)
    eventually(lambda: bound(store) == {"run/checkpoint-1": 1})
    save(live.path / "run/checkpoint-2", 2, optimizer=False)
    with (live.path / "run/checkpoint-1/config.json").open("r+b") as file:
        file.write(b"[")
        file.flush()
        time.sleep(4 * SECONDS)
        assert bound(store) == {"run/checkpoint-1": 1}
        eventually(lambda: "run/checkpoint-2" in ask(str(live.path), "status")["missing"])
        (why,) = ask(str(live.path), "status")["missing"]["run/checkpoint-2"]
        assert why == "optimizer.pt: missing, and its siblings have it"
    eventually(lambda: bound(store) == {"run/checkpoint-1": 2})
    unmount(live.path)
    assert bound(store) == {"run/checkpoint-1": 2, "run/checkpoint-2": 1}
    assert store.names().bound()["run/checkpoint-2"].metadata["incomplete"] is True
    again = mounter(store.path)
    assert os.readlink(again.path / "@latest/run") == "../run/checkpoint-1"
    assert (again.path / "run/checkpoint-2/model.safetensors").read_bytes() == model(2, 200_000)
    no_trouble(live)


def test_what_was_sealed_or_committed_is_found_everywhere_at_once(store: Store, mounter: Mounter) -> None:
    """Whoever seals or commits finds the version under every name of that mount when the command returns."""
    live = mounter(store.path, read_only=False, seal_after=None)
    place = str(live.path)
    for name in (f"run{number}" for number in range(4)):
        save(live.path / name / "a", 1)
        ask(place, "seal", None, path=f"{name}/a")
        found = [(live.path / area / name).is_dir() for area in ("@versions", "@latest", "@experts")]
        ask(place, "overlay_create", None, name="arm", base=f"{name}/a")
        ask(place, "overlay_commit", None, name="arm", **{"as": f"{name}/b"})
        assert all(
            [*found, (live.path / name / "b/config.json").is_file(), (live.path / "@versions" / name / "b/1").is_dir()]
        )
        ask(place, "overlay_discard", None, name="arm")
    unmount(live.path)
    no_trouble(live)


def test_other_mounts_see_a_seal_whole_and_soon(store: Store, mounter: Mounter, tmp_path: Path) -> None:
    """Other mounts of the store see each seal within a second, complete or not at all."""
    live = mounter(store.path, read_only=False, seal_after=None, layer="one")
    reader = mounter(store.path, tmp_path / "reader")
    second = mounter(store.path, tmp_path / "second", read_only=False, seal_after=None, layer="two")
    for step in (1, 2, 3):
        save(live.path / f"run/checkpoint-{step}", step)
        assert not (reader.path / f"run/checkpoint-{step}").exists()
        ask(str(live.path), "seal", path=f"run/checkpoint-{step}")
        began = time.monotonic()
        for other in (reader, second):
            place = other.path / f"run/checkpoint-{step}"
            while not place.exists():
                assert time.monotonic() - began < 1.5
                time.sleep(0.01)
            assert sorted(os.listdir(place)) == ["config.json", "model.safetensors", "optimizer.pt"]
            assert (place / "model.safetensors").read_bytes() == model(step, 200_000)
    (second.path / "run/checkpoint-3/rank1.bin").write_bytes(b"1")
    (live.path / "run/checkpoint-3/rank0.bin").write_bytes(b"0")
    ask(str(second.path), "seal", path="run/checkpoint-3")
    ask(str(live.path), "seal", path="run/checkpoint-3")
    for mounted in (live, reader, second):
        eventually(lambda place=mounted.path / "run/checkpoint-3": len(os.listdir(place)) == 5)  # type: ignore[misc]
    os.rename(live.path / "run", live.path / "moved")
    for other in (reader, second):
        eventually(lambda root=other.path: sorted(os.listdir(root)) == ["moved"])  # type: ignore[misc]
        assert sorted(os.listdir(other.path / "moved")) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    for mounted in (live, reader, second):
        unmount(mounted.path)
        no_trouble(mounted)


def test_a_captured_directory_survives_a_kill_of_the_server(store: Store, mounter: Mounter) -> None:
    live = mounter(store.path, read_only=False, seal_after=None)
    save(live.path / "run/checkpoint-1", 1)
    for step in range(3):
        (live.path / "run/checkpoint-1/config.json").write_text(str(step))
        ask(str(live.path), "seal", path="run/checkpoint-1", wait=False)
    os.kill(live.pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{live.pid}/fd").is_dir() or not os.listdir(f"/proc/{live.pid}/fd"))
    subprocess.run(["fusermount3", "-uz", str(live.path)], check=False)
    again = mounter(store.path, read_only=False, seal_after=None)
    eventually(lambda: ask(str(again.path), "status")["captures"] == 0)
    versions = store.names().versions("run/checkpoint-1")
    assert [stored(store, one)["config.json"] for one in versions] == [b"0", b"1", b"2"]
    assert (again.path / "run/checkpoint-1/config.json").read_text() == "2"
    assert (again.path / "run/checkpoint-1/model.safetensors").read_bytes() == model(1, 200_000)
    unmount(again.path)
    no_trouble(again)


@pytest.mark.slow
def test_kills_while_checkpoints_rotate_and_seal(store: Store, mounter: Mounter) -> None:
    """After kill -9 of the server, again and again, every checkpoint and every version is whole."""
    kept: list[int] = []
    rng = random.Random(5)
    step = 0
    for _ in range(6):
        live = mounter(store.path, read_only=False, seal_after=0.3)
        run, end = live.path / "run", time.monotonic() + rng.uniform(1, 3)
        run.mkdir(exist_ok=True)
        for old in kept:
            assert (run / f"checkpoint-{old}/model.safetensors").read_bytes() == model(old % 250, 200_000)
        while time.monotonic() < end:
            step += 1
            save(run / f"checkpoint-{step}", step % 250)
            kept.append(step)
            if step % 3 == 0:
                ask(str(live.path), "seal", path=f"run/checkpoint-{step}", wait=bool(step % 2))
            if len(kept) > 4:
                shutil.rmtree(run / f"checkpoint-{kept.pop(0)}")
            if step % 5 == 0:
                os.rename(run, live.path / "aside")
                os.rename(live.path / "aside", run)
        os.kill(live.pid, signal.SIGKILL)
        eventually(lambda pid=live.pid: not Path(f"/proc/{pid}/fd").is_dir() or not os.listdir(f"/proc/{pid}/fd"))  # type: ignore[misc]
        subprocess.run(["fusermount3", "-uz", str(live.path)], check=False)
    live = mounter(store.path, read_only=False, seal_after=0.3)
    unmount(live.path)
    no_trouble(live)
    assert sorted(bound(store)) == sorted(f"run/checkpoint-{one}" for one in kept)
    for version in store.names().all_versions():
        files = stored(store, version)
        assert files["model.safetensors"] == model(int(version.path.rpartition("-")[2]) % 250, 200_000)
        assert set(files) == {"model.safetensors", "config.json", "optimizer.pt"}
    assert verify(store).problems == []
