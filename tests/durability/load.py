"""Programs that write to a mount until its server is killed, and tell beside it what they were promised.

Each line of what they tell is `{"path": ..., "may": value}`: from here on the file may also be that, or
`{"path": ..., "is": value}`: that was accepted, and nothing else may be there. A value is null for an absent file,
`[seed, size]` for the bytes of a seed, `[seed, size, "prefix"]` for any beginning of them, a text for a symbolic link.
`PATH#N` is page N of a file. `{"path": ..., "sealed": names}`: a seal of a directory that holds these was accepted.
A path is written to by one program only.

Run: python -m tests.durability.load ROLE MOUNTPOINT LOG SEED
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

from moonclipfs.errors import MountError, NotFoundError
from moonclipfs.fuse.control import ask
from tests.formats.samples import entry, safetensors

PAGE = 4096
PAGES = 48
SMALL_PAGES = 3
GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV}
"""What a program gets when the server is killed."""


def data_of(seed: int, size: int) -> bytes:
    """The bytes of a seed, none of them zero; half of them are those of its neighbours, as in a line of checkpoints."""
    half = size // 2
    shared, own = random.Random(seed // 8).randbytes(half), random.Random(seed).randbytes(size - half)
    return (shared + own).replace(b"\0", b"\1")


def model_of(seed: int, size: int) -> bytes:
    """A whole file of safetensors with the bytes of a seed."""
    return safetensors({"w": entry("U8", [size], 0, size)}, data_of(seed, size))


def bytes_of(path: str, seed: int, size: int) -> bytes:
    """What a file at a path holds that was written with a seed."""
    return (model_of if path.endswith(".safetensors") else data_of)(seed, size)


class Program:
    """One that writes. `root` is its own directory of the mount."""

    def __init__(self, role: str, mountpoint: Path, log: Path, seed: int) -> None:
        self.role = role
        self.mountpoint = mountpoint
        self.root = mountpoint / role
        self.seed = seed
        self.rng = random.Random(f"{role} {seed}")
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(self) -> None:
        """Until the server is gone."""
        self.root.mkdir(exist_ok=True)
        work: Callable[[], None] = getattr(self, self.role)
        while True:
            work()

    def tell(self, path: str, what: str, value: object) -> None:
        """One line of the log."""
        line = json.dumps({"path": f"{self.role}/{path}", what: value}) + "\n"
        os.write(self._log, line.encode())

    def fresh(self, size: int) -> list[int]:
        """A new seed, with a size."""
        self.seed += 1
        return [self.seed, size]

    def write(self, path: str, value: list[int], flags: int = os.O_TRUNC) -> int:
        """Write a file in pieces, and leave it open."""
        descriptor = os.open(self.root / path, os.O_RDWR | os.O_CREAT | flags, 0o644)
        data = bytes_of(path, *value)
        step = self.rng.choice([len(data), 100_000, 333_333]) or 1
        for at in range(0, len(data), step):
            os.write(descriptor, data[at : at + step])
        return descriptor

    def create(self, path: str, value: list[int], *, sync: bool) -> None:
        """A new file, closed."""
        self.tell(path, "may", [*value, "prefix"])
        descriptor = self.write(path, value, os.O_EXCL)
        if sync:
            os.fsync(descriptor)
            self.tell(path, "is", value)
        os.close(descriptor)
        self.tell(path, "is", value)

    def remove(self, path: str) -> None:
        self.tell(path, "may", None)
        os.unlink(self.root / path)
        self.tell(path, "is", None)

    def seal(self, path: str, *, wait: bool) -> None:
        """Seal by hand a directory that holds what it should."""
        if not os.path.ismount(self.mountpoint):
            return  # an overlay
        names = os.listdir(self.root / path)
        ask(str(self.mountpoint), "seal", None, path=f"{self.role}/{path}", wait=wait)
        self.tell(path, "sealed", names)

    # Roles

    def checkpoints(self) -> None:
        """A trainer: checkpoints with fsync, sealed by hand or by the mount; the oldest is removed."""
        there = sorted(os.listdir(self.root), key=lambda name: int(name.rpartition("-")[2]))
        for old in there[:-2]:
            for name in os.listdir(self.root / old):
                self.remove(f"{old}/{name}")
            os.rmdir(self.root / old)
        number = int(there[-1].rpartition("-")[2]) + 1 if there else 1
        place = f"checkpoint-{number}"
        os.mkdir(self.root / place)
        self.create(f"{place}/model.safetensors", self.fresh(self.rng.choice([300_000, 1_500_000])), sync=True)
        self.create(f"{place}/optimizer.pt", self.fresh(self.rng.choice([1000, 400_000])), sync=False)
        self.create(f"{place}/config.json", self.fresh(300), sync=True)
        directory = os.open(self.root / place, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        if self.rng.random() < 0.6:
            self.seal(place, wait=self.rng.random() < 0.5)

    def replacing(self) -> None:
        """A saver that writes beside and renames over, before or after the close, with fsync or not."""
        value = self.fresh(self.rng.choice([0, 500, 200_000, 900_000]))
        self.tell("last.tmp", "may", [*value, "prefix"])
        descriptor = self.write("last.tmp", value, os.O_TRUNC)
        if self.rng.random() < 0.5:
            os.fsync(descriptor)
        early = self.rng.random() < 0.5
        if early:
            os.close(descriptor)
        self.tell("last.tmp", "may", None)
        self.tell("last.pt", "may", value)
        os.rename(self.root / "last.tmp", self.root / "last.pt")
        self.tell("last.tmp", "is", None)
        self.tell("last.pt", "is", value)
        if not early:
            os.close(descriptor)

    def truncating(self) -> None:
        """A saver that opens the old file with O_TRUNC. An empty one has nothing to lose, and is as a new one."""
        path = self.rng.choice(["a.pt", "b.pt"])
        value = self.fresh(self.rng.choice([0, 700, 100_000, 800_000]))
        new = not (self.root / path).exists() or (self.root / path).stat().st_size == 0
        self.tell(path, "may", [*value, "prefix"] if new else value)
        descriptor = self.write(path, value, os.O_TRUNC)
        if self.rng.random() < 0.3:
            os.fsync(descriptor)
        os.close(descriptor)
        self.tell(path, "is", value)

    def pages(self) -> None:
        """A database: pages of a file are written in place, through write and through a map; some are synced."""
        path = self.rng.choice(["large", "small"])
        count = PAGES if path == "large" else SMALL_PAGES
        if not (self.root / path).exists():
            self._make_pages(path, count)
        descriptor = os.open(self.root / path, os.O_RDWR)
        written: dict[int, list[int]] = {}
        for _ in range(self.rng.randrange(1, 12)):
            number = self.rng.randrange(count)
            written[number] = self.fresh(PAGE)
            self.tell(f"{path}#{number}", "may", written[number])
            data = data_of(*written[number])
            if self.rng.random() < 0.8:
                os.pwrite(descriptor, data, number * PAGE)
            else:
                with mmap.mmap(descriptor, PAGES * PAGE if path == "large" else SMALL_PAGES * PAGE) as map_:
                    map_[number * PAGE : (number + 1) * PAGE] = data
                    map_.flush()
        if self.rng.random() < 0.7:
            os.fdatasync(descriptor)
            for number, value in written.items():
                self.tell(f"{path}#{number}", "is", value)
        os.close(descriptor)
        for number, value in written.items():
            self.tell(f"{path}#{number}", "is", value)

    def _make_pages(self, path: str, count: int) -> None:
        values = [self.fresh(PAGE) for _ in range(count)]
        for number, value in enumerate(values):
            self.tell(f"{path}#{number}", "may", [*value, "prefix"])
        self.tell(f"{path}.new", "may", "pages")
        (self.root / f"{path}.new").write_bytes(b"".join(data_of(*value) for value in values))
        os.rename(self.root / f"{path}.new", self.root / path)
        for number, value in enumerate(values):
            self.tell(f"{path}#{number}", "is", value)

    def files(self) -> None:
        """Many small files in directories, some of them removed again, and links."""
        directory = f"d{self.rng.randrange(3)}"
        (self.root / directory).mkdir(exist_ok=True)
        names = os.listdir(self.root / directory)
        if len(names) > 40:
            for name in self.rng.sample(names, 20):
                self.remove(f"{directory}/{name}")
        for _ in range(5):
            value = self.fresh(self.rng.choice([0, 10, 300, 5000]))
            self.create(f"{directory}/{value[0]}", value, sync=self.rng.random() < 0.1)
        link = f"{directory}/{value[0]}-link"
        self.tell(link, "may", value)
        os.link(self.root / f"{directory}/{value[0]}", self.root / link)
        self.tell(link, "is", value)

    def moving(self) -> None:
        """A sealed directory, with a fresh file in it, goes to and fro; a symbolic link to it is replaced."""
        here, there = ("here", "there") if (self.root / "here").exists() else ("there", "here")
        if not (self.root / here).exists():
            os.mkdir(self.root / here)
        for name in os.listdir(self.root / here):
            if (self.root / here / name).read_bytes() != bytes_of(name, *sizes_in(name)):
                self.remove(f"{here}/{name}")  # its writing was cut short
        if len(os.listdir(self.root / here)) < 5:
            value = self.fresh(self.rng.choice([100, 150_000]))
            self.create(f"{here}/{value[0]}-{value[1]}.safetensors", value, sync=False)
            if self.rng.random() < 0.5:
                self.seal(here, wait=True)
        values = {name: sizes_in(name) for name in os.listdir(self.root / here)}
        for name, value in values.items():
            self.tell(f"{here}/{name}", "may", None)
            self.tell(f"{there}/{name}", "may", value)
        os.rename(self.root / here, self.root / there)
        for name, value in values.items():
            self.tell(f"{here}/{name}", "is", None)
            self.tell(f"{there}/{name}", "is", value)
        (self.root / "LATEST.tmp").unlink(missing_ok=True)
        self.tell("LATEST.tmp", "may", there)
        os.symlink(there, self.root / "LATEST.tmp")
        self.tell("LATEST", "may", there)
        self.tell("LATEST.tmp", "may", None)
        os.replace(self.root / "LATEST.tmp", self.root / "LATEST")
        self.tell("LATEST", "is", there)
        self.tell("LATEST.tmp", "is", None)

    def flushing(self) -> None:
        """Somebody who wants all encoded now."""
        ask(str(self.mountpoint), "flush", None)


def sizes_in(name: str) -> list[int]:
    """The seed and the size that a name tells."""
    seed, size = name.partition(".")[0].split("-")
    return [int(seed), int(size)]


ROLES = ("checkpoints", "replacing", "truncating", "pages", "files", "moving", "flushing")


def main() -> int:
    """See above. Exit code 0 when the server went away."""
    role, mountpoint, log, seed = sys.argv[1:]
    try:
        Program(role, Path(mountpoint), Path(log), int(seed)).run()
    except OSError as error:
        if error.errno in GONE:
            return 0
        raise
    except (MountError, NotFoundError):  # nobody answers at the control socket
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
