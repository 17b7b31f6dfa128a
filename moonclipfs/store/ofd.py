"""Open-file-description locks: held by an open file, not by a process, and gone when its last descriptor closes."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock: type, whence, start, length (0 = to the end), pid (0 for this kind of lock)."""


def lock(fd: int) -> bool:
    """Take the exclusive lock on the whole file, without waiting; False when another holds it.

    `fd` is open for writing. Taking it again through the same open file succeeds. Raises OSError where the file
    system has no locks.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int) -> None:
    """Give the lock up, for every descriptor of the same open file: also those of forked children."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def is_locked(fd: int) -> bool:
    """Whether another open file holds the lock. Takes nothing, so it never stands in anybody's way."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
