"""A layer's state as the fewest records that make it again: what a journal that is written anew begins with."""

from __future__ import annotations

from collections.abc import Iterator

from moonclipfs.layers.inodes import Inode, Lower
from moonclipfs.layers.records import Based, Counters, Record, Unbinding, Whole
from moonclipfs.layers.state import State
from moonclipfs.types import NO_ID, EntryType, Kind, ObjectId

Refs = list[tuple[Kind, ObjectId]]


def whole_records(state: State) -> Iterator[tuple[Record, Refs]]:
    """All own state but contents and captures. Under the lock of the layer, until the end."""
    yield Counters(state.inodes, state.generations, state.captures, state.change), []
    if state.based is not None:
        yield state.based, based_refs(state.based)
    others: list[Inode] = []
    todo = [state.root]
    while todo:
        inode = todo.pop()
        yield _whole(inode), _refs(inode)
        for child in inode.entries.values():
            (todo if child.is_directory else others).append(child)
    for inode in dict.fromkeys(others):
        yield _whole(inode), _refs(inode)
    for sequence, path in state.unbinding.items():
        yield Unbinding(path, sequence), []
    if state.moving is not None:
        yield state.moving, []


def based_refs(based: Based) -> Refs:
    """The objects that an overlay needs because of what it stands on."""
    return [(Kind.DIRECTORY, object_id) for object_id in dict.fromkeys((based.base, based.shown))]


def apply_whole(state: State, record: Whole) -> None:
    """Make an inode again, or the root as it was. Raises KeyError for a directory that is not there."""
    inode = state.root
    if record.number != inode.number:
        inode = Inode(record.number, EntryType(record.type), record.mode)
        state.take_over(inode)
    inode.mode, inode.uid, inode.gid = record.mode, record.uid, record.gid
    inode.atime_ns, inode.mtime_ns, inode.ctime_ns = record.atime_ns, record.mtime_ns, record.ctime_ns
    inode.xattrs, inode.target = dict(record.xattrs), record.target
    inode.size, inode.child, inode.group, inode.sealed = record.size, record.child, record.group, record.sealed
    inode.lower = Lower(*record.lower) if record.lower else None
    if inode.is_directory:
        inode.removed, inode.names_changed = set(record.removed), dict(record.names_changed)
    inode.changed, inode.below = record.changed, record.below
    for parent, name in record.links:
        state.attach(state.directory(parent), name, inode)


def _whole(inode: Inode) -> Whole:
    links = tuple((parent.number, name) for parent, name in inode.links)
    return Whole(
        inode.number, inode.type, inode.mode, inode.uid, inode.gid, inode.atime_ns, inode.mtime_ns, inode.ctime_ns,
        tuple(inode.xattrs.items()), inode.target, links, inode.size, inode.child, inode.group,
        () if inode.lower is None else tuple(inode.lower), tuple(inode.removed), tuple(inode.names_changed.items()),
        inode.changed, inode.below, inode.sealed,
    )  # fmt: skip


def _refs(inode: Inode) -> Refs:
    if inode.is_directory:
        return [] if inode.lower is None else [(Kind.DIRECTORY, inode.lower.directory)]
    return [] if inode.content is not None or inode.child == NO_ID else [(Kind.RECIPE, inode.child)]
