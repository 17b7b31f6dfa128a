"""Rebasing: what an overlay changed goes onto another version of its base, file by file.

What one side alone changed is taken from it. Where both changed one file, the overlay's stays, and the base's is told
as a conflict; so are a file that one side changed and the other removed. A directory that the overlay removed stays
removed, whatever the base put into it since. A rename is a removal and an addition. Times alone are no change.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias, TypeGuard

from moonclipfs import limits
from moonclipfs.errors import LimitError
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, ObjectId


class Conflict(enum.StrEnum):
    """What both sides did to one path; the overlay's stays."""

    CONTENT = "both changed it"
    ATTRIBUTES = "both changed its attributes"
    TYPE = "one side has a directory there"
    REMOVED_HERE = "removed in the overlay, changed in the base"
    REMOVED_THERE = "changed in the overlay, removed in the base"


class Trees(Protocol):
    """Directory objects of a store."""

    def load(self, object_id: ObjectId, /) -> Mapping[bytes, Entry]:
        """The entries of a directory object; none for NO_ID. Raises CorruptError."""

    def put(self, entries: Iterable[Entry], /) -> ObjectId:
        """Store a directory object. Raises LimitError."""


@dataclass(frozen=True, slots=True)
class Rebased:
    """The directory object that results, and the conflicts by path, sorted."""

    root: ObjectId
    conflicts: Mapping[bytes, Conflict]


def rebase(trees: Trees, base: ObjectId, ours: ObjectId, theirs: ObjectId) -> Rebased:
    """Apply what changed from `base` to `ours` onto `theirs`. Raises CorruptError, LimitError."""
    work = _Rebase(trees, by_reference=not _have_links(trees, (ours, theirs)))
    top = work.directory(base, ours, theirs, b"")
    root = _Numbering(trees).put(top) if isinstance(top, dict) else top
    return Rebased(root, dict(sorted(work.conflicts.items())))


_Key: TypeAlias = tuple[str, int]
"""A side and the number of a group of hard links in it."""


class _Leaf(NamedTuple):
    """What the result has at a name: no directory, or one that is taken as it is."""

    entry: Entry
    keys: tuple[_Key, ...] = ()
    """The groups of hard links that it is in."""


class _Branch(NamedTuple):
    """A directory of the result that is no directory object yet."""

    entry: Entry
    entries: _Entries


_Entries: TypeAlias = "dict[bytes, _Leaf | _Branch]"


class _Rebase:
    """One rebase."""

    def __init__(self, trees: Trees, *, by_reference: bool) -> None:
        """With `by_reference`, a directory that one side alone changed is taken as the object that it is: groups of
        hard links must not be numbered anew then."""
        self._trees = trees
        self._by_reference = by_reference
        self.conflicts: dict[bytes, Conflict] = {}

    def directory(
        self, base: ObjectId, ours: ObjectId, theirs: ObjectId, path: bytes, depth: int = 0
    ) -> _Entries | ObjectId:
        """What results of a directory that is there on both sides; NO_ID stands for an empty one."""
        if depth > limits.PATH_DEPTH:
            raise LimitError(f"more than {limits.PATH_DEPTH} directories deep")
        if self._by_reference and theirs in (base, ours):
            return ours
        if self._by_reference and ours == base:
            return theirs
        b, o, t = map(self._trees.load, (base, ours, theirs))
        found: _Entries = {}
        for name in sorted(o.keys() | t.keys()):
            place = path + b"/" + name if path else name
            taken = self._entry(b.get(name), o.get(name), t.get(name), place, depth)
            if taken is not None:
                found[name] = taken
        return found

    def _entry(
        self, base: Entry | None, ours: Entry | None, theirs: Entry | None, path: bytes, depth: int
    ) -> _Leaf | _Branch | None:
        below = base.child if _is_directory(base) else NO_ID
        if _is_directory(ours) and _is_directory(theirs):
            attributes = _merged_attributes(base, ours, theirs)[0]
            return self._branch(replace(ours, attributes=attributes), below, ours.child, theirs.child, path, depth)
        if _same(ours, base):
            return self._whole(theirs, ours, theirs, path, depth)
        if _same(theirs, base) or _same(ours, theirs):
            return self._whole(ours, ours, theirs, path, depth)
        if ours is None:
            if not (_is_directory(theirs) and theirs.child == below):
                self.conflicts[path] = Conflict.REMOVED_HERE
            return None
        if theirs is None:
            if not _is_directory(ours):
                self.conflicts[path] = Conflict.REMOVED_THERE
            elif _is_directory(base):
                kept = self._branch(ours, below, ours.child, NO_ID, path, depth)
                return kept if isinstance(kept, _Leaf) or kept.entries else None
            return self._whole(ours, ours, None, path, depth)
        if _is_directory(ours) or _is_directory(theirs):
            self.conflicts[path] = Conflict.TYPE
            return self._whole(ours, ours, None, path, depth)
        return self._file(base, ours, theirs, path)

    def _file(self, base: Entry | None, ours: Entry, theirs: Entry, path: bytes) -> _Leaf:
        """Both sides have a file (or link, ...) that is not the same; at least one of them differs from the base."""
        if base is not None and _content(ours) == _content(base):
            taken = theirs
        elif _content(ours) == _content(theirs) or (base is not None and _content(theirs) == _content(base)):
            taken = ours
        else:
            self.conflicts[path] = Conflict.CONTENT
            return _leaf(ours, ours, None)
        attributes, clash = _merged_attributes(base, ours, theirs)
        if clash:
            self.conflicts[path] = Conflict.ATTRIBUTES
        times = taken.attributes
        attributes = replace(attributes, mtime_ns=times.mtime_ns, ctime_ns=times.ctime_ns)
        return _leaf(replace(taken, attributes=attributes), ours, theirs)

    def _whole(
        self, entry: Entry | None, ours: Entry | None, theirs: Entry | None, path: bytes, depth: int
    ) -> _Leaf | _Branch | None:
        """An entry of one side as it is; its groups are also those of the other side where that has the same."""
        if entry is None:
            return None
        if not _is_directory(entry):
            return _leaf(entry, ours, theirs)
        if self._by_reference:
            return _Leaf(entry)
        is_ours = entry is ours
        sides = (NO_ID, entry.child, NO_ID) if is_ours else (NO_ID, NO_ID, entry.child)
        return self._branch(entry, *sides, path, depth)

    def _branch(
        self, entry: Entry, base: ObjectId, ours: ObjectId, theirs: ObjectId, path: bytes, depth: int
    ) -> _Leaf | _Branch:
        found = self.directory(base, ours, theirs, path, depth + 1)
        if isinstance(found, dict):
            return _Branch(entry, found)
        return _Branch(entry, {}) if found == NO_ID else _Leaf(replace(entry, child=found))


