"""Whole stores, first checkpoint included, beside other ways to keep the same files.

    python -m tests.bench.store_bench [--size tiny|small|full] [--series NAME,...]
    python -m tests.bench.store_bench --files CHECKPOINT ...      your own, in the order in which they were saved

Prints for each series the ratio (bytes of the files / bytes stored) of every rival, and their times to write and to
read it all as multiples of copying and of reading plain files in the same run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.bench import series
from tests.bench.common import MIB, SCRATCH, machine, print_table
from tests.bench.rivals import Kept, installed
from tests.demo.gpt import quiet_torch

TARGETS = {"weights_late": 1.75, "family": 5.0}
"""Ratios for a whole store to reach."""


def family(plan: series.Plan) -> list[Path]:
    """One model as it lies about: the base, two fine-tunes of its head, a bf16 export, and two other files of it."""
    base = series.make(plan, ["weights"])[0][0]
    directory = plan.out / "family"
    names = ("0-base", "1-tuned-a", "2-tuned-b", "3-export-bf16", "4-longer-header")
    files = [directory / f"{name}.safetensors" for name in names] + [directory / "5-torch.pt"]
    if all(path.exists() for path in files):
        return files
    directory.mkdir(parents=True, exist_ok=True)
    state = load_file(base)
    shutil.copyfile(base, files[0])
    for path, seed in ((files[1], 1), (files[2], 2)):
        head = state["head.weight"]
        change = torch.randn(head.shape, generator=torch.Generator().manual_seed(seed))
        save_file({**state, "head.weight": head + change * head.std() * 0.01}, path)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, files[3])
    save_file(state, files[4], metadata={"format": "pt", "note": "x" * 777})
    torch.save(state, files[5])
    return files


def run(files: Sequence[Path]) -> dict[str, Kept]:
    """Keep the files in every way there is, one after the other, each in a directory that is gone afterwards.

    A rival that fails, or gives back other bytes, has no figure; what it said is printed.
    """
    kept = {}
    for name, keep in installed().items():
        with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="store-") as scratch:
            try:
                result = keep(files, Path(scratch))
            except Exception as error:
                if name == "moonclipfs":
                    raise
                print(f"  {name} fails: {type(error).__name__}: {error}", flush=True)
                continue
        if result is not None:
            kept[name] = result
    return kept


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one series: its files' lengths in order, and how each rival kept them."""

    name: str
    lengths: list[int]
    kept: dict[str, Kept]

    @property
    def ratios(self) -> dict[str, float]:
        """Bytes of the files per byte stored."""
        return {rival: sum(self.lengths) / kept.stored for rival, kept in self.kept.items()}


def report(results: Sequence[Result]) -> None:
    """Print one table for ratios and one for times."""
    rivals = [name for name in installed() if name != "plain files"]
    ratios, times = [], []
    for result in results:
        ours, first = result.kept["moonclipfs"], result.lengths[0]
        later = (sum(result.lengths) - first) / max(1, ours.stored - ours.first)
        row = [result.ratios.get(rival, "-") for rival in rivals]
        size = f"{sum(result.lengths) / MIB:.0f}"
        ratios.append([result.name, size, *row, first / ours.first, later, TARGETS.get(result.name, "-")])
        plain = result.kept["plain files"]
        times.append([result.name, *(_times(result.kept.get(rival), plain) for rival in rivals)])
    print(
        "\nRatio: bytes of the files / bytes stored, all files together; of moonclipfs also for the first and the rest"
    )
    print_table(["series", "MiB", *rivals, "first", "rest", "target"], ratios)
    print("\nTime to write and to read all of it, as multiples of copying and of reading plain files")
    print_table(["series", *rivals], times)


def _times(kept: Kept | None, plain: Kept) -> str:
    if kept is None:
        return "-"
    return f"{kept.write_seconds / plain.write_seconds:.1f} {kept.read_seconds / plain.read_seconds:.1f}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=series.SIZES, default="small")
    parser.add_argument("--series", default=",".join([*series.SERIES, "family"]))
    parser.add_argument("--data", type=Path, help="where the series are, or are made")
    parser.add_argument("--files", type=Path, nargs="+", help="measure these files instead, as one series")
    arguments = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    quiet_torch()
    plan = series.Plan(arguments.data or SCRATCH / f"series-{arguments.size}", arguments.size)
    print(machine())
    results = []
    for name in ["files"] if arguments.files else arguments.series.split(","):
        files = arguments.files or (family(plan) if name == "family" else series.make(plan, [name])[0])
        print(f"{name}: {len(files)} files", flush=True)
        results.append(Result(name, [path.stat().st_size for path in files], run(files)))
    report(results)


if __name__ == "__main__":
    main()
