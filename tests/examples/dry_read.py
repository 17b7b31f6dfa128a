"""A small mixture-of-experts model reads a text and learns from it: on trial, or for good.

    python -m tests.examples.dry_read MOUNT_OR_STORE run/model TEXT
    python -m tests.examples.dry_read MOUNT_OR_STORE run/model TEXT --commit run/model-2

The model lies in a snapshot and is paged from there. What it learns is written to an overlay, which is gone at the end
unless it is committed; the snapshot itself is never touched.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import moonclipfs
from tests.examples.moe import measure, open_model, read

SLOTS, RAM = 3, 4
"""Experts that compute at a time, and experts in RAM."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", metavar="MOUNT_OR_STORE")
    parser.add_argument("model", help="the snapshot that holds it")
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--commit", metavar="NAME", help="keep what was learned, as this snapshot")
    options = parser.parse_args(arguments)
    text = options.text.read_bytes()

    run = moonclipfs.dry_run(options.where, options.model, commit=options.commit or False)
    with run as place:
        model = open_model(place, SLOTS, RAM)
        before = measure(model, text)
        read(model, place, text, options.steps)
        print(f"loss {before:.3f} before, {measure(model, text):.3f} after reading {options.text.name}")
        report = model.mixture.experts.report()
        print(f"{report['swaps']} swaps, {report['reads']} experts read and {report['writebacks']} written in {place}")
        changed = [file["path"] for file in run.diff()["files"] if file["change"] != "unchanged"]
        print(f"{len(changed)} files changed")
    print(f"kept as {run.version}" if run.version else "nothing was kept")


if __name__ == "__main__":
    main()
