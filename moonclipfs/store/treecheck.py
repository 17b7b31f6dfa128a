"""Verifying trees: what all kept versions refer to, as far as it can be read, and which files something affects."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from moonclipfs.errors import MoonclipError
from moonclipfs.store.problems import Problem, ProblemKind
from moonclipfs.store.reachable import PackTable
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Entry, EntryType, ObjectId, Version


@dataclass(slots=True)
class Trees:
    """What trees refer to. `unreadable` are directories and recipes that cannot be read, and why."""

    needed: set[ObjectId] = field(default_factory=set)
    unreadable: dict[ObjectId, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def name_of(version: Version, path: bytes = b"") -> str:
    """NAME@N or NAME@N/PATH, for messages."""
    snapshot = f"{version.path}@{version.number}"
    return f"{snapshot}/{os.fsdecode(path)}" if path else snapshot


def read_trees(store: Store, versions: list[Version], table: PackTable) -> Trees:
    """Read every directory and recipe once, and check that recipes stay inside their objects."""
    found = Trees()
    for version in versions:
        todo = [(b"", store.root_entry(version))]
        while todo:
            path, entry = todo.pop()
            if entry.child == NO_ID or entry.child in found.needed:
                continue
            found.needed.add(entry.child)
            try:
                if entry.type is EntryType.DIRECTORY:
                    prefix = path + b"/" if path else b""
                    todo += [(prefix + name, child) for name, child in store.directory(entry.child).items()]
                elif entry.type is EntryType.FILE:
                    _read_recipe(store, name_of(version, path), entry, table, found)
            except MoonclipError as error:
                found.unreadable[entry.child] = str(error)
    return found


def _read_recipe(store: Store, name: str, entry: Entry, table: PackTable, found: Trees) -> None:
    extents = [extent for extent in store.recipe(entry).extents if extent.object_id is not None]
    ids = [extent.object_id or NO_ID for extent in extents]
    found.needed.update(ids)
    for extent, raw_length in zip(extents, table.raw_lengths(ids), strict=True):
        if raw_length is not None and extent.object_offset + extent.length > raw_length:
            message = f"its recipe refers to byte {extent.object_offset + extent.length} of an object of {raw_length}"
            found.problems.append(Problem(ProblemKind.TREE, name, message, [name]))
            return


def affected_files(
    store: Store, versions: list[Version], broken: Container[ObjectId]
) -> Iterator[tuple[ObjectId, str]]:
    """Yield (broken object, name) for every file that needs one of `broken`, and every directory that is one.

    A directory's name ends in a slash, and stands for all that is below it.
    """
    for version in versions:
        todo: list[tuple[bytes, Entry]] = [(b"", store.root_entry(version))]
        while todo:
            path, entry = todo.pop()
            name = name_of(version, path)
            if entry.type is EntryType.DIRECTORY:
                if entry.child in broken:
                    yield entry.child, name + "/"
                    continue
                prefix = path + b"/" if path else b""
                todo += [(prefix + inner, child) for inner, child in store.directory(entry.child).items()]
            elif entry.type is EntryType.FILE and entry.child != NO_ID:
                if entry.child in broken:
                    yield entry.child, name
                    continue
                for object_id in store.recipe(entry).object_ids():
                    if object_id in broken:
                        yield object_id, name
