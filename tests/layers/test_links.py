"""Following symbolic links without a kernel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import NotFoundError
from moonclipfs.layers.links import follow

Tree = dict[bytes, "Tree"] | bytes | None
"""A directory, the text of a symbolic link, or None for a file."""


def lookup(node: Tree, name: bytes) -> Tree:
    if not isinstance(node, dict) or name not in node:
        raise NotFoundError(f"no {name!r}")
    return node[name]


def link(node: Tree) -> bytes | None:
    return node if isinstance(node, bytes) else None


def at(tree: Tree, path: bytes, *, last: bool = True) -> Tree:
    return follow(tree, path, lookup, link, last=last)


FILES: Tree = {b"f": None, b"g": {b"h": None}}
TREE: Tree = {
    b"d": FILES, b"to-f": b"d/f", b"to-d": b"d", b"chain": b"to-d/g", b"up": b"d/../to-f", b"out": b"../x",
    b"absolute": b"/d", b"loop": b"loop", b"empty": b"",
}  # fmt: skip


def test_paths_through_links() -> None:
    assert at(TREE, b"") is TREE
    assert at(TREE, b"./d//g/") is FILES[b"g"]
    assert at(TREE, b"to-f") is None
    assert at(TREE, b"to-d") is FILES
    assert at(TREE, b"to-d/g/h") is None
    assert at(TREE, b"chain/h") is None
    assert at(TREE, b"up") is None
    assert at(TREE, b"to-d/..") is TREE
    assert at(TREE, b"to-f", last=False) == b"d/f"
    assert at(TREE, b"to-d/g", last=False) is FILES[b"g"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (b"..", "leads out of"),
        (b"d/../..", "leads out of"),
        (b"out", "leads out of"),
        (b"absolute", "leads out of"),
        (b"loop", "in a circle"),
        (b"nothing", "no b'nothing'"),
        (b"to-f/x", "no b'x'"),
    ],
)
def test_paths_that_lead_nowhere(path: bytes, words: str) -> None:
    with pytest.raises(NotFoundError, match=words):
        at(TREE, path)


def test_as_many_links_as_the_kernel_follows() -> None:
    tree: Tree = {b"%d" % number: b"%d" % (number + 1) for number in range(limits.SYMLINKS + 1)}
    tree[b"%d" % (limits.SYMLINKS + 1)] = None
    assert at(tree, b"1") is None
    with pytest.raises(NotFoundError, match="circle"):
        at(tree, b"0")


@given(st.lists(st.sampled_from([*TREE, *FILES, b"..", b".", b""]), max_size=12))
def test_any_path_ends(parts: list[bytes]) -> None:
    try:
        at(TREE, b"/".join(parts))
    except NotFoundError:
        return
