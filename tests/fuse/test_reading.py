"""Section A of the public reports, as far as a read-only mount goes: mmap, page faults, caches, odd ways to read."""

from __future__ import annotations

import concurrent.futures
import json
import mmap
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from moonclipfs.store.store import Store
from tests.fuse.conftest import SMALL_FILES, Mounted, Mounter, eventually, patched_server
from tests.layers.publish import publish

MIB = 1 << 20
BIG = 64 * MIB


def big_bytes(seed: int, size: int = BIG) -> bytes:
    """Bytes that no encoding makes smaller."""
    return np.random.default_rng(seed).bytes(size)


@pytest.fixture(scope="module")
def big_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    """A store with one file of 64 MiB, big/a/w.bin, stored in full; and the file's bytes."""
    path, data = tmp_path_factory.mktemp("big") / "store", big_bytes(1)
    Store.create(path).close()
    with Store.open(path, write=True) as store:
        publish(store, "big/a", {"w.bin": data})
    yield path, data
    shutil.rmtree(path)


def shared_map(file: IO[bytes]) -> mmap.mmap:
    """The whole file, mapped to be read."""
    return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)


def safetensors(weights: np.ndarray) -> bytes:
    """A file with one tensor, "w"."""
    spec = {"w": {"dtype": "F32", "shape": list(weights.shape), "data_offsets": [0, weights.nbytes]}}
    header = json.dumps(spec).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + weights.tobytes()


def count_blocks(path: Path, name: str) -> int:
    """Blocks of a file of a stored snapshot, each a unit of decoding."""
    with Store.open(path) as store:
        snapshot, _, inside = name.rpartition("/")
        entry = store.lookup(store.resolve(snapshot), inside.encode())
        total = 0
        for extent in store.recipe(entry).extents:
            if extent.object_id is not None:
                total += store.objects.chain(extent.object_id)[0].encoded.blocks
        return total


def test_r001_shared_and_private_maps_work(small: Mounted) -> None:
    """Files can be mapped, shared and private, and the map holds the bytes that read gives."""
    with open(small.path / "run1/a/model.bin", "rb") as file:
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            with mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == SMALL_FILES["model.bin"]
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            mapped[0:4] = b"mine"
            assert mapped[:4] == b"mine"
        assert file.read() == SMALL_FILES["model.bin"]


def test_r003_a_mapped_file_is_decoded_once(big_store: tuple[Path, bytes], mounter: Mounter) -> None:
    """Each block is decoded once in a sequential pass, by faults of a map too."""
    path, data = big_store
    mounted = mounter(path)
    with open(mounted.path / "big/a/w.bin", "rb") as file, shared_map(file) as mapped:
        touched = bytes(mapped[at] for at in range(0, BIG, 4096))
    assert touched == data[::4096]
    stats = mounted.stats()
    assert stats["requests"]["read"] <= 600
    assert stats["blocks_decoded"] == count_blocks(path, "big/a/w.bin") + 2  # of the recipe and of the directory


def test_each_block_is_decoded_once_by_read_too(big_store: tuple[Path, bytes], mounter: Mounter) -> None:
    path, data = big_store
    mounted = mounter(path)
    with open(mounted.path / "big/a/w.bin", "rb", buffering=0) as file:
        parts = iter(lambda: file.read(MIB), b"")
        assert b"".join(parts) == data
    assert mounted.stats()["blocks_decoded"] == count_blocks(path, "big/a/w.bin") + 2


def test_a_second_read_asks_nothing_of_the_server(big_store: tuple[Path, bytes], mounter: Mounter) -> None:
    """What was read once is read again from the kernel's cache, with no request reaching the server."""
    path, data = big_store
    mounted = mounter(path)
    for _ in range(2):
        assert (mounted.path / "big/a/w.bin").read_bytes() == data
        before = mounted.stats()["requests"]["read"]
    assert (mounted.path / "big/a/w.bin").read_bytes() == data
    assert mounted.stats()["requests"]["read"] == before


