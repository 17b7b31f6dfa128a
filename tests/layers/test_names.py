"""Names as directories, without a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from moonclipfs.layers.names import Area, Link, NameTree, View
from moonclipfs.store.log import Names
from moonclipfs.types import NO_ID, Version


def version(path: str, sequence: int, number: int = 1, **metadata: object) -> Version:
    return Version(path, number, NO_ID, sequence, sequence * 1000, metadata)


class FakeNames:
    """Bound names and versions, as given."""

    def __init__(self, sequence: int, *bound: Version, older: tuple[Version, ...] = ()) -> None:
        self.sequence = sequence
        self._bound = bound
        self._older = older

    def bound(self) -> Mapping[str, Version]:
        return {version.path: version for version in self._bound}

    def all_versions(self) -> tuple[Version, ...]:
        return self._older + self._bound


def view(*bound: Version, sequence: int = 1, before: View | None = None, now_ns: int = 0, **more: Any) -> View:
    return View(cast(Names, FakeNames(sequence, *bound, **more)), before, now_ns)


def shape(tree: NameTree) -> dict[bytes, list[bytes]]:
    return {path: sorted(children) for path, children in tree.directories.items()}


def test_every_prefix_of_a_name_is_a_directory() -> None:
    tree = view(version("a/b/c", 1), version("a/d", 2), version("e", 3)).area(Area.LIVE)
    assert shape(tree) == {b"": [b"a", b"e"], b"a": [b"b", b"d"], b"a/b": [b"c"]}
    assert tree.directories[b""][b"a"] is None
    assert isinstance(tree.directories[b""][b"e"], Version)


def test_a_name_with_names_below_it_is_a_snapshot_and_a_directory() -> None:
    for order in ((version("a", 1), version("a/b", 2)), (version("a/b", 2), version("a", 1))):
        tree = view(*order).area(Area.LIVE)
        assert shape(tree) == {b"": [b"a"], b"a": [b"b"]}
        assert isinstance(tree.directories[b""][b"a"], Version)


def test_a_store_without_snapshots_has_an_empty_root() -> None:
    assert shape(view().area(Area.LIVE)) == {b"": []}
    assert shape(view().area(Area.LATEST)) == {b"": []}


def test_versions_stand_below_the_path_by_number() -> None:
    old, new, inner = version("run/a", 1, 1), version("run/a", 5, 2), version("run/a/2", 6, 1)
    tree = view(new, inner, older=(old,)).area(Area.VERSIONS)
    assert shape(tree) == {b"": [b"run"], b"run": [b"a"], b"run/a": [b"1", b"2"], b"run/a/2": [b"1"]}
    assert tree.directories[b"run/a"][b"1"] == old
    assert tree.directories[b"run/a"][b"2"] == new


def test_latest_links_from_each_parent_to_its_newest_complete_snapshot() -> None:
    bound = [version("run/step-9", 4), version("run/step-10", 2), version("run/step-11", 7, incomplete=True)]
    tree = view(*bound).area(Area.LATEST)
    assert shape(tree) == {b"": [b"run"]}
    link = tree.directories[b""][b"run"]
    assert isinstance(link, Link)
    assert link.target == b"../run/step-9"


def test_latest_of_a_parent_with_lines_below_it_stands_inside() -> None:
    tree = view(version("top", 1), version("run/a", 2), version("run/sub/x/b", 3)).area(Area.LATEST)
    links = {path: leaf.target for path, leaf in tree.leaves.items() if isinstance(leaf, Link)}
    assert links == {
        b"@latest": b"../top",
        b"run/@latest": b"../../run/a",
        b"run/sub/x": b"../../../run/sub/x/b",
    }


def test_directories_are_as_young_as_their_youngest_child() -> None:
    tree = view(version("a/b/c", 5), version("a/b/d", 2), version("a/e", 3)).area(Area.LIVE)
    assert tree.mtimes == {b"a/b": 5000, b"a": 3000, b"": 2000}


def test_a_directory_that_lost_a_child_was_modified_when_that_was_seen() -> None:
    a, b = version("run/a", 1), version("run/b", 2)
    before = view(a, b)
    after = view(b, sequence=3, before=before, now_ns=9999)
    assert after.area(Area.LIVE).mtimes == {b"run": 9999, b"": 1000}
    later = view(b, sequence=4, before=after, now_ns=12345)
    assert later.area(Area.LIVE).mtimes[b"run"] == 9999


def test_an_old_view_is_not_kept_alive_by_a_newer_one() -> None:
    first = view(version("a", 1))
    first.area(Area.VERSIONS)
    second = view(version("a", 1), before=first)
    second.area(Area.VERSIONS)
    assert not second._before.get(Area.VERSIONS)


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)
BOUND = st.dictionaries(PATHS, st.integers(1, 50), max_size=8)


def build(bound: dict[str, int], before: View | None = None) -> View:
    return view(*(version(path, sequence) for path, sequence in bound.items()), before=before)


@given(BOUND, BOUND)
def test_changes_are_exactly_the_names_that_mean_something_else(old: dict[str, int], new: dict[str, int]) -> None:
    before, after = build(old), build(new)
    for area in Area:
        told = set(after.area(area).changes(before.area(area)))

        def all_names(tree: NameTree) -> dict[tuple[bytes, bytes], object]:
            return {(path, name): leaf for path, names in tree.directories.items() for name, leaf in names.items()}

        left, right = all_names(before.area(area)), all_names(after.area(area))
        missing = object()
        differing = {key for key in left.keys() | right.keys() if left.get(key, missing) != right.get(key, missing)}
        assert told == differing


@given(BOUND)
def test_every_name_can_be_walked_to(bound: dict[str, int]) -> None:
    tree = build(bound).area(Area.LIVE)
    for path in bound:
        walked = b""
        for name in path.encode().split(b"/"):
            assert name in tree.directories[walked]
            walked = walked + b"/" + name if walked else name
        assert tree.leaves[walked] == version(path, bound[path])
    assert set(tree.mtimes) == set(tree.directories)