class _Numbering:
    """Makes directory objects of a result: names that are one file on a side are one in the result, if they still have
    the same contents and attributes there."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._joined: dict[_Key, _Key] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._members: Counter[tuple[object, ...]] = Counter()

    def put(self, top: _Entries) -> ObjectId:
        """The directory object of a result."""
        leaves = [leaf for leaf in _leaves(top) if leaf.keys]
        for leaf in leaves:
            for key in leaf.keys[1:]:
                self._joined[self._first(key)] = self._first(leaf.keys[0])
        self._members.update(self._group(leaf) for leaf in leaves)
        return self._put(top)

    def _first(self, key: _Key) -> _Key:
        while (other := self._joined.get(key, key)) != key:
            key = other
        return key

    def _group(self, leaf: _Leaf) -> tuple[object, ...]:
        entry = leaf.entry
        return self._first(leaf.keys[0]), _content(entry), repr(entry.attributes)

    def _put(self, entries: _Entries) -> ObjectId:
        return self._trees.put(self._entry(one) for one in entries.values())

    def _entry(self, one: _Leaf | _Branch) -> Entry:
        if isinstance(one, _Branch):
            return replace(one.entry, child=self._put(one.entries))
        if not one.keys:
            return one.entry
        group = self._group(one)
        number = self._numbers.setdefault(group, len(self._numbers) + 1) if self._members[group] > 1 else 0
        return replace(one.entry, link_group=number)


def _leaves(entries: _Entries) -> Iterator[_Leaf]:
    for one in entries.values():
        if isinstance(one, _Branch):
            yield from _leaves(one.entries)
        else:
            yield one


def _leaf(entry: Entry, ours: Entry | None, theirs: Entry | None) -> _Leaf:
    sides = (("ours", ours), ("theirs", theirs))
    groups = [(side, one) for side, one in sides if one is not None and _content(one) == _content(entry)]
    return _Leaf(entry, tuple((side, one.link_group) for side, one in groups if one.link_group))


def _is_directory(entry: Entry | None) -> TypeGuard[Entry]:
    return entry is not None and entry.type is EntryType.DIRECTORY


def _content(entry: Entry) -> tuple[EntryType, ObjectId, bytes, int]:
    return entry.type, entry.child, entry.target, entry.size


def _bits(attributes: Attributes) -> tuple[int, int, int, Mapping[bytes, bytes]]:
    return attributes.mode, attributes.uid, attributes.gid, dict(attributes.xattrs)


def _same(left: Entry | None, right: Entry | None) -> bool:
    """Whether nothing differs but times and numbers of link groups."""
    if left is None or right is None:
        return left is right
    return _content(left) == _content(right) and _bits(left.attributes) == _bits(right.attributes)


def _merged_attributes(base: Entry | None, ours: Entry, theirs: Entry) -> tuple[Attributes, bool]:
    """Each attribute of whoever changed it, ours where both did; and whether both changed one, differently."""
    o, t = ours.attributes, theirs.attributes
    b = base.attributes if base is not None and base.type is ours.type is theirs.type else None
    clash = False

    def pick(before: object, here: object, there: object) -> bool:
        """Whether ours counts."""
        nonlocal clash
        if here == there or (b is not None and before == here):
            return False
        clash = clash or b is None or before != there
        return True

    xattrs = {}
    for name in o.xattrs.keys() | t.xattrs.keys():
        here, there = o.xattrs.get(name), t.xattrs.get(name)
        value = here if pick(b.xattrs.get(name) if b else None, here, there) else there
        if value is not None:
            xattrs[name] = value
    numbers: dict[str, int] = {}
    for field in ("mode", "uid", "gid"):
        here, there = getattr(o, field), getattr(t, field)
        numbers[field] = here if pick(getattr(b, field, None), here, there) else there
    times = o if b is None or o.mtime_ns != b.mtime_ns else t
    return Attributes(**numbers, mtime_ns=times.mtime_ns, ctime_ns=times.ctime_ns, xattrs=xattrs), clash


def _have_links(trees: Trees, roots: Iterable[ObjectId]) -> bool:
    """Whether there are groups of hard links in the trees of directory objects."""
    todo = list(roots)
    seen = set(todo)
    while todo:
        for entry in trees.load(todo.pop()).values():
            if entry.link_group:
                return True
            if _is_directory(entry) and entry.child not in seen:
                seen.add(entry.child)
                todo.append(entry.child)
    return False
