"""Small stores for tests: files of given bytes become snapshots, one pack each."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, BytesSource, Entry, EntryType, Version

ATTRIBUTES = Attributes(0o644)


def noise(seed: int, length: int = 20_000) -> bytes:
    """Bytes that do not compress: one object, stored in full."""
    return random.Random(seed).randbytes(length)


def publish(store: Store, path: str, files: Mapping[str, bytes], **metadata: object) -> Version:
    """Bind files of one directory to `path`."""
    with store.ingest() as ingest:
        entries = []
        for name, data in files.items():
            child, size, _ = ingest.put_file(BytesSource(data))
            entries.append(Entry(name.encode(), EntryType.FILE, ATTRIBUTES, size, child))
        return ingest.publish(path, ingest.put_directory(entries), metadata)


def contents(store: Store, spec: str) -> dict[str, bytes]:
    """The files of a snapshot, read whole."""
    version = store.resolve(spec)
    return {
        path.decode(): store.open_file(entry).read(0, entry.size)
        for path, entry in store.walk(version)
        if entry.type is EntryType.FILE
    }


def packs(store: Store) -> set[str]:
    """Names of the pack files that there are."""
    return {path.stem for path in (Path(store.path) / "packs").iterdir()}


def in_order(store: Store) -> None:
    """Date the packs in the order of their snapshots: those of one tick of the clock have none, and what is stored anew
    against what depends on it."""
    versions = sorted(store.names().all_versions(), key=lambda version: version.sequence)
    roots = [store.index.locate(version.root).pack for version in versions]
    for seconds, pack in enumerate(dict.fromkeys([*packs(store) - set(roots), *roots])):
        os.utime(store.path / "packs" / f"{pack}.pack", (seconds, seconds))


def series(count: int, elements: int = 20_000, *, seed: int = 0) -> list[bytes]:
    """Safetensors files of one fp32 tensor, each a small step after the one before: deltas pay."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(elements).astype(np.float32)
    files = []
    for _ in range(count):
        header = json.dumps({"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}).encode()
        files.append(len(header).to_bytes(8, "little") + header + values.tobytes())
        values = values * (1 + rng.standard_normal(elements).astype(np.float32) * np.float32(1e-5))
    return files
