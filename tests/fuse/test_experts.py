"""`@experts` in real mounts."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter, eventually
from tests.layers.expertkit import Arrays, fused, fused_expert, mixtral, mixtral_expert, shards
from tests.layers.publish import publish


def loaded(path: Path) -> dict[str, bytes]:
    """What safetensors' own loader finds in a file, which it maps."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - it is no mapping


def stored_bytes(store: Path) -> int:
    """The length of all packs."""
    return sum(path.stat().st_size for path in (store / "packs").rglob("*") if path.is_file())


@pytest.mark.parametrize("read_only", [True, False])
def test_experts_are_files_of_a_mount(store: Store, mounter: Mounter, read_only: bool) -> None:
    """Expert files are loaded from a mount, and hold the bytes of the slices of the large files."""
    arrays, stacks = mixtral(layers=2, experts=3), fused(experts=4, inner=700, outer=300)
    publish(store, "run1/ckpt", {**shards(arrays), "sub": {"model.safetensors": save(stacks)}})
    before = stored_bytes(store.path)
    mounted = mounter(store.path, read_only=read_only)
    top = mounted.path / "@experts"
    assert sorted(os.listdir(mounted.path)) == ["run1"]
    assert os.listdir(top) == ["run1"]
    assert sorted(os.listdir(top / "run1/ckpt")) == ["L000", "L001", "sub"]
    for layer in range(2):
        for number in range(3):
            path = top / f"run1/ckpt/L{layer:03}/e{number:05}.safetensors"
            assert loaded(path) == mixtral_expert(arrays, layer, number)
    for number in range(4):
        path = top / f"run1/ckpt/sub/L003/e{number:05}.safetensors"
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert hashlib.sha256(mapped).digest() == hashlib.sha256(path.read_bytes()).digest()
        assert loaded(path) == fused_expert(stacks, number)
    assert stored_bytes(store.path) == before
    assert mounted.log_text().count("ERROR") == 0


@pytest.mark.parametrize("read_only", [True, False])
def test_nothing_is_written_below_the_experts_of_a_snapshot(store: Store, mounter: Mounter, read_only: bool) -> None:
    """Below @experts, what belongs to snapshots is read-only."""
    publish(store, "a", {"model.safetensors": save(mixtral(layers=1, experts=1))})
    layer = mounter(store.path, read_only=read_only).path / "@experts/a/L000"
    expert = layer / "e00000.safetensors"
    attempts: list[Callable[[], object]] = [
        lambda: (layer / "new").touch(),
        lambda: expert.open("r+b"),
        lambda: os.truncate(expert, 1),
        expert.unlink,
        lambda: expert.rename(layer / "e00001.safetensors"),
        lambda: (layer / "d").mkdir(),
        layer.rmdir,
        lambda: expert.chmod(0o600),
    ]
    for attempt in attempts:
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno == errno.EROFS
    assert os.listdir(layer) == ["e00000.safetensors"]


@pytest.mark.parametrize("read_only", [True, False])
def test_experts_follow_the_names_of_the_log(store: Store, mounter: Mounter, read_only: bool) -> None:
    """Experts of a snapshot that is published while mounted appear, and its new version replaces them."""
    first, second = mixtral(layers=1, experts=2), mixtral(layers=1, experts=3)
    publish(store, "a", {"model.safetensors": save(first)})
    top = mounter(store.path, read_only=read_only).path / "@experts"
    with open(top / "a/L000/e00000.safetensors", "rb") as held:
        old = os.fstat(held.fileno())
        assert not (top / "b").exists()
        publish(store, "a", {"model.safetensors": save({**second, "x": np.zeros(1)})})
        publish(store, "b", {"model.safetensors": save(first)})
        eventually(lambda: (top / "b/L000/e00001.safetensors").exists(), 5)
        eventually(lambda: len(os.listdir(top / "a/L000")) == 3, 5)
        assert os.stat(top / "a/L000/e00000.safetensors").st_ino != old.st_ino
        assert len(held.read()) == old.st_size
    store.log.unbind(["b"])
    eventually(lambda: os.listdir(top) == ["a"], 5)


def test_a_seal_shows_its_experts(store: Store, mounter: Mounter) -> None:
    """What was written in the live tree has its experts below @experts when it is sealed."""
    mounted = mounter(store.path, read_only=False, seal_after=0.5)
    arrays = mixtral(layers=1, experts=2)
    (mounted.path / "run").mkdir()
    for name, data in shards(arrays).items():
        (mounted.path / "run" / name).write_bytes(data)
    path = mounted.path / "@experts/run/L000/e00001.safetensors"
    eventually(path.exists, 20)
    assert loaded(path) == mixtral_expert(arrays, 0, 1)


def test_experts_keep_their_numbers_and_times(store: Store, mounter: Mounter) -> None:
    """Inode numbers, sizes and times of expert files are the same at every mount."""
    publish(store, "a", {"model.safetensors": save(mixtral(layers=1, experts=2))})
    seen = []
    for number in range(2):
        mounted = mounter(store.path, mounted_at(store, number))
        status = os.stat(mounted.path / "@experts/a/L000/e00001.safetensors")
        seen.append((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode))
    assert seen[0] == seen[1]


def mounted_at(store: Store, number: int) -> Path:
    return store.path.parent / f"mnt{number}"


def listing(arrays: Arrays, store: Store, mounter: Mounter, tmp_path: Path, count: int) -> tuple[float, float]:
    """Seconds to list the experts with all that stat says, and as many plain files of the local disk: the best of 8."""
    publish(store, "a", {"model.safetensors": save(arrays)})
    mounted: Mounted = mounter(store.path)
    plain = tmp_path / "plain"
    plain.mkdir()
    for number in range(count):
        (plain / f"e{number:05}.safetensors").touch()
    layer = mounted.path / "@experts/a/L003"

    def seconds(path: Path) -> float:
        start = time.perf_counter()
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.stat().st_size >= 0]
        assert len(names) == count and all(re.fullmatch(r"e\d{5}\.safetensors", name) for name in names)
        return time.perf_counter() - start

    return min(seconds(layer) for _ in range(8)), min(seconds(plain) for _ in range(8))


@pytest.mark.slow
def test_listing_512_experts_takes_no_more_than_ten_times_a_plain_directory(
    store: Store, mounter: Mounter, tmp_path: Path
) -> None:
    ours, plain = listing(fused(experts=512, inner=1, outer=1), store, mounter, tmp_path, 512)
    assert ours < 10 * plain


@pytest.mark.slow
def test_listing_25000_experts_takes_no_more_than_ten_times_a_plain_directory(
    store: Store, mounter: Mounter, tmp_path: Path
) -> None:
    ours, plain = listing(fused(experts=25_000, inner=1, outer=1), store, mounter, tmp_path, 25_000)
    assert ours < 10 * plain
