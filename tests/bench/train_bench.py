"""What encoding in the background costs a training loop with busy dataloaders.

    python -m tests.bench.train_bench [--mib 500] [--rounds 4] [--seconds 15]

A small network is trained on batches that worker processes compute, as many as there are cores: nothing is idle. A step
is timed while the encoder of a mount works on checkpoints that were just written there, and while the same mount has
nothing to do; both take turns. To reach: steps that are less than 5 % longer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from moonclipfs.fuse.control import ask
from tests.bench.common import MIB, SCRATCH, machine, print_table
from tests.bench.mounting import Place, load, writable

WIDTH, BATCH = 512, 256
TARGET = 0.05
_WARM_UP_STEPS = 20
_SETTLE_SECONDS = 1.0


class Batches(IterableDataset[torch.Tensor]):
    """Batches that take about as long to make as a step takes: a worker is never far ahead."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rng = np.random.default_rng()
        while True:
            yield torch.from_numpy(np.sort(rng.standard_normal((BATCH, WIDTH), np.float32), axis=1))


class Training:
    """A training loop that is stepped by whoever measures."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        layers: list[torch.nn.Module] = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        workers = len(os.sched_getaffinity(0))
        self._batches: Any = iter(DataLoader(Batches(), batch_size=None, num_workers=workers, prefetch_factor=2))

    def step(self) -> None:
        """One step of training."""
        batch = next(self._batches)
        loss = (self._model(batch) - batch).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def encoded(place: Place) -> int:
    """Bytes that the mount has encoded so far."""
    return int(ask(str(place.path), "status", None)["encoder"]["encoded_bytes"])


def timed_steps(training: Training, place: Place, seconds: float, *, busy: bool) -> tuple[float, float]:
    """Seconds a step, and MiB that were encoded a second meanwhile.

    With `busy`, that ends when the encoder has nothing left to do.
    """
    for _ in range(_WARM_UP_STEPS):
        training.step()
    before, steps, began = encoded(place), 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        for _ in range(_WARM_UP_STEPS):
            training.step()
        steps += _WARM_UP_STEPS
        if busy and not is_busy(place):
            break
    return spent / max(steps, 1), (encoded(place) - before) / MIB / spent


def is_busy(place: Place) -> bool:
    """Whether the mount is encoding something."""
    return bool(ask(str(place.path), "status", None)["encoder"]["encoding"])


def save(place: Place, number: int, mib: int) -> None:
    """Write a checkpoint, and wait until the encoder has begun with it."""
    rng = np.random.default_rng(number)
    for shard in range(mib // 32):
        rng.standard_normal((8, MIB), np.float32).tofile(place.path / f"checkpoint-{number}-{shard}.bin")
    while not is_busy(place):
        time.sleep(0.1)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="what is saved before each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15)
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    print(machine(), load(), "\n")
    rows: list[tuple[object, ...]] = []
    changes = []
    training = Training()
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="train-") as scratch, writable(Path(scratch)) as place:
        for number in range(options.rounds):
            save(place, number, options.mib)
            busy, rate = timed_steps(training, place, options.seconds, busy=True)
            ask(str(place.path), "flush", None)
            time.sleep(_SETTLE_SECONDS)
            idle, _ = timed_steps(training, place, options.seconds, busy=False)
            changes.append(busy / idle - 1)
            rows.append((f"round {number}", idle * 1000, busy * 1000, 100 * changes[-1], rate, load()))
    print_table(("", "idle ms", "encoding ms", "longer by %", "MiB/s", ""), rows)
    print_table(
        ["measured", "percent", "target"],
        [["a step is longer by, median", 100 * sorted(changes)[len(changes) // 2], f"< {100 * TARGET:.0f}"]],
    )


if __name__ == "__main__":
    main()
