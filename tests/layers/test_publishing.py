"""Captured directories become versions: encoding, merging with what others published, groups of hard links."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonclipfs.errors import CorruptError
from moonclipfs.layers.captured import CapturedEntry, decode_tree, encode_tree
from moonclipfs.layers.publishing import publish
from moonclipfs.layers.records import PART_HOLE, PART_RECIPE, PART_STAGED
from moonclipfs.layers.stagedsource import StagedSource
from moonclipfs.store.log import Log
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, EntryType, ObjectId, Version
from tests.layers import publish as plain


def file(name: bytes, data: bytes, inode: int, **fields: Any) -> CapturedEntry:
    """A file whose bytes are all staged in memory."""
    parts = ((0, len(data), PART_STAGED, inode),) if data else ()
    kept = ((inode, 0, data),) if data else ()
    return CapturedEntry(
        name,
        EntryType.FILE,
        inode,
        0o640,
        1,
        2,
        3,
        4,
        (),
        len(data),
        NO_ID,
        parts=parts,
        data=kept,
        freeze=inode,
        **fields,
    )


def directory(
    name: bytes, entries: Iterable[CapturedEntry], inode: int = 1, child: ObjectId = NO_ID, **fields: Any
) -> CapturedEntry:
    return CapturedEntry(
        name, EntryType.DIRECTORY, inode, 0o750, 0, 0, 5, 6, (), 0, child, entries=tuple(entries), **fields
    )


def seal(store: Store, tree: CapturedEntry, path: str = "run/a", **fields: Any) -> dict[str, Any]:
    metadata = fields.pop("metadata", {"automatic": True})
    return publish(
        store,
        {"path": path.encode(), "tree": encode_tree(tree), "staged": {}, "metadata": json.dumps(metadata), **fields},
    )


def files(store: Store, version: Version | None = None, path: str = "run/a") -> dict[str, bytes]:
    version = version or store.names().bound()[path]
    found = {}
    for name, entry in store.walk(version):
        if entry.type is EntryType.FILE:
            reader = store.open_file(entry)
            found[name.decode()] = reader.read(0, reader.size)
    return found


def test_a_captured_tree_comes_back_from_its_bytes() -> None:
    tree = directory(b"", [file(b"a", b"x", 3), directory(b"d", [], 4, removed=(b"q",), anchor=b"7")])
    assert decode_tree(encode_tree(tree)) == tree
    for broken in (b"", b"\x01", encode_tree(tree)[:-1], encode_tree(file(b"a", b"x", 3)._replace(type=99))):
        with pytest.raises(CorruptError):
            decode_tree(broken)


def test_a_new_directory_becomes_version_one(store: Store) -> None:
    tree = directory(b"", [file(b"a", b"x" * 9000, 3), directory(b"d", [file(b"b", b"", 5)], 4)])
    answer = seal(store, tree, metadata={"automatic": True, "layer": "host"})
    version = store.names().bound()["run/a"]
    assert (answer["number"], answer["sequence"], answer["new"]) == (1, version.sequence, True)
    assert files(store) == {"a": b"x" * 9000, "d/b": b""}
    entry = store.lookup(version, b"a")
    assert (entry.attributes.mode, entry.attributes.mtime_ns, entry.attributes.ctime_ns) == (0o640, 3, 4)
    assert version.metadata["attributes"] == {"mode": 0o750, "uid": 0, "gid": 0, "mtime_ns": 5, "ctime_ns": 6}
    assert (version.metadata["files"], version.metadata["bytes"], version.metadata["layer"]) == (2, 9000, "host")
    assert dict(answer["directories"]) == {1: version.root, 4: store.lookup(version, b"d").child}
    assert [(inode, generation, size) for inode, generation, _, size in answer["files"]] == [(3, 3, 9000)]


def test_only_changes_need_to_be_captured(store: Store) -> None:
    first = seal(store, directory(b"", [file(b"a", b"1", 3), file(b"b", b"2", 4), directory(b"d", [], 5)]))
    tree = directory(b"", [file(b"a", b"new", 3)], child=first["root"], removed=(b"b", b"never"))
    assert seal(store, tree)["number"] == 2
    assert files(store) == {"a": b"new"}
    assert store.lookup(store.names().bound()["run/a"], b"d").type is EntryType.DIRECTORY


def test_nothing_new_makes_no_version(store: Store) -> None:
    """A seal of a directory that is as its newest version makes no new one; only an explicit one of an automatic."""
    tree = directory(b"", [file(b"a", b"1", 3)])
    first = seal(store, tree)
    again = seal(store, directory(b"", [], child=first["root"]))
    assert (again["number"], again["new"], again["sequence"]) == (1, False, first["sequence"])
    same = directory(b"", [], child=first["root"])
    assert seal(store, same, metadata={"automatic": False})["number"] == 2
    assert seal(store, same, metadata={"automatic": False})["new"] is False
    assert seal(store, same)["new"] is False


def test_a_capture_is_published_once(store: Store) -> None:
    """A capture whose version is there already, perhaps under newer ones, is not published again."""
    tree = directory(b"", [file(b"a", b"1", 3)])
    first = seal(store, tree, metadata={"capture": "x.1"})
    second = seal(store, directory(b"", [file(b"a", b"2", 3)], child=first["root"]), metadata={"capture": "x.2"})
    again = seal(store, tree, metadata={"capture": "x.1"})
    assert (again["sequence"], again["root"], again["new"]) == (first["sequence"], first["root"], False)
    assert store.names().bound()["run/a"].sequence == second["sequence"]


def test_different_files_of_two_layers_end_in_one_version(store: Store) -> None:
    """Two layers that write different files of one directory end in one snapshot."""
    base = seal(store, directory(b"", [file(b"both", b"0", 2), file(b"old", b"old", 3), directory(b"d", [], 9)]))[
        "root"
    ]
    seal(store, directory(b"", [file(b"x", b"x", 4), directory(b"d", [file(b"dx", b"1", 5)], 9)], child=base))
    tree = directory(
        b"", [file(b"y", b"y", 6), directory(b"d", [file(b"dy", b"2", 7)], 8)], child=base, removed=(b"old",)
    )
    answer = seal(store, tree)
    assert files(store) == {"both": b"0", "x": b"x", "y": b"y", "d/dx": b"1", "d/dy": b"2"}
    assert answer["foreign"] == [b"d/dx", b"x"]
    assert dict(answer["directories"])[1] == answer["root"]


def test_the_last_seal_of_a_file_wins(store: Store) -> None:
    """Where two layers write one file, the last seal wins, and both are in @versions."""
    base = seal(store, directory(b"", [file(b"f", b"0", 2)]))["root"]
    seal(store, directory(b"", [file(b"f", b"one", 3)], child=base))
    answer = seal(store, directory(b"", [file(b"f", b"two", 4)], child=base))
    assert (answer["foreign"], files(store)) == ([], {"f": b"two"})
    assert [files(store, version)["f"] for version in store.names().versions("run/a")] == [b"0", b"one", b"two"]


def test_what_others_removed_or_changed_is_theirs(store: Store) -> None:
    base = seal(store, directory(b"", [file(b"f", b"0", 2), file(b"g", b"0", 3), file(b"h", b"0", 4)]))["root"]
    seal(store, directory(b"", [file(b"g", b"theirs", 5)], child=base, removed=(b"f",)))
    answer = seal(store, directory(b"", [file(b"h", b"ours", 6)], child=base))
    assert files(store) == {"g": b"theirs", "h": b"ours"}
    assert answer["foreign"] == [b"f", b"g"]


def test_a_lost_race_is_merged_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published while a seal is being made is merged into it."""
    base = seal(store, directory(b"", [file(b"f", b"0", 2)]))["root"]
    bind, others = Log.bind, [b"x", b"z"]

    def slow(log: Log, path: str, *arguments: Any, **named: Any) -> Version:
        if others:
            name = others.pop()
            seal(store, directory(b"", [file(name, name, 4)], child=base))
        return bind(log, path, *arguments, **named)

    monkeypatch.setattr(Log, "bind", slow)
    seal(store, directory(b"", [file(b"y", b"y", 6)], child=base))
    assert files(store) == {"f": b"0", "x": b"x", "y": b"y", "z": b"z"}


