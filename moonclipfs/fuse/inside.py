"""Paths inside a mount, whether or not something is there yet."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moonclipfs.errors import ReadOnlyError, UsageError
from moonclipfs.fuse.mounts import Mount, all_mounts
from moonclipfs.layers.dryness import require_kept
from moonclipfs.store.target import OVERLAYS


@dataclass(frozen=True, slots=True)
class Inside:
    """A path inside a mount: `path` is relative to the mountpoint, empty for that itself."""

    mount: Mount
    path: str

    @property
    def overlay(self) -> str | None:
        """The overlay that it lies in, by name."""
        top, _, rest = self.path.partition("/")
        return rest.partition("/")[0] or None if top == OVERLAYS else None


def inside_mount(text: str) -> Inside | None:
    """Where `text` lies in a mount of ours, links followed; None for a path anywhere else."""
    real = os.path.realpath(text) if text and "\0" not in text else ""
    found: Mount | None = None
    for mount in all_mounts():  # in the order in which they were made: the last of the longest is what one sees
        below = mount.mountpoint.rstrip("/") + "/"
        if (real + "/").startswith(below) and (found is None or len(mount.mountpoint) >= len(found.mountpoint)):
            found = mount
    if found is None or not found.is_ours:
        return None
    return Inside(found, real[len(found.mountpoint) :].strip("/"))


def need_mount(text: str, otherwise: str) -> Inside:
    """As `inside_mount`. Raises UsageError outside of a mount: `otherwise` says what to do there."""
    found = inside_mount(text)
    if found is None:
        raise UsageError(f"{text or 'an empty path'} is not inside a mount: {otherwise}")
    return found


def sealable(path: str) -> Inside:
    """Where the directory `path` lies in a mount that can seal it. Raises UsageError, ReadOnlyError."""
    inside = need_mount(path, "`moonclipfs add` stores a plain directory")
    if not inside.mount.writable:
        raise ReadOnlyError(f"{path} is in a read-only mount: everything there is sealed already")
    require_kept(path)
    if inside.overlay is not None:
        place = f"{inside.mount.mountpoint} {inside.overlay}"
        raise UsageError(f"{path} is in an overlay: `moonclipfs overlay commit {place}` makes a snapshot of that")
    if not inside.path:
        raise UsageError(f"{path} is the whole mount: name a directory in it, which becomes a snapshot of its name")
    if inside.path.startswith("@"):
        raise UsageError(f"{path} is a view of versions that are sealed already")
    return inside


def flushable(path: str) -> tuple[Inside, str, dict[str, str]]:
    """Where `path` lies in a mount, and the verb and arguments that flush it: an overlay alone, or the whole mount.
    Raises UsageError, also for a dry run.
    """
    inside = need_mount(path, "only a mount has something to flush")
    require_kept(path)
    if inside.overlay is not None:
        return inside, "overlay_flush", {"name": inside.overlay}
    return inside, "flush", {}
