"""Verifying objects: that each decodes to its id, and that the bases of all that is needed are there.

An object is broken when no copy of it can be read. What is broken through its base belongs to the base's problem.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from moonclipfs import limits
from moonclipfs.errors import CorruptError, NotFoundError
from moonclipfs.store.audit import Audited, audit_all
from moonclipfs.store.packs import Location, pack_key
from moonclipfs.store.problems import Problem, ProblemKind
from moonclipfs.store.reachable import PackTable
from moonclipfs.store.store import Store
from moonclipfs.types import ObjectId


def has_gone(store: Store, condemned: Collection[str], pack: str) -> bool:
    """True when gc deleted a pack since it was listed. `condemned` are the packs condemned by then: nobody waits for
    us with these, and the log forgets them when they are gone."""
    try:
        store.backend.size(pack_key(pack))
    except NotFoundError:
        return pack in condemned or pack in store.names().condemned()
    return False


class ObjectCheck:
    """What is wrong with the objects of a table. `broken` leads from an object to the problem behind it."""

    def __init__(self, store: Store, table: PackTable, needed: Iterable[ObjectId], condemned: Collection[str]) -> None:
        """Looks for what is missing, and for bases that lead nowhere; reads nothing."""
        self._store = store
        self._table = table
        self._condemned = condemned
        self.broken: dict[ObjectId, Problem] = {}
        self.problems: list[Problem] = []
        closure = table.closure(needed, table.choose(np.zeros(len(table.names), np.bool_)))
        for object_id in closure.missing:
            nor = f", nor in the base store {store.base.path}" if store.base is not None else ""
            missing = self._report(ProblemKind.MISSING, f"object {object_id.hex()}", f"it is in no pack{nor}")
            self.broken[object_id] = missing
        bases = table.bases(np.flatnonzero(closure.live))
        for object_id in closure.unresolved:
            self._follow(object_id, bases)

    def audit(self, progress: Callable[[int, int], None]) -> None:
        """Decode and hash every copy of every object, needed or not. The index learns which are damaged."""
        total, done = int(self._table.entries["encoded_length"].sum()), 0
        whole: set[ObjectId] = set()
        failed: list[Audited] = []
        for found in audit_all(self._in_pack_order(), self._store.packs, self._store.objects):
            done += found.location.encoded_length
            progress(done, total)
            if found.error is None:
                whole.add(found.location.object_id)
            elif not has_gone(self._store, self._condemned, found.location.pack):
                failed.append(found)
        self._store.index.set_damaged(
            {(one.location.pack, one.location.offset) for one in failed if not one.through_base}
        )
        for found in failed:
            if not found.through_base:
                self._report_copy(found.location, str(found.error), found.location.object_id in whole)
        through = {
            found.location.object_id: found.location.base
            for found in failed
            if found.through_base and found.location.object_id not in whole
        }
        for object_id in through:
            self._follow(object_id, through)

    def report_unreadable(self, object_id: ObjectId, why: str) -> None:
        """Note that a directory or recipe could not be read, unless it is known what is behind that."""
        if object_id not in self.broken:
            self.broken[object_id] = self._report(ProblemKind.TREE, f"object {object_id.hex()}", why)

    def blame(self, object_id: ObjectId, name: str) -> None:
        """Note that `name` is affected by what broke `object_id`."""
        affected = self.broken[object_id].affected
        if name not in affected[-1:]:  # names come file by file
            affected.append(name)

    def _report_copy(self, location: Location, message: str, elsewhere: bool) -> None:
        if elsewhere:
            self._report(ProblemKind.OBJECT, pack_key(location.pack), f"{message}; another copy of it is whole")
            return
        problem = self._report(ProblemKind.OBJECT, pack_key(location.pack), message)
        self.broken.setdefault(location.object_id, problem)

    def _report(self, kind: ProblemKind, where: str, message: str) -> Problem:
        self.problems.append(Problem(kind, where, message))
        return self.problems[-1]

    def _follow(self, object_id: ObjectId, bases: dict[ObjectId, ObjectId]) -> None:
        """Follow the bases of an object to the end."""
        chain = [object_id]
        while (base := bases.get(chain[-1])) is not None:
            if base in self.broken:
                self.broken.update((one, self.broken[base]) for one in chain if one not in self.broken)
                return
            if base in chain:
                ring = ", ".join(one.hex() for one in chain[chain.index(base) :])
                problem = self._report(
                    ProblemKind.CHAIN, f"object {base.hex()}", f"DeltaCycle({ring}): bases lead back"
                )
                self.broken.update((one, problem) for one in chain)
                return
            chain.append(base)
            if len(chain) > limits.CHAIN_READ_DEPTH + 1:
                message = f"more than {limits.CHAIN_READ_DEPTH} bases behind it"
                self.broken[object_id] = self._report(ProblemKind.CHAIN, f"object {object_id.hex()}", message)
                return

    def _in_pack_order(self) -> Iterator[Location]:
        table = self._table
        for row in np.lexsort((table.entries["offset"], table.pack)).tolist():
            try:
                yield table.location(row)
            except CorruptError as error:
                name = table.names[table.pack[row]]
                self._report(ProblemKind.OBJECT, pack_key(name), f"an entry that cannot be: {error}")
