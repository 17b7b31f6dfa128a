"""Bases that only the dead need: what hangs on them is stored anew, and reads the same whatever happens meanwhile."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonclipfs import limits
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect, preview
from moonclipfs.store.packs import Location, pack_key
from moonclipfs.store.store import Store
from moonclipfs.types import ObjectId
from tests.store.kit import contents, in_order, noise, packs, publish, series


def tensor_of(store: Store, name: str, file: str = "m") -> ObjectId:
    """The object of a file of one tensor."""
    ids = store.recipe(store.lookup(store.resolve(name), file.encode())).object_ids()
    (found,) = [one for one in ids if (place := store.index.find(one)) is not None and place.raw_length > 4000]
    return found


def place_of(store: Store, object_id: ObjectId) -> Location:
    found = store.index.find(object_id)
    assert found is not None
    return found


def in_packs(store: Store, object_id: ObjectId) -> bool:
    return any(location.object_id == object_id for location in store.index.iterate())


def pack_bytes(store: Store) -> int:
    return sum((store.path / pack_key(pack)).stat().st_size for pack in packs(store))


def fresh_copy(path: Path, versions: Mapping[str, Mapping[str, bytes]]) -> int:
    """What the same versions take in a store of their own, in bytes of packs."""
    Store.create(path).close()
    with Store.open(path, write=True, index_path=path.parent / f"{path.name}.sqlite") as store:
        for name, files in versions.items():
            publish(store, name, files)
        return pack_bytes(store)


def read_elsewhere(store: Store, name: str, tmp_path: Path) -> dict[str, bytes]:
    """A snapshot as a process reads it that knows nothing of the store yet."""
    with Store.open(store.path, index_path=tmp_path / "elsewhere.sqlite") as other:
        return contents(other, name)


def test_a_base_that_only_the_dead_need_goes(store: Store, tmp_path: Path) -> None:
    files = series(4)
    for name, data in zip("abcd", files, strict=True):
        publish(store, name, {"m": data})
    base, newest = tensor_of(store, "a"), tensor_of(store, "d")
    assert place_of(store, newest).depth > 0
    in_order(store)
    store.log.forget([("a", 1), ("b", 1)])
    expected = preview(store)
    report = collect(store)
    assert report.rebased_objects == expected.rebased_objects == 2
    assert abs(report.freed_bytes - expected.freed_bytes) < 0.1 * expected.deleted_bytes
    assert not in_packs(store, base)
    assert place_of(store, newest).depth == 0, "the newest stays the longest, so it is stored in full"
    assert place_of(store, tensor_of(store, "c")).base == newest
    assert verify(store).problems == []
    for name, data in (("c", files[2]), ("d", files[3])):
        assert contents(store, name) == read_elsewhere(store, name, tmp_path) == {"m": data}
    assert pack_bytes(store) < 1.05 * fresh_copy(tmp_path / "fresh", {"c": {"m": files[2]}, "d": {"m": files[3]}})
    again = collect(store)
    assert (again.rebased_objects, again.copied_bytes, again.deleted_packs) == (0, 0, 0)


def test_what_goes_on_after_that_is_stored_against_the_new_copies(store: Store) -> None:
    files = series(6)
    for name, data in zip("abcd", files[:4], strict=True):
        publish(store, name, {"m": data})
    store.log.forget([("a", 1), ("b", 1)])
    collect(store)
    for name, data in zip("ef", files[4:], strict=True):
        publish(store, name, {"m": data})
        assert 0 < place_of(store, tensor_of(store, name)).depth <= limits.CHAIN_DEPTH
    assert verify(store).problems == []


def test_little_gain_is_not_worth_the_work(store: Store) -> None:
    """Many deltas on one base that is needed no more: they would need another one as large."""
    files = series(14)
    for number, data in enumerate(files):
        publish(store, f"n{number}", {"m": data})
    store.log.forget([("n0", 1)])
    assert preview(store).rebased_objects == 0
    report = collect(store)
    assert (report.rebased_objects, report.freed_bytes) == (0, 0)


def test_without_repacking_nothing_is_stored_anew(store: Store) -> None:
    for name, data in zip("ab", series(2), strict=True):
        publish(store, name, {"m": data})
    store.log.forget([("a", 1)])
    assert collect(store, repack=False).rebased_objects == 0
    assert collect(store).rebased_objects == 1


def safetensors(values: np.ndarray, dtype: str) -> bytes:
    header = {"w": {"dtype": dtype, "shape": list(values.shape), "data_offsets": [0, values.nbytes]}}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values.tobytes()


def test_narrower_copies_still_lean_on_their_master(store: Store) -> None:
    """A model in bf16 beside its master in fp32: the copy costs nothing, before and after."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(20_000).astype(np.float32)
    kept = {}
    for name in "abcd":
        narrow = (values.view(np.uint32) >> 16).astype(np.uint16)
        kept[name] = {"a-master": safetensors(values, "F32"), "model": safetensors(narrow, "BF16")}
        publish(store, name, kept[name])
        values = values * (1 + rng.standard_normal(20_000).astype(np.float32) * np.float32(1e-5))
    copies = {name: tensor_of(store, name, "model") for name in "bcd"}
    store.log.forget([("a", 1)])
    assert collect(store).rebased_objects > 0
    for name, copy in copies.items():
        assert place_of(store, copy).encoded_length < 4000
        assert contents(store, name) == kept[name]
    assert verify(store).problems == []


