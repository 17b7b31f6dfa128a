"""What this host says of a path's file system: where a cache may lie that needs working locks and shared memory."""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path

_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2", "tmpfs", "overlay"}
)
"""File systems of one host alone. A type that is not known counts as shared: the careful answer."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


def file_system_type(path: Path, mountinfo: str | None = None) -> str:
    """The type of the file system that holds `path`, from this process's table of mounts; empty when it has none."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return ""
    wanted, best, found = Path(os.path.realpath(path)), -1, ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")[0]
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # Of mounts on one point the last covers the others.
        if len(point.parts) >= best and (point == wanted or point in wanted.parents):
            best, found = len(point.parts), kind
    return found


@cache
def boot_id() -> str:
    """Which start of which kernel this is; empty where that cannot be told.

    Processes that agree on it share one page cache, and see each other's locks.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_local(path: Path) -> bool:
    """Whether only this host can reach the file system of `path`."""
    return file_system_type(path) in _LOCAL


def index_path(root: Path, store_id: str, *, shared: bool, inside: bool = True) -> Path | None:
    """Where this host keeps its index of a store: inside it when that is private, local and writable, and `inside`,
    else in the user's cache directory; None when that cannot be written either.

    The name in the cache holds the store's path, since a copy of a store has the same id and other packs.
    """
    if inside and not shared and os.access(root, os.W_OK) and is_local(root):
        return root / "index.sqlite"
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    place = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()[:16]
    directory = base / "moonclipfs" / store_id
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return directory / f"index-{place}.sqlite"


def base_index_path(root: Path, store_id: str, private: Path) -> Path | None:
    """Where this host keeps its index of a store in whose directory nothing is to be written: in the user's cache
    directory, which all private stores over it share, else in that of the private store; None when neither can be
    written.
    """
    found = index_path(root, store_id, shared=False, inside=False)
    if found is None and os.access(private, os.W_OK) and is_local(private):
        return private / f"base-{store_id}.sqlite"
    return found
