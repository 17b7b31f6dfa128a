"""Experts in a store beside experts in a plain directory: paging them in and out, listing them, and a dry run.

    python -m tests.bench.experts_bench [--experts 8] [--rounds 3] [--many 1000]

An expert is 25 MB: three matrices in fp32, and their moments in bf16. The dry run has `--many` experts of 1 MB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from moonclipfs.fuse.mount import MountOptions, mount, unmount
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.add import add
from moonclipfs.store.store import Store
from moonclipfs.torch import ExpertStore
from tests.bench.common import SCRATCH, machine, print_table, timed
from tests.bench.mounting import load

MB = 1e6
ROWS, COLUMNS = 512, 2048
FLIGHTS = 8
LISTED = (512, 25_000)
SMALL_ROWS, CHANGED_SHARE = 20, 0.05
Tensors = dict[str, torch.Tensor]
Opened = Callable[[], AbstractContextManager[ExpertStore]]


def expert(seed: int, rows: int = ROWS) -> Tensors:
    """An expert as a pretrained one is distributed, with moments."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(rows, COLUMNS, generator=generator) * 0.02 for name in ("w1", "w3", "w2")}
    moments = {name + suffix: (weight * 0.01).bfloat16() for name, weight in weights.items() for suffix in ("_m", "_v")}
    return {**weights, **moments}


def trained(tensors: Tensors, seed: int) -> Tensors:
    """The same expert after some steps."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (one.float() + torch.randn(one.shape, generator=generator) * 1e-4).to(one.dtype)
        for name, one in tensors.items()
    }


def drop_caches() -> None:
    """Let the kernel forget every file."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def forget_pages(path: Path) -> None:
    """Let the kernel forget one file."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def best(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of several runs."""
    return min(timed(work)[1] for _ in range(rounds))


@contextmanager
def mounted(store: Path, at: Path) -> Iterator[Path]:
    """A writable mount of a store."""
    at.mkdir(exist_ok=True)
    mount(store, at, MountOptions(seal_after=None))
    try:
        yield at
    finally:
        unmount(at)


@contextmanager
def in_mount(store: Path, at: Path) -> Iterator[ExpertStore]:
    """The experts of the snapshot `model` in a new mount."""
    with mounted(store, at):
        yield ExpertStore(at / "model" / "experts")


@contextmanager
def in_overlay(path: Path, name: str) -> Iterator[ExpertStore]:
    """The experts in an overlay that this process opens."""
    with Store.open(path, write=True) as store, Overlays(store) as overlays:
        yield ExpertStore(LayerPath(overlays.get(name), "experts"))


def read_all(store: ExpertStore, count: int, threads: int = 1) -> None:
    """Page every expert in."""
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(store.read, range(count)):
            pass


def page_in(name: str, opened: Opened, count: int, size: float, rounds: int) -> list[object]:
    """MB/s of one place: cold, cold with several in flight, one expert from the decoded cache, and the page cache."""
    rates: list[object] = [name]
    for threads in (1, FLIGHTS):
        with opened() as store:  # anew, so that nothing is decoded yet
            drop_caches()
            rates.append(count * size / timed(partial(read_all, store, count, threads))[1])
    with opened() as store:
        store.read(0)
        decoded: object = "-"
        if isinstance(store.root, Path) and name != "disk":
            seconds = []
            for _ in range(rounds):
                forget_pages(store.root / "e00000.safetensors")
                seconds.append(timed(partial(store.read, 0))[1])
            decoded = size / min(seconds)
        return [*rates, decoded, size / best(partial(store.read, 0), rounds)]


def write_back(store: ExpertStore, tensors: Sequence[Tensors]) -> float:
    """Milliseconds that the writing of one expert takes, at best."""
    return min(timed(partial(store.write, 0, one))[1] for one in tensors) * 1e3


