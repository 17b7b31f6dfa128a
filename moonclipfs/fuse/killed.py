"""Mounts whose server was killed while one of its threads waited inside the kernel.

The kernel lets such a process go only when the lock is free that the thread waits for; whoever has the lock may wait
for an answer of that very server. Then the mount neither answers nor fails, and what the process had locked stays
locked, until its connection is aborted.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from moonclipfs.errors import MoonclipError
from moonclipfs.fuse.mounts import Mount
from moonclipfs.store.leases import live_leases

_MNT_FORCE = 1
_GONE_SECONDS = 10.0
_POLL_SECONDS = 0.02


def killed_server(mount: Mount) -> int | None:
    """The process that served a mount, if it was killed and cannot end; None for any other mount."""
    try:
        leases = live_leases(Path(mount.store))
    except (MoonclipError, OSError):
        return None
    servers = [lease.pid for lease in leases if lease.purpose.endswith(f", at {mount.mountpoint}")]
    return next((pid for pid in servers if _is_ending(pid)), None)


def abort(mount: Mount, pid: int) -> bool:
    """Let everything that waits for a mount fail, and wait for its killed server to end. False: this takes root."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.umount2(os.fsencode(mount.mountpoint), _MNT_FORCE)  # it may be busy still: the connection is aborted first
    deadline = time.monotonic() + _GONE_SECONDS
    while _is_ending(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_ending(pid: int) -> bool:
    """Whether a process is dead, and still has threads: only then it is more than a line in the list of processes."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        return state in b"ZX" and len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False
