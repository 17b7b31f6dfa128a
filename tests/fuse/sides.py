"""The same calls on a mount and on a plain directory, side by side: results, errno and what stat says are compared."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[[Path], Any]


def outcome(call: Call, directory: Path) -> tuple[str, Any]:
    """What a call returns, or the name of its errno."""
    try:
        return "ok", call(directory)
    except OSError as error:
        return "error", errno.errorcode.get(error.errno or 0, error.errno)


def describe(directory: Path, *, times: bool = False) -> dict[str, Any]:
    """All that can be compared of a tree: types, modes, links, sizes, contents, texts, extended attributes."""
    root, found = os.fsencode(directory), {}
    for path, names, files in os.walk(root):
        for name in sorted([*names, *files]):
            full = os.path.join(path, name)
            status = os.lstat(full)
            value: list[Any] = [oct(status.st_mode), status.st_uid, status.st_gid]
            if not stat.S_ISDIR(status.st_mode):
                value += [status.st_size, status.st_nlink]
            if stat.S_ISREG(status.st_mode):
                with open(full, "rb") as file:
                    value.append(file.read())
            if stat.S_ISLNK(status.st_mode):
                value.append(os.readlink(full))
            else:
                value.append({name: os.getxattr(full, name) for name in os.listxattr(full)})
            if times:
                value.append(status.st_mtime_ns)
            found[os.fsdecode(full[len(root) + 1 :])] = value
    return found


class Sides:
    """Two directories, of which every call and every tree has to be the same."""

    def __init__(self, mounted: Path, plain: Path) -> None:
        self.mounted = mounted
        self.plain = plain

    def call(self, call: Call) -> Any:
        """Do it on both; return what the plain side gave."""
        expected, got = outcome(call, self.plain), outcome(call, self.mounted)
        assert got == expected
        return expected

    def compare(self, *, times: bool = False) -> None:
        """Both trees are the same."""
        assert describe(self.mounted, times=times) == describe(self.plain, times=times)