SLOW_DECODING = """
import time
from moonclipfs.store.reader import ObjectReader
decode = ObjectReader._decode
ObjectReader._decode = lambda *args: time.sleep(0.005) or decode(*args)
"""


def test_r005_many_faults_at_once_all_get_an_answer(store: Store, tmp_path: Path, fuse: None) -> None:
    """Reads never block the server's loop: every request is answered, however many wait for decoding."""
    files = {f"{number}.bin": big_bytes(number, 8 * MIB) for number in range(16)}
    publish(store, "many", files)
    with patched_server(store.path, tmp_path / "mnt", SLOW_DECODING) as mounted:
        maps = {}
        for name in files:
            with open(mounted.path / "many" / name, "rb") as file:
                maps[name] = shared_map(file)

        def touch(seed: int) -> bool:
            picks = random.Random(seed)
            touched = [(picks.choice(list(files)), picks.randrange(8 * MIB)) for _ in range(40)]
            return all(maps[name][at] == files[name][at] for name, at in touched)

        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            assert all(pool.map(touch, range(32)))
        assert time.monotonic() - start < 30
        waiting = Path(f"/sys/fs/fuse/connections/{os.minor(os.stat(mounted.path).st_dev)}/waiting")
        if waiting.exists():
            eventually(lambda: waiting.read_text().strip() == "0")
        for mapped in maps.values():
            mapped.close()


def test_r007_the_kernel_lists_the_type(small: Mounted, mounter: Mounter, tmp_path: Path) -> None:
    """The kernel lists the mount as fuse.moonclipfs, nosuid, nodev and, with --read-only, read-only."""
    written = mounter(small.store, tmp_path / "written", read_only=False)
    fields = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    for mounted, mode in ((small, "ro"), (written, "rw")):
        (line,) = [line for line in fields if line[1] == str(mounted.path)]
        assert line[0] == str(small.store)
        assert line[2] == "fuse.moonclipfs"
        assert {mode, "nosuid", "nodev", "default_permissions"} <= set(line[3].split(","))


def test_r007_the_head_of_a_file_warms_what_follows(big_store: tuple[Path, bytes], mounter: Mounter) -> None:
    """Reading the head of a file decodes the next 16 MiB of it, if the cache has room for that."""
    path, data = big_store
    mounted = mounter(path)
    with open(mounted.path / "big/a/w.bin", "rb", buffering=0) as file:
        assert file.read(64 << 10) == data[: 64 << 10]
        eventually(lambda: mounted.stats()["bytes_decoded"] >= 16 * MIB)
        time.sleep(0.2)
        assert mounted.stats()["bytes_decoded"] <= 20 * MIB


def test_r007_nothing_is_warmed_without_room(big_store: tuple[Path, bytes], mounter: Mounter) -> None:
    path, data = big_store
    mounted = mounter(path, cache_bytes=4 * MIB)
    with open(mounted.path / "big/a/w.bin", "rb", buffering=0) as file:
        assert file.read(64 << 10) == data[: 64 << 10]
        time.sleep(0.5)
        assert mounted.stats()["bytes_decoded"] <= 2 * MIB
        assert mounted.stats()["prefetches"] == 0


