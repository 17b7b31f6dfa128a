"""Overlays and paged experts beside a plain directory on the local disk.

    python -m tests.bench.overlay_bench [--mib 25] [--experts 16] [--dry-mib 4] [--dry-experts 1000] [--rounds 5]
                                        [--files 512 25000] [--only paging writing listing dry]

Ways take turns in each round, and the median of the ratios of all rounds counts, so that what else the machine does
meets all of them; the load stands beside. Cold means that neither a cache of ours nor one of the kernel has anything
of it. It is to be run on an idle machine; `--mib 4 --experts 8 --dry-mib 1 --dry-experts 100 --rounds 2` shows in a
minute that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from moonclipfs.fuse.control import ask
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.add import add
from moonclipfs.store.store import Store
from moonclipfs.types import Kind
from tests.bench.common import MIB, SCRATCH, machine, print_table, timed
from tests.bench.mounting import Place, load, served

PARTS = ("paging", "writing", "listing", "dry")
TARGET_COLD, TARGET_AGAIN_MOUNT, TARGET_AGAIN_LAYER = 0.5, 0.4, 0.8
TARGET_WRITE, TARGET_WRITE_PLAIN_INIT = 1.5, 3.5
TARGET_LISTING = 10.0
TARGET_SPACE, TARGET_TIME = 0.06, 0.1
FLIGHTS = 8
CHANGED_SHARE = 0.05
"""Of the experts of a dry run: 50 of 1,000."""

Rows = list[list[object]]


class Figures:
    """Seconds of each way, one a round: on the wall, and of processor time of this program and of a server."""

    def __init__(self) -> None:
        self._rounds: dict[str, list[tuple[float, float, float]]] = {}

    def note(self, way: str, work: Callable[[], object], place: Place | None = None) -> float:
        """Time something, once a round; `place` is whose server works for it. Returns the seconds on the wall."""
        server, own = 0.0 if place is None else place.cpu(), own_cpu()
        seconds = timed(work)[1]
        spent = own_cpu() - own
        self._rounds.setdefault(way, []).append((seconds, spent, 0.0 if place is None else place.cpu() - server))
        return seconds

    def ratio(self, way: str, beside: str) -> float:
        """How many times as long a way takes as another: the median over the rounds."""
        pairs = zip(self._rounds[way], self._rounds[beside], strict=True)
        return median(one[0] / other[0] for one, other in pairs)

    def cores(self, way: str) -> float:
        """How many processors a way keeps busy."""
        return median((own + server) / wall for wall, own, server in self._rounds[way])

    def show(self, title: str, size: int = 0) -> None:
        """Print them; with the bytes that each moves, as speed too."""
        rows = []
        for way, all_ in self._rounds.items():
            wall, own, server = (median(values) * 1000 for values in zip(*all_, strict=True))
            best = min(all_)[0] * 1000
            rows.append([way, best, wall, own, server, *([size / wall / 1e6] if size else [])])
        print_table([title, "best ms", "median ms", "program ms", "server ms", *(["GB/s"] if size else [])], rows)
        print(load(), "\n")


def own_cpu() -> float:
    """Processor time of this program and of those that it has run."""
    return time.process_time() + sum(os.times()[2:4])


def make_experts(directory: Path, count: int, mib: int) -> None:
    """Files of one expert each, three matrices of fp32 as training begins with them."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(mib * MIB // 4, dtype=np.float32) * np.float32(0.02)
    for number in range(count):
        # Drawn once and shuffled by shifting: no two experts have a block in common.
        write_expert(directory / f"e{number:05d}.safetensors", np.roll(values, number * 7919) * np.float32(1 + number))


def fill(store: Path, experts: Path) -> None:
    """Make a store with two snapshots: `experts`, and `warm` with one file, to be read before anything is timed."""
    warm = store.with_name("warm")
    warm.mkdir(exist_ok=True)
    (warm / "file").write_bytes(os.urandom(8192))
    with Store.create(store) as opened:
        add(opened, [experts], name="experts")
        add(opened, [warm], name="warm")


