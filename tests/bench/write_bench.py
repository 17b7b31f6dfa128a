"""Writing through a mount beside the local disk, and beside the ceiling of pyfuse3.

    python -m tests.bench.write_bench [--mib 500] [--rounds 5] [--files 25000] [--only saves creates small]

Ways take turns, and the best of all rounds counts, so that what else the machine does meets all of them. Processor
time of the program and of the server stands beside the time on the wall.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from moonclipfs.fuse.control import ask
from moonclipfs.store.store import Store
from tests.bench.common import MIB, SCRATCH, machine, print_table, timed
from tests.bench.mounting import Place, counted, load, trivial, writable

TENSORS = 64
TARGETS = {
    ("torch.save", "mount"): 1.5,
    ("save_file", "mount"): 1.5,
    ("save_file", "no flags"): 3.5,
}
"""How many times as long as on the local disk a save may take."""
TARGET_CREATES = 1 / 3
CREATES, CREATE_TURNS, CREATE_BYTES = 250, 24, 4096
DIRECTORY_FILES = 100
COUNTED_FILES = 5000
TARGET_PACKS, TARGET_SYNCS = 8, 100
"""For any number of files below what fills a pack."""

PARTS = ("saves", "small", "creates")
Save = Callable[[Path], object]


def state_of(mib: int) -> dict[str, torch.Tensor]:
    """Weights as training begins with them."""
    rows = mib * MIB // 4 // TENSORS // 1024
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{n:02d}.weight": torch.randn(rows, 1024, generator=generator) * 0.02 for n in range(TENSORS)}


def ways_to_save(state: dict[str, torch.Tensor], source: Path) -> dict[str, Save]:
    """What programs do. `source` is a plain file to copy."""
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    torch.save(state, source)
    return {
        "torch.save": partial(torch.save, state),
        "save_file": partial(save_file, state),
        "np.savez": lambda path: np.savez(path, **arrays),  # type: ignore[arg-type]
        "cp": lambda path: subprocess.run(["cp", source, path], check=True),
    }


def read_all(path: Path) -> int:
    """Read a file in pieces of 1 MiB into one buffer."""
    buffer, total = bytearray(MIB), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


def bench_saves(work: Path, mib: int, rounds: int) -> list[list[object]]:
    """Each way to save on the disk and on mounts, and reading what was just written."""
    figures: dict[tuple[str, str], list[tuple[float, float, float]]] = {}

    def note(way: str, place: Place, body: Callable[[], object]) -> None:
        server, own = place.cpu(), os.times()
        _, wall = timed(body)
        spent = sum(os.times()[:4]) - sum(own[:4])
        figures.setdefault((way, place.name), []).append((wall, spent, place.cpu() - server))

    (work / "plain").mkdir()
    ways = ways_to_save(state_of(mib), work / "source.pt")
    with ExitStack() as stack:
        places = [Place("disk", work / "plain")]
        places.append(stack.enter_context(writable(work)))
        places.append(stack.enter_context(writable(work, "no flags", flags=False)))
        for _ in range(rounds):
            for way, save in ways.items():
                for place in places:
                    path = place.path / "saved.npz"
                    note(way, place, partial(save, path))
                    if way == "save_file":
                        note("read after it", place, partial(read_all, path))
                    path.unlink()
    best = {key: tuple(map(min, zip(*all_, strict=True))) for key, all_ in figures.items()}
    print_table(
        ["way", "place", "best s", "program s", "server s", "x disk", "x disk, median"],
        [
            [way, place, *figure, figure[0] / best[way, "disk"][0], _median(figures, way, place)]
            for (way, place), figure in best.items()
        ],
    )
    print(load(), "\n")
    return [
        [f"{way} of {mib} MiB: {place} / disk", best[way, place][0] / best[way, "disk"][0], f"<= {target}"]
        for (way, place), target in TARGETS.items()
    ]


def _median(figures: dict[tuple[str, str], list[tuple[float, float, float]]], way: str, place: str) -> float:
    """Of the ratios of each round to the disk in the same round."""
    pairs = zip(figures[way, place], figures[way, "disk"], strict=True)
    return sorted(one[0] / disk[0] for one, disk in pairs)[len(figures[way, place]) // 2]


def create_files(directory: Path, count: int, prefix: str) -> None:
    """Small files, each opened, written and closed as a program does."""
    data = os.urandom(CREATE_BYTES)
    for number in range(count):
        file = os.open(directory / f"{prefix}{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(file, data)
        os.close(file)


def bench_creates(work: Path) -> list[list[object]]:
    """Creates a second, on a mount and on the trivial server, in short turns: what is encoded later is not in them."""
    figures: dict[str, list[tuple[float, float]]] = {}
    with trivial(work) as ceiling, writable(work, "creates") as ours:
        for number in range(CREATE_TURNS):
            for place in (ceiling, ours):
                before = place.cpu()
                _, seconds = timed(partial(create_files, place.path, CREATES, f"{number}-"))
                figures.setdefault(place.name, []).append((seconds, place.cpu() - before))
    best = {name: tuple(map(min, zip(*all_, strict=True))) for name, all_ in figures.items()}
    print_table(
        ["creates of 4 KiB", "a second", "server us each"],
        [[name, CREATES / wall, cpu / CREATES * 1e6] for name, (wall, cpu) in best.items()],
    )
    print(load(), "\n")
    wall, cpu = (best["trivial server"][at] / best["creates"][at] for at in (0, 1))
    return [
        ["creates a second: mount / trivial server", wall, f">= {TARGET_CREATES:.2f}"],
        ["the same by the processor time of the servers", cpu, ""],
    ]


def bench_small(work: Path, count: int) -> list[list[object]]:
    """Many small files, one by one: the packs that they cost, and for fewer of them the syncs."""
    with writable(work, "small") as place:
        _, written = timed(partial(_write_small, place.path, count))
        _, flushed = timed(partial(ask, str(place.path), "flush", None))
    with Store.open(work / "store-small", write=True) as store:
        store.index.sync()
        packs = store.index.packs()
    size = sum(info.bytes for info in packs.values()) / MIB
    print_table(
        ["small files", "written s", "flushed s", "packs", "MiB"], [[count, written, flushed, len(packs), size]]
    )
    print(load(), "\n")
    rows: list[list[object]] = [[f"packs for {count} files of 4 KiB", len(packs), f"<= {TARGET_PACKS}"]]
    with counted(work) as (place, syncs):
        before = syncs()
        _write_small(place.path, COUNTED_FILES)
        ask(str(place.path), "flush", None)
        after = syncs()
    if before is not None and after is not None:
        rows.append([f"syncs for {COUNTED_FILES} files, flushed", after - before, f"<= {TARGET_SYNCS}"])
    return rows


def _write_small(directory: Path, count: int) -> None:
    for number in range(count):
        if number % DIRECTORY_FILES == 0:
            (directory / f"d{number // DIRECTORY_FILES}").mkdir()
        (directory / f"d{number // DIRECTORY_FILES}" / f"{number}").write_bytes(os.urandom(CREATE_BYTES))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=25_000)
    parser.add_argument(
        "--only", nargs="+", choices=("saves", "creates", "small"), default=["saves", "creates", "small"]
    )
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    print(machine(), load(), "\n")
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="write-") as scratch:
        if "saves" in options.only:
            rows += bench_saves(Path(scratch), options.mib, options.rounds)
        if "small" in options.only:
            rows += bench_small(Path(scratch), options.files)
        if "creates" in options.only:
            rows += bench_creates(Path(scratch))
    print_table(["measured", "ratio", "target"], rows)


if __name__ == "__main__":
    main()