def test_a_directory_that_is_gone_leaves_its_version(store: Store) -> None:
    """A directory that is removed between its capture and its publishing is kept in @versions, and not bound."""
    answer = seal(store, directory(b"", [file(b"f", b"last", 2)]), gone=True)
    assert answer["new"] and "run/a" not in store.names().bound()
    (version,) = store.names().versions("run/a")
    assert version.removed and files(store, version) == {"f": b"last"}


def test_a_directory_that_is_gone_is_removed_also_after_a_crash(store: Store) -> None:
    """Between binding and removing a version, a crash may leave it bound: the next attempt ends that."""
    tree = directory(b"", [file(b"f", b"last", 2)])
    seal(store, tree, metadata={"capture": "x.1"})
    answer = seal(store, tree, metadata={"capture": "x.1"}, gone=True)
    assert not answer["new"] and "run/a" not in store.names().bound()
    assert len(store.names().versions("run/a")) == 1


def test_what_others_bound_at_the_place_of_a_gone_directory_stays(store: Store) -> None:
    theirs = plain.publish(store, "run/a", {"f": b"theirs"})
    seal(store, directory(b"", [file(b"f", b"last", 2)]), gone=True)
    assert store.names().bound()["run/a"].root == theirs.root
    assert [files(store, one)["f"] for one in store.names().versions("run/a")] == [b"theirs", b"last", b"theirs"]


