"""How much of each pack is needed, and which packs can go. Pure arithmetic over the table of all objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.store.reachable import Closure, Flags, PackTable, Rows
from moonclipfs.types import ObjectId


@dataclass(frozen=True, slots=True)
class Waste:
    """What of the packs is needed.

    `needed` has a flag for each row: of every needed object one copy counts, the rest is `dead` (bytes, one number
    a pack). `stranded` are needed rows of condemned packs: nothing else holds these objects. `whole` are packs without
    anything needed, `partial` those of which a certain share or more is dead, the most dead first; as numbers.
    """

    needed: Flags
    dead: NDArray[np.int64]
    stranded: Rows
    whole: list[int]
    partial: list[int]


def measure(
    table: PackTable, closure: Closure, condemned: Flags, spared: Flags, share_dead: float = limits.REPACK_DEAD_SHARE
) -> Waste:
    """Tell needed from dead. `condemned` and `spared` have a flag for each pack: spared ones are never to go. Packs of
    which `share_dead` is dead count as partial.
    """
    needed = closure.live
    count = len(table.names)
    held = np.bincount(table.pack[needed], minlength=count)
    dead = np.bincount(table.pack[~needed], table.stored[~needed], count).astype(np.int64)
    may_go = ~condemned & ~spared
    share = dead / np.maximum(table.sizes, 1)
    partial = np.flatnonzero(may_go & (held > 0) & (share >= share_dead))
    return Waste(
        needed,
        dead,
        np.flatnonzero(needed & (condemned & ~spared)[table.pack]),
        np.flatnonzero(may_go & (held == 0)).tolist(),
        partial[np.argsort(-share[partial], kind="stable")].tolist(),
    )


def removable(
    table: PackTable, ids: Iterable[ObjectId], condemned: Collection[str], packs: Collection[str]
) -> list[str]:
    """Those of `packs` that can go together: whatever `ids` need can be decoded without them and the condemned ones.

    What only condemned packs hold does not keep any of `packs`, unless these are condemned themselves.
    """
    wanted = b"".join(ids)
    referred = table.flags([wanted])
    going = set(packs)
    while going:
        flags = table.mask(going)
        closure = table.closure([wanted], table.choose(table.mask(condemned), flags, referred))
        needed = {table.names[number] for number in np.unique(table.pack[closure.live])} & going
        if not needed:
            break
        going -= needed
    return [pack for pack in packs if pack in going]
