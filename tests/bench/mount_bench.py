"""A mounted store beside plain files and beside the ceiling of pyfuse3.

    python -m tests.bench.mount_bench [--mib 512] [--rounds 3]

Prints what each reading costs on the wall and in processor time, and the ratios that a mount has to reach.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import MountOptions, mount, unmount
from moonclipfs.store.add import add
from moonclipfs.store.store import Store
from tests.bench.common import MIB, SCRATCH, machine, print_table, timed

FILES, DIRECTORIES = 25_000, 250
TENSORS = 64
TARGET_REPEAT, TARGET_FIRST, TARGET_DECODED, TARGET_LISTING = 0.4, 0.5, 1.0, 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


def make_weights(path: Path, mib: int) -> None:
    """A safetensors file of weights as training begins with them, and one small tensor in the middle."""
    rng = np.random.default_rng(0)
    rows = mib * MIB // 4 // TENSORS // 1024
    names = [f"layer.{number:02d}.weight" for number in range(TENSORS)]
    names.insert(TENSORS // 2, "middle.bias")
    header, at = {}, 0
    for name in names:
        shape = [256] if name == "middle.bias" else [rows, 1024]
        length = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            shape = header[name]["shape"]
            assert isinstance(shape, list)
            file.write((rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)).tobytes())


def make_many(path: Path) -> None:
    """FILES small files in DIRECTORIES directories."""
    for number in range(DIRECTORIES):
        directory = path / f"shard-{number:03d}"
        directory.mkdir(parents=True)
        for file in range(FILES // DIRECTORIES):
            (directory / f"expert-{file:05d}.bin").write_bytes(b"x" * (file % 50))


def read_all(path: Path) -> int:
    """Read a file in pieces of 1 MiB into one buffer."""
    buffer, total = bytearray(MIB), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


def cached_read(path: Path) -> tuple[float, float]:
    """Seconds to read a file that is all in the kernel's cache: on the wall, and of processor time.

    On an idle machine they are the same; where others run beside it, only the second says what the read costs.
    """
    started = time.thread_time()
    _, seconds = timed(partial(read_all, path))
    return seconds, time.thread_time() - started


def cpu_seconds(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def mounted(store: Path, place: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Mount a store; gives the server's counts when called."""
    mount(store, place, MountOptions())
    try:
        yield lambda: ask(str(place), "stats")
    finally:
        unmount(place)


