"""Verifying trees: what versions and layers refer to, as far as it can be read, and which files something affects."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from moonclipfs.errors import MoonclipError
from moonclipfs.store.problems import Problem, ProblemKind
from moonclipfs.store.reachable import PackTable
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Entry, EntryType, Kind, ObjectId, Version


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


class Top(NamedTuple):
    """Where something that is needed begins: the root of a version, or an object that the journal of a layer names."""

    name: str
    kind: Kind
    object_id: ObjectId


def top_of(version: Version) -> Top:
    """The root directory of a version."""
    return Top(name_of(version), Kind.DIRECTORY, version.root)


class _Node(NamedTuple):
    """An object that trees lead to; `entry` is what leads to it, None for a top."""

    path: bytes
    kind: Kind
    object_id: ObjectId
    entry: Entry | None = None

    def below(self, store: Store) -> Iterator[_Node]:
        """What a directory leads to. Raises CorruptError."""
        prefix = self.path + b"/" if self.path else b""
        for name, entry in store.directory(self.object_id).items():
            if entry.child != NO_ID:
                kind = Kind.DIRECTORY if entry.type is EntryType.DIRECTORY else Kind.RECIPE
                yield _Node(prefix + name, kind, entry.child, entry)

    def recipe(self, store: Store) -> Recipe:
        """The extents of a file. Raises CorruptError."""
        return store.recipe_object(self.object_id) if self.entry is None else store.recipe(self.entry)

    def name(self, top: Top) -> str:
        """For messages."""
        return f"{top.name}/{os.fsdecode(self.path)}" if self.path else top.name


def read_trees(store: Store, tops: Iterable[Top], table: PackTable) -> Trees:
    """Read every directory and recipe once, and check that recipes stay inside their objects."""
    found = Trees()
    for top in tops:
        todo = [_Node(b"", top.kind, top.object_id)]
        while todo:
            node = todo.pop()
            if node.object_id in found.needed:
                continue
            found.needed.add(node.object_id)
            try:
                if node.kind is Kind.DIRECTORY:
                    todo += node.below(store)
                elif node.kind is Kind.RECIPE:
                    _read_recipe(node.recipe(store), node.name(top), table, found)
            except MoonclipError as error:
                found.unreadable[node.object_id] = str(error)
    return found


def _read_recipe(recipe: Recipe, name: str, table: PackTable, found: Trees) -> None:
    extents = [extent for extent in recipe.extents if extent.object_id is not None]
    ids = [extent.object_id or NO_ID for extent in extents]
    found.needed.update(ids)
    for extent, raw_length in zip(extents, table.raw_lengths(ids), strict=True):
        if raw_length is not None and extent.object_offset + extent.length > raw_length:
            message = f"its recipe refers to byte {extent.object_offset + extent.length} of an object of {raw_length}"
            found.problems.append(Problem(ProblemKind.TREE, name, message, [name]))
            return


def affected_files(store: Store, tops: Iterable[Top], broken: Container[ObjectId]) -> Iterator[tuple[ObjectId, str]]:
    """Yield (broken object, name) for every file that needs one of `broken`, and every directory that is one.

    A directory's name ends in a slash, and stands for all that is below it.
    """
    for top in tops:
        todo = [_Node(b"", top.kind, top.object_id)]
        while todo:
            node = todo.pop()
            name = node.name(top)
            if node.object_id in broken:
                yield node.object_id, name + "/" if node.kind is Kind.DIRECTORY else name
            elif node.kind is Kind.DIRECTORY:
                todo += node.below(store)
            elif node.kind is Kind.RECIPE:
                for object_id in node.recipe(store).object_ids():
                    if object_id in broken:
                        yield object_id, name
