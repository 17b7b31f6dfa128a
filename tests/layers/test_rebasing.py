"""Rebasing an overlay: three directory trees become one, file by file; a small reference says what is right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs.errors import LimitError
from moonclipfs.layers.rebasing import Conflict, Rebased, rebase
from moonclipfs.store.directories import encode_directory
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, ObjectId

Tree = dict[str, Any]
"""Names to a directory, or to a file: its contents, or (contents, mode), or an `Entry` for anything else."""


class Trees:
    """Directory objects in memory."""

    def __init__(self) -> None:
        self._known: dict[ObjectId, Mapping[bytes, Entry]] = {NO_ID: {}}
        self.loads = 0

    def load(self, object_id: ObjectId) -> Mapping[bytes, Entry]:
        self.loads += 1
        return self._known[object_id]

    def put(self, entries: Iterable[Entry]) -> ObjectId:
        known = {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}
        object_id = hashlib.sha256(encode_directory(known.values())).digest()
        self._known[object_id] = known
        return object_id

    def put_tree(self, tree: Tree) -> ObjectId:
        return self.put(self._entry(name.encode(), value) for name, value in tree.items())

    def _entry(self, name: bytes, value: Any) -> Entry:
        if isinstance(value, Entry):
            return replace(value, name=name)
        if isinstance(value, dict):
            return Entry(name, EntryType.DIRECTORY, Attributes(0o755), child=self.put_tree(value))
        text, mode = value if isinstance(value, tuple) else (value, 0o644)
        return file(text, mode=mode, name=name)

    def tree(self, root: ObjectId) -> Tree:
        """The other way round; a mode only where it is not the usual one."""
        found: Tree = {}
        for name, entry in self._known[root].items():
            if entry.type is EntryType.DIRECTORY:
                found[name.decode()] = self.tree(entry.child)
            elif entry.type is EntryType.FILE:
                text = entry.child.rstrip(b"\0").decode()
                mode = entry.attributes.mode
                found[name.decode()] = text if mode == 0o644 else (text, mode)
            else:
                found[name.decode()] = entry
        return found

    def groups(self, root: ObjectId, prefix: str = "") -> dict[str, int]:
        """The link group of each file by path."""
        found = {}
        for name, entry in self._known[root].items():
            path = prefix + name.decode()
            if entry.type is EntryType.DIRECTORY:
                found.update(self.groups(entry.child, path + "/"))
            else:
                found[path] = entry.link_group
        return found


def file(text: str, group: int = 0, *, mode: int = 0o644, name: bytes = b"", mtime_ns: int = 0) -> Entry:
    """A file whose recipe is its text."""
    return Entry(
        name, EntryType.FILE, Attributes(mode, mtime_ns=mtime_ns), 1, text.encode().ljust(32, b"\0"), b"", group
    )


def link(target: str) -> Entry:
    return Entry(b"", EntryType.SYMLINK, Attributes(0o777), target=target.encode())


def rebased(base: Tree, ours: Tree, theirs: Tree) -> tuple[Tree, dict[str, Conflict]]:
    trees = Trees()
    result = rebase(trees, *map(trees.put_tree, (base, ours, theirs)))
    return trees.tree(result.root), {path.decode(): kind for path, kind in result.conflicts.items()}


B: Tree = {"a": "1", "b": "1", "d": {"x": "1", "y": "1"}}


@pytest.mark.parametrize(
    ("ours", "theirs", "result", "conflicts"),
    [
        # one side alone
        (B | {"a": "o"}, B | {"b": "t"}, B | {"a": "o", "b": "t"}, {}),
        (B | {"n": "o"}, B | {"m": "t"}, B | {"n": "o", "m": "t"}, {}),
        ({"a": "1", "d": B["d"]}, {"b": "1", "d": B["d"]}, {"d": B["d"]}, {}),
        # both the same
        (B | {"a": "s"}, B | {"a": "s"}, B | {"a": "s"}, {}),
        (B | {"n": "s"}, B | {"n": "s"}, B | {"n": "s"}, {}),
        # both, differently
        (B | {"a": "o"}, B | {"a": "t"}, B | {"a": "o"}, {"a": Conflict.CONTENT}),
        (B | {"n": "o"}, B | {"n": "t"}, B | {"n": "o"}, {"n": Conflict.CONTENT}),
        ({"b": "1", "d": B["d"]}, B | {"a": "t"}, {"b": "1", "d": B["d"]}, {"a": Conflict.REMOVED_HERE}),
        (B | {"a": "o"}, {"b": "1", "d": B["d"]}, B | {"a": "o"}, {"a": Conflict.REMOVED_THERE}),
        # directories
        (B | {"d": {"x": "o", "y": "1"}}, B | {"d": {"x": "1", "y": "t"}}, B | {"d": {"x": "o", "y": "t"}}, {}),
        (B | {"d": {}}, B | {"d": {"x": "1", "y": "1", "z": "t"}}, B | {"d": {"z": "t"}}, {}),
        ({"a": "1", "b": "1"}, B | {"d": {"x": "t"}}, {"a": "1", "b": "1"}, {"d": Conflict.REMOVED_HERE}),
        ({"a": "1", "b": "1"}, B, {"a": "1", "b": "1"}, {}),
        (B, {"a": "1", "b": "1"}, {"a": "1", "b": "1"}, {}),
        (B | {"d": {"x": "o", "y": "1"}}, {"a": "1", "b": "1"}, B | {"d": {"x": "o"}}, {"d/x": Conflict.REMOVED_THERE}),
        (B | {"d": {**B["d"], "n": "o"}}, {"a": "1", "b": "1"}, B | {"d": {"n": "o"}}, {}),
        (B | {"n": {"q": "o"}}, B | {"n": {"q": "t", "r": "t"}}, B | {"n": {"q": "o", "r": "t"}},
         {"n/q": Conflict.CONTENT}),
        # another type
        (B | {"d": "o"}, B | {"d": {"x": "t"}}, B | {"d": "o"}, {"d": Conflict.TYPE}),
        (B | {"d": {"x": "o"}}, B | {"d": "t"}, B | {"d": {"x": "o"}}, {"d": Conflict.TYPE}),
        (B | {"d": "o"}, B, B | {"d": "o"}, {}),
        (B, B | {"d": "t"}, B | {"d": "t"}, {}),
        (B | {"a": link("o")}, B | {"a": "t"}, B | {"a": replace(link("o"), name=b"a")}, {"a": Conflict.CONTENT}),
        (B | {"a": {"q": "o"}}, {"b": "1", "d": B["d"]}, B | {"a": {"q": "o"}}, {}),
        # renames are a removal and an addition
        ({"b": "1", "moved": "1", "d": B["d"]}, B | {"b": "t"}, {"b": "t", "moved": "1", "d": B["d"]}, {}),
        ({"b": "1", "moved": "1", "d": B["d"]}, B | {"a": "t"}, {"b": "1", "moved": "1", "d": B["d"]},
         {"a": Conflict.REMOVED_HERE}),
        ({"a": "1", "b": "1", "e": B["d"]}, B | {"a": "t"}, {"a": "t", "b": "1", "e": B["d"]}, {}),
        (B | {"d": {"x": "o", "y": "1"}}, {"a": "1", "b": "1", "e": B["d"]},
         {"a": "1", "b": "1", "d": {"x": "o"}, "e": B["d"]}, {"d/x": Conflict.REMOVED_THERE}),
        # attributes
        (B | {"a": ("1", 0o600)}, B | {"a": "t"}, B | {"a": ("t", 0o600)}, {}),
        (B | {"a": "o"}, B | {"a": ("1", 0o600)}, B | {"a": ("o", 0o600)}, {}),
        (B | {"a": ("1", 0o600)}, B | {"a": ("1", 0o640)}, B | {"a": ("1", 0o600)}, {"a": Conflict.ATTRIBUTES}),
        (B | {"a": ("1", 0o600)}, {"b": "1", "d": B["d"]}, B | {"a": ("1", 0o600)}, {"a": Conflict.REMOVED_THERE}),
        (B | {"a": ("o", 0o600)}, B | {"a": ("t", 0o640)}, B | {"a": ("o", 0o600)}, {"a": Conflict.CONTENT}),
    ],
)  # fmt: skip
def test_what_becomes_of_a_path(ours: Tree, theirs: Tree, result: Tree, conflicts: dict[str, Conflict]) -> None:
    """What one side alone changed is taken; where both changed a file, the overlay's stays and the base's is told."""
    assert rebased(B, ours, theirs) == (result, conflicts)


def test_times_alone_are_no_change() -> None:
    touched = B | {"a": file("1", mtime_ns=5)}
    assert rebased(B, touched, {"b": "1", "d": B["d"]}) == ({"b": "1", "d": B["d"]}, {})
    assert rebased(B, {"b": "1", "d": B["d"]}, touched) == ({"b": "1", "d": B["d"]}, {})
    assert rebased(B, touched, B | {"a": "t"}) == (B | {"a": "t"}, {})


def test_a_removed_directory() -> None:
    """A directory that the overlay removed stays removed in a rebase, whatever the base put into it."""
    removed = {"a": "1", "b": "1"}
    theirs = B | {"d": {**B["d"], "new": "t"}}
    assert rebased(B, removed, theirs) == (removed, {"d": Conflict.REMOVED_HERE})


def test_extended_attributes_are_merged_one_by_one() -> None:
    def with_xattrs(**values: str) -> Tree:
        entry = file("1")
        xattrs = {name.encode(): value.encode() for name, value in values.items()}
        return {"f": replace(entry, attributes=replace(entry.attributes, xattrs=xattrs))}

    trees = Trees()
    roots = map(trees.put_tree, (with_xattrs(a="1", b="1"), with_xattrs(a="o", b="1", n="o"), with_xattrs(a="1")))
    result = rebase(trees, *roots)
    assert dict(trees.load(result.root)[b"f"].attributes.xattrs) == {b"a": b"o", b"n": b"o"}
    assert not result.conflicts


# Against a reference, which knows files, directories and contents

_FILES = st.sampled_from("123")
_NAMES = st.sampled_from("abc")
_TREES = st.recursive(
    st.dictionaries(_NAMES, _FILES, max_size=3),
    lambda below: st.dictionaries(_NAMES, st.one_of(_FILES, below), max_size=3),
    max_leaves=8,
)


def reference(base: Any, ours: Any, theirs: Any, path: str, conflicts: set[str]) -> Any:
    """What a path is to be: a tree, contents, or None for nothing."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return _both(base if isinstance(base, dict) else {}, ours, theirs, path, conflicts)
    if ours == base:
        return theirs
    if theirs == base or ours == theirs:
        return ours
    if theirs is None and isinstance(ours, dict):
        if not isinstance(base, dict):
            return ours
        return _both(base, ours, {}, path, conflicts) or None
    conflicts.add(path)
    return ours


