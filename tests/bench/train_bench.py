"""What encoding in the background costs a training loop with busy dataloaders.

    python -m tests.bench.train_bench [--mib 1024] [--turns 60]

A small network is trained on batches that worker processes compute, as many as there are cores: nothing is idle. Steps
are timed while the encoder of a mount works on checkpoints that were just written there, and while it is stopped by a
signal. Both take turns, of a second or so, so that what else the machine does meets both. To reach: steps that are less
than 5 % longer.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
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
from tests.bench.mounting import Place, cpu_seconds, load, writable

WIDTH, BATCH = 512, 256
TARGET = 0.05
_WARM_UP_STEPS, _STEPS = 4, 40


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


def is_busy(place: Place) -> bool:
    """Whether the mount is encoding something."""
    return bool(ask(str(place.path), "status", None)["encoder"]["encoding"])


def encoder_of(place: Place) -> int:
    """The process that encodes for a mount."""
    return int(ask(str(place.path), "status", None)["encoder"]["pid"])


def seconds_a_turn(training: Training) -> float:
    """How long some steps take, after some that are not timed."""
    for _ in range(_WARM_UP_STEPS):
        training.step()
    began = time.perf_counter()
    for _ in range(_STEPS):
        training.step()
    return time.perf_counter() - began


def bench_turns(training: Training, place: Place, mib: int, turns: int) -> list[tuple[float, float, float]]:
    """Of each turn: seconds with the encoder stopped, seconds while it works, and its processor time in these."""
    found: list[tuple[float, float, float]] = []
    number = 0
    while len(found) < turns:
        if not is_busy(place):
            save(place, number, mib)
            number += 1
        pid = encoder_of(place)
        taken: dict[bool, float] = {}
        spent = 0.0
        for stopped in (True, False) if len(found) % 2 else (False, True):
            before = cpu_seconds(pid)
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            try:
                taken[stopped] = seconds_a_turn(training)
            finally:
                os.kill(pid, signal.SIGCONT)
            spent += 0.0 if stopped else cpu_seconds(pid) - before
        if is_busy(place):  # else it ended in between
            found.append((taken[True], taken[False], spent))
    return found


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
    parser.add_argument("--mib", type=int, default=1024, help="what is saved whenever nothing is left to encode")
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    print(machine(), load(), "\n")
    training = Training()
    with tempfile.TemporaryDirectory(dir=SCRATCH, prefix="train-") as scratch, writable(Path(scratch)) as place:
        turns = bench_turns(training, place, options.mib, options.turns)
    alone, beside, spent = (sum(column) for column in zip(*turns, strict=True))
    longer = [100 * (one / other - 1) for other, one, _ in turns]
    print_table(
        ("turns", "ms a step, encoder stopped", "while it works", "cores that it got"),
        [[len(turns), *(1000 * each / len(turns) / _STEPS for each in (alone, beside)), spent / beside]],
    )
    print(load(), "\n")
    print_table(
        ["measured", "percent", "target"],
        [
            ["steps are longer by, all turns together", 100 * (beside / alone - 1), f"< {100 * TARGET:.0f}"],
            ["median of the turns", statistics.median(longer), ""],
        ],
    )


if __name__ == "__main__":
    main()