@contextmanager
def trivial(place: Path, size: int) -> Iterator[int]:
    """Mount the trivial server; gives its pid."""
    command = [sys.executable, "-m", "tests.bench.trivial_mount", str(place), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            yield server.pid
        finally:
            server.terminate()


def decode_rate(store_path: Path, name: str) -> float:
    """Bytes a second at which all cores decode a file, read-ahead steps at a time, without a mount."""
    with (
        Store.open(store_path, cache_bytes=64 * MIB) as store,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        reader = store.open_file(store.lookup(store.resolve(name), b"model.safetensors"))
        steps = range(0, reader.size, MIB)
        _, seconds = timed(lambda: list(pool.map(lambda at: reader.prefetch(at, MIB), steps)))
        return reader.size / seconds


def bench_reading(work: Path, mib: int, rounds: int) -> list[list[object]]:
    """First and repeated sequential reads. Ways take turns, so that what else the machine does meets all of them."""
    plain, place, size = (
        work / "plain/model.safetensors",
        work / "mnt",
        (work / "plain/model.safetensors").stat().st_size,
    )
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    def note(way: str, seconds: float, server: float = 0.0) -> None:
        rates.setdefault(way, []).append(size / seconds / 1e9)
        cpu.setdefault(way, []).append(server / (size / 1e9) * 1000)

    def note_cached(way: str, path: Path) -> None:
        wall, processor = cached_read(path)
        note(way, wall)
        note(f"{way}, processor time", processor)

    requests = set()
    for _ in range(rounds):
        read_all(plain)
        note_cached("plain file, cached", plain)
        note("decoding on all cores", size / decode_rate(work / "store", "weights"))
        with trivial(place, size) as pid:
            before = cpu_seconds(pid)
            note("trivial server, first read", timed(partial(read_all, place / "file"))[1], cpu_seconds(pid) - before)
        with mounted(work / "store", place) as stats:
            path, pid = place / "weights/model.safetensors", ask(str(place), "ping")["pid"]
            before = cpu_seconds(pid)
            seconds = timed(partial(read_all, path))[1]
            note("mount, first read", seconds, cpu_seconds(pid) - before)
            reads = stats()["requests"]["read"]
            note_cached("mount, repeated read", path)
            requests.add(stats()["requests"]["read"] - reads)
    print_table(
        ["way to read", "best GB/s", "median GB/s", "server ms/GB"],
        [[way, max(all_), sorted(all_)[len(all_) // 2], min(cpu[way])] for way, all_ in rates.items()],
    )
    best = {way: max(all_) for way, all_ in rates.items()}
    ceiling = min(best["decoding on all cores"], best["trivial server, first read"])
    return [
        *(
            [
                f"repeated read / plain file, {kind}",
                best[f"mount, repeated read{of}"] / best[f"plain file, cached{of}"],
                TARGET_REPEAT,
            ]
            for kind, of in (("on the wall", ""), ("processor time", ", processor time"))
        ),
        ["READ requests of a repeated read (more where the kernel gives up cached pages)", min(requests), 0],
        ["first read / ceiling", best["mount, first read"] / ceiling, TARGET_FIRST],
    ]


def bench_one_tensor(work: Path) -> list[list[object]]:
    """How much is decoded to get one small tensor."""
    size = (work / "plain/model.safetensors").stat().st_size
    with mounted(work / "store", work / "mnt") as stats:
        with safe_open(work / "mnt/weights/model.safetensors", "np") as tensors:
            assert tensors.get_tensor("middle.bias").shape == (256,)
        decoded = stats()["bytes_decoded"]
    words = f"percent of a file of {size / MIB:.0f} MiB decoded for one small tensor ({decoded / MIB:.1f} MiB)"
    return [[words, 100 * decoded / size, TARGET_DECODED]]


def bench_listing(work: Path, rounds: int) -> list[list[object]]:
    """`ls -lR` of many files, all of them new to the kernel each time."""
    best = {"plain": float("inf"), "mount": float("inf")}
    for _ in range(rounds):
        with mounted(work / "store", work / "mnt"):
            for way, path in (("plain", work / "many"), ("mount", work / "mnt/many")):
                command = ["ls", "-lR", path]
                best[way] = min(best[way], timed(partial(subprocess.run, command, stdout=subprocess.DEVNULL))[1])
    words = f"ls -lR of {FILES} files / plain ({best['mount']:.2f} s / {best['plain']:.2f} s)"
    return [[words, best["mount"] / best["plain"], TARGET_LISTING]]


def bench_random(work: Path) -> list[list[object]]:
    """Small random reads of warm pages and of decoded blocks."""
    picks = random.Random(0)
    with mounted(work / "store", work / "mnt"):
        path = work / "mnt/weights/model.safetensors"
        size = min(path.stat().st_size, 64 * MIB)
        file = os.open(path, os.O_RDONLY)
        for at in range(0, size, MIB):
            os.pread(file, MIB, at)
        places = [picks.randrange(size // 4096) * 4096 for _ in range(20_000)]
        _, seconds = timed(lambda: [os.pread(file, 4096, at) for at in places])
        os.close(file)
    return [["random 4 KiB reads, cached, thousands a second", len(places) / seconds / 1000, ""]]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib", type=int, default=512, help="size of the file that is read; the share of one tensor is meant at 2048"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    print(machine())
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="mount-") as scratch:
        work = Path(scratch)
        (work / "plain").mkdir()
        (work / "mnt").mkdir()
        make_weights(work / "plain/model.safetensors", options.mib)
        make_many(work / "many")
        with Store.create(work / "store") as store:
            add(store, [work / "plain"], name="weights")
            add(store, [work / "many"], name="many")
        rows = bench_reading(work, options.mib, options.rounds)
        rows += bench_one_tensor(work) + bench_listing(work, options.rounds) + bench_random(work)
        print_table(["measured", "ratio", "target"], rows)


if __name__ == "__main__":
    main()
