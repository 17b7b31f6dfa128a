"""Bound names as trees of directories: every prefix of a name is a directory, whether or not a snapshot lies there."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from moonclipfs.store.log import Names
from moonclipfs.store.replay import State
from moonclipfs.types import Version

LATEST_NAME = b"@latest"
"""In `@latest`: the link of a parent that is a directory there, since it has lines below it (the root, for one)."""


class Area(enum.Enum):
    """The trees of a mount; the value is the name at the root, empty for the root itself."""

    LIVE = b""
    """Bound snapshots at their paths."""
    VERSIONS = b"@versions"
    """Every kept version at PATH/NUMBER."""
    LATEST = b"@latest"
    """A link for each parent of snapshots to the newest complete one."""
    EXPERTS = b"@experts"
    """The experts of bound snapshots, at the same paths, each a file."""


class Link(NamedTuple):
    """A symlink to a snapshot."""

    target: bytes
    version: Version


Leaf: TypeAlias = Version | Link
Children: TypeAlias = Mapping[bytes, Leaf | None]
"""What stands at each name of a directory: a snapshot, a link, or None where only longer names pass through."""


def path_bytes(path: str) -> bytes:
    """The bytes of a snapshot's path."""
    return path.encode("utf-8", "surrogateescape")


class NameTree:
    """Directories made of names, never changed in place.

    A leaf may have names below it (`run1` and `run1/best` are both bound): then its path is a directory here too.
    """

    def __init__(self, leaves: Mapping[bytes, Leaf], before: NameTree | None = None, now_ns: int = 0) -> None:
        """Sort `leaves` into directories; those that differ from the tree `before` were modified at `now_ns`."""
        self.leaves = leaves
        self.directories: dict[bytes, Children] = _directories(leaves)
        self.mtimes: dict[bytes, int] = {}
        self._appeared: dict[bytes, int] = {}
        self._date({} if before is None else before._appeared)
        if before is not None:
            for path, children in self.directories.items():
                changed = now_ns if before.directories.get(path) != children else 0
                self.mtimes[path] = max(self.mtimes[path], before.mtimes.get(path, 0), changed)

    def changes(self, before: NameTree) -> Iterator[tuple[bytes, bytes]]:
        """Yield (directory, name) of each name that stands for something else, or for nothing, in the tree `before`."""
        for path in self.directories.keys() | before.directories.keys():
            new, old = self.directories.get(path, {}), before.directories.get(path, {})
            if new != old:
                both = new.keys() & old.keys()
                yield from ((path, name) for name in both if new[name] != old[name])
                yield from ((path, name) for name in new.keys() ^ old.keys())

    def _date(self, known: Mapping[bytes, int]) -> None:
        """Date each directory by its youngest child, in nanoseconds. One that longer names make is as old as the oldest
        of these, or as it was known to be when that one was still there.
        """
        for path in sorted(self.directories, key=lambda path: path.count(b"/") + bool(path), reverse=True):
            times = []
            for name, leaf in self.directories[path].items():
                times.append(self._appeared[join(path, name)] if leaf is None else _version(leaf).time_ns)
            self.mtimes[path] = max(times, default=0)
            self._appeared[path] = known.get(path, min(times, default=0))


class View:
    """What one state of the log means as directories. Areas that are rarely looked at are built when they are."""

    def __init__(self, names: Names, before: View | None = None, now_ns: int = 0) -> None:
        """See `NameTree`. Builds the live names only."""
        self._names = names
        self._before = {} if before is None else dict(before._trees)
        self._now_ns = now_ns
        self.sequence = names.sequence
        self._trees: dict[Area, NameTree] = {}
        self.area(Area.LIVE)

    def area(self, area: Area) -> NameTree:
        """The names of an area."""
        tree = self._trees.get(area)
        if tree is None:
            before = self._before.pop(area, None)
            if area is Area.EXPERTS:
                tree = self.area(Area.LIVE)  # the same names, and other things in them
            else:
                tree = NameTree(self._leaves(area), before, self._now_ns)
            self._trees[area] = tree
        return tree

    def built(self, area: Area) -> bool:
        """True when `area` costs nothing."""
        return area in self._trees

    def keeps(self, version: Version) -> bool:
        """True while a version can be found by its path and number."""
        return any(kept.sequence == version.sequence for kept in self._names.versions(version.path))

    def _leaves(self, area: Area) -> Mapping[bytes, Leaf]:
        if area is Area.LIVE:
            return {path_bytes(path): version for path, version in self._names.bound().items()}
        if area is Area.VERSIONS:
            return {path_bytes(f"{version.path}/{version.number}"): version for version in self._names.all_versions()}
        live = self.area(Area.LIVE).directories
        newest = {path: version for path, names in live.items() if (version := _newest(names)) is not None}
        parents = {ancestor for path in newest for ancestor in _ancestors(path)}
        leaves: dict[bytes, Leaf] = {}
        for path, version in newest.items():
            place = join(path, LATEST_NAME) if path in parents or not path else path
            up = b"../" * (place.count(b"/") + 1)
            leaves[place] = Link(up + path_bytes(version.path), version)
        return leaves


def no_names() -> Names:
    """A log without records."""
    return Names(State())


def join(directory: bytes, name: bytes) -> bytes:
    """The path of `name` in `directory`; the root is the empty path."""
    return directory + b"/" + name if directory else name


def _version(leaf: Leaf) -> Version:
    return leaf.version if isinstance(leaf, Link) else leaf


def _newest(names: Children) -> Version | None:
    complete = [leaf for leaf in names.values() if isinstance(leaf, Version) and not leaf.metadata.get("incomplete")]
    return max(complete, key=lambda version: version.order, default=None)


def _ancestors(path: bytes) -> Iterator[bytes]:
    """Every proper prefix of a path, the root last."""
    while path:
        path = path.rpartition(b"/")[0]
        yield path


def _directories(leaves: Mapping[bytes, Leaf]) -> dict[bytes, Children]:
    directories: dict[bytes, dict[bytes, Leaf | None]] = {b"": {}}
    for path, leaf in leaves.items():
        parent, _, name = path.rpartition(b"/")
        directories.setdefault(parent, {})[name] = leaf
        while parent:
            above, _, name = parent.rpartition(b"/")
            siblings = directories.setdefault(above, {})
            if name in siblings:
                break  # then its ancestors stand too
            siblings[name] = None
            parent = above
    return dict(directories)
