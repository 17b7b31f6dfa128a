"""gc: what is needed stays whatever happens, and what is not goes."""

from __future__ import annotations

from moonclipfs.store.gc import collect, preview
from moonclipfs.store.store import Store
from tests.store.kit import contents, noise, packs, publish


def test_nothing_to_do(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    before = packs(store)
    report = collect(store)
    assert packs(store) == before
    assert (report.deleted_packs, report.copied_bytes, report.dead_bytes) == (0, 0, 0)
    assert report.live_objects == 3


def test_a_forgotten_snapshot_goes_and_what_it_shared_stays(store: Store) -> None:
    publish(store, "a", {"f": noise(1), "shared": noise(2)})
    publish(store, "b", {"g": noise(3), "shared": noise(2)})
    publish(store, "c", {"h": noise(4)})
    store.log.forget([("a", 1), ("c", 1)])
    expected = preview(store)
    report = collect(store)
    assert contents(store, "b") == {"g": noise(3), "shared": noise(2)}
    assert report.deleted_packs == expected.deleted_packs == 2
    assert report.copied_bytes > 20_000
    assert report.waiting_packs == 0
    assert (report.deleted_bytes, report.live_objects) == (expected.deleted_bytes, expected.live_objects)
    assert collect(store).freed_bytes == 0
    assert not store.names().condemned().keys() & packs(store)


def test_removed_versions_are_kept_until_forgotten(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    publish(store, "a", {"f": noise(2)})
    store.log.unbind(["a"])
    assert collect(store).deleted_packs == 0
    assert contents(store, "a@1") == {"f": noise(1)}
    assert contents(store, "a@2") == {"f": noise(2)}
    store.log.forget([("a", 1)])
    assert collect(store).deleted_packs == 1
    assert contents(store, "a@2") == {"f": noise(2)}