def _both(base: Tree, ours: Tree, theirs: Tree, path: str, conflicts: set[str]) -> Tree:
    found = {}
    for name in ours.keys() | theirs.keys():
        place = f"{path}/{name}".lstrip("/")
        value = reference(base.get(name), ours.get(name), theirs.get(name), place, conflicts)
        if value is not None:
            found[name] = value
    return found


@given(_TREES, _TREES, _TREES)
def test_as_the_reference_has_it(base: Tree, ours: Tree, theirs: Tree) -> None:
    result, conflicts = rebased(base, ours, theirs)
    expected: set[str] = set()
    assert result == _both(base, ours, theirs, "", expected)
    assert conflicts.keys() == expected


@given(_TREES, _TREES)
def test_where_one_side_changed_nothing_the_other_results(base: Tree, other: Tree) -> None:
    trees = Trees()
    root, changed = trees.put_tree(base), trees.put_tree(other)
    for sides in ((root, changed, root), (root, root, changed), (root, changed, changed)):
        assert rebase(trees, *sides) == Rebased(changed, {})


# Hard links

_LINKED = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d/x", "d/y", "e/x"]), st.integers(0, 3), max_size=6
)  # of each path, a group: those of one group are one file


def linked(paths: dict[str, int], salt: str) -> Tree:
    tree: Tree = {}
    for path, group in paths.items():
        above, _, name = path.rpartition("/")
        # The text follows from the group, so that members are the same file; without a group, from the path.
        text = f"{salt if group == 3 else ''}{group or path}"
        (tree.setdefault(above, {}) if above else tree)[name] = file(text, group)
    return tree


