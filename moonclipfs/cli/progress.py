"""Progress bars: on stderr, and only when that is a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm

from moonclipfs.cli.output import ratio
from moonclipfs.store.progress import Progress

T = TypeVar("T")
_STEP_SECONDS = 0.5
_BYTES = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}


@contextmanager
def _bar(title: str, **options: Any) -> Iterator[tqdm[Any]]:
    with tqdm(desc=title, disable=None, leave=False, dynamic_ncols=True, **options) as bar:
        yield bar


def _move(bar: tqdm[Any], done: int, total: int) -> None:
    if not bar.disable:
        bar.total = total
        bar.update(done - bar.n)


@contextmanager
def count_bar(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over things; yields what is to be told (done, total)."""
    with _bar(title, unit=f" {unit}") as bar:
        yield lambda done, total: _move(bar, done, total)


@contextmanager
def byte_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over bytes; yields what is to be told (done, total)."""
    with _bar(title, **_BYTES) as bar:
        yield lambda done, total: _move(bar, done, total)


@contextmanager
def left_bar(title: str) -> Iterator[Callable[[int], None]]:
    """A bar over bytes that are still to be done; yields what is to be told how many these are."""
    with byte_bar(title) as tell:
        total = 0

        def tell_left(left: int) -> None:
            nonlocal total
            total = max(total, left)
            tell(total - left, total)

        yield tell_left


@contextmanager
def file_bar(title: str, *, show_ratio: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A bar over the bytes of files, with the ratio so far; yields what is to be told each `Progress`."""
    with _bar(title, **_BYTES) as bar:

        def tell(progress: Progress) -> None:
            if show_ratio and progress.stored:
                bar.set_postfix_str(f"ratio {ratio(progress.done, progress.stored)}", refresh=False)
            _move(bar, progress.done, progress.total)

        yield tell


def with_left_bar(title: str, work: Callable[[], T], left: Callable[[], int]) -> T:
    """Do what may take long; on a terminal, show meanwhile how many bytes are `left`. Raises as `work`."""
    if not sys.stderr.isatty():
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with left_bar(title) as tell:
        while thread.is_alive():
            tell(left())
            thread.join(_STEP_SECONDS)
    if errors:
        raise errors[0]
    return results[0]
