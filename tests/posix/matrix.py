"""Every system call on every kind of object by every kind of user: what it says, and what it changes.

The objects of a tree are made anew whenever a call has changed one. `calls` are functions of paths relative to the
directory of the process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.posix.users import OWNER, STAFF

LONG = "n" * 255
_libc = ctypes.CDLL(None, use_errno=True)
_RESOLVED_HERE = -100

FILES = {  # name: mode, uid, gid
    "file": (0o644, 0, 0),
    "own": (0o644, OWNER.uid, OWNER.gid),
    "shared": (0o664, 0, STAFF),
    "private": (0o600, 0, 0),
    "suid": (0o6755, OWNER.uid, OWNER.gid),
    "sgid": (0o2755, OWNER.uid, STAFF),
    "locked": (0o2644, OWNER.uid, OWNER.gid),
    LONG: (0o666, 0, 0),
    "full/file": (0o644, 0, 0),
    "rodir/own": (0o644, OWNER.uid, OWNER.gid),
    "sticky/theirs": (0o666, 0, 0),
    "sticky/own": (0o666, OWNER.uid, OWNER.gid),
    "mine/theirs": (0o666, 0, 0),
    "closed/file": (0o666, 0, 0),
    "noexec/file": (0o666, 0, 0),
    "setgid/file": (0o666, 0, STAFF),
}
SET_IDS = [name for name, (mode, _, _) in FILES.items() if mode & 0o6000]
DIRECTORIES = {
    "empty": (0o777, 0, 0),
    "full": (0o777, 0, 0),
    "rodir": (0o755, 0, 0),
    "sticky": (0o1777, 0, 0),
    "sticky/theirdir": (0o777, 0, 0),
    "sticky/owndir": (0o777, OWNER.uid, OWNER.gid),
    "mine": (0o1777, OWNER.uid, OWNER.gid),
    "closed": (0o700, 0, 0),
    "noexec": (0o666, 0, 0),
    "unlisted": (0o333, 0, 0),
    "setgid": (0o2777, 0, STAFF),
    "team": (0o770, 0, STAFF),
}
SYMLINKS = {"tofile": "file", "todir": "full", "dangling": "nowhere", "loop": "loop", "toclosed": "closed/file"}
OBJECTS = (*FILES, *DIRECTORIES, *SYMLINKS, "fifo", "sock", "hard")
PATHS = (
    *OBJECTS, "missing", "missing/x", "missing/", "file/x", "file/", "file/.", "full/", "empty/", "empty/.", "full/.",
    "full/..", ".", "..", "empty/..", "tofile/", "todir/", "todir/file", "loop/x", "dangling/", "", LONG + "n",
    LONG + "n/x", "x/" * 2048, "empty/new", "rodir/new", "sticky/new", "mine/new", "closed/new", "noexec/new",
    "setgid/new", "team/new", "full/new/", "unlisted/new",
)  # fmt: skip


def build(root: Path) -> None:
    """Make the objects in a directory, as root."""
    for name, (mode, uid, gid) in DIRECTORIES.items():
        os.mkdir(root / name)
        _own(root / name, mode, uid, gid)
    for name, (mode, uid, gid) in FILES.items():
        (root / name).write_bytes(b"0123456789")
        _own(root / name, mode, uid, gid)
    for name, text in SYMLINKS.items():
        os.symlink(text, root / name)
    os.mkfifo(root / "fifo")
    os.chmod(root / "fifo", 0o666)
    os.mknod(root / "sock", stat.S_IFSOCK | 0o666)
    os.link(root / "own", root / "hard")
    os.chmod(root, 0o777)


def _own(path: Path, mode: int, uid: int, gid: int) -> None:
    os.chown(path, uid, gid)
    os.chmod(path, mode)


Facts = dict[str, tuple[Any, ...]]


Times = dict[int, tuple[str, int, int]]


def look(root: Path) -> tuple[Facts, Times]:
    """What is in a directory, by path: what stat says and bytes; and by inode number a path and times of changes."""
    facts: Facts = {}
    times: Times = {}
    for directory, names, files in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in (*names, *files))):
            found = os.lstat(path)
            kind = stat.S_IFMT(found.st_mode)
            inside: Any = found.st_nlink
            if kind == stat.S_IFLNK:
                inside = os.readlink(path)
            elif kind == stat.S_IFREG:
                inside = (found.st_nlink, found.st_size, Path(path).read_bytes())
            name = os.path.relpath(path, root)
            attributes = {} if kind == stat.S_IFLNK else {key: os.getxattr(path, key) for key in os.listxattr(path)}
            facts[name] = (oct(found.st_mode), found.st_uid, found.st_gid, inside, attributes)
            first = min(name, times.get(found.st_ino, (name,))[0])
            times[found.st_ino] = (first, found.st_mtime_ns, found.st_ctime_ns)
    return facts, times


# Calls of one path


def open_read(path: str) -> bytes:
    return _open(path, os.O_RDONLY)


def open_write(path: str) -> bytes:
    return _open(path, os.O_WRONLY)


def open_cut(path: str) -> bytes:
    return _open(path, os.O_RDWR | os.O_TRUNC)


def open_cut_reading(path: str) -> bytes:
    return _open(path, os.O_RDONLY | os.O_TRUNC)


def open_append(path: str) -> bytes:
    return _open(path, os.O_WRONLY | os.O_APPEND, b"more")


def open_new(path: str) -> bytes:
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, b"new")


def open_create(path: str) -> bytes:
    return _open(path, os.O_WRONLY | os.O_CREAT, b"some", 0o6777)


def open_create_reading(path: str) -> bytes:
    return _open(path, os.O_RDONLY | os.O_CREAT, b"", 0o200)


def open_directory(path: str) -> bytes:
    return _open(path, os.O_RDONLY | os.O_DIRECTORY)


def open_create_directory(path: str) -> bytes:
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECTORY)


def open_no_follow(path: str) -> bytes:
    return _open(path, os.O_RDWR | os.O_NOFOLLOW)


def open_no_access_time(path: str) -> bytes:
    return _open(path, os.O_RDONLY | os.O_NOATIME)


def open_path(path: str) -> bytes:
    return _open(path, os.O_PATH)


def _open(path: str, flags: int, data: bytes = b"", mode: int = 0o666) -> bytes:
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        if data:
            os.write(fd, data)
        if flags & (os.O_ACCMODE | os.O_PATH) == os.O_RDONLY and stat.S_ISREG(os.fstat(fd).st_mode):
            return os.pread(fd, 100, 0)
        return b""
    finally:
        os.close(fd)


def chmod(path: str) -> None:
    os.chmod(path, 0o640)


def chmod_all(path: str) -> None:
    os.chmod(path, 0o7777)


def chown_user(path: str) -> None:
    os.chown(path, 1300, -1)


def chown_same(path: str) -> None:
    os.chown(path, os.getuid(), -1)


def chown_own_group(path: str) -> None:
    os.chown(path, -1, os.getgid())


def chown_staff(path: str) -> None:
    os.chown(path, -1, STAFF)


def chown_nothing(path: str) -> None:
    os.chown(path, -1, -1)


def lchown(path: str) -> None:
    os.chown(path, os.getuid(), STAFF, follow_symlinks=False)


def truncate_short(path: str) -> None:
    os.truncate(path, 3)


def truncate_same(path: str) -> None:
    os.truncate(path, 10)


def truncate_long(path: str) -> None:
    os.truncate(path, 5000)


def truncate_negative(path: str) -> None:
    os.truncate(path, -1)


def mkdir(path: str) -> None:
    os.mkdir(path, 0o7777)


def mkfifo(path: str) -> None:
    os.mkfifo(path, 0o622)


def mknod(path: str) -> None:
    os.mknod(path, stat.S_IFREG | 0o6751)


def bind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(path)
        except ValueError:
            return  # longer than an address may be
        except OSError as error:
            if "too long" not in str(error):
                raise


def symlink(path: str) -> None:
    os.symlink("any text", path)


def unlink(path: str) -> None:
    os.unlink(path)


def rmdir(path: str) -> None:
    os.rmdir(path)


def utime_now(path: str) -> None:
    os.utime(path)


def utime_set(path: str) -> int:
    os.utime(path, ns=(1_000_000_001, 2_000_000_002))
    return os.stat(path).st_mtime_ns


def utime_link(path: str) -> int:
    os.utime(path, ns=(1_000_000_001, 2_000_000_002), follow_symlinks=False)
    return os.lstat(path).st_mtime_ns


def access(path: str) -> list[bool]:
    return [os.access(path, mode) for mode in (os.F_OK, os.R_OK, os.W_OK, os.X_OK)]


def stat_mode(path: str) -> str:
    return oct(os.stat(path).st_mode)


def listdir(path: str) -> list[str]:
    return sorted(os.listdir(path or "missing"))  # Python lists the present directory by the empty path


def chdir(path: str) -> None:
    os.chdir(path)


def readlink(path: str) -> str:
    return os.readlink(path)


def setxattr(path: str) -> None:
    os.setxattr(path, "user.a", b"1")


def setxattr_replace(path: str) -> None:
    os.setxattr(path, "user.a", b"1", os.XATTR_REPLACE)


def setxattr_trusted(path: str) -> None:
    os.setxattr(path, "trusted.a", b"1")


def getxattr(path: str) -> bytes:
    return os.getxattr(path, "user.a")


def execute(path: str) -> None:
    """Whether it may be run: what is no program is ENOEXEC."""
    os.execv(path, ["x"])


def statfs(path: str) -> int:
    return os.statvfs(path).f_namemax


ONE_PATH: tuple[Callable[[str], Any], ...] = (
    open_read, open_write, open_cut, open_cut_reading, open_append, open_new, open_create, open_create_reading,
    open_directory, open_create_directory, open_no_follow, open_no_access_time, open_path, chmod, chmod_all,
    chown_user, chown_same, chown_own_group, chown_staff, chown_nothing, lchown, truncate_short, truncate_same,
    truncate_long, truncate_negative, mkdir, mkfifo, mknod, bind, symlink, unlink, rmdir, utime_now, utime_set,
    utime_link, access, stat_mode, listdir, chdir, readlink, setxattr, setxattr_replace, setxattr_trusted, getxattr,
    execute, statfs,
)  # fmt: skip


# Calls of two paths


def link(path: str, new: str) -> None:
    os.link(path, new, follow_symlinks=False)


def link_follow(path: str, new: str) -> None:
    """linkat(2) with AT_SYMLINK_FOLLOW."""
    _check(_libc.linkat(_RESOLVED_HERE, os.fsencode(path), _RESOLVED_HERE, os.fsencode(new), 0x400))


def rename(path: str, new: str) -> None:
    os.rename(path, new)


def rename_new(path: str, new: str) -> None:
    _rename(path, new, 1)


def exchange(path: str, new: str) -> None:
    _rename(path, new, 2)


def _rename(path: str, new: str, flags: int) -> None:
    _check(_libc.renameat2(_RESOLVED_HERE, os.fsencode(path), _RESOLVED_HERE, os.fsencode(new), flags))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


TWO_PATHS: tuple[Callable[[str, str], Any], ...] = (link, link_follow, rename, rename_new, exchange)
