"""How much of each pack is needed, and which packs can go. Pure arithmetic over the table of all objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.store.reachable import Closure, PackTable
from moonclipfs.types import ObjectId

Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Waste:
    """What of the packs is needed.

    `primary` has a flag for each row: of every needed object one copy counts, the rest is `dead` (bytes, one number
    a pack). `stranded` are rows of needed objects that only condemned packs hold. `whole` are packs without anything
    needed, `partial` those of which REPACK_DEAD_SHARE or more is dead, the most dead first; as numbers of the table.
    """

    primary: Flags
    dead: NDArray[np.int64]
    stranded: Rows
    whole: list[int]
    partial: list[int]


def measure(table: PackTable, closure: Closure, usable: Flags, spared: Flags) -> Waste:
    """Tell needed from dead. `usable` and `spared` have a flag for each pack: spared ones are never to go."""
    groups = np.cumsum(table.first_rows())
    rows = np.flatnonzero(closure.live)
    # Of several copies the one that readers take: not condemned, then fewest links behind it, then the newest.
    rows = rows[np.lexsort((-table.pack[rows], table.entries["depth"][rows], ~usable[table.pack[rows]], groups[rows]))]
    first = np.ones(len(rows), np.bool_)
    first[1:] = groups[rows][1:] != groups[rows][:-1]
    chosen = rows[first]
    primary = np.zeros(len(groups), np.bool_)
    primary[chosen] = True
    count = len(table.names)
    held = np.bincount(table.pack[primary], minlength=count)
    dead = np.bincount(table.pack[~primary], table.stored[~primary], count).astype(np.int64)
    may_go = usable & ~spared
    share = dead / np.maximum(table.sizes, 1)
    partial = np.flatnonzero(may_go & (held > 0) & (share >= limits.REPACK_DEAD_SHARE))
    return Waste(
        primary,
        dead,
        chosen[~(usable | spared)[table.pack[chosen]]],
        np.flatnonzero(may_go & (held == 0)).tolist(),
        partial[np.argsort(-share[partial], kind="stable")].tolist(),
    )


def removable(
    table: PackTable, ids: Iterable[ObjectId], condemned: Collection[str], packs: Collection[str]
) -> list[str]:
    """Those of `packs` that can go together: whatever `ids` need has a copy outside them and the condemned ones.

    What only condemned packs hold does not keep any of `packs`, unless these are condemned themselves.
    """
    wanted = b"".join(ids)
    going = set(packs)
    while going:
        closure = table.closure([wanted], ~table.mask([*condemned, *going]))
        needed = {table.names[number] for number in np.unique(table.pack[closure.live])} & going
        if not needed:
            break
        going -= needed
    return [pack for pack in packs if pack in going]
