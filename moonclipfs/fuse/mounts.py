"""Mounts of moonclipfs as the kernel lists them. Nothing here touches a mounted file system, which may hang."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

FILE_SYSTEM = "fuse.moonclipfs"
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the kernel's list. `device` is "major:minor"; `mount_id` is what /proc/PID/fdinfo names; `writable`
    is what the kernel lets through; `owner` is the user who mounted it, None where the kernel does not say."""

    mount_id: int
    device: str
    mountpoint: str
    type: str
    source: str
    writable: bool = False
    owner: int | None = None

    @property
    def is_ours(self) -> bool:
        """True for a mount of moonclipfs, dead or alive."""
        return self.type == FILE_SYSTEM

    @property
    def store(self) -> str:
        """Directory of the mounted store."""
        return unquote(self.source, errors="surrogateescape")


def mount_source(store: str) -> str:
    """How a store stands in the list of mounts: plain ASCII without commas and blanks, which mount options split at."""
    return quote(store, safe="/", errors="surrogateescape")


def all_mounts(process: int | str = "self") -> list[Mount]:
    """Every mount that a process sees, in the order in which they were made. Raises OSError for one of others."""
    lines = Path(f"/proc/{process}/mountinfo").read_bytes().splitlines()
    return [mount for line in lines if (mount := _parse(os.fsdecode(line))) is not None]


def find_mounts() -> list[Mount]:
    """The mounts of moonclipfs, dead ones too."""
    return [mount for mount in all_mounts() if mount.is_ours]


def mount_at(path: str) -> Mount | None:
    """The uppermost mount on exactly this directory, of any kind."""
    place = real_place(path)
    return next((mount for mount in reversed(all_mounts()) if mount.mountpoint == place), None)


def is_mounted(mount: Mount) -> bool:
    """Whether a mount is still the uppermost at its place: after a lazy unmount, another may be."""
    there = [found for found in all_mounts() if found.mountpoint == mount.mountpoint]
    return bool(there) and (there[-1].mount_id, there[-1].device) == (mount.mount_id, mount.device)


def real_place(path: str) -> str:
    """The path without symlinks, its last part untouched when that is a mountpoint: a dead one cannot be looked at."""
    path = os.path.abspath(path)
    parent, name = os.path.split(path)
    place = os.path.join(os.path.realpath(parent), name)
    if any(mount.mountpoint == place for mount in all_mounts()):
        return place
    return os.path.realpath(path)


def _parse(line: str) -> Mount | None:
    before, separator, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    if not separator or len(fields) < 6 or len(rest) < 2:
        return None
    # Of the two lists of options, the second is that of the file system itself.
    options = rest[-1].split(",")
    writable = "ro" not in {*fields[5].split(","), *options}
    owner = next((int(one.removeprefix("user_id=")) for one in options if one.startswith("user_id=")), None)
    return Mount(int(fields[0]), fields[2], _unescape(fields[4]), rest[0], _unescape(rest[1]), writable, owner)


def _unescape(field: str) -> str:
    """Blanks, tabs, newlines and backslashes stand as three octal digits."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
