"""Private stores: what is written over a base store that is only read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import (
    CorruptError,
    ExistsError,
    FormatVersionError,
    LimitError,
    MissingObjectError,
    NotFoundError,
    UsageError,
)
from moonclipfs.store.alternates import copy_version_into, make_private_store
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.check import verify
from moonclipfs.store.config import Alternate, create_store, encode_config, load_config
from moonclipfs.store.export import export
from moonclipfs.store.gc import collect
from moonclipfs.store.optimize import optimize
from moonclipfs.store.packs import Location
from moonclipfs.store.store import Store
from moonclipfs.store.usage import du, stats
from moonclipfs.types import NO_ID, BytesSource
from tests.nobody import Nobody
from tests.store.kit import contents, noise, publish, series


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory, where the index of a base store lies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base store with one snapshot: a tensor, and a file of noise."""
    with Store.create(tmp_path / "base") as store:
        publish(store, "run/1", {"m.safetensors": series(1)[0], "n": noise(1)})
    return tmp_path / "base"


def digests(root: Path) -> dict[str, tuple[str, int, int]]:
    """Digest, mode and mtime of everything in a directory."""
    return {
        str(path.relative_to(root)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in (root, *root.rglob("*"))
    }


def own(store: Store) -> set[bytes]:
    """The objects in the packs of a store itself."""
    return {one.object_id for one in store.index.iterate()}


def test_a_private_store_reads_its_base_and_stores_only_what_changed(tmp_path: Path, base: Path) -> None:
    before = digests(base)
    first, second = series(2)
    with make_private_store(tmp_path / "state", base) as private:
        assert private.base is not None
        root = private.base.resolve("run/1").root
        assert dict(private.walk_directory(root)).keys() == {b"m.safetensors", b"n"}
        publish(private, "mine", {"m.safetensors": second, "n": noise(1), "old": first})
        assert contents(private, "mine") == {"m.safetensors": second, "n": noise(1), "old": first}
        held = list(private.index.iterate())
        deltas = [one for one in held if one.base != NO_ID]
        assert len(deltas) == 1 and deltas[0].base not in own(private), "the tensor is a delta against the base store"
        assert not any(one.raw_length == 20_000 for one in held), "what the base store has is not stored again"
        assert private.config.cut == private.base.config.cut
    assert digests(base) == before
    assert not (tmp_path / "state/reserve").exists()
    with Store.open(tmp_path / "state") as again:
        assert contents(again, "mine")["m.safetensors"] == second
    assert digests(base) == before


def test_the_file_before_offers_its_objects_of_the_base_store_as_bases(tmp_path: Path, base: Path) -> None:
    """Also where no label leads to them: the tensor has another shape."""
    first = series(1)[0]
    longer = series(1, 20_100)[0][-4 * 20_100 :]
    header = json.dumps({"w": {"dtype": "F32", "shape": [20_100], "data_offsets": [0, 4 * 20_100]}}).encode()
    grown = len(header).to_bytes(8, "little") + header + first[-4 * 20_000 :] + longer[:400]
    with make_private_store(tmp_path / "state", base) as private:
        assert private.base is not None
        before = private.open_file(private.lookup(private.base.resolve("run/1"), b"m.safetensors"))
        with private.ingest() as ingest:
            ingest.put_file(BytesSource(grown), before)
            ingest.complete([])
            assert ingest.stats.delta_bytes == 4 * 20_100 and ingest.stats.delta_stored < 10_000


def test_gc_verify_and_stats_of_a_private_store_leave_the_base_store_alone(tmp_path: Path, base: Path) -> None:
    before = digests(base)
    _, second, third = series(3)
    with make_private_store(tmp_path / "state", base) as private:
        version = publish(private, "mine", {"m.safetensors": second, "n": noise(1), "o": noise(2)})
        publish(private, "mine", {"m.safetensors": third, "n": noise(1), "o": noise(3)})
        assert verify(private).problems == []
        assert du(private, [version]).stored < 60_000
        private.log.forget([("mine", 1)])
        report = collect(private)
        assert report.deleted_packs and not report.problems
        assert contents(private, "mine") == {"m.safetensors": third, "n": noise(1), "o": noise(3)}
        checked = verify(private)
        assert not checked.problems and checked.base == str(base)
        assert checked.base_objects == 2, "the noise, and the recipe of its file"
        found = stats(private)
        assert found.in_base.raw == 20_000 and found.in_base.stored == 0
        assert found.logical == len(third) + 40_000
        assert found.logical == sum(
            (found.shared, found.holes, found.literals, found.full.raw, found.delta.raw, found.in_base.raw)
        )
        export(private, private.resolve("mine"), tmp_path / "out")
    assert (tmp_path / "out/m.safetensors").read_bytes() == third
    assert digests(base) == before


@pytest.mark.parametrize(("there", "kept"), [(2, (0, 4, 8)), (3, (1, 2, 5)), (4, (2, 5, 6, 9))])
def test_chains_over_both_stores_keep_to_their_depth(tmp_path: Path, there: int, kept: tuple[int, ...]) -> None:
    """As they are made, and after versions were forgotten and what hung on their objects was stored anew."""
    steps = series(there + 10)
    with Store.create(tmp_path / "base") as store:
        for step in steps[:there]:
            publish(store, "run", {"m.safetensors": step})
    with make_private_store(tmp_path / "state", tmp_path / "base") as private:
        for number, step in enumerate(steps[there:]):
            publish(private, f"mine/{number}", {"m.safetensors": step})
        for location in private.index.iterate():
            assert len(private.objects.chain(location.object_id)) - 1 == location.depth <= limits.CHAIN_DEPTH
        private.log.forget([(f"mine/{number}", 1) for number in range(10) if number not in kept])
        assert collect(private, pressed=True).rebased_objects
        assert verify(private).problems == []

        def links(location: Location | None) -> int:
            assert location is not None
            return 0 if location.base == NO_ID else 1 + links(private.index.find(location.base))

        for number in kept:
            assert contents(private, f"mine/{number}") == {"m.safetensors": steps[there + number]}
            entry = private.lookup(private.resolve(f"mine/{number}"), b"m.safetensors")
            for object_id in private.recipe(entry).object_ids():
                copies = private.index.copies(object_id)
                assert all(links(one) <= one.depth <= limits.CHAIN_DEPTH for one in copies)


def test_a_private_store_is_optimized_as_far_as_it_goes_without_the_base_store(tmp_path: Path) -> None:
    steps = series(12)
    with Store.create(tmp_path / "base") as store:
        publish(store, "run", {"m.safetensors": steps[0]})
    before = digests(tmp_path / "base")
    with make_private_store(tmp_path / "state", tmp_path / "base") as private:
        for step in steps[1:]:
            publish(private, "mine", {"m.safetensors": step, "n": noise(1)})
        report = optimize(private)
        assert not report.problems
        for number, step in enumerate(steps[1:], 1):
            assert contents(private, f"mine@{number}")["m.safetensors"] == step
        for location in private.index.iterate():
            assert len(private.objects.chain(location.object_id)) - 1 == location.depth <= limits.CHAIN_DEPTH
        assert verify(private).problems == []
    assert digests(tmp_path / "base") == before


# The base store changes


def test_a_base_store_that_grows_and_is_cleaned_up_meanwhile_is_read_on(tmp_path: Path, base: Path) -> None:
    steps = series(4)
    with make_private_store(tmp_path / "state", base) as private:
        assert private.base is not None
        publish(private, "mine", {"m.safetensors": steps[1]})
        with Store.open(base, write=True) as other:
            publish(other, "run/2", {"m.safetensors": steps[3], "o": noise(5), "big": noise(6, 400_000)})
            later = publish(other, "run/2", {"m.safetensors": steps[3], "o": noise(5)})
            entries = private.directory(later.root)
            assert private.open_file(entries[b"o"]).read(0, 20_000) == noise(5), "what came after it was opened"
            other.log.forget([("run/2", 1)])
            assert collect(other).copied_bytes, "the pack was repacked"
            private.names()
            assert private.open_file(entries[b"m.safetensors"]).read(0, len(steps[3])) == steps[3], (
                "found where it is by now"
            )
        assert contents(private, "mine") == {"m.safetensors": steps[1]}
        assert verify(private).problems == []


def test_what_is_condemned_in_the_base_store_is_stored_here(tmp_path: Path, base: Path) -> None:
    with make_private_store(tmp_path / "state", base) as private, Store.open(base, write=True) as other:
        packs = [pack.stem for pack in (base / "packs").iterdir()]
        other.log.append("condemn", lambda names: {"packs": packs})
        publish(private, "mine", {"n": noise(1)})
        assert any(one.raw_length == 20_000 for one in private.index.iterate())
    shutil.rmtree(base / "packs")
    (base / "packs").mkdir()
    with Store.open(tmp_path / "state") as alone:
        assert contents(alone, "mine") == {"n": noise(1)}


def test_what_the_base_store_lost_is_reported_with_both_names(tmp_path: Path, base: Path) -> None:
    second = series(2)[1]
    with make_private_store(tmp_path / "state", base) as private:
        publish(private, "mine", {"m.safetensors": second, "n": noise(1), "own": noise(2)})
    with Store.open(base, write=True) as other:
        other.log.forget([("run/1", 1)])
        assert collect(other).deleted_packs
    with Store.open(tmp_path / "state", write=True) as private:
        for name in (b"m.safetensors", b"n"):
            with pytest.raises(MissingObjectError, match=r"object [0-9a-f]{64}") as caught:
                private.open_file(private.lookup(private.resolve("mine"), name)).read(0, 100)
            assert str(base) in str(caught.value) and str(tmp_path / "state") in str(caught.value)
            assert caught.value.errno == 5, "EIO"
        own = private.open_file(private.lookup(private.resolve("mine"), b"own"))
        assert own.read(0, own.size) == noise(2)
        problems = verify(private).problems
        assert {one.kind for one in problems} == {"missing"} and str(base) in problems[0].message
        assert sorted(name for one in problems for name in one.affected) == ["mine@1/m.safetensors", "mine@1/n"]
        with pytest.raises(MissingObjectError, match="nothing is deleted"):
            collect(private)
        # What is stored next does not refer to it.
        publish(private, "again", {"m.safetensors": second, "n": noise(1)})
        assert contents(private, "again") == {"m.safetensors": second, "n": noise(1)}
        assert contents(private, "mine")["n"] == noise(1)


def test_a_base_store_that_vanishes_while_it_is_read(
    tmp_path: Path, base: Path, expect_log: Callable[[str], None]
) -> None:
    with make_private_store(tmp_path / "state", base) as private:
        publish(private, "mine", {"n": noise(1), "own": noise(2)})
        private.packs.close()
        base.rename(tmp_path / "away")
        with pytest.raises(MissingObjectError, match=str(base)):
            contents(private, "mine")
        with pytest.raises(MissingObjectError, match=str(base)):
            collect(private)
        expect_log(f"WARNING moonclipfs.store.paired: its base store {base} cannot be read")
        publish(private, "new", {"own": noise(3)})
        assert contents(private, "new") == {"own": noise(3)}
        (tmp_path / "away").rename(base)
        assert contents(private, "mine") == {"n": noise(1), "own": noise(2)}


def test_another_store_in_the_place_of_the_base_store(
    tmp_path: Path, base: Path, expect_log: Callable[[str], None]
) -> None:
    mine = load_config(LocalBackend(base)).store_id
    with make_private_store(tmp_path / "state", base) as private:
        publish(private, "mine", {"n": noise(1)})
        private.packs.close()
        base.rename(tmp_path / "away")
        other = create_store(base).store_id
        expect_log(f"WARNING moonclipfs.store.paired: its base store {base} cannot be read: .*{other}")
        with pytest.raises(MissingObjectError, match=rf"{other}.*{mine}"):
            collect(private)
    with pytest.raises(NotFoundError, match=mine) as opened:
        Store.open(tmp_path / "state")
    with pytest.raises(UsageError, match=mine) as made:
        make_private_store(tmp_path / "state", base)
    for message in (str(opened.value), str(made.value)):
        assert other in message and str(base) in message


def test_a_base_store_that_is_gone_or_was_moved(tmp_path: Path, base: Path) -> None:
    with make_private_store(tmp_path / "state", base) as private:
        publish(private, "mine", {"n": noise(1)})
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(NotFoundError, match=rf"{tmp_path / 'state'}.*{base}.*--state"):
        Store.open(tmp_path / "state")
    base.mkdir()
    with pytest.raises(FormatVersionError, match=rf"{tmp_path / 'state'}.*not a store: {base}"):
        Store.open(tmp_path / "state")
    with make_private_store(tmp_path / "state", moved) as private:
        assert contents(private, "mine") == {"n": noise(1)}
    with Store.open(tmp_path / "state") as private:
        assert private.config.alternate is not None and private.config.alternate.path == str(moved)
        assert contents(private, "mine") == {"n": noise(1)}
    copied = Path(shutil.copytree(moved, tmp_path / "copied"))
    shutil.rmtree(moved)
    with make_private_store(tmp_path / "state", copied) as private:
        assert contents(private, "mine") == {"n": noise(1)}


# What cannot be


def test_what_cannot_be_a_private_store(tmp_path: Path, base: Path) -> None:
    with pytest.raises(NotFoundError, match="no store at"):
        make_private_store(tmp_path / "state", tmp_path / "nothing")
    assert not (tmp_path / "state").exists()
    create_store(tmp_path / "other")
    with pytest.raises(UsageError, match="a store of its own"):
        make_private_store(tmp_path / "other", base)
    for place in (base, base / "state", base / "packs"):
        with pytest.raises(UsageError, match="one lies in the other"):
            make_private_store(place, base)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(ExistsError, match="not empty"):
        make_private_store(tmp_path / "full", base)
    make_private_store(tmp_path / "state", base).close()
    with pytest.raises(UsageError, match="over the store"):
        make_private_store(tmp_path / "state", tmp_path / "other")


def test_private_stores_one_over_the_other(tmp_path: Path, base: Path) -> None:
    steps = series(limits.BASE_STORES + 2)
    below = base
    for number in range(1, limits.BASE_STORES + 1):
        with make_private_store(tmp_path / str(number), below) as private:
            publish(private, "mine", {"m.safetensors": steps[number], "n": noise(1)})
            assert contents(private, "mine") == {"m.safetensors": steps[number], "n": noise(1)}
            assert all(one.base != NO_ID for one in private.index.iterate() if one.raw_length > 50_000)
            assert verify(private).problems == []
        below = tmp_path / str(number)
    with pytest.raises(LimitError, match="base stores"):
        make_private_store(tmp_path / "last", below)


def test_base_stores_that_lead_back(tmp_path: Path, base: Path) -> None:
    make_private_store(tmp_path / "a", base).close()
    make_private_store(tmp_path / "b", tmp_path / "a").close()
    configs = {name: load_config(LocalBackend(tmp_path / name)) for name in "ab"}
    _write_alternate(tmp_path / "a", str(tmp_path / "b"), configs["b"].store_id)
    for name in "ab":
        with pytest.raises(CorruptError, match="lead back"):
            Store.open(tmp_path / name)
    _write_alternate(tmp_path / "a", str(tmp_path / "a"), configs["a"].store_id)
    with pytest.raises(CorruptError, match="lead back"):
        Store.open(tmp_path / "a")


def _write_alternate(store: Path, path: str, store_id: str) -> None:
    config = load_config(LocalBackend(store))
    (store / "config.json").write_bytes(encode_config(replace(config, alternate=Alternate(path, store_id))))


@pytest.mark.parametrize(
    ("path", "store_id"),
    [
        ("relative/path", "0" * 32),
        ("", "0" * 32),
        ("/nul\0byte", "0" * 32),
        ("/" + "x" * limits.PATH_BYTES, "0" * 32),
        ("/store", "0" * 31),
        ("/store", "../../../../../../../etc/passwd0"),
    ],
)
def test_hostile_names_of_a_base_store_are_damage(tmp_path: Path, base: Path, path: str, store_id: str) -> None:
    make_private_store(tmp_path / "state", base).close()
    _write_alternate(tmp_path / "state", path, store_id)
    with pytest.raises(CorruptError, match="base store"):
        Store.open(tmp_path / "state")


@pytest.mark.parametrize("alternate", [None, [], "x", {"path": "/x"}, {"store_id": "0" * 32}])
def test_a_feature_without_its_member_is_damage(tmp_path: Path, base: Path, alternate: object) -> None:
    make_private_store(tmp_path / "state", base).close()
    fields = json.loads((tmp_path / "state/config.json").read_text())
    del fields["sha256"]
    fields["alternate"] = alternate
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    fields["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "state/config.json").write_text(json.dumps(fields))
    with pytest.raises(CorruptError, match=r"config\.json"):
        Store.open(tmp_path / "state")


def test_an_ordinary_store_has_no_word_of_it(tmp_path: Path) -> None:
    create_store(tmp_path / "store")
    assert "alternate" not in (tmp_path / "store/config.json").read_text()
    with Store.open(tmp_path / "store") as store:
        assert store.base is None


# Without rights


def test_a_base_store_that_may_only_be_read_and_no_cache_directory(tmp_path: Path, base: Path) -> None:
    """As a user without rights on a base store of mode 0500."""
    nobody = Nobody()
    with nobody.copy(base) as copy:
        state = copy.parent / "state"
        state.mkdir()
        os.chown(state, copy.stat().st_uid, -1)
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o500 if path.is_dir() else 0o400)
        before = digests(copy)

        def work() -> None:
            with make_private_store(state, copy) as private:
                publish(private, "mine", {"m.safetensors": series(2)[1], "n": noise(1)})
                assert contents(private, "mine")["n"] == noise(1)
                assert verify(private).problems == []
                assert collect(private).deleted_packs == 0
            assert [path.name for path in state.glob("base-*.sqlite")], "the index of the base store lies here, then"

        nobody.run(work)
        assert digests(copy) == before


def test_a_base_store_on_a_read_only_file_system(tmp_path: Path, base: Path) -> None:
    point = tmp_path / "point"
    point.mkdir()
    if subprocess.run(["mount", "--bind", base, point], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", point], check=True)
        with make_private_store(tmp_path / "state", point) as private:
            publish(private, "mine", {"m.safetensors": series(2)[1]})
            assert verify(private).problems == []
            assert len(own(private)) == 3, "a tensor, a recipe, a directory"
    finally:
        subprocess.run(["umount", point], check=True)


# Copying out


def _private(tmp_path: Path, base: Path, files: dict[str, bytes]) -> Store:
    private = make_private_store(tmp_path / "state", base)
    publish(private, "mine", files)
    return private


def test_a_version_is_copied_into_the_base_store_as_it_is_encoded(tmp_path: Path, base: Path) -> None:
    files = {"m.safetensors": series(2)[1], "n": noise(1), "o": noise(2)}
    with closing(_private(tmp_path, base, files)) as private, Store.open(base, write=True) as target:
        root = private.resolve("mine").root
        before = own(target)
        version = copy_version_into(private, root, target, "run/mine", {"attributes": {"mode": 0o755}})
        assert (version.path, version.number, version.root) == ("run/mine", 1, root)
        assert contents(target, "run/mine") == files
        assert own(target) - before == own(private), "what it lacked, and no more"
        deltas = [one for one in target.index.iterate() if one.base != NO_ID]
        assert len(deltas) == 1
        assert verify(target).problems == []
        records = target.names().sequence
        assert copy_version_into(private, root, target, "run/mine", {"attributes": {"mode": 0o755}}) == version
        assert target.names().sequence == records and own(target) - before == own(private), "nothing new"
    shutil.rmtree(tmp_path / "state")
    with Store.open(base) as alone:
        assert contents(alone, "run/mine") == files


def test_a_version_is_copied_into_a_store_that_lacks_all_of_it(tmp_path: Path, base: Path) -> None:
    files = {"m.safetensors": series(2)[1], "n": noise(1)}
    with closing(_private(tmp_path, base, files)) as private, Store.create(tmp_path / "target") as target:
        told: list[tuple[int, int]] = []
        copy_version_into(
            private,
            private.resolve("mine").root,
            target,
            "a",
            {},
            progress=lambda done, total: told.append((done, total)),
        )
        assert told[-1][0] == told[-1][1] > 0
        assert contents(target, "a") == files
        assert sum(one.base != NO_ID for one in target.index.iterate()) == 1, "the delta, and its base beside it"
        assert verify(target).problems == []


def test_a_base_with_a_longer_chain_in_the_target(tmp_path: Path, base: Path) -> None:
    """What would be too deep there is stored in full."""
    steps = series(8)
    with Store.create(tmp_path / "target") as target:
        for number, step in enumerate([*steps[:0:-1], steps[0]]):
            publish(target, f"x/{number}", {"m.safetensors": step})
        tensors = {one.object_id: one for one in target.index.iterate() if one.raw_length == 80_000}
        deep = next(one for one in tensors.values() if one.depth == limits.CHAIN_DEPTH)
    with Store.open(tmp_path / "target") as target:
        raw = target.objects.load(deep.object_id, deep.kind)
    header = series(1)[0][: -len(raw)]
    with Store.create(tmp_path / "shallow") as store:
        publish(store, "run", {"m.safetensors": header + raw})
    moved = bytearray(raw)
    moved[0] ^= 1
    with make_private_store(tmp_path / "state", tmp_path / "shallow") as private:
        publish(private, "mine", {"m.safetensors": header + bytes(moved)})
        assert {one.base for one in private.index.iterate()} == {NO_ID, deep.object_id}
        with Store.open(tmp_path / "target", write=True) as target:
            copy_version_into(private, private.resolve("mine").root, target, "mine", {})
            assert contents(target, "mine") == {"m.safetensors": header + bytes(moved)}
            assert verify(target).problems == []
            assert all(len(target.objects.chain(one.object_id)) <= 4 for one in target.index.iterate())


def test_nothing_damaged_is_copied(tmp_path: Path, base: Path) -> None:
    with closing(_private(tmp_path, base, {"n": noise(1), "o": noise(2)})) as private:
        place = next(one for one in private.index.iterate() if one.raw_length == 20_000)
        pack = tmp_path / "state/packs" / f"{place.pack}.pack"
        data = bytearray(pack.read_bytes())
        data[place.offset + place.encoded_length // 2] ^= 1
        pack.write_bytes(data)
        private.packs.close()
        with Store.create(tmp_path / "target") as target:
            with pytest.raises(CorruptError, match=place.object_id.hex()):
                copy_version_into(private, private.resolve("mine").root, target, "mine", {})
            assert not target.names().bound()


def test_what_was_deleted_and_stored_again_is_copied_from_where_it_is(tmp_path: Path, base: Path) -> None:
    """What reading has kept in memory of its place is not believed."""
    files = {"o": noise(2), "m.safetensors": series(2)[1]}
    with closing(_private(tmp_path, base, files)) as private, Store.create(tmp_path / "target") as target:
        assert contents(private, "mine") == files
        private.log.forget([("mine", 1)])
        assert collect(private).deleted_packs == 1
        publish(private, "mine", files)
        copy_version_into(private, private.resolve("mine").root, target, "mine", {})
        assert contents(target, "mine") == files


def test_the_rescue_reader_knows_base_stores(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("zstandard")
    run = _rescue()
    files = {"m.safetensors": series(2)[1], "n": noise(1), "own": noise(2)}
    _private(tmp_path, base, files).close()
    assert run(tmp_path / "state", tmp_path / "out").returncode == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out/mine").iterdir()} == files
    moved = base.rename(tmp_path / "moved")
    alone = run(tmp_path / "state", tmp_path / "alone")
    assert alone.returncode == 1 and str(base) in alone.stderr and "--base" in alone.stderr
    assert [path.name for path in (tmp_path / "alone/mine").iterdir()] == ["own"], "what does not need it"
    assert run("--base", moved, tmp_path / "state", tmp_path / "again").returncode == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "again/mine").iterdir()} == files


def _rescue() -> Callable[..., subprocess.CompletedProcess[str]]:
    from tests.test_rescue import run

    return run