def test_r009_small_random_reads_are_served_from_decoded_blocks(store: Store, mounter: Mounter) -> None:
    """Small reads decode whole blocks, once: random reads of a file decode it no more than once a link of its chain."""
    rng = np.random.default_rng(3)
    weights = rng.normal(size=2 * MIB).astype(np.float32)
    for number in range(4):
        data = safetensors(weights)
        publish(store, f"run/step-{number}", {"w.bin": data})
        weights = weights + np.float32(1e-4) * rng.normal(size=weights.size).astype(np.float32)
    mounted = mounter(store.path)
    file = os.open(mounted.path / "run/step-3/w.bin", os.O_RDONLY | os.O_DIRECT)
    try:
        picks = random.Random(0)
        buffer = mmap.mmap(-1, 4096)
        for _ in range(2000):
            at = picks.randrange(len(data) // 4096) * 4096
            assert os.preadv(file, [buffer], at) == 4096
            assert buffer[:] == data[at : at + 4096]
        decoded = mounted.stats()["bytes_decoded"]
        recipe = store.recipe(store.lookup(store.resolve("run/step-3"), b"w.bin"))
        chains = [store.objects.chain(object_id) for object_id in recipe.object_ids()]
        assert max(len(chain) for chain in chains) > 1
        assert decoded <= sum(link.encoded.raw_length for chain in chains for link in chain) + MIB
    finally:
        os.close(file)


def test_r011_o_direct_reads(small: Mounted) -> None:
    """O_DIRECT reads work, over the end of the file too."""
    data = SMALL_FILES["model.bin"]
    assert isinstance(data, bytes)
    file = os.open(small.path / "run1/a/model.bin", os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, MIB)
        for at in (0, 4096, len(data) // 4096 * 4096):
            count = os.preadv(file, [buffer], at)
            assert count == len(data) - at
            assert buffer[:count] == data[at:]
        assert os.preadv(file, [buffer], len(data) // 4096 * 4096 + 4096) == 0
    finally:
        os.close(file)


def test_r015_new_content_is_a_new_inode(store: Store, mounter: Mounter) -> None:
    """An inode's bytes never change: a new version under the same name is a new inode, an open file keeps its bytes."""
    publish(store, "run/latest", {"w.bin": b"A" * 8192})
    mounted = mounter(store.path)
    path = mounted.path / "run/latest/w.bin"
    with open(path, "rb") as old, shared_map(old) as mapped:
        assert old.read() == b"A" * 8192
        before = os.stat(path)
        publish(store, "run/latest", {"w.bin": b"B" * 8192})
        eventually(lambda: path.read_bytes() == b"B" * 8192, 2)
        assert os.stat(path).st_ino != before.st_ino
        old.seek(0)
        assert old.read() == b"A" * 8192
        assert mapped[:] == b"A" * 8192


def test_a_file_opened_before_forget_and_gc_is_read_after(store: Store, mounter: Mounter) -> None:
    """A file that is open when its snapshot is forgotten and reclaimed can be read to its end."""
    gc = pytest.importorskip("moonclipfs.store.gc")
    data = big_bytes(7, 2 * MIB)
    publish(store, "run/a", {"w.bin": data})
    publish(store, "run/b", {"w.bin": b"other"})
    mounted = mounter(store.path)
    with open(mounted.path / "run/a/w.bin", "rb", buffering=0) as file:
        assert file.read(4096) == data[:4096]
        version = store.resolve("run/a")
        store.log.unbind(["run/a"])
        store.log.forget([("run/a", version.number)])
        eventually(lambda: not (mounted.path / "run/a").exists(), 2)
        gc.collect(store)
        time.sleep(1)
        gc.collect(store)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), len(data), 0) == data
    eventually(lambda: mounted.stats()["handles"] == 0)
    time.sleep(1.2)
    report = gc.collect(store)
    assert report is not None
    assert not any(
        data[:4096] in (store.path / "packs" / name).read_bytes() for name in os.listdir(store.path / "packs")
    )


def compare_random_reads(path: Path, data: bytes, seed: int, count: int = 60) -> bool:
    picks = random.Random(seed)
    with open(path, "rb", buffering=0) as file:
        for _ in range(count):
            at, length = picks.randrange(len(data)), picks.choice((1, 100, 4096, 65536, 300_000))
            if os.pread(file.fileno(), length, at) != data[at : at + length]:
                return False
    return True


def test_concurrent_random_reads_give_the_stored_bytes(big_store: tuple[Path, bytes], mounter: Mounter) -> None:
    """Any number of readers at any places get the bytes that were stored."""
    path, data = big_store
    mounted = mounter(path, cache_bytes=8 * MIB)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = [pool.submit(compare_random_reads, mounted.path / "big/a/w.bin", data, seed) for seed in range(8)]
        assert all(result.result() for result in results)
    eventually(lambda: mounted.stats()["handles"] == 0)


def test_sendfile_and_copies(small: Mounted, tmp_path: Path) -> None:
    """sendfile, copy_file_range and cp --reflink=auto copy the bytes."""
    source, data = small.path / "run1/a/model.bin", SMALL_FILES["model.bin"]
    assert isinstance(data, bytes)
    with open(source, "rb") as left, open(tmp_path / "sent", "wb") as right:
        sent = 0
        while sent < len(data):
            sent += os.sendfile(right.fileno(), left.fileno(), sent, len(data))
    assert (tmp_path / "sent").read_bytes() == data
    subprocess.run(["cp", "--reflink=auto", "--preserve=all", source, tmp_path / "copied"], check=True)
    assert (tmp_path / "copied").read_bytes() == data
    assert os.stat(tmp_path / "copied").st_mtime_ns == os.stat(source).st_mtime_ns
    assert not os.listxattr(tmp_path / "copied")


def _tar(mounted: Path, target: Path) -> None:
    target.mkdir()
    subprocess.run(f"tar -C '{mounted}' -cf - . | tar -C '{target}' -xf -", shell=True, check=True)


def _cp(mounted: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", mounted, target], check=True)


def _rsync(mounted: Path, target: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    subprocess.run(["rsync", "-aHX", f"{mounted}/", f"{target}/"], check=True)


@pytest.mark.parametrize("copy", [_tar, _cp, _rsync])
def test_tree_copies(small: Mounted, tmp_path: Path, copy: Callable[[Path, Path], None]) -> None:
    """tar, cp -a and rsync see each file once, and copy names, bytes, modes, times and symlinks."""
    target = tmp_path / "target"
    copy(small.path, target)
    seen = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    inside = ["config.json", "empty", "latest", "model.bin", "sub", "sub/deep", "sub/deep/x", "sub/y"]
    assert seen == sorted(["run1", "run1/a", *(f"run1/a/{name}" for name in inside)])
    for name in ("config.json", "model.bin", "sub/deep/x"):
        assert (target / "run1/a" / name).read_bytes() == (small.path / "run1/a" / name).read_bytes()
        assert os.stat(target / "run1/a" / name).st_mode == os.stat(small.path / "run1/a" / name).st_mode
        assert int(os.stat(target / "run1/a" / name).st_mtime) == int(os.stat(small.path / "run1/a" / name).st_mtime)
    assert os.readlink(target / "run1/a/latest") == "model.bin"


def test_find_sees_every_name(small: Mounted) -> None:
    """find and du walk the whole tree."""
    found = subprocess.run(
        ["find", small.path, "-type", "f"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert sorted(found) == sorted(
        str(small.path / "run1/a" / name) for name in ("config.json", "model.bin", "empty", "sub/deep/x", "sub/y")
    )
    ls = subprocess.run(["ls", "-la", small.path / "run1/a"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in ls.splitlines()[1:3]] == [".", ".."]


def test_r101_sizes_in_blocks(store: Store, mounter: Mounter) -> None:
    """st_blocks is the size in blocks of 512 bytes, rounded up; du -sb is the sum of the sizes."""
    sizes = {"empty": 0, "twelve": 12, "a": 512, "b": 513, "c": 100_000}
    publish(store, "run/a", {name: bytes(size) for name, size in sizes.items()})
    mounted = mounter(store.path)
    for name, size in sizes.items():
        status = os.stat(mounted.path / "run/a" / name)
        assert (status.st_size, status.st_blocks, status.st_nlink) == (size, -(-size // 512), 1)
        assert status.st_blksize == MIB
    assert os.stat(mounted.path / "run").st_nlink == 3
    total = subprocess.run(["du", "-sb", mounted.path], capture_output=True, text=True, check=True).stdout.split()[0]
    assert int(total) == sum(sizes.values())
    blocks = subprocess.run(["du", "-s", "--block-size=512", mounted.path], capture_output=True, text=True, check=True)
    assert int(blocks.stdout.split()[0]) == sum(-(-size // 512) for size in sizes.values())