def groups(store: Store, path: str = "run/a") -> dict[str, int]:
    return {name.decode(): entry.link_group for name, entry in store.walk(store.names().bound()[path])}


def test_hard_links_get_a_group_of_their_own(store: Store) -> None:
    plain.publish(store, "run/a", {"p": plain.File(b"1", link_group=1), "q": plain.File(b"1", link_group=1)})
    base = store.names().bound()["run/a"].root
    plain.publish(
        store,
        "run/a",
        {n: plain.File(b"1", link_group=1) for n in "pq"} | {n: plain.File(b"2", link_group=5) for n in "rs"},
    )
    linked = [file(b"x", b"3", 7), directory(b"d", [file(b"y", b"3", 7)], 8), file(b"single", b"4", 9)]
    seal(store, directory(b"", linked, child=base))
    assert groups(store) == {"p": 1, "q": 1, "r": 5, "s": 5, "x": 6, "d": 0, "d/y": 6, "single": 0}


def test_groups_of_another_tree_are_not_taken_for_those_of_this_one(store: Store) -> None:
    other = plain.publish(store, "other", {"sub": {n: plain.File(b"1", link_group=1) for n in ("m", "n", "o")}})
    sub = store.lookup(other, b"sub").child
    base = plain.publish(store, "run/a", {n: plain.File(b"2", link_group=1) for n in "pq"}).root
    changed = file(b"m", b"3", 7, group=1, anchor=b"other")
    moved = directory(b"sub", [changed], 8, child=sub, anchor=b"other")
    seal(store, directory(b"", [moved], child=base, anchor=b"a"))
    assert groups(store) == {"p": 1, "q": 1, "sub": 0, "sub/m": 2, "sub/n": 2, "sub/o": 2}


def test_holes_of_a_terabyte_are_not_read(store: Store, tmp_path: Path) -> None:
    """Nor are they where the file before has them: the seal of a sparse file ends at once."""
    end = 1 << 40
    parts = ((0, 3, PART_STAGED, 7), (3, end - 6, PART_HOLE, 0), (end - 3, 3, PART_STAGED, 7))
    sparse = file(b"f", b"", 3)._replace(size=end, parts=parts, data=((7, 0, b"abc"), (7, end - 3, b"xyz")))
    [(_, _, recipe, _)] = seal(store, directory(b"", [sparse]))["files"]
    again = ((0, end - 3, PART_RECIPE, 0), (end - 3, 3, PART_STAGED, 8))
    changed = sparse._replace(child=recipe, parts=again, data=((8, end - 3, b"new"),), freeze=8)
    version = store.names().bound()["run/a"]
    seal(store, directory(b"", [changed], child=version.root))
    [entry] = [entry for _, entry in store.walk(store.names().bound()["run/a"]) if entry.type is EntryType.FILE]
    reader = store.open_file(entry)
    assert (reader.size, reader.read(0, 5), reader.read(end - 5, 5)) == (end, b"abc\0\0", b"\0\0new")


