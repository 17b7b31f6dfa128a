"""The same calls on a layer and on a plain directory beside it: the same errno, and the same tree afterwards."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs.errors import MoonclipError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.layers.publish import File, publish

NOREPLACE, EXCHANGE = 1, 2
LINK = File(b"linked", link_group=1)
FILES = {
    "f": b"file", "g": b"other", "l1": LINK, "l2": LINK, "s": "f",
    "d": {"in": b"1", "sub": {"deep": b"2"}}, "e": {}, "e2": {}, "full": {"x": b""},
}  # fmt: skip
TYPES = {stat.S_IFREG: EntryType.FILE, stat.S_IFDIR: EntryType.DIRECTORY, stat.S_IFLNK: EntryType.SYMLINK}
_libc = ctypes.CDLL(None, use_errno=True)


class Plain:
    """A directory of the machine."""

    def __init__(self, top: Path) -> None:
        self.top = os.fsencode(top)
        self._fill(os.fsencode(top), FILES)

    def _fill(self, directory: bytes, files: object) -> None:
        assert isinstance(files, dict)
        os.makedirs(directory, exist_ok=True)
        for name, value in files.items():
            path = os.path.join(directory, os.fsencode(name))
            if isinstance(value, dict):
                self._fill(path, value)
            elif isinstance(value, str):
                os.symlink(value, path)
            elif value is LINK and name == "l2":
                os.link(os.path.join(directory, b"l1"), path)
            else:
                Path(os.fsdecode(path)).write_bytes(value.data if isinstance(value, File) else value)

    def at(self, path: bytes) -> bytes:
        return os.path.join(self.top, path)

    def make(self, path: bytes, kind: int) -> None:
        if kind == stat.S_IFDIR:
            os.mkdir(self.at(path))
        elif kind == stat.S_IFLNK:
            os.symlink(b"target", self.at(path))
        else:
            os.close(os.open(self.at(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    def link(self, path: bytes, new: bytes) -> None:
        os.link(self.at(path), self.at(new), follow_symlinks=False)

    def unlink(self, path: bytes) -> None:
        os.unlink(self.at(path))

    def rmdir(self, path: bytes) -> None:
        os.rmdir(self.at(path))

    def rename(self, path: bytes, new: bytes, flags: int) -> None:
        if _libc.renameat2(-100, self.at(path), -100, self.at(new), flags):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def tree(self, path: bytes = b"") -> dict[bytes, tuple[int, int]]:
        found = {}
        for name in os.listdir(self.at(path)):
            place = os.path.join(path, name)
            status = os.lstat(self.at(place))
            is_directory = stat.S_ISDIR(status.st_mode)
            found[place] = (stat.S_IFMT(status.st_mode), status.st_nlink)
            if is_directory:
                found |= self.tree(place)
        return found


class Layered:
    """The same in a layer."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.now = 10**18

    def _split(self, path: bytes) -> tuple[Inode, bytes]:
        above, _, name = (b"top/" + path).rpartition(b"/")
        directory = self.layer.resolve(above)
        self.layer.lookup(directory, b".")  # paths are followed before anything is done
        return directory, name

    def make(self, path: bytes, kind: int) -> None:
        above, name = self._split(path)
        self.layer.make(above, name, TYPES[kind], 0o644, 0, 0, self.now)

    def link(self, path: bytes, new: bytes) -> None:
        inode = self.layer.resolve(b"top/" + path)
        above, name = self._split(new)
        self.layer.link(inode, above, name, self.now)

    def unlink(self, path: bytes) -> None:
        above, name = self._split(path)
        self.layer.unlink(above, name, self.now)

    def rmdir(self, path: bytes) -> None:
        above, name = self._split(path)
        self.layer.rmdir(above, name, self.now)

    def rename(self, path: bytes, new: bytes, flags: int) -> None:
        (above, name), (new_above, new_name) = self._split(path), self._split(new)
        self.layer.rename(
            above, name, new_above, new_name, self.now,
            replace=not flags & NOREPLACE, exchange=bool(flags & EXCHANGE),
        )  # fmt: skip

    def tree(self, path: bytes = b"") -> dict[bytes, tuple[int, int]]:
        found = {}
        directory = self.layer.resolve(b"top/" + path if path else b"top")
        for name in self.layer.names_in(directory):
            place = os.path.join(path, name)
            inode = self.layer.lookup(directory, name)
            status = self.layer.stat(inode)
            found[place] = (stat.S_IFMT(status.mode), status.nlink)
            if inode.is_directory:
                found |= self.tree(place)
        return found