def paging(work: Path, count: int, rounds: int) -> None:
    """Print how fast experts are paged in and written back on the disk, in a mount and through the layer API."""
    disk = ExpertStore(work / "disk" / "experts")
    for number in range(count):
        disk.write(number, expert(number))
    size = disk.stat(0).size / MB
    with Store.create(work / "store") as store:
        add(store, [work / "disk"], name="model")
        with Overlays(store) as overlays:
            overlays.create("trial", "model")
    places: dict[str, Opened] = {
        "disk": lambda: nullcontext(disk),
        "mount": partial(in_mount, work / "store", work / "mnt"),
        "layer API": partial(in_overlay, work / "store", "trial"),
    }
    rows, writes = [], {}
    changed = [trained(disk.read(0), seed) for seed in range(rounds)]
    for name, opened in places.items():
        rows.append(page_in(name, opened, count, size, rounds))
    for name, opened in places.items():
        with opened() as store:
            writes[name] = write_back(store, changed)
    print(f"\n{count} experts of {size:.1f} MB, in MB/s\n")
    print_table(["page-in", "cold", f"cold, {FLIGHTS} at a time", "decoded cache", "page cache"], rows)
    print("(cold 0.5 of the disk; again 0.4 of the disk's page cache in the mount, 0.8 by the layer API)\n")
    print_table(["write-back", "ms", "times the disk"], [[one, ms, ms / writes["disk"]] for one, ms in writes.items()])
    print("(mount 3.5, and 1.5 with the INIT flags)")


def listing(work: Path) -> None:
    """Print how long it takes to list experts in a plain directory and in a mount."""
    rows = []
    for count in LISTED:
        disk, store = work / f"listed-{count}" / "experts", work / f"store-{count}"
        disk.mkdir(parents=True)
        for number in range(count):
            (disk / f"e{number:05d}.npz").write_bytes(b"x" * (number % 50))
        with Store.create(store) as opened:
            add(opened, [disk.parent], name="model")
        with mounted(store, work / f"mnt-{count}") as at:
            plain, there = ExpertStore(disk), ExpertStore(at / "model" / "experts")
            first = timed(there.ids)[1]
            pair = best(plain.ids, 3), best(there.ids, 3)
        rows.append([count, pair[0] * 1e3, first * 1e3, pair[1] * 1e3, pair[1] / pair[0]])
    print("\n")
    print_table(["experts listed", "disk ms", "mount, first", "mount", "times the disk"], rows)


def tree_bytes(path: Path) -> int:
    """Bytes that the files of a directory take on the disk."""
    return sum(one.lstat().st_blocks * 512 for one in path.rglob("*"))


def dry_run(work: Path, many: int) -> None:
    """Print what it takes to try something on a twentieth of many experts, beside copying all of them."""
    disk = ExpertStore(work / "many" / "experts")
    for number in range(many):
        disk.write(number, expert(number, SMALL_ROWS))
    with Store.create(work / "store-many") as store:
        add(store, [work / "many"], name="model")
    base = tree_bytes(work / "many")
    changed = {number: trained(disk.read(number), number) for number in range(0, many, round(1 / CHANGED_SHARE))}
    os.sync()
    _, copying = timed(lambda: (shutil.copytree(work / "many", work / "copy"), os.sync()))
    with Store.open(work / "store-many", write=True) as store, Overlays(store) as overlays:
        before = tree_bytes(store.path)
        started = time.perf_counter()
        overlay = overlays.create("dry", "model")
        created = time.perf_counter() - started
        place = ExpertStore(LayerPath(overlay, "experts"))
        for number, tensors in changed.items():
            place.write(number, tensors)
        seconds = time.perf_counter() - started
        overlay.flush()
        space = tree_bytes(store.path) - before
    print(f"\na dry run over {many} experts ({base / MB:.0f} MB) that changes {len(changed)} of them\n")
    rows = [
        ["copy", base / MB, 100.0, copying, 1.0],
        ["overlay", space / MB, 100 * space / base, seconds, seconds / copying],
    ]
    print_table(["", "MB", "% of the base", "s", "share of copying"], rows)
    print(f"(space under 6 %, time under 0.1; the overlay itself was made in {created * 1e3:.0f} ms)")


def main() -> None:
    """Run it all in build/bench, and leave nothing there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--many", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), load())
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as work:
        paging(Path(work), options.experts, options.rounds)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as work:
        listing(Path(work))
    with tempfile.TemporaryDirectory(dir=SCRATCH) as work:
        dry_run(Path(work), options.many)


if __name__ == "__main__":
    main()
