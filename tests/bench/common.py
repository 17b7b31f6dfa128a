"""What the benchmarks share: series of checkpoints to run on, a clock, and tables of plain text."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy

T = TypeVar("T")

MIB = 1 << 20
MEMCPY_BYTES = 64 * MIB
SCRATCH = Path(__file__).resolve().parents[2] / "build" / "bench"
"""Series and stores of the benchmarks; `make clean` removes it."""


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of a call, and how many seconds it took on the wall."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def memcpy_rate(repeats: int = 5) -> float:
    """Bytes a second at which one core copies a buffer of 64 MiB: the yardstick that speeds are a share of."""
    source = numpy.full(MEMCPY_BYTES, 7, dtype=numpy.uint8)
    target = numpy.zeros_like(source)
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        numpy.copyto(target, source)
        best = min(best, time.thread_time() - started)
    return MEMCPY_BYTES / best


def machine() -> str:
    """One line on where the figures were taken: they mean little without it."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Linux {platform.release()}, Python {platform.python_version()}"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in columns: the first to the left, numbers to the right, floats with two decimals."""

    def text(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    cells = [[text(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(headers), *cells]) for column in range(len(headers))]
    for row in [list(headers), ["-" * width for width in widths], *cells]:
        first, *rest = (f"{value:<{widths[0]}}" if not at else f"{value:>{widths[at]}}" for at, value in enumerate(row))
        print("  ".join([first, *rest]).rstrip())
