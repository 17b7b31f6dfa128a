"""Paths in a layer that no mount shows: what pathlib offers for a mounted one, so that a program takes either.

Symbolic links are followed inside the layer. All methods raise OSError, with the errno that a mount would answer.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from functools import partial, total_ordering
from pathlib import PurePosixPath
from typing import IO, Any, Self

from moonclipfs.errors import ExistsError, NotFoundError, UsageError, as_os_errors
from moonclipfs.layers.heldexperts import HeldExperts
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layerfile import LayerFile
from moonclipfs.layers.links import follow
from moonclipfs.layers.room import Holder, with_room
from moonclipfs.types import Buffer, EntryType

FILE_MODE = 0o644
DIRECTORY_MODE = 0o755
"""Permission bits of what is made by a path. Permissions are not checked: whoever has the layer may do everything."""
_BUFFER_BYTES = 1 << 17
_BLOCK = 4096


@total_ordering
class LayerPath:
    """A path in a layer that this process holds. Cheap to make, never changes, thread-safe; no `os.PathLike`, since no
    other program could open it.
    """

    __slots__ = ("_holder", "_label", "_path")

    def __init__(self, holder: Holder, path: str = "", *, label: str = "") -> None:
        """The path below the root of the layer that `holder` has; `label` is what stands before it in messages."""
        self._holder = holder
        self._path = PurePosixPath(path)
        self._label = label
        if self._path.is_absolute():
            raise ValueError(f"{path} is absolute: paths in a layer are relative to its root")

    # The path itself

    def __truediv__(self, other: str | os.PathLike[str]) -> Self:
        return type(self)(self._holder, os.fspath(self._path / other), label=self._label)

    def joinpath(self, *others: str | os.PathLike[str]) -> Self:
        """The path with others after it."""
        return type(self)(self._holder, os.fspath(self._path.joinpath(*others)), label=self._label)

    def with_name(self, name: str) -> Self:
        """The path with another last part."""
        return type(self)(self._holder, os.fspath(self._path.with_name(name)), label=self._label)

    def with_suffix(self, suffix: str) -> Self:
        """The path with another suffix."""
        return type(self)(self._holder, os.fspath(self._path.with_suffix(suffix)), label=self._label)

    def relative_to(self, other: LayerPath) -> PurePosixPath:
        """What leads from a path of the same layer to this one. Raises ValueError."""
        if other._holder is not self._holder:
            raise ValueError(f"{other} is in another layer than {self}")
        return self._path.relative_to(other._path)

    @property
    def name(self) -> str:
        """The last part; empty at the root."""
        return self._path.name

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return self._path.stem

    @property
    def suffix(self) -> str:
        """What stands after the last dot of the last part, with the dot."""
        return self._path.suffix

    @property
    def parent(self) -> Self:
        """The directory above; the root is its own."""
        return type(self)(self._holder, os.fspath(self._path.parent), label=self._label)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts, from the root of the layer on."""
        return self._path.parts

    def __str__(self) -> str:
        inner = "" if not self._path.parts else str(self._path)
        return f"{self._label}/{inner}" if self._label and inner else self._label or inner or "."

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerPath) and (self._holder, self._path) == (other._holder, other._path)

    def __lt__(self, other: LayerPath) -> bool:
        return self._path < other._path

    def __hash__(self) -> int:
        return hash((id(self._holder), self._path))

    # What is there

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """What stat(2) says; `st_dev` is the same for all files of the layer."""
        with as_os_errors(str(self)):
            inode = self._inode(last=follow_symlinks)
            status = self._holder.layer.stat(inode)
        times = (status.atime_ns, status.mtime_ns, status.ctime_ns)
        fields: dict[str, object] = {"st_blocks": status.blocks, "st_blksize": _BLOCK, "st_rdev": status.rdev}
        for name, time_ns in zip(("atime", "mtime", "ctime"), times, strict=True):
            fields |= {f"st_{name}": time_ns / 1e9, f"st_{name}_ns": time_ns}
        whole = (one // 10**9 for one in times)
        device = id(self._holder.layer) & 0x7FFFFFFF
        row = (status.mode, inode.number, device, status.nlink, status.uid, status.gid, status.size, *whole)
        return os.stat_result(row, fields)

    def lstat(self) -> os.stat_result:
        """As `stat`, of a symbolic link itself."""
        return self.stat(follow_symlinks=False)

    def exists(self) -> bool:
        """Whether something is there."""
        return self._there() is not None

    def is_dir(self) -> bool:
        """Whether a directory is there."""
        inode = self._there()
        return inode is not None and inode.is_directory

    def is_file(self) -> bool:
        """Whether a regular file is there."""
        inode = self._there()
        return inode is not None and inode.is_file

    def is_symlink(self) -> bool:
        """Whether a symbolic link is there."""
        inode = self._there(last=False)
        return inode is not None and inode.type is EntryType.SYMLINK

    def samefile(self, other: LayerPath) -> bool:
        """Whether both lead to the same file."""
        return self._holder is other._holder and self.stat().st_ino == other.stat().st_ino

    def iterdir(self) -> Iterator[Self]:
        """The paths in a directory, sorted by name."""
        with as_os_errors(str(self)):
            names = self._holder.layer.names_in(self._inode())
        return iter([self / os.fsdecode(name) for name in names])

    def experts(self) -> LayerPath:
        """The directory of the experts of the checkpoint in this one: a file for each, which can be written to. Files
        that wait there to be renamed over experts are found by this path and those made of it only.
        """
        if isinstance(self._holder, HeldExperts):
            return self
        return LayerPath(HeldExperts(self._holder), os.fspath(self._path), label=f"{self._label}(experts)")

    def readlink(self) -> PurePosixPath:
        """The text of a symbolic link."""
        with as_os_errors(str(self)):
            return PurePosixPath(os.fsdecode(self._holder.layer.readlink(self._inode(last=False))))

    def attribute(self, name: bytes) -> bytes | None:
        """The value of an extended attribute, stored or computed; None when there is none."""
        try:
            return self._holder.layer.xattr(self._inode(), name)
        except NotFoundError:
            return None

    # Files

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """A file object, as the built-in `open` gives it for a path; it has no `fileno`."""
        letters = set(mode)
        kind = letters & set("rwxa")
        if len(kind) != 1 or letters - set("rwxabt+") or len(mode) != len(letters) or {"b", "t"} <= letters:
            raise ValueError(f"invalid mode: {mode!r}")
        binary, both = "b" in letters, "+" in letters
        if buffering == 0 and not binary:
            raise ValueError("can't have unbuffered text I/O")
        raw = self._open_raw(kind.pop(), both=both)
        if buffering == 0:
            return raw  # type: ignore[return-value]  # as of every raw file of `io`
        size = buffering if buffering > 1 else _BUFFER_BYTES
        buffered: io.BufferedRandom | io.BufferedWriter | io.BufferedReader
        if both:
            buffered = io.BufferedRandom(raw, size)
        else:
            buffered = io.BufferedReader(raw, size) if raw.readable() else io.BufferedWriter(raw, size)
        if binary:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)

    def _open_raw(self, kind: str, *, both: bool) -> LayerFile:
        writes = both or kind != "r"
        with as_os_errors(str(self)):
            inode, made = (self._inode(), False) if kind == "r" else self._inode_to_write(exclusive=kind == "x")
        raw = LayerFile(self._holder, inode, str(self), read=both or not writes, write=writes, append=kind == "a")
        try:
            if kind == "w" and not made:
                raw.truncate(0)
            if kind == "a":
                raw.seek(0, os.SEEK_END)
        except BaseException:
            raw.close()
            raise
        return raw

    def read_bytes(self) -> bytes:
        """All bytes of a file."""
        with self.open("rb", buffering=0) as file:
            return file.read()  # type: ignore[no-any-return]

    def write_bytes(self, data: Buffer) -> int:
        """Make these the bytes of a file, which is made when it is not there; returns their count."""
        with self.open("wb", buffering=0) as file:
            return file.write(data)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """The text of a file."""
        with self.open("r", encoding=encoding, errors=errors) as file:
            return file.read()  # type: ignore[no-any-return]

    def write_text(self, data: str, encoding: str | None = None, errors: str | None = None) -> int:
        """Make this the text of a file; returns the count of characters."""
        with self.open("w", encoding=encoding, errors=errors) as file:
            return file.write(data)

    # Changes

    def touch(self, mode: int = FILE_MODE, exist_ok: bool = True) -> None:
        """Make a file, or give the one that is there the time of now."""
        with as_os_errors(str(self)):
            inode, made = self._inode_to_write(exclusive=not exist_ok, mode=mode)
            if not made:
                now = time.time_ns()
                self._change("set_attributes", inode, now_ns=now, atime_ns=now, mtime_ns=now)

    def mkdir(self, mode: int = DIRECTORY_MODE, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a directory, with `parents` those above it too."""
        try:
            self._make(EntryType.DIRECTORY, mode)
        except FileNotFoundError:
            if not parents or not self._path.parts:
                raise
            self.parent.mkdir(parents=True, exist_ok=True)
            self.mkdir(mode, exist_ok=exist_ok)
        except FileExistsError:
            if not exist_ok or not self.is_dir():
                raise

    def symlink_to(self, target: str | os.PathLike[str]) -> None:
        """Make a symbolic link of this text."""
        self._make(EntryType.SYMLINK, 0o777, os.fsencode(target))

    def hardlink_to(self, target: LayerPath) -> None:
        """Make this one more name of a file of the same layer."""
        self._require_same(target)
        with as_os_errors(str(self)):
            directory, name = self._place()
            self._change("link", target._inode(last=False), directory, name, time.time_ns())

    def chmod(self, mode: int) -> None:
        """Set the permission bits."""
        with as_os_errors(str(self)):
            self._change("set_attributes", self._inode(), now_ns=time.time_ns(), mode=mode)

    def unlink(self, missing_ok: bool = False) -> None:
        """Take the name of a file away."""
        try:
            with as_os_errors(str(self)):
                self._change("unlink", *self._place(), time.time_ns())
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        """Remove an empty directory."""
        with as_os_errors(str(self)):
            self._change("rmdir", *self._place(), time.time_ns())

    def rename(self, target: LayerPath) -> LayerPath:
        """Give what is here another path of the same layer, and replace what is there; returns it. Atomic."""
        self._require_same(target)
        with as_os_errors(str(self)):
            self._change("rename", *self._place(), *target._place(), time.time_ns())
        return target

    replace = rename

    # Finding inodes

    def _inode(self, *, last: bool = True) -> Inode:
        layer = self._holder.layer
        return follow(layer.root, os.fsencode(self._path), layer.lookup, _link_text, last=last)

    def _there(self, *, last: bool = True) -> Inode | None:
        try:
            with as_os_errors(str(self)):
                return self._inode(last=last)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _place(self) -> tuple[Inode, bytes]:
        """The directory that holds what is here, and the name in it."""
        if not self._path.parts or self._path.name == "..":
            raise UsageError(f"{self} has no name that could be made, removed or renamed")
        return self.parent._inode(), os.fsencode(self._path.name)

    def _inode_to_write(self, *, exclusive: bool, mode: int = FILE_MODE) -> tuple[Inode, bool]:
        """The file here, and whether it was made just now. Raises NotFoundError for a link that leads nowhere."""
        while True:
            if not exclusive:
                try:
                    return self._inode(), False
                except NotFoundError:
                    if self.is_symlink():
                        raise
            try:
                return self._new(EntryType.FILE, mode), True
            except ExistsError:
                if exclusive:
                    raise  # else somebody made it just now

    def _make(self, type_: EntryType, mode: int, target: bytes = b"") -> None:
        with as_os_errors(str(self)):
            self._new(type_, mode, target)

    def _new(self, type_: EntryType, mode: int, target: bytes = b"") -> Inode:
        if not self._path.parts:
            raise ExistsError(f"{self} is the root of a layer")
        owner = os.geteuid(), os.getegid()
        made: Inode = self._change("make", *self._place(), type_, mode, *owner, time.time_ns(), target)
        return made

    def _change(self, method: str, *arguments: Any, **options: Any) -> Any:
        return with_room(self._holder, partial(getattr(self._holder.layer, method), *arguments, **options))

    def _require_same(self, other: LayerPath) -> None:
        if not isinstance(other, LayerPath) or other._holder is not self._holder:
            raise ValueError(f"{other} is not in the same layer as {self}")


def _link_text(inode: Inode) -> bytes | None:
    return inode.target if inode.type is EntryType.SYMLINK else None
