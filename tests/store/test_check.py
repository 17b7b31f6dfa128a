"""verify: damage of every kind is found, named with the files it affects, and never returned as data."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError, DeltaCycleError, MissingObjectError
from moonclipfs.store import check
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.packs import Location, PackWriter, pack_key
from moonclipfs.store.problems import Problem, ProblemKind
from moonclipfs.store.reachable import Footers
from moonclipfs.store.repack import copy_objects
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType, Kind
from tests.store.kit import contents, noise, publish, series

ExpectLog = Callable[[str], None]


def reopened(store: Store) -> Store:
    """The same store as another process sees it: nothing cached."""
    return Store.open(store.path, write=True, index_path=store.path.parent / "index.sqlite")


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def pack_path(store: Store, pack: str) -> Path:
    return store.path / pack_key(pack)


def place(store: Store, name: str, kind: Kind = Kind.DATA) -> Location:
    """Where the first object of file NAME/PATH lies, or its recipe."""
    snapshot, _, path = name.partition("/")
    entry = store.lookup(store.resolve(snapshot), path.encode())
    object_id = entry.child if kind is Kind.RECIPE else store.recipe(entry).object_ids()[0]
    location = store.index.find(object_id)
    assert location is not None
    return location


def found(store: Store, *, quick: bool = False, inside: bool = False) -> list[Problem]:
    return verify(store, quick=quick, contents=inside).problems


@pytest.fixture
def line(store: Store) -> Store:
    """Snapshots a, b, c: one line of deltas, and a file of their own each."""
    for name, data in zip("abc", series(3), strict=True):
        publish(store, name, {"model.safetensors": data, "own": noise(ord(name))})
    return store


@pytest.mark.parametrize("quick", [False, True])
def test_a_whole_store_has_no_problem(line: Store, quick: bool) -> None:
    told: list[tuple[int, int]] = []
    report = verify(line, quick=quick, contents=True, progress=lambda done, total: told.append((done, total)))
    assert report.ok
    assert (report.versions, report.packs) == (3, 3)
    assert report.objects == sum(1 for _ in line.index.iterate())
    assert bool(told) is not quick
    assert not told or told[-1] == (report.object_bytes, report.object_bytes)


def test_a_flipped_byte_of_a_base_names_what_depends_on_it(line: Store) -> None:
    base = place(line, "a/model.safetensors")
    assert place(line, "b/model.safetensors").base == base.object_id
    flip(pack_path(line, base.pack), base.offset + base.encoded_length // 2)
    with reopened(line) as store:
        (problem,) = found(store)
        assert problem.kind is ProblemKind.OBJECT
        assert problem.where == pack_key(base.pack)
        assert base.object_id.hex() in problem.message
        assert problem.affected == [f"{name}@1/model.safetensors" for name in "abc"]
        assert found(store, quick=True) == []
        own = store.lookup(store.resolve("a"), b"own")
        assert store.open_file(own).read(0, own.size) == noise(ord("a"))
        with pytest.raises(CorruptError, match=base.object_id.hex()):
            contents(store, "c")


def test_a_damaged_recipe_and_a_damaged_directory(line: Store) -> None:
    recipe = place(line, "a/own", Kind.RECIPE)
    flip(pack_path(line, recipe.pack), recipe.offset + 40)
    root = line.index.find(line.resolve("b").root)
    assert root is not None
    flip(pack_path(line, root.pack), root.offset + 40)
    with reopened(line) as store:
        for quick in (False, True):
            affected = [problem.affected for problem in found(store, quick=quick)]
            assert sorted(affected) == [["a@1/own"], ["b@1/"]]


def test_another_copy_that_is_whole_saves_the_files(line: Store) -> None:
    location = place(line, "a/own")
    copy_objects(line, [location])
    flip(pack_path(line, location.pack), location.offset + 100)
    with reopened(line) as store:
        (problem,) = found(store)
        assert problem.affected == []
        assert "another copy of it is whole" in problem.message
        assert contents(store, "a")["own"] == noise(ord("a"))


@pytest.mark.parametrize("quick", [False, True])
def test_a_lost_pack(line: Store, quick: bool) -> None:
    pack_path(line, place(line, "a/own").pack).unlink()
    with reopened(line) as store:
        problems = found(store, quick=quick)
        assert {problem.kind for problem in problems} == {ProblemKind.MISSING}
        affected = {name for problem in problems for name in problem.affected}
        assert {"b@1/model.safetensors", "c@1/model.safetensors", "a@1/"} <= affected
        assert not affected & {"b@1/own", "c@1/own"}


def test_a_pack_cut_short(line: Store, expect_log: ExpectLog) -> None:
    expect_log("its objects are found by scanning it")
    location = place(line, "c/own")
    os.truncate(pack_path(line, location.pack), location.offset + 100)
    with reopened(line) as store:
        kinds = {problem.kind for problem in found(store, quick=True)}
        assert kinds == {ProblemKind.PACK, ProblemKind.MISSING}
        assert {name for problem in found(store) for name in problem.affected} == {"c@1/"}
        assert contents(store, "b")["own"] == noise(ord("b"))


def write_chain(store: Store, links: list[tuple[bytes, bytes]]) -> None:
    """Hand-made deltas: (object id, base id) each, over nothing that decodes."""
    template = place(store, "b/model.safetensors")
    encoded = store.packs.read(template, 0, template.encoded_length)
    writer = PackWriter(store.backend, store.index.add_pack)
    for object_id, base in links:
        writer.add(
            encoded, object_id=object_id, kind=Kind.DATA, raw_length=template.raw_length,
            dtype=template.dtype, depth=1, base=base,
        )  # fmt: skip
    writer.flush()


def test_R075_a_cycle_of_bases(line: Store) -> None:
    a, b = bytes([1]) * 32, bytes([2]) * 32
    write_chain(line, [(a, b), (b, a)])
    with reopened(line) as store:
        with pytest.raises(DeltaCycleError):
            store.objects.load(a, Kind.DATA)
        (problem,) = found(store)
        assert problem.kind is ProblemKind.CHAIN
        assert "DeltaCycle(" in problem.message
        assert a.hex() in problem.message
        assert b.hex() in problem.message


def test_R075_a_missing_base_is_named(line: Store) -> None:
    base = place(line, "a/model.safetensors")
    keep = [location for location in line.index.iterate() if location.object_id != base.object_id]
    copy_objects(line, [location for location in keep if location.pack == base.pack])
    pack_path(line, base.pack).unlink()
    with reopened(line) as store:
        (problem,) = found(store)
        assert problem.kind is ProblemKind.MISSING
        assert base.object_id.hex() in problem.where
        assert problem.affected == [f"{name}@1/model.safetensors" for name in "abc"]
        with pytest.raises(MissingObjectError, match=base.object_id.hex()):
            contents(store, "b")


def test_a_delta_that_nothing_needs_may_lack_its_base(line: Store) -> None:
    write_chain(line, [(bytes([1]) * 32, bytes([2]) * 32)])
    with reopened(line) as store:
        assert found(store) == []


@pytest.mark.parametrize(
    ("place_of", "affected"),
    [
        (b"moonclipfs-log", ["b@1/"]),
        (b"metadata", ["b@1/"]),
        (b'"number":', ["b/"]),
        (b'path":', []),
        (b'root":"', []),
        (b'","sequence', ["b@1/"]),
    ],
)
def test_a_damaged_log_record_is_named(
    line: Store, expect_log: ExpectLog, place_of: bytes, affected: list[str]
) -> None:
    expect_log("log record 2")
    record = line.path / "log" / f"{2:016d}.json"
    flip(record, record.read_bytes().index(place_of))
    with reopened(line) as store:
        (problem,) = found(store)
        assert problem.kind is ProblemKind.LOG
        assert "log record 2" in problem.message
        assert problem.affected == affected
        assert ("the 2 versions from a@1 to c@1" in problem.message) is not bool(affected)


def test_a_damaged_log_record_that_seems_to_bind_what_is_known_is_misread(line: Store, expect_log: ExpectLog) -> None:
    expect_log("log record 2")
    record = line.path / "log" / f"{2:016d}.json"
    record.write_bytes(record.read_bytes().replace(b'"path":"b"', b'"path":"c"'))
    with reopened(line) as store:
        (problem,) = found(store)
        assert "cannot be told" in problem.message


def test_a_lost_log_record_is_named(line: Store, expect_log: ExpectLog) -> None:
    expect_log("log record 2 is missing")
    (line.path / "log" / f"{2:016d}.json").unlink()
    with reopened(line) as store:
        (problem,) = found(store)
        assert "the 2 versions from a@1 to c@1" in problem.message


def test_a_damaged_record_before_a_checkpoint_is_found(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    for number in range(70):
        store.log.move(f"a{number or ''}", f"a{number + 1}")
    flip(store.path / "log" / f"{3:016d}.json", 150)
    (store.path / "log" / f"{5:016d}.json").unlink()
    with reopened(store) as other:
        messages = [problem.message for problem in found(other)]
        assert len(messages) == 2
        assert all("known from a later checkpoint" in message for message in messages)
        assert contents(other, "a70") == {"f": noise(1)}


def test_an_index_that_does_not_know_a_pack_yet_is_right(line: Store) -> None:
    line.index.drop_pack(place(line, "a/own").pack)
    assert found(line) == []


def test_contents_are_looked_into(store: Store) -> None:
    data = series(1)[0]
    publish(store, "cut", {"model.safetensors": data[:-1]})
    publish(store, "whole", {"model.safetensors": data})
    assert found(store) == []
    (problem,) = found(store, inside=True)
    assert problem.where == "cut@1/model.safetensors"
    assert "data short by 1 byte" in problem.message


def _reads_right_or_not_at_all(store: Store, expected: dict[str, dict[str, bytes]]) -> set[str]:
    """Read everything; returns the names of what could not be read. Wrong bytes fail."""
    failed = set()
    bound = store.names().bound()
    for name, files in expected.items():
        if name not in bound:
            failed.add(f"{name}@1/")
            continue
        for path, data in files.items():
            try:
                entry = store.lookup(bound[name], path.encode())
                assert entry.type is EntryType.FILE
                assert store.open_file(entry).read(0, entry.size) == data
            except CorruptError:
                failed.add(f"{name}@1/{path}")
    return failed


@pytest.mark.parametrize("where", ["packs", "log"])
def test_a_flipped_bit_anywhere_is_found_and_never_returned(line: Store, where: str) -> None:
    """Bits at sampled places all over: the store as it was, one bit, verify, read everything, the bit back."""
    logging.getLogger("moonclipfs").setLevel(logging.CRITICAL)
    expected = {name: contents(line, name) for name in "abc"}
    files = sorted((line.path / where).iterdir())
    line.close()
    chooser = random.Random(7)
    try:
        for file in files:
            size = file.stat().st_size
            edges = [0, 5, 17, 20, size - 1, size - 20, size - 60, size - 100]
            for offset in [*edges, *(chooser.randrange(size) for _ in range(12))]:
                bit = chooser.randrange(8)
                flip(file, offset, bit)
                (line.path.parent / "index.sqlite").unlink(missing_ok=True)
                with reopened(line) as store:
                    problems = found(store)
                    affected = {name for problem in problems for name in problem.affected}
                    failed = _reads_right_or_not_at_all(store, expected)
                assert problems, f"{file} byte {offset} bit {bit}"
                if where == "log" and not affected:
                    assert any("cannot be told" in problem.message for problem in problems)
                if where == "packs":
                    assert failed == {name for name in failed if _covered(name, affected)}, f"{file} byte {offset}"
                flip(file, offset, bit)
    finally:
        logging.getLogger("moonclipfs").setLevel(logging.NOTSET)


def _covered(name: str, affected: set[str]) -> bool:
    return any(name == one or (one.endswith("/") and name.startswith(one)) for one in affected)


def test_a_flipped_bit_of_the_index_changes_no_answer(line: Store) -> None:
    """The index is a cache: damage is found by SQLite, by verify, or when what it says is read; or it says nothing."""
    logging.getLogger("moonclipfs").setLevel(logging.CRITICAL)
    expected = {name: contents(line, name) for name in "abc"}
    index = line.path.parent / "index.sqlite"
    line.close()
    whole = index.read_bytes()
    chooser = random.Random(3)
    try:
        for offset in [*range(0, 100, 9), *(chooser.randrange(len(whole)) for _ in range(60))]:
            index.write_bytes(whole)
            flip(index, offset, chooser.randrange(8))
            with reopened(line) as store:
                assert _reads_right_or_not_at_all(store, expected) == set()
    finally:
        logging.getLogger("moonclipfs").setLevel(logging.NOTSET)


def _dump(index: Path) -> list[str] | None:
    """What an index says, as SQL; None when SQLite finds damage."""
    try:
        with closing(sqlite3.connect(index)) as connection:
            if connection.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                return None
            return [*connection.iterdump(), str(connection.execute("PRAGMA user_version").fetchone())]
    except (sqlite3.Error, UnicodeDecodeError):
        return None


def test_a_flipped_bit_of_the_index_is_found_unless_it_means_nothing(line: Store, tmp_path: Path) -> None:
    logging.getLogger("moonclipfs").setLevel(logging.CRITICAL)
    index, copy = line.path.parent / "index.sqlite", tmp_path / "copy.sqlite"
    line.close()
    whole = index.read_bytes()
    copy.write_bytes(whole)
    right = _dump(copy)
    assert right is not None
    chooser = random.Random(3)
    used = [offset for offset, byte in enumerate(whole) if byte]
    meant = 0
    try:
        for offset in [*range(0, 100, 3), *chooser.sample(used, 100)]:
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << chooser.randrange(8)
            index.write_bytes(damaged)
            copy.write_bytes(damaged)
            with reopened(line) as store:
                problems = found(store, quick=True)
                if _dump(copy) != right:
                    meant += 1
                    assert [(one.kind, one.repaired) for one in problems] == [(ProblemKind.INDEX, True)], offset
                assert found(store, quick=True) == []
    finally:
        logging.getLogger("moonclipfs").setLevel(logging.NOTSET)
    assert meant > 50


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE objects SET key = key + 1 WHERE row % 2 = 0",
        "UPDATE objects SET label = label + 1 WHERE label IS NOT NULL",
        "UPDATE objects SET elements = elements + 1 WHERE elements IS NOT NULL",
        "UPDATE objects SET row = row + 1000 WHERE row = (SELECT max(row) FROM objects)",
        "INSERT INTO objects SELECT row + (1 << 30), key, label, elements, entry FROM objects WHERE elements > 0",
        "DELETE FROM objects WHERE row = (SELECT max(row) FROM objects)",
        "UPDATE packs SET entries = entries + 1",
        "UPDATE packs SET damaged = 1",
        "UPDATE packs SET bytes = bytes + 1 WHERE number = 2",
        "DROP INDEX by_label; CREATE INDEX by_label ON objects (label) WHERE label > 0",
        "PRAGMA user_version = 0",
        "UPDATE owner SET tag = 'other'",
    ],
)
def test_every_lie_of_the_index_is_found(line: Store, change: str) -> None:
    """SQLite sees nothing wrong with any of these."""
    right = sorted(line.index.iterate(), key=str)
    line.close()
    with closing(sqlite3.connect(line.path.parent / "index.sqlite", isolation_level=None)) as connection:
        connection.executescript(change)
    with reopened(line) as store:
        (problem,) = found(store, quick=True)
        assert (problem.kind, problem.repaired) == (ProblemKind.INDEX, True)
        assert found(store) == []
        assert sorted(store.index.iterate(), key=str) == right


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("after", ["table", "entries", "trees"])
def test_packs_that_gc_deletes_meanwhile_are_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch, quick: bool, after: str
) -> None:
    """A pack condemned before verify began waits for others only, and goes whenever these let it."""
    publish(store, "a", {"f": noise(1)})
    publish(store, "b", {"f": noise(2)})
    waiting = Store.open(store.path, index_path=store.path.parent / "other.sqlite")
    store.log.forget([("a", 1)])
    assert collect(store, wait_seconds=0).waiting_packs == 1
    monkeypatch.setattr(limits, "LOG_CHECKPOINT_EVERY", 1)

    def delete(result: object) -> object:
        monkeypatch.undo()
        waiting.close()
        assert collect(store, wait_seconds=0).deleted_packs == 1
        store.log.move("b", "c")
        store.log.move("c", "b")
        store.log.trim()
        return result

    owner, name = {
        "table": (Footers, "table"),
        "entries": (check, "_check_index"),
        "trees": (check, "read_trees"),
    }[after]
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: delete(real(*arguments)))
    with Store.open(store.path, index_path=store.path.parent / "third.sqlite") as other:
        assert found(other, quick=quick) == []
    assert waiting.lease is None
