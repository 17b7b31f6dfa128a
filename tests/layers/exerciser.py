"""The same random system calls on two directory trees, compared after each: one may be a mount, the other is ext4.

    python -m tests.layers.exerciser LEFT RIGHT [--seed N] [--steps N]

Both directories must be empty at the start. The same seed makes the same calls. Times are compared where a call set
them (to years long past); that others moved on is compared too.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import random
import shutil
import stat
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

LONG = b"n" * 255
DIRECTORIES = (b"a", b"b", b"\xff\xfe\x01", LONG)
"""Names that mostly mean directories; with the others, mostly files."""
FILES = (b"c", b"d", b"e", b"f", "名前 ".encode(), LONG[1:])
ODD_NAMES = (b"n" * 256, b".", b"..", b"")
TARGETS = (b"a", b"b/c", b"./d", b"nowhere", b"e/" + LONG, b"t" * 1000, b"")
XATTRS = (b"user.a", b"user.moon")
MODES = (0o644, 0o600, 0o755, 0o777, 0o000, 0o4755, 0o2755, 0o1777, 0o6711)
SLOTS = 6
WHOLE_BYTES = 1 << 20
"""So much of the beginning and the end of a file is compared: sparse ones may be of a terabyte."""
PAST_NS = 1_000_000_000 * 10**9
"""Times before this were set by a call."""
_HISTORY = 40
_libc = ctypes.CDLL(None, use_errno=True)

Value = object


class Difference(AssertionError):
    """The trees do not do the same; says the seed, the step, and the last calls."""


class Side:
    """One of the trees: system calls by paths relative to its root, and open files by slot."""

    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)
        self.fds: dict[int, int] = {}

    def at(self, path: bytes) -> bytes:
        return self.root + b"/" + path

    def close_all(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()

    # Open files

    def open(self, slot: int, path: bytes, flags: int, mode: int) -> Value:
        if slot in self.fds:
            os.close(self.fds.pop(slot))
        self.fds[slot] = os.open(self.at(path), flags, mode)
        return None

    def open_directory(self, slot: int, path: bytes) -> Value:
        return self.open(slot, path, os.O_RDONLY | os.O_DIRECTORY, 0)

    def close(self, slot: int) -> Value:
        return os.close(self.fds.pop(slot))

    def duplicate(self, slot: int) -> Value:
        return os.close(os.dup(self.fds[slot]))

    def pread(self, slot: int, offset: int, length: int) -> Value:
        return os.pread(self.fds[slot], length, offset)

    def pwrite(self, slot: int, offset: int, data: bytes) -> Value:
        return os.pwrite(self.fds[slot], data, offset)

    def append(self, slot: int, data: bytes) -> Value:
        """At the end of the file with O_APPEND, else where the last one ended."""
        return os.write(self.fds[slot], data), os.lseek(self.fds[slot], 0, os.SEEK_CUR)

    def seek_end(self, slot: int) -> Value:
        if stat.S_ISDIR(os.fstat(self.fds[slot]).st_mode):
            return None  # where a directory ends is each file system's own affair
        return os.lseek(self.fds[slot], 0, os.SEEK_END)

    def ftruncate(self, slot: int, size: int) -> Value:
        return os.ftruncate(self.fds[slot], size)

    def allocate(self, slot: int, offset: int, length: int) -> Value:
        if fcntl.fcntl(self.fds[slot], fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND) != os.O_RDWR:
            return None  # what the C library does instead, where a file system cannot, does not work there
        os.posix_fallocate(self.fds[slot], offset, length)
        return os.utime(self.fds[slot])  # it changes nothing where it finds bytes, ext4 changes the time

    def fsync(self, slot: int) -> Value:
        return os.fsync(self.fds[slot])

    def fdatasync(self, slot: int) -> Value:
        return os.fdatasync(self.fds[slot])

    def fstat(self, slot: int) -> Value:
        return facts(os.fstat(self.fds[slot]))

    def fchmod(self, slot: int, mode: int) -> Value:
        return os.fchmod(self.fds[slot], mode)

    def flock(self, slot: int, how: int) -> Value:
        return fcntl.flock(self.fds[slot], how | fcntl.LOCK_NB)

    def list_open(self, slot: int) -> Value:
        return sorted(os.fsencode(name) for name in os.listdir(self.fds[slot]))

    def map_write(self, slot: int, offset: int, data: bytes) -> Value:
        with self._map(slot, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            end = min(len(mapped), offset + len(data))
            mapped[offset:end] = data[: max(0, end - offset)]
            mapped.flush()
        return os.pread(self.fds[slot], len(data), offset)

    def map_read(self, slot: int, offset: int, length: int) -> Value:
        with self._map(slot, mmap.PROT_READ) as mapped:
            return mapped[offset : offset + length]

    def _map(self, slot: int, protection: int) -> mmap.mmap:
        status = os.fstat(self.fds[slot])
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("only a file is mapped: the size of others is each file system's own affair")
        return mmap.mmap(self.fds[slot], min(status.st_size, WHOLE_BYTES), mmap.MAP_SHARED, protection)

    # Paths

    def truncate(self, path: bytes, size: int) -> Value:
        return os.truncate(self.at(path), size)

    def rename(self, path: bytes, target: bytes, flags: int) -> Value:
        if not flags:
            return os.rename(self.at(path), self.at(target))
        here = -100  # AT_FDCWD
        if _libc.renameat2(here, self.at(path), here, self.at(target), flags):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return None

    def rename_directory(self, path: bytes, target: bytes, flags: int) -> Value:
        return self.rename(path, target, flags)

    def link(self, path: bytes, target: bytes) -> Value:
        return os.link(self.at(path), self.at(target), follow_symlinks=False)

    def symlink(self, text: bytes, path: bytes) -> Value:
        return os.symlink(text, self.at(path))

    def readlink(self, path: bytes) -> Value:
        return os.readlink(self.at(path))

    def unlink(self, path: bytes) -> Value:
        return os.unlink(self.at(path))

    def mkdir(self, path: bytes, mode: int) -> Value:
        return os.mkdir(self.at(path), mode)

    def rmdir(self, path: bytes) -> Value:
        return os.rmdir(self.at(path))

    def remove_tree(self, path: bytes) -> Value:
        os.listdir(self.at(path))  # `rmtree` would wait for the other end of a fifo
        return shutil.rmtree(self.at(path))

    def mknod(self, path: bytes, type_: int) -> Value:
        return os.mknod(self.at(path), 0o640 | type_)

    def chmod(self, path: bytes, mode: int) -> Value:
        return os.chmod(self.at(path), mode)

    def chown(self, path: bytes, uid: int, gid: int) -> Value:
        return os.chown(self.at(path), uid, gid, follow_symlinks=False)

    def utime(self, path: bytes, atime_ns: int, mtime_ns: int) -> Value:
        os.utime(self.at(path), ns=(atime_ns, mtime_ns), follow_symlinks=False)
        found = os.lstat(self.at(path))
        return found.st_atime_ns, found.st_mtime_ns

    def set_xattr(self, path: bytes, name: bytes, value: bytes, flags: int) -> Value:
        return os.setxattr(self.at(path), name, value, flags)

    def get_xattr(self, path: bytes, name: bytes) -> Value:
        return os.getxattr(self.at(path), name)

    def remove_xattr(self, path: bytes, name: bytes) -> Value:
        return os.removexattr(self.at(path), name)

    def stat(self, path: bytes) -> Value:
        return facts(os.stat(self.at(path)))

    def lstat(self, path: bytes) -> Value:
        return facts(os.lstat(self.at(path)))

    def listdir(self, path: bytes) -> Value:
        return sorted(os.listdir(self.at(path)))

    def statfs(self, path: bytes) -> Value:
        return os.statvfs(self.at(path)).f_namemax

    def access(self, path: bytes, mode: int) -> Value:
        return os.access(self.at(path), mode)

    # All of it

    def tree(self) -> dict[bytes, Value]:
        """Everything below the root, by path: what stat says, bytes, links, extended attributes, hard links."""
        found: dict[bytes, Value] = {}
        first: dict[int, bytes] = {}
        todo = [b"."]
        while todo:
            directory = todo.pop()
            with os.scandir(self.at(directory)) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = os.path.join(directory, entry.name)
                    status = os.lstat(self.at(path))
                    assert entry.inode() == status.st_ino, f"{path!r}: readdir and stat tell different inodes"
                    if stat.S_ISDIR(status.st_mode):
                        todo.append(path)
                    found[path] = (*facts(status), first.setdefault(status.st_ino, path), self._inside(path, status))
        return found

    def _inside(self, path: bytes, status: os.stat_result) -> Value:
        if stat.S_ISLNK(status.st_mode):
            return os.readlink(self.at(path))
        names = sorted(name for name in os.listxattr(self.at(path)) if name.startswith("user."))
        xattrs = {name: os.getxattr(self.at(path), name) for name in names}
        if not stat.S_ISREG(status.st_mode):
            return xattrs
        fd = os.open(self.at(path), os.O_RDONLY)
        try:
            ends = [os.pread(fd, WHOLE_BYTES, at) for at in (0, max(0, status.st_size - WHOLE_BYTES))]
        finally:
            os.close(fd)
        return xattrs, [hashlib.sha256(end).hexdigest() for end in ends], [len(end) for end in ends]


def facts(status: os.stat_result) -> tuple[Value, ...]:
    """What stat must say alike; a time only when a call set it."""
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    dated = status.st_mtime_ns < PAST_NS and not stat.S_ISFIFO(status.st_mode)  # the kernel alone serves a fifo
    mtime = status.st_mtime_ns if dated else None
    return status.st_mode, status.st_nlink, status.st_uid, status.st_gid, size, mtime


class Exerciser:
    """Draws calls and makes them on both sides. `skip` names calls that are not made."""

    def __init__(self, left: Path, right: Path, seed: int, *, skip: Collection[str] = ()) -> None:
        self.left, self.right = Side(left), Side(right)
        self.seed = seed
        self._rng = random.Random(seed)
        self._step = 0
        self._drawn: list[bytes] = []
        self._used: deque[bytes] = deque(maxlen=20)
        self._history: deque[str] = deque(maxlen=_HISTORY)
        unknown = set(skip) - set(_CALLS)
        assert not unknown, f"no such calls: {unknown}"
        self._names = [name for name in _CALLS if name not in skip]
        self._weights = [_CALLS[name][0] for name in self._names]

    def run(self, steps: int, *, compare_every: int = 100) -> None:
        """Make so many calls; compare the whole trees at intervals and at the end. Raises Difference."""
        umask = os.umask(0o022)
        try:
            for step in range(1, steps + 1):
                self._one()
                if step % compare_every == 0:
                    self.compare()
            self.compare()
        finally:
            os.umask(umask)
            self.left.close_all()
            self.right.close_all()

    def compare(self) -> None:
        """Compare the trees as they are. Raises Difference."""
        left, right = self.left.tree(), self.right.tree()
        for path in sorted({*left, *right}):
            if left.get(path) != right.get(path):
                self._differ(f"tree: {path!r}", left.get(path), right.get(path))

    def _one(self) -> None:
        self._step += 1
        name = self._rng.choices(self._names, self._weights)[0]
        if _CALLS[name][1] is _SLOT and not self.left.fds:
            name = "open"
        self._drawn = []
        arguments = [draw(self) for draw in _CALLS[name][1:]]
        call = f"{name}({', '.join(map(_shown, arguments))})"
        outcomes = [_outcome(getattr(side, name), arguments) for side in (self.left, self.right)]
        self._history.append(f"{self._step}: {call} -> {_shown(outcomes[0])}")
        if outcomes[0] != outcomes[1]:
            self._differ(call, *outcomes)
        if outcomes[0][0] == "value":
            self._used.extend(self._drawn)

    def _differ(self, what: str, left: Value, right: Value) -> None:
        history = "\n".join(self._history)
        raise Difference(f"seed {self.seed}, step {self._step}: {what}\nleft:  {left!r}\nright: {right!r}\n{history}")

    # Arguments

    def slot(self) -> int:
        return self._rng.choice(sorted(self.left.fds))

    def new_slot(self) -> int:
        return self._rng.randrange(SLOTS)

    def path(self) -> bytes:
        return self._path(0.8)

    def used(self) -> bytes:
        """A path that a call succeeded with lately, mostly."""
        return self._rng.choice(self._used) if self._used and self._rng.random() < 0.7 else self.path()

    def directory(self) -> bytes:
        return self._path(0.1)

    def _path(self, file_chance: float) -> bytes:
        rng = self._rng
        parts = rng.choices(DIRECTORIES, (10, 6, 2, 1), k=rng.choices((0, 1, 2, 3), (5, 6, 3, 1))[0])
        as_file = rng.random() < file_chance
        parts.append(rng.choice(FILES) if as_file else rng.choices(DIRECTORIES, (10, 6, 2, 1))[0])
        if rng.random() < 0.02:
            # Never as the first part: the way up would lead out of the tree.
            parts.insert(rng.randint(1, len(parts)), rng.choice(ODD_NAMES))
        self._drawn.append(b"/".join(parts))
        return self._drawn[-1]

    def flags(self) -> int:
        rng = self._rng
        flags = rng.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR))
        for flag, chance in _FLAGS:
            flags |= flag if rng.random() < chance else 0
        return flags

    def offset(self) -> int:
        rng = self._rng
        kind = rng.random()
        if kind < 0.01:
            return rng.randrange(1 << 41)
        return rng.randrange(200_000) if kind < 0.2 else rng.randrange(20_000) if kind < 0.6 else rng.randrange(100)

    def length(self) -> int:
        rng = self._rng
        return rng.choice((0, 1, 100, 4096, rng.randrange(10_000), rng.randrange(140_000)))

    def data(self) -> bytes:
        return self._rng.randbytes(16) * (self.length() // 16) + self._rng.randbytes(3)

    def value(self) -> bytes:
        return self._rng.randbytes(self._rng.choice((0, 3, 100)))

    def time(self) -> int:
        return self._rng.randrange(PAST_NS)

    def one_of(self, *choices: Value) -> Value:
        return self._rng.choice(choices)


def _outcome(call: Callable[..., Value], arguments: list[Value]) -> tuple[str, Value]:
    try:
        return "value", call(*arguments)
    except OSError as error:
        return "errno", errno.errorcode.get(error.errno or 0, error.errno)
    except ValueError as error:
        return "refused", str(error)  # by Python, as a map of an empty file is


def _shown(value: Value) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]}...{len(text)} characters"


def _one_of(*choices: Value) -> Callable[[Exerciser], Value]:
    return lambda exerciser: exerciser.one_of(*choices)


_FLAGS = (
    (os.O_CREAT, 0.7),
    (os.O_EXCL, 0.1),
    (os.O_TRUNC, 0.15),
    (os.O_APPEND, 0.15),
    (os.O_DIRECTORY, 0.03),
    (os.O_NOFOLLOW, 0.06),
    (os.O_SYNC, 0.03),
    (os.O_NONBLOCK, 1.0),  # a fifo must not wait for its other end
)
_SLOT, _PATH, _MODE, _OFFSET, _DATA = Exerciser.slot, Exerciser.path, _one_of(*MODES), Exerciser.offset, Exerciser.data
_USED, _LENGTH = Exerciser.used, Exerciser.length
_NOREPLACE, _EXCHANGE = 1, 2
_RENAMES = _one_of(0, 0, 0, _NOREPLACE, _EXCHANGE, _EXCHANGE, _NOREPLACE | _EXCHANGE)
_LOCKS = _one_of(fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN)
_CALLS: dict[str, tuple[int, *tuple[Callable[[Exerciser], Value], ...]]] = {
    "open": (40, Exerciser.new_slot, _PATH, Exerciser.flags, _MODE),
    "open_directory": (4, Exerciser.new_slot, Exerciser.directory),
    "close": (10, _SLOT),
    "duplicate": (3, _SLOT),
    "pread": (15, _SLOT, _OFFSET, _LENGTH),
    "pwrite": (30, _SLOT, _OFFSET, _DATA),
    "append": (10, _SLOT, _DATA),
    "seek_end": (4, _SLOT),
    "ftruncate": (8, _SLOT, _OFFSET),
    "allocate": (2, _SLOT, _one_of(0, 1000, 100_000), _one_of(1, 5000)),
    "fsync": (3, _SLOT),
    "fdatasync": (3, _SLOT),
    "fstat": (8, _SLOT),
    "fchmod": (2, _SLOT, _MODE),
    "flock": (4, _SLOT, _LOCKS),
    "list_open": (2, _SLOT),
    "map_write": (8, _SLOT, _one_of(0, 1, 5000, 100_000), _DATA),
    "map_read": (5, _SLOT, _one_of(0, 1, 5000, 100_000), _LENGTH),
    "truncate": (6, _USED, _OFFSET),
    "rename": (20, _USED, _PATH, _RENAMES),
    "rename_directory": (8, Exerciser.directory, Exerciser.directory, _RENAMES),
    "link": (8, _USED, _PATH),
    "symlink": (6, _one_of(*TARGETS), _PATH),
    "readlink": (4, _USED),
    "unlink": (12, _PATH),
    "mkdir": (15, Exerciser.directory, _MODE),
    "rmdir": (4, Exerciser.directory),
    "remove_tree": (1, Exerciser.directory),
    "mknod": (2, _PATH, _one_of(stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG)),
    "chmod": (6, _USED, _MODE),
    "chown": (4, _USED, _one_of(-1, 0, 1000), _one_of(-1, 0, 2000)),
    "utime": (6, _USED, Exerciser.time, Exerciser.time),
    "set_xattr": (8, _USED, _one_of(*XATTRS), Exerciser.value, _one_of(0, os.XATTR_CREATE, os.XATTR_REPLACE)),
    "get_xattr": (5, _USED, _one_of(*XATTRS)),
    "remove_xattr": (3, _USED, _one_of(*XATTRS)),
    "stat": (10, _USED),
    "lstat": (10, _USED),
    "listdir": (6, Exerciser.directory),
    "statfs": (1, _USED),
    "access": (2, _USED, _one_of(os.F_OK, os.R_OK | os.W_OK, os.X_OK)),
}
"""Weight, and what to draw for each argument, of each call."""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("left", type=Path)
    parser.add_argument("right", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--skip", nargs="*", default=())
    arguments = parser.parse_args()
    Exerciser(arguments.left, arguments.right, arguments.seed, skip=arguments.skip).run(arguments.steps)


if __name__ == "__main__":
    main()
