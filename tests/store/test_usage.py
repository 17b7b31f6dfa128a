"""Usage: exact, beside a plain count over every object."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest

from moonclipfs.store.forget import forget
from moonclipfs.store.gc import collect
from moonclipfs.store.packfile import ENTRY, RECORD_BYTES
from moonclipfs.store.packs import Location
from moonclipfs.store.recipes import decode_recipe
from moonclipfs.store.repack import copy_objects
from moonclipfs.store.store import Store
from moonclipfs.store.usage import SetUsage, du, stats
from moonclipfs.types import NO_ID, EntryType, Kind, ObjectId, Version
from tests.store.kit import noise, publish, series


class Count:
    """What versions need, the slow way: one dictionary and recursion."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.places: dict[ObjectId, Location] = {place.object_id: place for place in store.index.iterate()}

    def needed(self, versions: Iterable[Version]) -> set[ObjectId]:
        found: set[ObjectId] = set()

        def add(object_id: ObjectId) -> None:
            found.add(object_id)
            if self.places[object_id].base != NO_ID:
                add(self.places[object_id].base)

        for version in versions:
            add(version.root)
            for _, entry in self.store.walk(version):
                if entry.child == NO_ID:
                    continue
                add(entry.child)
                if entry.type is EntryType.FILE:
                    recipe = decode_recipe(self.store.objects.load(entry.child, Kind.RECIPE))
                    for object_id in recipe.object_ids():
                        add(object_id)
        return found

    def bytes(self, ids: Iterable[ObjectId]) -> int:
        return sum(self.places[each].encoded_length + RECORD_BYTES + ENTRY.itemsize for each in ids)


@pytest.fixture
def filled(store: Store) -> Store:
    """Lines of deltas, shared files, holes, literals, a removed version, and dead objects."""
    for number, data in enumerate(series(5)):
        publish(store, f"run/{number}", {"model.safetensors": data, "same": noise(1), "small": b"step %d" % number})
    publish(store, "run/0", {"other": noise(2), "zeros": bytes(2_000_000) + noise(3)})
    publish(store, "copy", {"model.safetensors": series(5)[2], "again": noise(2)})
    publish(store, "gone", {"f": noise(4), "same": noise(1)})
    publish(store, "dead", {"f": noise(5)})
    store.log.unbind(["gone"])
    store.log.forget([("dead", 1), ("run/1", 1)])
    return store


def test_du_is_exact(filled: Store) -> None:
    count = Count(filled)
    kept = list(filled.names().all_versions())
    for usage in du(filled, kept).versions:
        alone = count.needed([usage.version])
        others = count.needed(version for version in kept if version != usage.version)
        assert usage.stored == count.bytes(alone)
        assert usage.exclusive == count.bytes(alone - others)
        assert usage.shared == count.bytes(alone & others)
        assert usage.logical == sum(e.size for _, e in filled.walk(usage.version) if e.type is EntryType.FILE)


def test_what_a_set_frees_is_counted_for_the_set(filled: Store) -> None:
    count = Count(filled)
    kept = list(filled.names().all_versions())
    for size in (1, 2, 3):
        for some in combinations(kept, size):
            alone = count.needed(some) - count.needed(version for version in kept if version not in some)
            assert forget(filled, some, dry_run=True).exclusive == count.bytes(alone)
            together = du(filled, some)
            assert [usage.version for usage in together.versions] == list(some)
            assert together.exclusive == count.bytes(alone)
            assert together.stored == together.exclusive + together.shared == count.bytes(count.needed(some))
            assert together.logical == sum(usage.logical for usage in together.versions)


def test_forget_frees_what_the_dry_run_said(filled: Store) -> None:
    collect(filled)
    version = filled.resolve("run/4")
    said = forget(filled, [version], dry_run=True)
    done = forget(filled, [version])
    assert said.exclusive == done.exclusive
    assert said.gc.deleted_bytes == done.gc.deleted_bytes
    assert said.gc.live_bytes == done.gc.live_bytes


def test_stats_add_up(filled: Store) -> None:
    found = stats(filled)
    count = Count(filled)
    kept = list(filled.names().all_versions())
    files = [entry for version in kept for _, entry in filled.walk(version) if entry.type is EntryType.FILE]
    assert found.versions == len(kept)
    assert found.files == len(files)
    assert found.logical == sum(entry.size for entry in files)
    parts = (found.full, found.delta)
    assert found.logical == found.shared + found.holes + found.literals + sum(part.raw for part in parts)
    assert found.holes > 0
    assert found.literals > 0
    assert found.delta.objects > 0
    assert found.only_bases.objects > 0
    stored = [part.stored for part in (*parts, found.trees, found.only_bases)]
    assert sum(stored) == count.bytes(count.needed(kept))
    assert found.dead == count.bytes(count.places.keys() - count.needed(kept))
    assert found.pack_bytes == sum(stored) + found.dead + found.overhead
    assert sum(part.stored for part in found.dtypes.values()) == sum(part.stored for part in parts)
    assert set(found.dtypes) == {"BYTES", "F32"}


def test_copies_of_one_object_count_once(store: Store) -> None:
    """Two ingests that do not see each other store the same object twice: one is dead, and gc takes it."""
    publish(store, "a", {"f": noise(1)})
    used = stats(store)
    copy_objects(store, list(store.index.iterate()))
    found = stats(store)
    assert (found.trees, found.full) == (used.trees, used.full)
    assert found.dead == found.trees.stored + found.full.stored
    collect(store)
    assert stats(store).dead == 0


def test_an_empty_store(store: Store) -> None:
    assert du(store, []) == SetUsage([], 0, 0)
    assert stats(store).ratio == 0.0
