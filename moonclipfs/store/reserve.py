"""The reserve: space kept back in a store so that forget and gc work on a full disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import NoSpaceError
from moonclipfs.store.backend import os_errors


def _file(root: Path) -> str:
    return os.path.join(root, "reserve")


def release(root: Path) -> bool:
    """Give the reserve back to the file system. Returns False when there was none."""
    path = _file(root)
    with os_errors(f"delete {path}"):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True


def take(root: Path) -> bool:
    """Preallocate `limits.RESERVE_BYTES` unless that is done. Returns False when the disk is too full for it."""
    path = _file(root)
    try:
        with os_errors(f"reserve space in {path}"):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, limits.RESERVE_BYTES)
            finally:
                os.close(fd)
    except NoSpaceError:
        with suppress(FileNotFoundError), os_errors(f"delete {path}"):
            os.unlink(path)
        return False
    return True
