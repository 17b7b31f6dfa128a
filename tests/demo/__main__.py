"""`make demo`: the main job from end to end, on checkpoints of a real training run.

Trains a small GPT on the Python standard library, saves it as people do, puts every checkpoint into a store, mounts
the store, loads each file from there in every usual way, and compares it all with the originals bit for bit.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import moonclipfs as moonclipfs_api
from tests.bench.common import MIB, print_table, timed
from tests.demo.gpt import quiet_torch
from tests.demo.loading import Count, Place, compare, in_directory, in_python, in_snapshots
from tests.demo.session import CommandError, is_mounted, moonclipfs, moonclipfs_json, mounted, stop_on_signals
from tests.demo.training import FULL, QUICK, Saved, Scale, checkpoints

ROOT = Path(__file__).resolve().parents[2]
MARK = ".moonclipfs-demo"
"""In the directory of a demo, which the next one may therefore remove."""


def empty_directory(work: Path) -> Path:
    """Make the directory anew; only an earlier demo's is removed."""
    if work.exists() and any(work.iterdir()):
        if not (work / MARK).exists():
            raise SystemExit(f"{work} is in use for something else; give another --directory")
        if is_mounted(work / "mount"):
            raise SystemExit(f"another demo has {work / 'mount'} mounted; end it, or `moonclipfs umount` that first")
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    (work / MARK).touch()
    return work


def train_and_save(work: Path, scale: Scale) -> list[Saved]:
    """Run the training; say how far it is."""
    print("Training a small GPT on the sources of Python's standard library (about a minute) ...", flush=True)
    saved, started = [], time.monotonic()
    for checkpoint in checkpoints(work / "checkpoints", scale):
        saved.append(checkpoint)
        print(f"  {time.monotonic() - started:4.0f} s  {checkpoint.name}  loss {checkpoint.loss:.2f}", flush=True)
    return saved


def store_all(store: Path, saved: Sequence[Saved]) -> None:
    """Add one checkpoint after the other, and print what each took."""
    print("\nPutting every checkpoint into a store ...")
    moonclipfs("init", store)
    rows, total = [], [0.0] * 6
    for checkpoint in saved:
        report, seconds = timed(partial(moonclipfs_json, "add", store, checkpoint.directory, "--as", checkpoint.name))
        figures = [float(report[key]) / MIB for key in ("raw", "stored", "shared", "delta", "full")]
        total = [sum(pair) for pair in zip(total, [*figures, checkpoint.save_seconds], strict=True)]
        rows.append(_row(checkpoint.name, figures, checkpoint.save_seconds, seconds))
    print()
    headers = ["snapshot", "files MiB", "stored", "ratio", "shared", "as delta", "in full", "save s", "add s"]
    rows.append(_row("all", total[:5], total[5], sum(row[-1] for row in rows)))
    print_table(headers, rows)
    print("shared, as delta, in full: MiB of the files that were there already, were kept as a difference, or whole")


def _row(name: str, figures: Sequence[float], save_seconds: float, add_seconds: float) -> list[object]:
    size, stored, shared, delta, full = (round(value, 1) for value in figures)
    return [name, size, stored, round(figures[0] / figures[1], 2), shared, delta, full, save_seconds, add_seconds]


@dataclass(slots=True)
class Times:
    """Of one way to load: files loaded in the last pass, and seconds spent in all."""

    files: int = 0
    plain: float = 0.0
    first: float = 0.0
    again: float = 0.0


def passes(place: Place) -> Iterator[tuple[str, str, bool]]:
    """Suffix and name of each way to load, in turn, and whether it is the first to read those files.

    One way for each kind of file comes first; then all of them, when the bytes are at hand.
    """
    for suffix, loaders in place.loaders.items():
        yield suffix, next(iter(loaders)), True
    for suffix, loaders in place.loaders.items():
        for name in loaders:
            yield suffix, name, False


