"""Random reads, writes, truncations, maps and reopenings of one file, each compared with a plain bytearray.

    python -m tests.layers.fsx FILE [--seed N] [--steps N]

The file must not exist at the start. The same seed makes the same calls.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

PAGE = 4096
_HISTORY = 40


class Mismatch(AssertionError):
    """The file does not hold what was written; says the seed, the step, and the last calls."""


class FileExerciser:
    """Exercises one file of at most `size` bytes. `skip` names calls that are not made."""

    def __init__(self, path: Path, seed: int, *, size: int = 300_000, skip: Collection[str] = ()) -> None:
        self._path = path
        self._seed = seed
        self._size = size
        self._rng = random.Random(seed)
        self._step = 0
        self._model = bytearray()
        self._history: deque[str] = deque(maxlen=_HISTORY)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._direct = self._open_direct()
        unknown = set(skip) - set(_CALLS)
        assert not unknown, f"no such calls: {unknown}"
        self._calls = [call for name, call in _CALLS.items() if name not in skip]

    def _open_direct(self) -> int:
        """With O_DIRECT, -1 where a file system has none."""
        try:
            return os.open(self._path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            return -1

    def run(self, steps: int, *, compare_every: int = 50) -> None:
        """Make so many calls; compare the whole file at intervals and at the end. Raises Mismatch."""
        try:
            for step in range(1, steps + 1):
                self._step = step
                self._rng.choice(self._calls)(self)
                if os.fstat(self._fd).st_size != len(self._model):
                    self._fail(f"size {os.fstat(self._fd).st_size} instead of {len(self._model)}")
                if step % compare_every == 0:
                    self._same("all", 0, self._path.read_bytes(), len(self._model))
            self._same("all", 0, self._path.read_bytes(), len(self._model))
        finally:
            os.close(self._fd)
            if self._direct >= 0:
                os.close(self._direct)

    # Calls

    def read(self) -> None:
        offset, length = self._range()
        self._note("read", offset, length)
        self._same("read", offset, os.pread(self._fd, length, offset), length)

    def write(self) -> None:
        offset, length = self._range()
        self._note("write", offset, length)
        data = self._data(length)
        self._wrote(offset, data, os.pwrite(self._fd, data, offset))

    def append(self) -> None:
        data = self._data(self._rng.randrange(min(10_000, self._size - len(self._model) + 1)))
        self._note("append", len(self._model), len(data))
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            count = os.write(fd, data)
        finally:
            os.close(fd)
        self._wrote(len(self._model), data, count)

    def truncate(self) -> None:
        size = self._rng.choice((0, self._rng.randrange(self._size), self._rng.randrange(len(self._model) + 1)))
        self._note("truncate", size)
        if self._rng.random() < 0.5:
            os.ftruncate(self._fd, size)
        else:
            os.truncate(self._path, size)
        del self._model[size:]
        self._model.extend(bytes(size - len(self._model)))

    def map_read(self) -> None:
        if self._model:
            offset, length = self._range()
            self._note("map_read", offset, length)
            with mmap.mmap(self._fd, len(self._model), mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
                self._same("map_read", offset, mapped[offset : offset + length], length)

    def map_write(self) -> None:
        if self._model:
            offset, length = self._range()
            data = self._data(max(0, min(length, len(self._model) - offset)))
            self._note("map_write", offset, len(data))
            with mmap.mmap(self._fd, len(self._model), mmap.MAP_SHARED) as mapped:
                mapped[offset : offset + len(data)] = data
                if self._rng.random() < 0.5:
                    mapped.flush()
            self._model[offset : offset + len(data)] = data

    def direct_read(self) -> None:
        if self._direct >= 0:
            offset, length = self._pages()
            self._note("direct_read", offset, length)
            with mmap.mmap(-1, length) as buffer:
                count = os.preadv(self._direct, [buffer], offset)
                self._same("direct_read", offset, buffer[:count], length)

    def direct_write(self) -> None:
        if self._direct >= 0:
            offset, length = self._pages()
            self._note("direct_write", offset, length)
            data = self._data(length)
            with mmap.mmap(-1, length) as buffer:
                buffer[:] = data
                count = os.pwritev(self._direct, [buffer], offset)
            self._wrote(offset, data, count)

    def reopen(self) -> None:
        self._note("reopen")
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_RDWR)
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = self._open_direct()

    def sync(self) -> None:
        self._note("sync")
        self._rng.choice((os.fsync, os.fdatasync))(self._fd)

    # What they need

    def _range(self) -> tuple[int, int]:
        offset = self._rng.randrange(self._size)
        return offset, self._rng.randrange(min(self._rng.choice((100, 9000, 140_000)), self._size - offset + 1))

    def _pages(self) -> tuple[int, int]:
        page = self._rng.randrange(self._size // PAGE)
        return page * PAGE, self._rng.randint(1, min(16, self._size // PAGE - page)) * PAGE

    def _data(self, length: int) -> bytes:
        """Bytes of which no two calls write the same."""
        return (self._rng.randbytes(61) * (length // 61 + 1))[:length]

    def _wrote(self, offset: int, data: bytes, count: int) -> None:
        if count != len(data):
            self._fail(f"{count} bytes written of {len(data)}")
        if data:
            self._model.extend(bytes(max(0, offset - len(self._model))))
            self._model[offset : offset + len(data)] = data

    def _note(self, name: str, *numbers: int) -> None:
        self._history.append(f"{self._step}: {name} {' '.join(map(str, numbers))}")

    def _same(self, what: str, offset: int, found: bytes, length: int) -> None:
        expected = bytes(self._model[offset : offset + length])
        if found != expected:
            common = zip(found, expected, strict=False)
            at = next((index for index, (a, b) in enumerate(common) if a != b), min(len(found), len(expected)))
            self._fail(
                f"{what} of {length} bytes at {offset}: {len(found)} bytes instead of {len(expected)}, the first "
                f"difference at {offset + at}: {found[at : at + 16].hex()} instead of {expected[at : at + 16].hex()}"
            )

    def _fail(self, text: str) -> None:
        history = "\n".join(self._history)
        raise Mismatch(f"seed {self._seed}, step {self._step}: {text}\n{history}")


_CALLS: dict[str, Callable[[FileExerciser], None]] = {
    "read": FileExerciser.read,
    "write": FileExerciser.write,
    "append": FileExerciser.append,
    "truncate": FileExerciser.truncate,
    "map_read": FileExerciser.map_read,
    "map_write": FileExerciser.map_write,
    "direct_read": FileExerciser.direct_read,
    "direct_write": FileExerciser.direct_write,
    "reopen": FileExerciser.reopen,
    "sync": FileExerciser.sync,
}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--skip", nargs="*", default=())
    arguments = parser.parse_args()
    FileExerciser(arguments.file, arguments.seed, skip=arguments.skip).run(arguments.steps)


if __name__ == "__main__":
    main()
