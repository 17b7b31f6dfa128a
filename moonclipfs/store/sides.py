"""The two sides of a comparison: files by relative path, out of a snapshot or from the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from moonclipfs.errors import CorruptError
from moonclipfs.formats.layout import Layout, opaque
from moonclipfs.formats.sniff import parse
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.scan import FileSource, Found, scan
from moonclipfs.store.store import Store
from moonclipfs.store.target import XATTR_OBJECT
from moonclipfs.types import BytesSource, Entry, EntryType, Source, Version


class SideFile:
    """One path of a side: a file, or a symlink with its `target`. `recipe` is None where only the bytes can tell."""

    def __init__(
        self,
        type_: EntryType,
        source: Callable[[], Source],
        *,
        target: bytes = b"",
        recipe: Recipe | None = None,
        layout: Callable[[Source], Layout] = parse,
    ) -> None:
        self.type = type_
        self.target = target
        self.recipe = recipe
        self._source = source
        self._layout = layout

    @cached_property
    def source(self) -> Source:
        """The bytes; empty for anything but a file."""
        return self._source()

    @cached_property
    def layout(self) -> Layout:
        """The structure of the bytes."""
        return self._layout(self.source) if self.type is EntryType.FILE else opaque(0, "not a file")


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared: `files` by relative path; `single` when a file was named rather than a directory."""

    files: dict[bytes, SideFile]
    single: bool = False


def store_side(store: Store, version: Version, path: bytes = b"") -> Side:
    """A snapshot, or a directory or file inside it. Raises NotFoundError for a path that is not there."""
    entry = store.lookup(version, path)
    if entry.type is not EntryType.DIRECTORY:
        return Side({entry.name: entry_side(store, entry)}, single=True)
    below = path + b"/" if path else b""
    return Side(
        {
            found[len(below) :]: entry_side(store, inner)
            for found, inner in store.walk(version)
            if inner.type is not EntryType.DIRECTORY and found.startswith(below)
        }
    )


def entry_side(store: Store, entry: Entry) -> SideFile:
    """What is no directory in a snapshot."""
    if entry.type is not EntryType.FILE:
        return SideFile(entry.type, _no_bytes, target=entry.target)
    return SideFile(
        entry.type,
        partial(store.open_file, entry),
        recipe=store.recipe(entry),
        layout=lambda _source: store.layout(entry),
    )


RecipeOf = Callable[[Found], Recipe | None]
"""What is known of the extents of a file on the disk, which then is in a mount."""


def path_side(path: Path, recipe_of: RecipeOf = lambda found: None) -> Side:
    """A file or directory on the disk. Raises NotFoundError, PermissionDeniedError, or UsageError for a device."""
    top = scan(path)
    if top.type is not EntryType.DIRECTORY:
        return Side({top.name: _on_disk(top, recipe_of)}, single=True)
    return Side(dict(_below(top, b"", recipe_of)))


def mounted_recipes(store: Store) -> RecipeOf:
    """What a mount of a store tells of files that it has stored as they are."""

    def recipe_of(found: Found) -> Recipe | None:
        try:
            recipe = store.recipe_object(bytes.fromhex(os.getxattr(found.path, XATTR_OBJECT).decode()))
        except (OSError, ValueError, CorruptError):
            return None  # changed since it was stored, or stored just now: its bytes tell
        return recipe if recipe.size == found.size else None

    return recipe_of


def _below(directory: Found, prefix: bytes, recipe_of: RecipeOf) -> Iterator[tuple[bytes, SideFile]]:
    for child in directory.children:
        if child.type is EntryType.DIRECTORY:
            yield from _below(child, prefix + child.name + b"/", recipe_of)
        else:
            yield prefix + child.name, _on_disk(child, recipe_of)


def _on_disk(found: Found, recipe_of: RecipeOf) -> SideFile:
    if found.type is not EntryType.FILE:
        return SideFile(found.type, _no_bytes, target=found.target)
    return SideFile(found.type, partial(FileSource, found), recipe=recipe_of(found))


def _no_bytes() -> Source:
    return BytesSource(b"")