def test_copies_that_outlived_their_base_are_in_nobodys_way(store: Store, tmp_path: Path) -> None:
    """The older copy of an object may stay in a pack that is needed for other things; its base is gone."""
    files = series(4)
    publish(store, "a", {"m": files[0]})
    publish(store, "b", {"m": files[1], "own": noise(1, 2_000_000)})
    publish(store, "c", {"m": files[2]})
    base, hanging = tensor_of(store, "a"), tensor_of(store, "b")
    store.log.forget([("a", 1)])
    assert collect(store).rebased_objects == 2
    assert not in_packs(store, base)
    assert [one.base for one in store.index.iterate() if one.object_id == hanging].count(base) == 1
    assert place_of(store, hanging).base != base
    publish(store, "again", {"m": files[1], "next": files[3]})
    assert contents(store, "again") == {"m": files[1], "next": files[3]}
    assert read_elsewhere(store, "b", tmp_path)["m"] == files[1]
    assert verify(store).ok


def test_a_damaged_base_is_left_alone(store: Store) -> None:
    files = series(3)
    for name, data in zip("abc", files, strict=True):
        publish(store, name, {"m": data})
    publish(store, "whole", {"own": noise(1)})
    location = place_of(store, tensor_of(store, "a"))
    with (store.path / pack_key(location.pack)).open("r+b") as file:
        file.seek(location.offset + location.encoded_length // 2)
        file.write(b"\xff\x00\xff\x00")
    store.log.forget([("a", 1)])
    assert collect(store).rebased_objects == 0
    assert location.pack in packs(store)
    assert contents(store, "whole") == {"own": noise(1)}


def test_families_are_done_as_far_as_there_is_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that keep a pack, or none: copies that free nothing would fill the disk."""
    kept = {}
    for line in range(2):
        for number, name in enumerate("abc"):
            kept[f"{line}/{name}"] = {f"m{seed}": series(3, seed=2 * line + seed)[number] for seed in range(2)}
            publish(store, f"{line}/{name}", kept[f"{line}/{name}"])
    store.log.forget([("0/a", 1), ("1/a", 1)])
    del kept["0/a"], kept["1/a"]
    before = pack_bytes(store)
    monkeypatch.setattr("moonclipfs.store.gc._Run._room", lambda run: 100_000)
    assert collect(store).rebased_objects == 0 and pack_bytes(store) == before
    monkeypatch.setattr("moonclipfs.store.gc._Run._room", lambda run: 250_000)
    assert collect(store).rebased_objects == 8, "a pack at a time, each in a cycle of its own"
    assert pack_bytes(store) < before - 90_000
    assert {name: contents(store, name) for name in kept} == kept
    assert verify(store).problems == []


def drift(elements: int, step: float, seed: int) -> list[bytes]:
    """The files of a long training: optimizer state changes all through, weights a little."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(elements).astype(np.float32)
    files = []
    for _ in range(30):
        files.append(safetensors(values, "F32"))
        values = values + rng.standard_normal(elements).astype(np.float32) * np.float32(step)
    return files


@pytest.mark.parametrize("pressed", [False, True])
def test_the_last_three_of_many_take_little_more_than_in_a_fresh_store(
    store: Store, tmp_path: Path, pressed: bool
) -> None:
    slow, fast = drift(8000, 1e-5, 0), drift(8000, 1e-3, 1)
    kept: dict[str, dict[str, bytes]] = {}
    for number in range(30):
        kept[f"c{number}"] = {"model": slow[number], "optimizer": fast[number]}
        publish(store, f"c{number}", kept[f"c{number}"])
        if number >= 3:
            del kept[f"c{number - 3}"]
            store.log.forget([(f"c{number - 3}", 1)])
            collect(store, pressed=pressed)
        if number >= 3 and number % 4 == 0:
            assert pack_bytes(store) < 1.3 * fresh_copy(tmp_path / f"fresh{number}", kept)
    assert {name: contents(store, name) for name in kept} == kept
    assert verify(store).problems == []


class Lines(RuleBasedStateMachine):
    """Lines that grow, versions that are forgotten in any order, and gc: all that is kept can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        root = Path(self.directory.name)
        Store.create(root / "store").close()
        self.store = Store.open(root / "store", write=True, index_path=root / "index.sqlite")
        self.lines = [drift(3000, step, seed) for seed, step in enumerate((1e-5, 1e-4, 1e-3))]
        self.kept: dict[str, dict[str, bytes]] = {}
        self.count = 0

    @rule(line=st.integers(0, 2), step=st.integers(0, 29), other=st.integers(0, 29))
    def save(self, line: int, step: int, other: int) -> None:
        name = f"s{self.count}"
        self.count += 1
        self.kept[name] = {"m": self.lines[line][step], "n": self.lines[(line + 1) % 3][other]}
        publish(self.store, name, self.kept[name])

    @rule(which=st.integers(0, 100), pressed=st.booleans())
    @precondition(lambda self: self.kept)
    def forget(self, which: int, pressed: bool) -> None:
        name = sorted(self.kept)[which % len(self.kept)]
        del self.kept[name]
        self.store.log.forget([(name, 1)])
        collect(self.store, pressed=pressed)
        assert collect(self.store, pressed=pressed).freed_bytes >= 0

    @invariant()
    def all_is_there(self) -> None:
        for name, files in self.kept.items():
            assert contents(self.store, name) == files

    def teardown(self) -> None:
        assert verify(self.store).problems == []
        self.store.close()
        self.directory.cleanup()


TestLines = Lines.TestCase
TestLines.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