def write_expert(path: Path | LayerPath, values: np.ndarray) -> None:
    """As savers do: beside it, then renamed."""
    third = len(values) // 3
    parts = {"down": values[:third], "gate": values[third : 2 * third], "up": values[2 * third :]}
    header, at = {}, 0
    for name, part in parts.items():
        header[name] = {"dtype": "F32", "shape": [part.size], "data_offsets": [at, at + part.nbytes]}
        at += part.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(np.ascontiguousarray(values).view(np.uint8).data)
    beside.replace(path)  # type: ignore[arg-type]  # both are of one kind


def read_expert(path: Path | LayerPath, buffer: bytearray) -> int:
    """Read a file into memory that is there."""
    with path.open("rb", buffering=0) as file:
        view, at = memoryview(buffer), 0
        while at < len(buffer) and (count := file.readinto(view[at:])):  # type: ignore[union-attr]
            at += count
    return at


def update(path: Path | LayerPath, factors: np.ndarray) -> None:
    """What a step of training does to an expert: each weight changes a little. `factors` are drawn before: a trainer's
    own work is no part of what paging costs."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    values = np.frombuffer(raw, np.float32, offset=start)
    write_expert(path, values * factors)


def forget_pages(*roots: Path) -> None:
    """Let the kernel forget what it has of files; what is not on the disk yet is brought there first."""
    for root in roots:
        for path in [root] if root.is_file() else [one for one in root.rglob("*") if one.is_file()]:
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def taken(root: Path) -> int:
    """Bytes that a directory takes on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in (root, *root.rglob("*")))


@contextmanager
def overlaid(store: Path, mount: Path, *, flags: bool = True) -> Iterator[tuple[Path, Place]]:
    """An overlay over the snapshot `experts` in a mount that was just made; discarded at the end."""
    with served(store, mount, flags=flags) as place:
        ask(str(mount), "overlay_create", None, name="bench", base="experts")
        (mount / "warm/file").read_bytes()  # the server has opened what it needs for any file
        yield mount / "@overlays/bench", place
        ask(str(mount), "overlay_discard", None, name="bench")


@contextmanager
def without_mount(store: Path) -> Iterator[LayerPath]:
    """The same without a mount, in a store that was just opened."""
    with Store.open(store, write=True) as opened, Overlays(opened) as overlays:
        overlays.create("bench", "experts")
        opened.objects.load(opened.resolve("warm").root, Kind.DIRECTORY)
        yield LayerPath(overlays.get("bench"))
        overlays.discard("bench")


# Parts


def bench_paging(work: Path, rounds: int) -> Rows:
    """Experts into memory: cold, in a server that has been at work, and again."""
    plain, store, mount = work / "plain", work / "store", work / "mnt"
    names = sorted(path.name for path in plain.iterdir())
    size = (plain / names[0]).stat().st_size
    buffer, one = bytearray(size), Figures()
    for number in range(rounds):
        name, other = names[number % len(names)], names[(number + 1) % len(names)]
        forget_pages(plain, store)
        one.note("disk, cold", partial(read_expert, plain / name, buffer))
        one.note("disk, page cache", partial(read_expert, plain / name, buffer))
        with overlaid(store, mount) as (root, place):
            read_expert(root / other, buffer)
            forget_pages(store / "packs")
            one.note("mount, cold", partial(read_expert, root / name, buffer), place)
            one.note("mount, page cache", partial(read_expert, root / name, buffer), place)
            forget_pages(root / name)
            one.note("mount, decoded cache", partial(read_expert, root / name, buffer), place)
        with without_mount(store) as path:
            read_expert(path / other, buffer)
            forget_pages(store / "packs")
            one.note("layer API, cold", partial(read_expert, path / name, buffer))
            one.note("layer API, decoded cache", partial(read_expert, path / name, buffer))
    one.show(f"one expert of {size / MIB:.0f} MiB", size)
    rows: Rows = [
        ["cold page-in, speed: mount / disk", one.ratio("disk, cold", "mount, cold"), f">= {TARGET_COLD}"],
        ["cold page-in, speed: layer API / disk", one.ratio("disk, cold", "layer API, cold"), f">= {TARGET_COLD}"],
    ]
    for way, target in (
        ("mount, page cache", TARGET_AGAIN_MOUNT),
        ("mount, decoded cache", TARGET_AGAIN_MOUNT),
        ("layer API, decoded cache", TARGET_AGAIN_LAYER),
    ):
        rows.append([f"again, speed: {way} / plain page cache", one.ratio("disk, page cache", way), f">= {target}"])
    return rows


