"""Who keeps a mount busy, told from /proc alone: the mount itself is never touched, since it may hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moonclipfs.fuse.mounts import Mount


@dataclass(frozen=True, slots=True)
class Holder:
    """A process and one path on the mount that it uses."""

    pid: int
    command: str
    path: str


def find_holders(mount: Mount) -> list[Holder]:
    """One line for each process that has a file open or mapped, or its working directory, on a mount.

    Processes of other users are seen by root only.
    """
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    paths = {pid: next(_paths(Path("/proc", str(pid)), mount), None) for pid in pids}
    return [Holder(pid, _command(pid), path) for pid, path in paths.items() if path is not None]


def _paths(process: Path, mount: Mount) -> Iterator[str]:
    """Paths on the mount that a process uses; it may end, or be another's, at any moment."""
    try:
        for name in os.listdir(process / "fd"):
            if _has_line(process / "fdinfo" / name, f"mnt_id:\t{mount.mount_id}"):
                yield _link(process / "fd" / name) or mount.mountpoint
    except OSError:
        pass
    for name in ("cwd", "root"):
        if _is_below(path := _link(process / name), mount.mountpoint):
            yield path
    for line in _lines(process / "maps"):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and _device(fields[3]) == mount.device:
            yield fields[5]


def _device(hexadecimal: str) -> str:
    """ "00:2d" of a map as the "0:45" of the list of mounts."""
    major, _, minor = hexadecimal.partition(":")
    return f"{int(major, 16)}:{int(minor, 16)}"


def _is_below(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint + "/")


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _has_line(path: Path, line: str) -> bool:
    return line in _lines(path)


def _command(pid: int) -> str:
    return next(iter(_lines(Path("/proc", str(pid), "comm"))), "?")
