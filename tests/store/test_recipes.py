"""Recipes and directories: what a hostile one makes of itself in memory is bounded, and caches count it."""

from __future__ import annotations

import struct

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError
from moonclipfs.store.directories import directory_weight
from moonclipfs.store.recipes import decode_recipe
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, BytesSource, Entry, EntryType
from tests.store.kit import noise


def recipe(literals: bytes, extents: list[tuple[int, int]]) -> bytes:
    """A recipe of literals alone, (length, offset) each."""
    table = b"".join(struct.pack("<QIQ", length, 0xFFFFFFFE, offset) for length, offset in extents)
    size = sum(length for length, _ in extents) % (1 << 64)
    return struct.pack("<4sB3xQIII", b"MCRC", 1, size, 0, len(extents), len(literals)) + table + literals


def test_literal_bytes_belong_to_one_extent() -> None:
    """Else a recipe of a few KiB fills the memory."""
    whole = decode_recipe(recipe(b"abcd", [(1, 0), (3, 1)]))
    assert [extent.literal for extent in whole.extents] == [b"a", b"bcd"]
    for extents in ([(4, 0), (1, 3)], [(4, 0)] * 1000):
        with pytest.raises(CorruptError, match="share"):
            decode_recipe(recipe(b"abcd", extents))
    with pytest.raises(CorruptError, match="share"):
        decode_recipe(recipe(b"abcd", [((1 << 64) - 1, 0), (1, 0)]))


def test_cached_recipes_and_directories_weigh_what_they_hold(store: Store) -> None:
    value = b"v" * limits.XATTR_BYTES
    attributes = Attributes(0o644, xattrs={b"user.%d" % number: value for number in range(8)})
    with store.ingest() as ingest:
        child, size, _ = ingest.put_file(BytesSource(noise(1, limits.LITERAL_FILE_BYTES)))
        root = ingest.put_directory([Entry(b"f", EntryType.FILE, attributes, size, child)])
        version = ingest.publish("a", root, {})
    entries = store.directory(version.root)
    assert store._directories.weight == directory_weight(entries) >= 8 * limits.XATTR_BYTES // limits.KIB
    store.recipe(entries[b"f"])
    assert store._recipes.weight >= limits.LITERAL_FILE_BYTES // 256
