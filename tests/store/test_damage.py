"""What is damaged costs only itself: later saves go on, and a full disk gets back what a failed save had stored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MissingObjectError, NoSpaceError
from moonclipfs.store.add import add
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.packs import pack_key
from moonclipfs.store.publish import Ingest
from moonclipfs.store.repack import copy_objects
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Kind
from tests.store import kit

SERIES = kit.series(3, 400_000)


def save(store: Store, step: int, root: Path) -> None:
    directory = root / f"in{step}"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(SERIES[step])
    add(store, [directory], name=f"run/step-{step}")


def flip(store: Store, pack: str, offset: int) -> None:
    path = Path(store.path) / pack_key(pack)
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damage(store: Store, what: str) -> None:
    """Damage the snapshot `run/step-0`."""
    entry = store.lookup(store.resolve("run/step-0"), b"model.safetensors")
    victim = entry.child if what == "recipe" else store.recipe(entry).object_ids()[0]
    if what == "directory":
        victim = store.resolve("run/step-0").root
    location = store.index.find(victim)
    assert location is not None
    if what == "pack":
        (Path(store.path) / pack_key(location.pack)).unlink()
    else:
        flip(store, location.pack, location.offset + location.encoded_length - 1)


@pytest.mark.parametrize("what", ["object", "recipe", "directory", "pack"])
def test_a_damaged_predecessor_does_not_stop_the_next_save(
    what: str, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    path = tmp_path / "store"
    Store.create(path).close()
    with Store.open(path, write=True, index_path=tmp_path / "index") as store:
        save(store, 0, tmp_path)
        damage(store, what)
    expect_log(r"so (no tensor is stored as a delta against it|nothing is stored (as a delta )?against it)")
    with Store.open(path, write=True, index_path=tmp_path / "index") as store:
        save(store, 1, tmp_path)
        assert kit.contents(store, "run/step-1") == {"model.safetensors": SERIES[1]}
        if what in ("object", "pack"):
            assert {location.base for location in store.index.iterate()} == {NO_ID}
        save(store, 2, tmp_path)
        assert kit.contents(store, "run/step-2") == {"model.safetensors": SERIES[2]}
        with pytest.raises((CorruptError, MissingObjectError)):
            kit.contents(store, "run/step-0")


def test_every_damaged_object_of_a_pack_is_read_from_its_other_copy(store: Store) -> None:
    files = {"x": kit.noise(1, 600_000), "y": kit.noise(2, 600_000)}
    version = kit.publish(store, "a", files)
    entries = {name: store.lookup(version, name.encode()) for name in files}
    ids = {object_id for entry in entries.values() for object_id in store.recipe(entry).object_ids()}
    locations = [location for location in store.index.iterate() if location.object_id in ids]
    copy_objects(store, locations)
    readers = {name: store.open_file(entry) for name, entry in entries.items()}
    for name in files:
        assert readers[name].read(0, 100) == files[name][:100]  # the heads are known, and of the first copy
    for location in locations:
        flip(store, location.pack, location.offset + location.encoded_length - 1)
    for name, data in files.items():
        assert readers[name].read(0, len(data)) == data


@pytest.mark.parametrize("cores", [1, 4, 256])
def test_workers_are_bounded_by_memory_not_only_by_cores(
    cores: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    with store.ingest() as ingest:
        workers = ingest._pool._max_workers
    assert 1 <= workers <= cores
    assert workers * 4 * limits.OBJECT_BYTES <= limits.INGEST_BYTES


def test_a_full_disk_gets_back_what_a_failed_add_had_stored(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.publish(store, "before", {"f": kit.noise(0)})
    packs = kit.packs(store)
    source = tmp_path / "in"
    source.mkdir()
    for number in range(6):
        (source / f"f{number}").write_bytes(kit.noise(number + 1, 300_000))
    seen = []

    def full(self: Ingest, *_: object) -> None:
        self._packs_sink.flush()
        seen.append(kit.packs(store) - packs)
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(limits, "PACK_BYTES", 500_000)
    monkeypatch.setattr(Ingest, "publish", full)
    with pytest.raises(NoSpaceError):
        add(store, [source], name="big")
    assert len(seen[0]) > 1
    assert kit.packs(store) == packs
    assert kit.contents(store, "before") == {"f": kit.noise(0)}
    assert {location.kind for location in store.index.iterate()} == set(Kind)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("gc_knows", [True, False])
@pytest.mark.parametrize("part", ["base", "delta", "recipe", "directory"])
def test_what_verify_found_damaged_is_stored_anew_by_the_next_add(
    store: Store, tmp_path: Path, part: str, gc_knows: bool, order: tuple[int, int]
) -> None:
    """The originals are at hand: adding them again heals every snapshot, and gc keeps the good copies, even on
    another host, whose index has not heard of the damage.
    """
    for step in range(2):
        save(store, step, tmp_path)
    step = 1 if part == "delta" else 0
    version = store.resolve(f"run/step-{step}")
    entry = store.lookup(version, b"model.safetensors")
    victim = {"recipe": entry.child, "directory": version.root}.get(part) or store.recipe(entry).object_ids()[0]
    location = store.index.find(victim)
    assert location is not None
    assert (location.depth == 1) is (part == "delta")
    flip(store, location.pack, location.offset + location.encoded_length - 1)
    store.close()
    with Store.open(store.path, write=True) as other:
        assert not verify(other).ok
        assert other.index.find(victim, usable=True) is None
        other.index.rebuild()  # that does not forget the damage
    with Store.open(store.path, write=True) as other:
        for step in order:
            add(other, [tmp_path / f"in{step}"], name=f"again/step-{step}")
    with Store.open(store.path, write=True) as other:
        assert_healed(other)
        good = other.index.find(victim, usable=True)
        assert good is not None
        assert good.pack != location.pack
    with Store.open(store.path, write=True, index_path=None if gc_knows else tmp_path / "gc") as other:
        collect(other)
    with Store.open(store.path, write=True, index_path=tmp_path / "fresh") as other:
        assert_healed(other)
        assert not [one for problem in verify(other).problems for one in problem.affected]


def assert_healed(store: Store) -> None:
    for step in range(2):
        assert kit.contents(store, f"run/step-{step}") == {"model.safetensors": SERIES[step]}
        assert kit.contents(store, f"again/step-{step}") == {"model.safetensors": SERIES[step]}


def test_what_is_found_whole_again_is_referred_to_again(store: Store) -> None:
    """As when a pack was replaced by a good copy of it."""
    version = kit.publish(store, "a", {"f": kit.noise(1)})
    location = store.index.find(store.recipe(store.lookup(version, b"f")).object_ids()[0])
    assert location is not None
    for whole in (False, True):
        flip(store, location.pack, location.offset + 100)
        store.packs.close()
        with Store.open(store.path, write=True) as other:
            assert verify(other).ok is whole
            assert (other.index.find(location.object_id, usable=True) == location) is whole
