"""What the last K checkpoints of a long training take, beside the same K in a fresh store.

    python -m tests.bench.retention_bench [--saves 200] [--keep 3] [--elements 30000]

An Adam run in fp32 with a bf16 copy of its weights saves again and again and removes all but its last K checkpoints.
What was removed is kept until the disk is needed, which is after every save, every 20, or only once at the end; then
it is forgotten, and gc runs as on a full disk. To reach: 1.3 times the fresh store, each time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, BytesSource, Entry, EntryType
from tests.bench.common import MIB, SCRATCH, machine, print_table, timed

_TO_REACH = 1.3
_TENSORS = 4
Files = Mapping[str, bytes]


def training(elements: int, rate: float) -> Iterator[Files]:
    """The files of one checkpoint after another: weights in bf16, and masters and moments in fp32."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((_TENSORS, elements), np.float32) * np.float32(0.02)
    first, second = np.zeros_like(weights), np.full_like(weights, 1e-6)
    while True:
        narrow = (weights.view(np.uint32) >> 16).astype(np.uint16)
        state = {"weight": weights, "exp_avg": first, "exp_avg_sq": second}
        yield {
            "model.safetensors": safetensors({f"layer{n}": narrow[n] for n in range(_TENSORS)}, "BF16"),
            "optimizer.safetensors": safetensors(
                {f"layer{n}.{key}": values[n] for n in range(_TENSORS) for key, values in state.items()}, "F32"
            ),
        }
        gradient = rng.standard_normal(weights.shape, np.float32) * np.float32(1e-3)
        first = np.float32(0.9) * first + np.float32(0.1) * gradient
        second = np.float32(0.999) * second + np.float32(0.001) * gradient * gradient
        weights = weights - np.float32(rate) * first / (np.sqrt(second) + np.float32(1e-8))


def safetensors(tensors: Mapping[str, NDArray[np.generic]], dtype: str) -> bytes:
    """A file of tensors of one dimension."""
    at, header, data = 0, {}, b""
    for name, values in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(values)], "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
        data += values.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def publish(store: Store, name: str, files: Files, before: str | None) -> None:
    """Bind files to a name, each stored beside the one of its name in the snapshot `before`."""
    known = {} if before is None else {path.decode(): entry for path, entry in store.walk(store.resolve(before))}
    with store.ingest() as ingest:
        entries = []
        for path, data in files.items():
            previous = store.open_file(known[path]) if path in known else None
            recipe, size, _ = ingest.put_file(BytesSource(data), previous)
            entries.append(Entry(path.encode(), EntryType.FILE, Attributes(0o644), size, recipe))
        ingest.publish(name, ingest.put_directory(entries), {})


def pack_bytes(store: Store) -> int:
    """What all packs take."""
    return sum(path.stat().st_size for path in (store.path / "packs").iterdir())


def fresh(directory: Path, kept: Mapping[str, Files]) -> int:
    """What these checkpoints take in a store of their own."""
    Store.create(directory).close()
    before = None
    with Store.open(directory, write=True, index_path=directory / "index.sqlite") as store:
        for name, files in kept.items():
            publish(store, name, files, before)
            before = name
        size = pack_bytes(store)
    shutil.rmtree(directory)
    return size


def reclaim(store: Store) -> None:
    """What a mount does when the disk is needed, and all that was removed has to go."""
    removed = [(one.path, one.number) for one in store.names().all_versions() if one.removed]
    if removed:
        store.log.forget(removed)
    collect(store, pressed=True, wait_seconds=0.0)


def bench(scratch: Path, rate: float, every: int, options: argparse.Namespace) -> tuple[float, int, int, float]:
    """The worst ratio to a fresh store, the last size, its plain bytes, and the seconds that reclaiming took."""
    Store.create(scratch / "store").close()
    kept: dict[str, Files] = {}
    worst, seconds, before = 0.0, 0.0, None
    with Store.open(scratch / "store", write=True, index_path=scratch / "index.sqlite") as store:
        for number, files in zip(range(options.saves), training(options.elements, rate), strict=False):
            name = f"run/checkpoint-{number}"
            publish(store, name, files, before)
            kept[name], before = files, name
            if len(kept) > options.keep:
                oldest = next(iter(kept))
                del kept[oldest]
                store.log.unbind([oldest])
            if number >= options.keep and ((number + 1) % every == 0 or number + 1 == options.saves):
                seconds += timed(lambda: reclaim(store))[1]
                if every > 1 or number % 10 == 9:
                    worst = max(worst, pack_bytes(store) / fresh(scratch / "fresh", kept))
        assert verify(store).ok
        size = pack_bytes(store)
    shutil.rmtree(scratch / "store")
    (scratch / "index.sqlite").unlink()
    return worst, size, sum(len(data) for files in kept.values() for data in files.values()), seconds


def main() -> None:
    """Run all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--elements", type=int, default=30_000)
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    print(machine(), "\n")
    rows, reached = [], True
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="retention-") as scratch:
        for rate in (1e-6, 1e-4, 1e-2):
            for every in (1, 20, options.saves):
                worst, size, plain, seconds = bench(Path(scratch), rate, every, options)
                reached &= worst <= _TO_REACH
                rows.append((f"rate {rate:g}", every, worst, size / MIB, plain / MIB, seconds))
    print_table(("", "needed every", "to fresh", "MiB", "plain MiB", "reclaiming s"), rows)
    print(f"to reach: {_TO_REACH} at most: {'reached' if reached else 'not reached'}")


if __name__ == "__main__":
    main()
