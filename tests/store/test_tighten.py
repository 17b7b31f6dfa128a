"""Objects that were stored plain are encoded later: nothing is lost or disturbed, and the store is as small as ever."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moonclipfs.codec.encoded import decode
from moonclipfs.codec.plain import encode_plain
from moonclipfs.errors import CorruptError
from moonclipfs.store import tighten as tightening
from moonclipfs.store.bases import AT_ONCE, NEAR, QUICK, Effort
from moonclipfs.store.check import verify
from moonclipfs.store.forget import forget
from moonclipfs.store.gc import collect
from moonclipfs.store.optimize import optimize
from moonclipfs.store.sinks import Hints
from moonclipfs.store.store import Store
from moonclipfs.store.tighten import Tightened, plain_objects, tighten
from moonclipfs.types import Attributes, BytesSource, DType, Entry, EntryType, Version

ELEMENTS = 200_000


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def weights(number: int) -> bytes:
    """A tensor that drifts a little with each number."""
    start = np.random.default_rng(1).normal(size=ELEMENTS).astype(np.float32)
    for step in range(number):
        start = start + np.random.default_rng(100 + step).normal(size=ELEMENTS).astype(np.float32) * np.float32(1e-5)
    return start.tobytes()


def file(number: int) -> bytes:
    """A safetensors file of it."""
    header = f'{{"w":{{"dtype":"F32","shape":[{ELEMENTS}],"data_offsets":[0,{4 * ELEMENTS}]}}}}'.encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + weights(number)


def save(store: Store, number: int, effort: Effort = AT_ONCE) -> Version:
    with store.ingest() as ingest:
        ingest.effort = effort
        recipe, size, _ = ingest.put_file(BytesSource(file(number)))
        entry = Entry(b"m.safetensors", EntryType.FILE, Attributes(0o644, 0, 0, 0, 0), size, recipe)
        return ingest.publish(f"r/{number}", ingest.put_directory([entry]), {})


def read(store: Store, version: Version) -> bytes:
    entry = store.lookup(version, b"m.safetensors")
    return store.open_file(entry).read(0, entry.size)


def depths(store: Store, number: int) -> set[int]:
    version = store.names().bound()[f"r/{number}"]
    recipe = store.lookup(version, b"m.safetensors").child
    ids = store.recipe_object(recipe).object_ids()
    return {one.depth for one in store.index.find_many(ids, usable=True).values()}


def tightened(store: Store, pool: ThreadPoolExecutor, version: Version, effort: Effort = QUICK) -> Tightened:
    return tighten(store, lambda: plain_objects(store, [version]), pool, effort)


def check(store: Store, count: int) -> None:
    bound = store.names().bound()
    for number in range(count):
        assert read(store, bound[f"r/{number}"]) == file(number)
    assert verify(store).problems == []


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("length", [0, 1, 262_144, 262_145, 1_000_003])
def test_a_plain_object_is_one_that_any_reader_decodes(dtype: DType, length: int) -> None:
    raw = np.random.default_rng(length).bytes(length)
    encoded = encode_plain(raw, dtype)
    assert decode(encoded) == raw and len(encoded) <= length + 32 + 13 * (length // 65_536 + 1)


def test_the_store_is_as_small_as_if_it_had_been_encoded_at_once(
    store: Store, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    versions = [save(store, number) for number in range(6)]
    assert all(depths(store, number) == {0} for number in range(6))
    for version in versions:
        done = tightened(store, pool, version, NEAR if version is versions[-1] else QUICK)
        assert done.objects == 1 and done.left == 0
    collect(store)
    check(store, 6)
    assert [depths(store, number) for number in range(6)] == [{0}, {1}, {2}, {2}, {1}, {1}]
    assert plain_objects(store, versions) == []
    with Store.create(tmp_path / "other") as other:
        for number in range(6):
            save(other, number, QUICK)
        assert size(store) <= 1.02 * size(other), "one link for the last costs a little"


def size(store: Store) -> int:
    return sum(info.size for info in store.backend.list("packs/"))


def test_nothing_is_stored_against_what_is_plain(store: Store, pool: ThreadPoolExecutor) -> None:
    """It may get a base later that leads back."""
    first = save(store, 0)
    save(store, 1, QUICK)
    assert depths(store, 1) == {0}
    tightened(store, pool, first)
    save(store, 2, QUICK)
    assert depths(store, 0) == {1} and depths(store, 2) == {2}
    collect(store)
    check(store, 3)


def test_gc_keeps_the_encoded_copy_and_drops_the_plain_one(store: Store, pool: ThreadPoolExecutor) -> None:
    save(store, 0, QUICK)
    version = save(store, 1)
    before = size(store)
    tightened(store, pool, version)
    assert size(store) > before, "the plain one goes by gc only"
    collect(store)
    assert size(store) < before - 4 * ELEMENTS * 0.3
    assert plain_objects(store, [version]) == [] and depths(store, 1) == {1}
    check(store, 2)


def test_gc_alone_leaves_what_is_plain(store: Store) -> None:
    save(store, 0)
    version = save(store, 1)
    collect(store)
    assert len(plain_objects(store, [version])) == 1
    check(store, 2)


def test_a_run_that_is_told_to_stop_is_gone_on_with(store: Store, pool: ThreadPoolExecutor) -> None:
    version = save(store, 0)
    done = tighten(store, lambda: plain_objects(store, [version]), pool, QUICK, lambda: False)
    assert done == Tightened(left=1, stopped=True)
    assert tightened(store, pool, version).objects == 1
    assert tightened(store, pool, version).objects == 0, "nothing is done twice"


def test_a_base_that_is_forgotten_meanwhile_leaves_what_was_stored_against_it(
    store: Store, pool: ThreadPoolExecutor
) -> None:
    save(store, 0, QUICK)
    version = save(store, 1)
    tightened(store, pool, version)
    forget(store, [store.names().bound()["r/0"]])
    collect(store)
    assert read(store, store.names().bound()["r/1"]) == file(1) and verify(store).problems == []


def test_optimize_encodes_what_is_plain(store: Store) -> None:
    save(store, 0, QUICK)
    versions = [save(store, number) for number in range(1, 3)]
    dry = optimize(store, dry_run=True)
    report = optimize(store)
    assert dry.objects == report.objects == 2 and report.gc is not None
    assert plain_objects(store, versions) == [] and depths(store, 2) == {1}
    check(store, 3)


def test_damage_is_passed_over(store: Store, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    version = save(store, 0)
    monkeypatch.setattr(tightening, "object_id", lambda *_: b"\1" * 32)
    done = tightened(store, pool, version)
    assert (done.objects, done.left) == (0, 1)
    check(store, 1)


def test_a_copy_that_does_not_read_back_is_told_and_loses_nothing(
    store: Store, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = save(store, 0)

    def broken(*_: object) -> bytes:
        raise CorruptError("the disk lies")

    with monkeypatch.context() as patch, pytest.raises(CorruptError, match="the disk lies"):
        patch.setattr(store.packs, "read", broken)
        patch.setattr(
            tightening._Work,
            "_encode",
            lambda work, old: work._sink.put(
                old.kind, weights(0), old.object_id, Hints(old.dtype, old.label, old.sketch)
            ),
        )
        tightened(store, pool, version)
    check(store, 1)