def load_all(files: Sequence[str], plain: Place, stored: Place, where: str) -> Count:
    """Load every file in every way from both places, compare, and print the times."""
    count = Count()
    times = {name: Times() for loaders in plain.loaders.values() for name in loaders}
    for suffix, name, is_first in passes(plain):
        for file in files:
            if not file.endswith(suffix):
                continue
            expected, plain_seconds = timed(partial(plain.loaders[suffix][name], file))
            got, stored_seconds = timed(partial(stored.loaders[suffix][name], file))
            compare(expected, got, file, count)
            if is_first:
                times[name].first += stored_seconds
            else:
                times[name].files += 1
                times[name].plain += plain_seconds
                times[name].again += stored_seconds
    print_table(
        ["loaded with", "files", "plain s", f"first, {where} s", "again s"],
        [[name, row.files, row.plain, row.first or "-", row.again] for name, row in times.items()],
    )
    return count


def check_hashes(files: Sequence[str], plain: Place, stored: Place, count: Count) -> None:
    """Compare every file by its SHA-256."""
    for file in files:
        if plain.digest(file) != stored.digest(file):
            count.different.append(f"{file}: another SHA-256")


def read_back(work: Path, store: Path, saved: Sequence[Saved]) -> Count:
    """Read from a mount, or through Python where nothing can be mounted, and compare with the originals."""
    originals = work / "checkpoints"
    files = [str(path.relative_to(originals)) for path in sorted(originals.rglob("*")) if path.is_file()]
    print("\nMounting the store, and loading every file from it ...")
    with mounted(store, work / "mount") as through_mount, ExitStack() as opened:
        if through_mount:
            plain, stored, where = in_directory(originals), in_directory(work / "mount"), "mount"
        else:
            print("No FUSE here, so the files are read through moonclipfs.open instead.")
            snapshots = {at.name: opened.enter_context(moonclipfs_api.open(store, at.name)) for at in saved}
            plain, stored, where = in_python(originals), in_snapshots(snapshots), "store"
        print()
        count = load_all(files, plain, stored, where)
        check_hashes(files, plain, stored, count)
    print(
        f"\nCompared {count.tensors} tensors and {count.values} other values bit for bit, {len(files)} files by hash:"
    )
    print("All equal." if not count.different else "DIFFERENT: " + ", ".join(count.different[:10]))
    return count


def what_next(store: Path, saved: Sequence[Saved]) -> None:
    """Commands to try on the store that stays."""
    at = store.relative_to(Path.cwd()) if store.is_relative_to(Path.cwd()) else store
    first, last = saved[0].name, saved[-1].name
    print(f"""
The store stays in {at}. Try next, with .venv/bin in your PATH:
  moonclipfs ls {at}
  moonclipfs show {at}:{last}
  moonclipfs diff {at}:{first} {at}:{last}
  moonclipfs export {at}:{last} /tmp/exported
  mkdir -p /tmp/mnt && moonclipfs mount {at} /tmp/mnt      # and: moonclipfs umount /tmp/mnt
With checkpoints of your own:
  moonclipfs init STORE && moonclipfs add STORE output/checkpoint-500 --as run1/""")


def main() -> int:
    """Run the demo; exit code 1 when anything differs, 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "demo", help="made anew; holds it all")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few steps")
    arguments = parser.parse_args()
    work = empty_directory(arguments.directory.resolve())
    stop_on_signals()
    quiet_torch()
    try:
        saved = train_and_save(work, QUICK if arguments.quick else FULL)
        store_all(work / "store", saved)
        count = read_back(work, work / "store", saved)
        what_next(work / "store", saved)
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left mounted")
        return 130
    except CommandError as error:
        print(error)
        return 1
    finally:
        shutil.rmtree(work / "checkpoints", ignore_errors=True)
    return 1 if count.different else 0


if __name__ == "__main__":
    raise SystemExit(main())