def test_staged_bytes_come_from_files_memory_recipes_and_holes(store: Store, tmp_path: Path) -> None:
    plain.publish(store, "old", {"f": b"r" * 9000})
    recipe = store.lookup(store.names().bound()["old"], b"f").child
    (tmp_path / "g").write_bytes(bytes(100) + b"s" * 200)
    parts = (
        (0, 100, PART_RECIPE, 0), (100, 200, PART_STAGED, 4), (300, 700, PART_RECIPE, 0),
        (1000, 5000, PART_HOLE, 0), (6000, 10, PART_STAGED, 5),
    )  # fmt: skip
    entry = CapturedEntry(
        b"f",
        EntryType.FILE,
        3,
        0o644,
        0,
        0,
        1,
        1,
        (),
        6010,
        recipe,
        parts=parts,
        data=((5, 6000, b"0123456789"),),
        freeze=5,
    )
    expected = b"r" * 100 + b"s" * 200 + b"r" * 700 + bytes(5000) + b"0123456789"
    answer = seal(store, directory(b"", [entry]), staged={4: str(tmp_path / "g")})
    assert files(store) == {"f": expected}
    assert [(inode, generation) for inode, generation, *_ in answer["files"]] == [(3, 5)]
    with pytest.raises(CorruptError, match="generation 4 is missing"):
        seal(store, directory(b"", [entry]), path="other")
    (tmp_path / "g").write_bytes(bytes(100))
    with pytest.raises(CorruptError, match="0 of 200 bytes"):
        seal(store, directory(b"", [entry]), path="other", staged={4: str(tmp_path / "g")})
    assert "other" not in store.names().bound()


NAMES = st.sampled_from([b"a", b"b", b"c"])
TREES = st.recursive(
    st.dictionaries(NAMES, st.binary(max_size=2), max_size=3),
    lambda below: st.dictionaries(NAMES, st.one_of(st.binary(max_size=2), below), max_size=3),
    max_leaves=6,
)


def expected(base: Any, ours: Any, theirs: Any) -> Any:
    """Merge as trees of dicts."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        base = base if isinstance(base, dict) else {}
        merged = {name: expected(base.get(name), ours.get(name), theirs.get(name)) for name in ours.keys() | theirs}
        return {name: value for name, value in merged.items() if value is not None}
    return theirs if ours == base else ours


@settings(max_examples=30)
@given(TREES, TREES, TREES)
def test_merging_is_right_for_any_trees(
    tmp_path_factory: pytest.TempPathFactory, base: Any, ours: Any, theirs: Any
) -> None:
    path = tmp_path_factory.mktemp("store")
    Store.create(path / "s").close()
    numbers = itertools.count(2)

    def captured(tree: dict[bytes, Any], name: bytes = b"") -> CapturedEntry:
        below = [
            captured(value, one) if isinstance(value, dict) else like_plain(file(one, value, next(numbers)))
            for one, value in tree.items()
        ]
        return like_plain(directory(name, below, next(numbers)))

    with Store.open(path / "s", write=True, index_path=path / "i") as store:
        root = plain.publish(store, "made", text(base)).root
        plain.publish(store, "run/a", text(theirs))
        seal(store, captured(ours)._replace(child=root, removed=tuple(base)))
        assert files(store) == flat(expected(base, ours, theirs))


def like_plain(entry: CapturedEntry) -> CapturedEntry:
    """With the attributes that `plain.publish` gives."""
    mode = 0o755 if entry.is_directory else 0o644
    return entry._replace(mode=mode, uid=0, gid=0, mtime_ns=plain.MTIME, ctime_ns=plain.MTIME)


def text(tree: dict[bytes, Any]) -> Any:
    """For `plain.publish`."""
    return {name.decode(): text(value) if isinstance(value, dict) else value for name, value in tree.items()}


def flat(tree: dict[bytes, Any], prefix: str = "") -> dict[str, bytes]:
    """Contents by path."""
    found: dict[str, bytes] = {}
    for name, value in tree.items():
        place = prefix + name.decode()
        found |= flat(value, place + "/") if isinstance(value, dict) else {place: value}
    return found


def test_a_file_before_that_is_too_short_is_an_error() -> None:
    """What is missing there is never made up, nor is what follows moved."""

    class Short:
        """Reads as a `FileReader` does at its end."""

        size = 5

        def read(self, offset: int, length: int) -> bytes:
            return b"12345"[offset : offset + length]

    parts = [(0, 4, PART_HOLE, 0), (4, 4, PART_RECIPE, 0), (8, 4, PART_HOLE, 0)]
    source = StagedSource(12, parts, (), {}, Short())
    with pytest.raises(CorruptError, match="ends at byte 5: 8 are needed"):
        source.read(0, 12)
