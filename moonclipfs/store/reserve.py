"""The reserve: space kept back in a store so that forget and gc work on a full disk."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import MoonclipError, NoSpaceError
from moonclipfs.store.backend import mode_of_files, os_errors

log = logging.getLogger(__name__)


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


def lend(root: Path) -> bool:
    """Give a little of the reserve back to the file system, as much as a lease and a layer take to be opened. Returns
    False when there was none.
    """
    path = _file(root)
    with os_errors(f"shorten {path}"):
        try:
            size = os.stat(path).st_size
            os.truncate(path, max(0, size - limits.RESERVE_LOAN_BYTES))
        except FileNotFoundError:
            return False
        return size > 0


def take(root: Path) -> bool:
    """Preallocate `limits.RESERVE_BYTES` unless that is done, whoever did it.

    Returns False when the disk is too full for it, where what there was stays, or, with a warning, when something else
    is in the way: a reserve that is missing harms nothing before the disk is full.
    """
    path = _file(root)
    try:
        with os_errors(f"reserve space in {path}"):
            _preallocate(path, mode_of_files(root))
    except NoSpaceError:
        return False
    except MoonclipError as error:
        log.warning("%s: without it, forget and gc may fail on a full disk", error)
        return False
    return True


def take_again(root: Path) -> bool:
    """`take`, where the disk has room for twice as much: whoever has it given back to work on a full disk can do that.
    Costs next to nothing where nothing is to be done.
    """
    with suppress(OSError):  # there is none, or `take` tells what is wrong
        if os.stat(_file(root)).st_size >= limits.RESERVE_BYTES:
            return True
    try:
        disk = os.statvfs(root)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize > 2 * limits.RESERVE_BYTES and take(root)


def _preallocate(path: str, mode: int) -> None:
    before = 0
    with suppress(FileNotFoundError):
        found = os.stat(path)
        before = found.st_size
        if min(found.st_size, found.st_blocks * 512) >= limits.RESERVE_BYTES:
            return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        # The umask takes nothing from the mode of a shared store.
        if os.fstat(fd).st_uid == os.geteuid():
            os.fchmod(fd, mode)
        os.posix_fallocate(fd, 0, limits.RESERVE_BYTES)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, before)
            if not before:
                os.unlink(path)
        raise
    finally:
        os.close(fd)
