"""What can go: over any set of copies, whatever their bases, all that can be decoded stays decodable."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.store.packfile import ENTRY
from moonclipfs.store.reachable import PackTable
from moonclipfs.store.waste import measure, removable
from moonclipfs.types import NO_ID, ObjectId

Copy = tuple[int, int | None]
"""An object and its base, as numbers."""


def id_of(number: int) -> ObjectId:
    return bytes([number + 1]) * 31 + bytes([0])  # ids may end in zero bytes


def table_of(packs: list[list[Copy]]) -> PackTable:
    tables = []
    for copies in packs:
        table = np.zeros(len(copies), ENTRY)
        for row, (number, base) in zip(table, copies, strict=True):
            row["id"], row["base"] = id_of(number), NO_ID if base is None else id_of(base)
            row["encoded_length"], row["kind"] = 10, 1
        tables.append(table)
    return PackTable([f"p{n}" for n in range(len(packs))], [1000] * len(packs), list(range(len(packs))), tables)


def decodable(packs: list[list[Copy]], without: set[str]) -> set[int]:
    """Objects with a chain to a full encoding, CHAIN_READ_DEPTH bases at most, the slow way."""
    copies = [copy for number, pack in enumerate(packs) if f"p{number}" not in without for copy in pack]
    known: set[int] = set()
    for _ in range(limits.CHAIN_READ_DEPTH + 1):
        known = known | {number for number, base in copies if base is None or base in known}
    return known


OBJECT = st.integers(0, 7)
PACKS = st.lists(st.lists(st.tuples(OBJECT, st.none() | OBJECT), max_size=5), min_size=1, max_size=6)


@given(PACKS, st.sets(OBJECT), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
@settings(max_examples=300)
def test_what_is_removed_together_leaves_all_decodable(
    packs: list[list[Copy]], needed: set[int], condemned_numbers: set[int], victims: set[int]
) -> None:
    table = table_of(packs)
    condemned = {f"p{n}" for n in condemned_numbers if n < len(packs)}
    asked = [f"p{n}" for n in sorted(victims) if n < len(packs) and f"p{n}" not in condemned]
    going = removable(table, map(id_of, needed), condemned, asked)
    assert set(going) <= set(asked)
    assert needed & decodable(packs, condemned) <= decodable(packs, condemned | set(going))


@given(PACKS, st.sets(OBJECT), st.sets(st.integers(0, 5)))
@settings(max_examples=300)
def test_the_chosen_copies_decode_without_the_others(
    packs: list[list[Copy]], needed: set[int], condemned_numbers: set[int]
) -> None:
    table = table_of(packs)
    flags = table.mask({f"p{n}" for n in condemned_numbers})
    closure = table.closure(map(id_of, needed), table.choose(flags))
    waste = measure(table, closure, flags, np.zeros(len(packs), np.bool_))
    everything = decodable(packs, set())
    present = {number for pack in packs for number, _ in pack}
    assert {id_of(number) for number in needed - present} <= set(closure.missing)
    assert {id_of(number) for number in needed & present - everything} <= set(closure.unresolved)
    kept: list[list[Copy]] = [[] for _ in packs]
    for row in np.flatnonzero(waste.needed).tolist():
        base = table.entries["base"][row].tobytes()
        kept[table.pack[row]].append(
            (table.entries["id"][row].tobytes()[0] - 1, None if base == NO_ID else base[0] - 1)
        )
    assert needed & everything <= decodable(kept, set())
    # What can be had without condemned packs is had without them.
    usable = {name for name in table.names if not flags[table.numbers[name]]}
    good = decodable(packs, set(table.names) - usable)
    if needed <= good:
        assert not len(waste.stranded)
        assert needed <= decodable(kept, set(table.names) - usable)


def test_two_copies_whose_bases_cross() -> None:
    """X was stored against Y, Y was lost and stored again against X's second copy: X's first copy leads back."""
    x, y, z = 0, 1, 2
    packs: list[list[Copy]] = [[(x, y)], [(z, None)], [(x, z)], [(y, x)]]
    table = table_of(packs)
    nothing = np.zeros(4, np.bool_)
    closure = table.closure([id_of(y)], table.choose(nothing))
    assert not closure.unresolved
    waste = measure(table, closure, nothing, nothing)
    assert waste.whole == [0]
    assert removable(table, [id_of(x)], (), ["p0", "p2"]) == ["p0"]
    assert removable(table, [id_of(x)], (), ["p3"]) == ["p3"]


def test_chains_that_no_reader_follows_are_not_decodable() -> None:
    depth = limits.CHAIN_READ_DEPTH
    links: list[Copy] = [(number, number - 1) for number in range(1, depth + 2)]
    packs: list[list[Copy]] = [[(0, None)], *([link] for link in links)]
    table = table_of(packs)
    closure = table.closure([id_of(depth + 1)], table.choose(np.zeros(len(packs), np.bool_)))
    assert closure.unresolved == [id_of(depth + 1)]
    assert closure.live.all(), "it may be mended: nothing of it goes"


def test_a_copy_known_as_damaged_is_chosen_only_when_there_is_no_other() -> None:
    x, y, z = 0, 1, 2
    packs: list[list[Copy]] = [[(x, None), (z, None)], [(y, None), (x, y)]]
    tables = [table_of([pack]).entries.copy() for pack in packs]
    for entries in tables:
        entries["offset"] = np.arange(len(entries)) * 100
    damaged = ("p0", int(tables[0]["offset"][0]))  # rows are sorted by id
    nothing = np.zeros(2, np.bool_)
    for known, whole in (((), [1]), ((damaged,), [0])):
        table = PackTable(["p0", "p1"], [1000, 1000], [0, 1], tables, known)
        closure = table.closure([id_of(x)], table.choose(nothing))
        assert measure(table, closure, nothing, nothing).whole == whole
        assert removable(table, [id_of(x)], (), [f"p{number}" for number in whole]) == [f"p{whole[0]}"]
    only = PackTable(["p0"], [1000], [0], tables[:1], (damaged,))
    assert not only.closure([id_of(x)], only.choose(np.zeros(1, np.bool_))).unresolved


def test_an_empty_table() -> None:
    table = table_of([[]])
    closure = table.closure([id_of(1)], table.choose(np.zeros(1, np.bool_)))
    assert closure.missing == [id_of(1)]
    assert measure(table, closure, np.zeros(1, np.bool_), np.zeros(1, np.bool_)).whole == [0]
    assert removable(table_of([]), [], (), []) == []
