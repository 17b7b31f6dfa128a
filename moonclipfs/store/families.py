"""Families of objects in which some are there as bases only: what could be stored anew without them.

Pure arithmetic over the table of all objects. Memory: some 60 bytes for each object that any pack holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.codec.sketch import similarity
from moonclipfs.store.packs import PLAIN
from moonclipfs.store.reachable import Choice, Flags, PackTable, Rows
from moonclipfs.types import DType

_STANDING = 64
"""Objects of a family that may serve as bases as they are, at most."""
_ALIKE = 20
"""See `bases.py`: places of a sketch that agree."""
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
    hangs, depths, roots = _follow(bases, needed, table.depths_elsewhere(choice.rows))
    hanging = np.flatnonzero(present & needed & hangs)
    if not len(hanging):
        return []
    labels = table.entries["label"][choice.rows]
    groups = _group(table, choice, roots, labels, hanging)[roots]
    plain = table.entries["generation"][choice.rows] == PLAIN
    others = present & needed & ~hangs & ~plain & np.isin(labels, labels[hanging]) & (labels != 0)
    by_label = _split(np.flatnonzero(others), labels)
    found = []
    for numbers in _split(np.flatnonzero(present & (groups >= 0)), groups).values():
        mine = numbers[needed[numbers] & hangs[numbers]]
        stands = [numbers[needed[numbers] & ~hangs[numbers] & ~plain[numbers]]]
        stands += [by_label[label] for label in np.unique(labels[mine]).tolist() if label in by_label]
        standing = _most_alike(table, choice.rows, np.unique(np.concatenate(stands)), mine[-1])
        bearing = choice.rows[numbers[~needed[numbers]]]
        depth_of = dict(zip(choice.rows[standing].tolist(), depths[standing].tolist(), strict=True))
        found.append(_family(table, choice.rows[mine], depth_of, bearing))
    return sorted(found, key=lambda family: -family.taken)


def affordable(table: PackTable, found: Iterable[Family], room: int) -> list[Family]:
    """Families of which the copies find room: of a pack that bears any, all or none, or it would have to stay, too."""
    by_pack: dict[int, list[Family]] = defaultdict(list)
    for family in found:
        largest = max(family.bearing, key=lambda row: int(table.stored[row]), default=family.hanging[0])
        by_pack[int(table.pack[largest])].append(family)
    chosen: list[Family] = []
    for group in sorted(by_pack.values(), key=lambda group: sum(family.expected for family in group)):
        room -= sum(family.expected for family in group)
        if room < 0:
            break
        chosen += group
    return chosen


def _follow(bases: Rows, needed: Flags, beyond: Rows) -> tuple[Flags, Rows, Rows]:
    """For each object whether any base behind it is not needed, the number of these bases, and the last of them.

    `beyond` are the links of each that no other object of the table is behind.
    """
    linked = bases >= 0
    behind = np.where(linked, bases, np.arange(len(bases)))
    hangs = np.zeros(len(bases), np.bool_)
    depths = np.zeros(len(bases), np.int64)
    roots = behind
    for _ in range(limits.CHAIN_READ_DEPTH):
        hangs = linked & (~needed[behind] | hangs[behind])
        depths = np.where(linked, depths[behind] + 1, beyond)
        roots = roots[behind]
    return hangs, depths, roots


def _group(table: PackTable, choice: Choice, roots: Rows, labels: NDArray[np.uint64], hanging: Rows) -> Rows:
    """The family of each root that any of `hanging` has, else -1: those of the same label that are alike share one."""
    groups = np.full(len(roots), -1, np.int64)
    sketches = table.sketches(choice.rows)
    with_label: dict[int, tuple[bytearray, list[int]]] = defaultdict(lambda: (bytearray(), []))
    firsts, at = np.unique(roots[hanging], return_index=True)
    for root, number in zip(firsts.tolist(), hanging[at].tolist(), strict=True):
        label, sketch = int(labels[number]), sketches[number].tobytes()
        groups[root] = root
        if label:
            known, known_groups = with_label[label]
            alike = similarity(sketch, np.frombuffer(bytes(known), np.uint8).reshape(-1, len(sketch))) >= _ALIKE
            if alike.any():
                groups[root] = known_groups[int(alike.argmax())]
            known += sketch
            known_groups.append(int(groups[root]))
    return groups


def _split(numbers: Rows, keys: NDArray[Any]) -> dict[int, Rows]:
    """Objects by their key."""
    numbers = numbers[np.argsort(keys[numbers], kind="stable")]
    parts = np.split(numbers, np.flatnonzero(np.diff(keys[numbers])) + 1)
    return {int(keys[part[0]]): part for part in parts if len(part)}


def _most_alike(table: PackTable, rows: Rows, numbers: Rows, to: int) -> Rows:
    """Those of `numbers` whose tensors are the most like that of `to`, _STANDING at most."""
    if len(numbers) <= _STANDING:
        return numbers
    places = similarity(table.sketches(rows[to : to + 1]).tobytes(), table.sketches(rows[numbers]))
    return numbers[np.argsort(-places.astype(np.int64), kind="stable")[:_STANDING]]


def _family(table: PackTable, hanging: Rows, standing: dict[int, int], bearing: Rows) -> Family:
    ordered = table.newest_first(hanging)
    widths = _WIDTHS.take(table.entries["dtype"][ordered], mode="clip")
    ordered = ordered[np.argsort(-widths, kind="stable")]
    sizes = table.stored[np.concatenate([hanging, bearing])]
    taken = int(sizes.sum())
    # The longest is stored in full; where another full one stands, the deltas are all that it takes.
    full = 0 if standing else int(sizes.max()) - int(table.stored[hanging].min())
    return Family(
        ordered.tolist(),
        [(row, standing[row]) for row in table.newest_first(np.array([*standing], np.int64)).tolist()],
        bearing.tolist(),
        taken,
        min(taken, int(table.stored[hanging].sum()) + full),
    )