def bench_flights(work: Path, rounds: int) -> Rows:
    """Several cold page-ins at once, in an overlay: the cores that they keep busy, and what that gains."""
    store, mount, names = work / "store", work / "mnt", sorted(path.name for path in (work / "plain").iterdir())
    names = names[:FLIGHTS]
    sizes = [(work / "plain" / name).stat().st_size for name in names]
    figures, ways = Figures(), {1: "1 at a time", FLIGHTS: f"{FLIGHTS} at a time"}
    for _ in range(rounds):
        for threads, way in ways.items():
            with overlaid(store, mount) as (root, place), ThreadPoolExecutor(threads) as pool:
                forget_pages(store / "packs")
                paths, buffers = [root / name for name in names], [bytearray(size) for size in sizes]
                figures.note(way, partial(read_all, pool, paths, buffers), place)
    figures.show(f"{len(names)} cold experts", sum(sizes))
    cores = len(os.sched_getaffinity(0))
    return [
        [f"{FLIGHTS} page-ins in flight, speed: / one by one", figures.ratio(*ways.values()), ""],
        [f"cores busy meanwhile, of {cores}", figures.cores(ways[FLIGHTS]), ""],
    ]


def read_all(pool: ThreadPoolExecutor, paths: Sequence[Path], buffers: Sequence[bytearray]) -> None:
    """Read files side by side."""
    assert sum(pool.map(read_expert, paths, buffers)) == sum(map(len, buffers))


def bench_writing(work: Path, rounds: int) -> Rows:
    """Write-back of an expert: a temporary, renamed over the old one. Nothing waits for the disk."""
    plain, store = work / "plain", work / "store"
    names = sorted(path.name for path in plain.iterdir())
    raw = (plain / names[0]).read_bytes()
    values = np.frombuffer(raw, np.float32, offset=8 + int.from_bytes(raw[:8], "little"))
    figures = Figures()
    for number in range(rounds):
        name, changed = names[number % len(names)], values * np.float32(1.0001 + number)
        figures.note("disk", partial(write_expert, plain / name, changed))
        for way, flags in (("mount", True), ("mount, plain INIT", False)):
            with overlaid(store, work / "mnt", flags=flags) as (root, place):
                read_expert(root / name, bytearray(len(raw)))
                figures.note(way, partial(write_expert, root / name, changed), place)
        with without_mount(store) as path:
            figures.note("layer API", partial(write_expert, path / name, changed))
    figures.show("write-back of an expert", len(raw))
    targets = {"mount": TARGET_WRITE, "mount, plain INIT": TARGET_WRITE_PLAIN_INIT, "layer API": TARGET_WRITE}
    return [[f"write-back, time: {way} / disk", figures.ratio(way, "disk"), f"<= {at}"] for way, at in targets.items()]