@given(_LINKED, _LINKED, _LINKED)
def test_hard_links(base: dict[str, int], ours: dict[str, int], theirs: dict[str, int]) -> None:
    """Names that are one file on both sides are one after a rebase, and none are that had different contents."""
    trees = Trees()
    roots = [trees.put_tree(linked(paths, salt)) for paths, salt in ((base, "b"), (ours, "o"), (theirs, "t"))]
    result = rebase(trees, *roots)
    groups, contents = trees.groups(result.root), flat(trees.tree(result.root))
    numbers = [group for group in groups.values() if group]
    assert all(numbers.count(number) > 1 for number in numbers)
    for one, other in combinations(sorted(groups), 2):
        together = groups[one] == groups[other] != 0
        if together:
            assert contents[one] == contents[other]
        kept = all(paths.get(one, 0) == paths.get(other, -1) != 0 for paths in (ours, theirs))
        if kept and contents[one] == contents[other]:
            assert together


def flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return found


def test_a_link_between_directories_that_different_sides_changed_stays() -> None:
    base = {"d": {"x": file("1", 7), "n": "1"}, "e": {"y": file("1", 7), "n": "1"}}
    ours = {"d": {"x": file("1", 7), "n": "o"}, "e": base["e"]}
    theirs = {"d": base["d"], "e": {"y": file("1", 7), "n": "t"}}
    trees = Trees()
    result = rebase(trees, *map(trees.put_tree, (base, ours, theirs)))
    groups = trees.groups(result.root)
    assert groups["d/x"] == groups["e/y"] != 0
    assert flat(trees.tree(result.root)) == {"d/x": "1", "d/n": "o", "e/y": "1", "e/n": "t"}


def test_what_nobody_changed_is_not_looked_at() -> None:
    """Without hard links, a directory that one side left alone is one reference, however much is in it."""
    trees = Trees()
    big = {str(number): {"f": str(number)} for number in range(100)}
    roots = [trees.put_tree(tree) for tree in ({"big": big}, {"big": big, "n": "o"}, {"big": big, "m": "t"})]
    before = trees.loads
    result = rebase(trees, *roots)
    looked = trees.loads - before
    assert trees.tree(result.root) == {"big": big, "n": "o", "m": "t"}
    assert looked < 110  # one look for hard links, no more


def test_a_tree_that_is_too_deep_is_refused() -> None:
    trees = Trees()
    roots = []
    for text in "bot":
        tree: Tree = {"f": text}
        for _ in range(130):
            tree = {"d": tree}
        roots.append(trees.put_tree(tree))
    with pytest.raises(LimitError):
        rebase(trees, *roots)
