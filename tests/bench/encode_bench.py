"""Encoding behind a writable layer, beside the codec alone and `add` of the same files, and what many small files cost.

    python -m tests.bench.encode_bench [--mib 500] [--files 25000] [--rounds 3]

A pair of fp32 checkpoints, the second a small step after the first, is written into a layer and drained with all
cores; the time from the start of the drain until all is durable and journalled is compared with that of the codec for
the same tensors in memory, on all cores (it chooses, encodes, decodes again and compares), and with that of `add`. To
reach: 60 % of the speed of the codec. Small files of 4 KiB are written one by one, for a bounded number of packs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from moonclipfs.codec.choose import Base, encode
from moonclipfs.layers.encoder import Encoder
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.store.add import add
from moonclipfs.store.store import Store
from moonclipfs.types import DType, EntryType
from tests.bench.common import MIB, SCRATCH, machine, print_table, timed
from tests.bench.mounting import load

_TENSORS = 16
_PIECE_BYTES = 16 * MIB
_TO_REACH = 0.6


def checkpoints(directory: Path, length: int) -> list[Path]:
    """Two safetensors files of about `length` bytes."""
    rng = np.random.default_rng(0)
    elements = length // _TENSORS // 4
    values = rng.standard_normal((_TENSORS, elements), np.float32)
    paths = []
    for number in range(2):
        at = [(4 * elements * t, 4 * elements * (t + 1)) for t in range(_TENSORS)]
        header = {f"t{t}": {"dtype": "F32", "shape": [elements], "data_offsets": at[t]} for t in range(_TENSORS)}
        text = json.dumps(header).encode()
        path = directory / f"checkpoint-{number}" / "model.safetensors"
        path.parent.mkdir()
        path.write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())
        paths.append(path)
        values *= 1 + rng.standard_normal(values.shape, np.float32) * np.float32(1e-4)
    return paths


def tensors(path: Path) -> list[memoryview]:
    """The bytes of each tensor of a file, in pieces as they are stored."""
    data = memoryview(path.read_bytes())
    data = data[8 + int.from_bytes(data[:8], "little") :]
    length = len(data) // _TENSORS
    return [
        data[start : min(start + _PIECE_BYTES, end)]
        for end in range(length, len(data) + 1, length)
        for start in range(end - length, end, _PIECE_BYTES)
    ]


def codec_seconds(paths: list[Path]) -> float:
    """How long the codec alone takes for both files, on all cores: the second is encoded against the first."""
    first, second = map(tensors, paths)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        _, alone = timed(lambda: list(pool.map(lambda raw: encode(raw, DType.F32), first)))
        _, against = timed(lambda: list(pool.map(_encode_against, second, first)))
    return alone + against


def _encode_against(raw: memoryview, base: memoryview) -> None:
    encode(raw, DType.F32, [Base(base, DType.F32)])


@contextmanager
def working(directory: Path) -> Iterator[tuple[Store, Layer, Encoder]]:
    """A layer of a new store with an encoder that has not begun."""
    Store.create(directory).close()
    with Store.open(directory, write=True) as store:
        layer = Layer.open(store, "bench")
        encoder = Encoder(layer, store.path)
        try:
            yield store, layer, encoder
        finally:
            encoder.stop()
            layer.close()


def make(layer: Layer, directory: Inode, name: bytes, data: bytes) -> None:
    """Write a file as a program does."""
    file = layer.open_file(layer.make(directory, name, EntryType.FILE, 0o644, 0, 0, time.time_ns()), write=True)
    for at in range(0, len(data), MIB):
        file.write(at, data[at : at + MIB], time.time_ns())
    file.flush()
    file.close()


def bench_pair(scratch: Path, length: int, rounds: int) -> bool:
    """Print the times of both ways; True when the speed to reach was reached."""
    plain = scratch / "plain"
    plain.mkdir()
    paths = checkpoints(plain, length)
    rows, best = [], [float("inf")] * 3
    for number in range(rounds):
        codec = codec_seconds(paths)
        Store.create(scratch / f"add-{number}").close()
        with Store.open(scratch / f"add-{number}", write=True) as store:
            _, added = timed(lambda store=store: [add(store, [path.parent]) for path in paths])
            stored = sum(info.bytes for info in store.index.packs().values())
        with working(scratch / f"layer-{number}") as (store, layer, encoder):
            drained = 0.0
            encoder.start()
            for path in paths:
                parent = path.parent.name.encode()
                directory = layer.make(layer.root, parent, EntryType.DIRECTORY, 0o755, 0, 0, time.time_ns())
                make(layer, directory, path.name.encode(), path.read_bytes())
                drained += timed(encoder.drain)[1]
            store.index.sync()
            behind = sum(info.bytes for info in store.index.packs().values())
        for way in ("add", "layer"):
            shutil.rmtree(scratch / f"{way}-{number}")  # its pages in the cache are for the next round
        seconds = (codec, added, drained)
        rows.append((f"round {number}", *seconds, codec / drained, added / drained, stored / MIB, behind / MIB))
        best = [min(pair) for pair in zip(best, seconds, strict=True)]
    rows.append(("best of each", *best, best[0] / best[2], best[1] / best[2], "", ""))
    print_table(("", "codec s", "add s", "drain s", "of codec", "of add", "add MiB", "layer MiB"), rows)
    print(f"to reach: {_TO_REACH} of the speed of the codec. Behind it come reading what is staged and the bases,")
    print(f"hashing, and writing packs, one thread at a time; {load()}\n")
    return best[0] / best[2] >= _TO_REACH


def bench_small(scratch: Path, count: int) -> None:
    """Print what small files cost."""
    rng = np.random.default_rng(1)
    with working(scratch / "small") as (store, layer, encoder):
        encoder.start()
        directory = layer.make(layer.root, b"d", EntryType.DIRECTORY, 0o755, 0, 0, time.time_ns())
        _, written = timed(lambda: [make(layer, directory, b"f%d" % n, rng.bytes(4096)) for n in range(count)])
        _, drained = timed(encoder.drain)
        store.index.sync()
        packs = store.index.packs()
    print_table(
        ("small files", "written s", "then drained s", "packs", "MiB"),
        [(count, written, drained, len(packs), sum(info.bytes for info in packs.values()) / MIB)],
    )


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=500)
    parser.add_argument("--files", type=int, default=25_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    print(machine(), "\n")
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="encode-") as scratch:
        bench_pair(Path(scratch), options.mib * MIB, options.rounds)
        bench_small(Path(scratch), options.files)


if __name__ == "__main__":
    main()