def bench_listing(work: Path, counts: Sequence[int], rounds: int) -> Rows:
    """Names alone, as a pager asks for them, and with stat: each mount is new, so the kernel knows nothing yet."""
    rows: Rows = []
    for count in counts:
        plain, store = work / f"plain-{count}", work / f"store-{count}"
        plain.mkdir()
        for number in range(count):
            (plain / f"e{number:05d}.safetensors").write_bytes(b"x" * (number % 50))
        fill(store, plain)
        figures = Figures()
        for _ in range(rounds):
            figures.note("names, disk", partial(os.listdir, plain))
            figures.note("ls -l, disk", partial(list_long, plain))
            for what, work_on in (("names", os.listdir), ("ls -l", list_long)):
                with overlaid(store, work / "mnt") as (root, place):
                    figures.note(f"{what}, mount", partial(work_on, root), place)
            with without_mount(store) as path:
                figures.note("names, layer API", partial(names_of, path))
        figures.show(f"{count} experts")
        ratio = figures.ratio("ls -l, mount", "ls -l, disk")
        rows.append([f"ls -l of {count} experts, time: mount / disk", ratio, f"<= {TARGET_LISTING:.0f}"])
    return rows


def names_of(directory: LayerPath) -> int:
    """Count a directory's entries."""
    return sum(1 for _ in directory.iterdir())


def list_long(directory: Path) -> None:
    """As people list: names, and what stat says of each."""
    subprocess.run(["ls", "-l", directory], stdout=subprocess.DEVNULL, check=True)


def bench_dry(work: Path, count: int, mib: int, rounds: int) -> Rows:
    """A dry run that changes some of many experts, beside copying them all; in a store that was mounted before."""
    plain, copy = work / "dry-plain", work / "dry-copy"
    make_experts(plain, count, mib)
    fill(work / "dry-store", plain)
    base, figures, space = taken(plain), Figures(), []
    some = [f"e{number:05d}.safetensors" for number in range(0, count, max(1, round(1 / CHANGED_SHARE)))]
    factors = 1 + np.float32(1e-4) * np.random.default_rng(1).standard_normal(mib * MIB // 4, dtype=np.float32)
    for _ in range(rounds):
        forget_pages(plain, work / "dry-store")
        figures.note("cp -r", partial(subprocess.run, ["cp", "-r", plain, copy], check=True))
        shutil.rmtree(copy)
        forget_pages(plain, work / "dry-store")
        with served(work / "dry-store", work / "mnt") as place:
            before = taken(work / "dry-store")

            def run(mounted: Path) -> None:
                ask(str(mounted), "overlay_create", None, name="dry", base="experts")
                for name in some:
                    update(mounted / "@overlays/dry" / name, factors)

            figures.note("dry run", partial(run, place.path), place)
            staged = taken(work / "dry-store") - before
            figures.note("and all of it encoded", partial(ask, str(place.path), "overlay_flush", None, name="dry"))
            space.append((staged / base, (taken(work / "dry-store") - before) / base))
            figures.note("discard", partial(ask, str(place.path), "overlay_discard", None, name="dry"))
    figures.show(f"{len(some)} of {count} experts of {mib} MiB")
    return [
        ["dry run, time: / cp -r", figures.ratio("dry run", "cp -r"), f"<= {TARGET_TIME}"],
        ["dry run, share of the base in space, written", max(one for one, _ in space), f"<= {TARGET_SPACE}"],
        ["the same, encoded", max(one for _, one in space), f"<= {TARGET_SPACE}"],
    ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=25, help="size of an expert that is paged")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--dry-mib", type=int, default=4, help="size of an expert of the dry run")
    parser.add_argument("--dry-experts", type=int, default=1000)
    parser.add_argument("--files", type=int, nargs="+", default=[512, 25_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    print(machine(), load(), "\n")
    rows: Rows = []
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="overlay-") as scratch:
        work = Path(scratch)
        make_experts(work / "plain", options.experts, options.mib)
        fill(work / "store", work / "plain")
        if "paging" in options.only:
            rows += bench_paging(work, options.rounds) + bench_flights(work, options.rounds)
        if "writing" in options.only:
            rows += bench_writing(work, options.rounds)
        if "listing" in options.only:
            rows += bench_listing(work, options.files, options.rounds)
        if "dry" in options.only:
            rows += bench_dry(work, options.dry_experts, options.dry_mib, options.rounds)
    print_table(["measured", "ratio", "target"], rows)


if __name__ == "__main__":
    main()
