"""A process that writes, syncs, renames and encodes is killed again and again: each file is as it was accepted last, or
as the next one who wrote it had it.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moonclipfs.errors import NotFoundError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.store.store import Store
from tests.layers.filekit import encode, make_file, overwrite, read_all, write_file

SIZES = [0, 50, 4096, 70_000, 300_000]


def noise(seed: int) -> bytes:
    """The bytes of a seed, of a size that follows from it."""
    rng = random.Random(seed)
    return rng.randbytes(rng.choice(SIZES))


def work(root: Path, first_seed: int) -> None:
    """Until killed: four threads write a file each, over and over, and one encodes; tells what begins and is done."""
    with Store.open(root / "store", write=True, index_path=root / "index.sqlite") as store:
        layer = Layer.open(store, "test")
        lock = threading.Lock()

        def say(what: str, name: str, seed: int) -> None:
            with lock:
                print(what, name, seed, flush=True)

        def write(name: str) -> None:
            rng, seed = random.Random(f"{name} {first_seed}"), first_seed
            while True:
                seed += 1
                say("begin", name, seed)
                replace(layer, name.encode(), noise(seed), rng)
                say("done", name, seed)

        for name in "abcd":
            threading.Thread(target=write, args=(name,), daemon=True).start()
        while True:
            encode(layer, *layer.take_jobs(time.monotonic() + 10, pressure=True))
            layer.sync_all()


def replace(layer: Layer, name: bytes, data: bytes, rng: random.Random) -> None:
    """Write a file as programs do: in place of the old content, or beside it and renamed."""
    if rng.random() < 0.5:
        temporary = name + b".tmp"
        file = layer.open_file(_file(layer, temporary), write=True)
        layer.truncate(file.inode, 0, 1)
        file.write(0, data, 2)
        layer.rename(layer.root, temporary, layer.root, name, 3)
        file.flush()
        file.close()
    else:
        overwrite(layer, _file(layer, name), data, sync=rng.random() < 0.3)


def _file(layer: Layer, name: bytes) -> Inode:
    try:
        return layer.lookup(layer.root, name)
    except NotFoundError:
        return make_file(layer, name)


_CHILD = """
import sys
from pathlib import Path
from tests.layers.test_layer_kill import work
work(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    Store.create(tmp_path / "store").close()
    rng = random.Random(1)
    known: dict[str, set[bytes | None]] = {name: {None} for name in "abcd"}
    seed = total = 0
    for _ in range(25):
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(tmp_path), str(seed)], stdout=subprocess.PIPE, text=True
        )
        time.sleep(0.8 + rng.random() * 1.5)
        process.kill()
        lines = process.communicate()[0].splitlines(keepends=True)
        for what, name, number in (line.split() for line in lines if line.endswith("\n")):
            seed = max(seed, int(number))
            data = noise(int(number))
            if what == "done":
                known[name] = {data}
                total += 1
            else:
                known[name].add(data)
                if None in known[name]:
                    known[name].update({b""})
        with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index.sqlite") as store:
            layer = Layer.open(store, "test")
            there = layer.names_in(layer.root)
            for name, allowed in known.items():
                found = read_all(layer, layer.resolve(name.encode())) if name.encode() in there else None
                assert found in allowed, f"{name}: {len(found or b'')} bytes, {[len(data or b'') for data in allowed]}"
                known[name] = {found}
            layer.close()
    assert total > 100


def test_the_worker_of_the_kill_test_runs(store: Store) -> None:
    layer = Layer.open(store, "test")
    write_file(layer, b"a", noise(1))
    for number in range(20):
        replace(layer, b"a", noise(number), random.Random(number))
        assert read_all(layer, layer.resolve(b"a")) == noise(number)
    layer.close()
