"""Objects that are made durable without a name: what protects them, and until when."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import LeaseLostError
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, BytesSource, Entry, EntryType, Kind, ObjectId
from tests.store.kit import noise, packs, publish, series


def read(store: Store, recipe: ObjectId, size: int) -> bytes:
    return store.open_file(Entry(b"f", EntryType.FILE, Attributes(0o644), size, recipe)).read(0, size)


def test_what_is_complete_is_there_for_others_and_for_a_new_index(store: Store) -> None:
    with store.ingest() as ingest:
        one, _, _ = ingest.put_file(BytesSource(noise(1)))
        ingest.complete([(Kind.RECIPE, one)])
        with Store.open(store.path, index_path=Path(store.path).parent / "other.sqlite") as other:
            assert read(other, one, 20_000) == noise(1)
        two, _, _ = ingest.put_file(BytesSource(noise(2)))
        ingest.complete([(Kind.RECIPE, one), (Kind.RECIPE, two)])
    assert len(packs(store)) == 2
    assert read(store, two, 20_000) == noise(2)
    assert not store.names().bound()


def test_nothing_goes_before_the_ingest_is_closed_and_all_after_it(store: Store) -> None:
    with Store.open(store.path, write=True) as other:
        with store.ingest() as ingest:
            one, _, _ = ingest.put_file(BytesSource(noise(1)))
            ingest.complete([(Kind.RECIPE, one)])
            collect(other, wait_seconds=0)
            collect(other, wait_seconds=0)
            assert read(store, one, 20_000) == noise(1)
        collect(other, wait_seconds=0)
        store.names()
        collect(other)
        assert not packs(store)


def test_complete_stores_again_what_was_condemned_meanwhile(store: Store) -> None:
    files = series(4)
    for number, data in enumerate(files[:3]):
        publish(store, f"run/{number}", {"w": data})
    old = packs(store)
    store.log.forget([(f"run/{number}", 1) for number in range(3)])
    with Store.open(store.path, write=True) as other, store.ingest() as ingest:
        known, size, _ = ingest.put_file(BytesSource(files[2]))
        new, _, stats = ingest.put_file(BytesSource(files[3]))
        assert stats.delta_bytes > 0
        directory = ingest.put_directory([Entry(b"w", EntryType.FILE, Attributes(0o644), size, new)])
        assert collect(other).waiting_packs == 3, "condemned, but not deleted while the ingest lives"
        ingest.complete([(Kind.RECIPE, known), (Kind.DIRECTORY, directory), (Kind.RECIPE, NO_ID)])
        for pack in old:
            store.backend.delete(f"packs/{pack}.pack")
            store.index.drop_pack(pack)
        store.packs.close()
        assert read(store, known, size) == files[2]
        assert read(store, store.directory(directory)[b"w"].child, size) == files[3]
        assert max(place.depth for place in store.index.iterate()) <= limits.CHAIN_DEPTH


def test_a_process_that_was_taken_for_dead_completes_nothing(store: Store) -> None:
    with store.ingest() as ingest:
        one, _, _ = ingest.put_file(BytesSource(noise(1)))
        for lease in (Path(store.path) / "leases").iterdir():
            lease.unlink()
        with pytest.raises(LeaseLostError):
            ingest.complete([(Kind.RECIPE, one)])
