"""Families of objects in which some are there as bases only: what could be stored anew without them.

Pure arithmetic over the table of all objects. Memory: some 60 bytes for each object that any pack holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.store.reachable import Choice, Flags, PackTable, Rows
from moonclipfs.types import DType

_STANDING = 64
"""Objects of a family that may serve as bases as they are, at most."""
_WIDTHS = np.array([DType(code).width for code in range(len(DType))])


@dataclass(slots=True)
class Family:
    """`hanging` are needed objects with a base that is not needed somewhere behind them, the widest dtype first, since
    narrower copies lean on it, and the newest of these; `standing` other needed ones with the number of their bases,
    the newest first; `bearing` what is needed only for the hanging ones. All as rows of the table."""

    hanging: list[int]
    standing: list[tuple[int, int]]
    bearing: list[int]
    taken: int
    """Bytes in packs of the hanging ones and the bearing ones."""
    expected: int
    """The same afterwards: a guess from the sizes of what there is."""


def families(table: PackTable, choice: Choice, live: Flags, needed: Flags) -> list[Family]:
    """The families in which something is there for others alone, what is the largest first.

    `live` has a flag for each row that has to stay as things are, `needed` one for each object that versions and
    layers refer to themselves.
    """
    bases = table.base_numbers(choice.rows)
    present = np.zeros(len(bases), np.bool_)
    present[table.object_numbers(np.flatnonzero(live))] = True
    hangs, depths, roots = _follow(bases, needed)
    hanging = np.flatnonzero(present & needed & hangs)
    if not len(hanging):
        return []
    labels = table.entries["label"][choice.rows]
    groups = _group(roots, labels, hanging)
    members = np.flatnonzero(present & (groups >= 0))
    members = members[np.argsort(groups[members], kind="stable")]
    edges = np.flatnonzero(np.diff(groups[members])) + 1
    found = [_family(table, choice, numbers, needed, hangs, depths) for numbers in np.split(members, edges)]
    return sorted(found, key=lambda family: -family.taken)


def _follow(bases: Rows, needed: Flags) -> tuple[Flags, Rows, Rows]:
    """For each object whether any base behind it is not needed, the number of these bases, and the last of them."""
    linked = bases >= 0
    behind = np.where(linked, bases, np.arange(len(bases)))
    hangs = np.zeros(len(bases), np.bool_)
    depths = np.zeros(len(bases), np.int64)
    roots = behind
    for _ in range(limits.CHAIN_READ_DEPTH):
        hangs = linked & (~needed[behind] | hangs[behind])
        depths = np.where(linked, depths[behind] + 1, 0)
        roots = roots[behind]
    return hangs, depths, roots


def _group(roots: Rows, labels: NDArray[np.uint64], hanging: Rows) -> Rows:
    """The family of each object: a number for what hangs together by roots and labels with any of `hanging`, or -1."""
    pairs = np.unique(np.stack([roots[hanging].astype(np.uint64), labels[hanging]]), axis=1).T.tolist()
    heads: dict[tuple[str, int], tuple[str, int]] = {}

    def head(one: tuple[str, int]) -> tuple[str, int]:
        while (above := heads.setdefault(one, one)) != one:
            heads[one] = one = heads[above]
        return one

    for root, label in pairs:
        mine = head(("root", root))
        if label:
            heads[head(("label", label))] = mine
    numbers: dict[tuple[str, int], int] = {}
    by_root = np.full(len(roots), -1, np.int64)
    by_label: dict[int, int] = {}
    for root, label in pairs:
        number = numbers.setdefault(head(("root", root)), len(numbers))
        by_root[root] = number
        if label:
            by_label[label] = number
    groups = by_root[roots]
    if by_label:
        known = np.array(sorted(by_label), np.uint64)
        at = np.minimum(np.searchsorted(known, labels), len(known) - 1)
        same = (known[at] == labels) & (groups < 0)
        groups[same] = np.array([by_label[label] for label in known.tolist()], np.int64)[at[same]]
    return groups


def _family(table: PackTable, choice: Choice, numbers: Rows, needed: Flags, hangs: Flags, depths: Rows) -> Family:
    rows = choice.rows[numbers]
    hanging = rows[needed[numbers] & hangs[numbers]]
    stands = needed[numbers] & ~hangs[numbers]
    bearing = rows[~needed[numbers]]
    depth_of = dict(zip(rows[stands].tolist(), depths[numbers[stands]].tolist(), strict=True))
    ordered = table.newest_first(hanging)
    widths = _WIDTHS.take(table.entries["dtype"][ordered], mode="clip")
    ordered = ordered[np.argsort(-widths, kind="stable")]
    standing = table.newest_first(rows[stands])[:_STANDING].tolist()
    sizes = table.stored[np.concatenate([hanging, bearing])]
    taken = int(sizes.sum())
    # The longest is stored in full; where another full one stands, the deltas are all that it takes.
    full = 0 if standing else int(sizes.max()) - int(table.stored[hanging].min())
    return Family(
        ordered.tolist(),
        [(row, depth_of[row]) for row in standing],
        bearing.tolist(),
        taken,
        min(taken, int(table.stored[hanging].sum()) + full),
    )