@pytest.fixture(params=["base", "own"])
def both(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[tuple[Plain, Layered]]:
    publish(store, "top", FILES)
    layer = Layer.open(store, "host")
    if request.param == "own":
        todo = [layer.resolve(b"top")]
        while todo:
            inode = todo.pop()
            layer.adopt(inode)
            if inode.is_directory:
                todo += [layer.lookup(inode, name) for name in layer.names_in(inode)]
    yield Plain(tmp_path / "plain"), Layered(layer)
    layer.close()


def outcome(call: Callable[[], object]) -> int:
    try:
        call()
    except MoonclipError as error:
        return type(error).errno
    except OSError as error:
        assert error.errno is not None
        return error.errno
    return 0


def same(both: tuple[Plain, Layered], call: Callable[[Plain | Layered], object], what: object) -> None:
    plain, layered = both
    expected, found = outcome(lambda: call(plain)), outcome(lambda: call(layered))
    assert found == expected, f"{what}: {os.strerror(found)} instead of {os.strerror(expected)}"
    assert layered.tree() == plain.tree(), what


PLACES = [
    b"f", b"g", b"l1", b"l2", b"s", b"d", b"d/in", b"d/sub", b"d/sub/deep", b"e", b"e2", b"full", b"new", b"d/new",
    b"d/sub/new", b"e/new", b"f/new", b"none/new", b"n" * 255, b"n" * 256, b"d/" + b"\xff" * 256,
]  # fmt: skip


@pytest.mark.parametrize("flags", [0, NOREPLACE, EXCHANGE])
def test_renames_are_those_of_a_plain_directory(both: tuple[Plain, Layered], flags: int) -> None:
    """Every rename, over files, directories, full ones and itself, has the errno and the outcome of ext4."""
    # An exchanged symlink would stand for a directory in the paths that follow.
    places = [place for place in PLACES if place != b"s" or not flags & EXCHANGE]
    for old in places:
        for new in places:
            same(both, lambda side, a=old, b=new: side.rename(a, b, flags), (old, new, flags))  # type: ignore[misc]
            # Put back what moved, so that every pair meets the same tree.
            if flags & EXCHANGE or outcome(lambda b=new: os.lstat(both[0].at(b))):  # type: ignore[misc]
                continue
            if old != new and outcome(lambda a=old: os.lstat(both[0].at(a))):  # type: ignore[misc]
                same(both, lambda side, a=old, b=new: side.rename(b, a, 0), ("back", old, new))  # type: ignore[misc]


def test_other_calls_are_those_of_a_plain_directory(both: tuple[Plain, Layered]) -> None:
    """Making, linking, unlinking and removing have the errno and the outcome of ext4."""
    for place in PLACES:
        for kind in TYPES:
            same(both, lambda side, p=place, k=kind: side.make(p, k), ("make", place, kind))  # type: ignore[misc]
    for old in PLACES:
        for new in PLACES:
            same(both, lambda side, a=old, b=new + b"2": side.link(a, b), ("link", old, new))  # type: ignore[misc]
    for place in PLACES:
        same(both, lambda side, p=place: side.rmdir(p), ("rmdir", place))  # type: ignore[misc]
    for place in PLACES:
        same(both, lambda side, p=place: side.unlink(p), ("unlink", place))  # type: ignore[misc]
