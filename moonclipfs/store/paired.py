"""Reading two stores as one: a private store first, and behind it the base store that its config names.

Objects are found by their id wherever they lie, and a delta here may have its base there. The base store is only read:
what is stored, repacked, condemned or known as damaged is the private store's own. Nothing keeps what is read there
from being deleted there, so what is not found is looked for anew in both, and then reported with both their names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import BackendError, MissingObjectError, MoonclipError, NotFoundError, PermissionDeniedError
from moonclipfs.store.backend import Backend
from moonclipfs.store.index import Index
from moonclipfs.store.packs import Location, PackReader
from moonclipfs.types import NO_ID, ObjectId

log = logging.getLogger(__name__)

_LOST = (MissingObjectError, NotFoundError, PermissionDeniedError, BackendError)
"""What a base store answers that is gone, or of which something is."""


class PairedPacks(PackReader):
    """Reads packs of a private store, and of the base store behind it. Lists and scans its own alone."""

    def __init__(self, backend: Backend, behind: PackReader) -> None:
        super().__init__(backend)
        self._behind = behind
        self._foreign: set[str] = set()
        """Packs that were found behind: the first place to look for them."""

    def read(self, location: Location, offset: int, length: int) -> bytes:
        """See `PackReader.read`."""
        if location.pack not in self._foreign:
            try:
                return super().read(location, offset, length)
            except MissingObjectError as error:
                own = error
            try:
                data = self._read_behind(location, offset, length)
            except MissingObjectError:
                raise own from own.__cause__
            self._foreign.add(location.pack)
            return data
        return self._read_behind(location, offset, length)

    def require(self, packs: Iterable[str]) -> None:
        """See `PackReader.require`: each has to be in one of the two."""
        for pack in packs:
            try:
                super().require([pack])
            except MissingObjectError:
                self._behind.require([pack])

    def forget_deleted(self) -> None:
        """See `PackReader.forget_deleted`."""
        super().forget_deleted()
        self._behind.forget_deleted()

    def _read_behind(self, location: Location, offset: int, length: int) -> bytes:
        try:
            return self._behind.read(location, offset, length)
        except PermissionDeniedError as error:
            # Whoever reads a file was allowed to: this is no answer about the file.
            raise BackendError(f"{location}: the base store cannot be read: {error}") from error


class PairedIndex(Index):
    """Finds objects of a private store, and of the base store behind it. Changes and tells of its own alone.

    Locks are taken in one order: an index may wait for the one behind it, never the other way.
    """

    def __init__(
        self,
        path: Path | None,
        backend: Backend,
        packs: PackReader,
        store_id: str,
        behind: Index,
        name: str,
        follow: Callable[[], None],
    ) -> None:
        """`name` tells which store is behind it; `follow` looks for what changed there, and raises if it is gone."""
        super().__init__(path, backend, packs, store_id)
        self._behind = behind
        self._name = name
        self._follow = follow
        self._trouble = ""

    def find_many(self, ids: Iterable[ObjectId], *, usable: bool = False) -> dict[ObjectId, Location]:
        """See `Index.find_many`."""
        wanted = set(ids)
        found = super().find_many(wanted, usable=usable)
        if rest := wanted - found.keys():
            found.update(self._behind.find_many(rest, usable=usable))
        return found

    def usable_within(self, ids: Iterable[ObjectId], links: int) -> set[ObjectId]:
        """See `Index.usable_within`."""
        wanted = set(ids)
        found = super().usable_within(wanted, links)
        return found | self._behind.usable_within(wanted - found, links)

    def _usable_elsewhere(self, ids: set[ObjectId], links: int) -> set[ObjectId]:
        return self._behind.usable_within(ids, links)

    def locate(self, object_id: ObjectId) -> Location:
        """See `Index.locate`."""
        location = self.find(object_id)
        if location is None:
            super().sync()
            location = self.find(object_id)
        if location is not None:
            return location
        try:
            return self._behind.locate(object_id)
        except _LOST as error:
            lost = error
        try:
            return super().locate(object_id)
        except MissingObjectError as error:
            raise MissingObjectError(f"{error}, {self._why_not(lost)}") from lost

    def _why_not(self, lost: MoonclipError) -> str:
        """What to say of an object that is not in the base store."""
        try:
            self._keep_up()
        except MissingObjectError as gone:
            return str(gone)
        if isinstance(lost, MissingObjectError):
            return f"nor in {self._name}, which nothing here keeps from deleting what is in it"
        return f"and {self._name} cannot be read: {lost}"

    def copies(self, object_id: ObjectId) -> list[Location]:
        """See `Index.copies`."""
        found = super().copies(object_id)
        try:
            return found + self._behind.copies(object_id)
        except _LOST:
            return found

    def relocate(self, location: Location) -> Location | None:
        """See `Index.relocate`."""
        try:
            if location.pack not in self._behind.packs():
                better = super().relocate(location)
            else:
                better = self._behind.relocate(location)
        except _LOST:
            better = self.locate(location.object_id)
        if better is None or better == location:
            better = next((other for other in self.copies(location.object_id) if other != location), None)
        return better

    def elsewhere(self, ids: Iterable[ObjectId]) -> set[ObjectId]:
        """See `Index.elsewhere`; looks for what changed there first. Raises MissingObjectError when it is gone."""
        self._keep_up()
        known: dict[ObjectId, ObjectId] = {}
        asked = wanted = set(ids)
        while asked:
            found = self._behind.find_many(asked)
            known.update((one, location.base) for one, location in found.items())
            asked = {location.base for location in found.values() if location.base != NO_ID} - known.keys()
        return {one for one in wanted if _is_whole(one, known)}

    def by_label(self, label: int, limit: int = 8) -> list[Location]:
        """See `Index.by_label`: its own first."""
        found = super().by_label(label, limit)
        return found + self._behind.by_label(label, limit - len(found)) if len(found) < limit else found

    def by_elements(self, elements: int, limit: int = 256) -> list[Location]:
        """See `Index.by_elements`: its own first."""
        found = super().by_elements(elements, limit)
        return found + self._behind.by_elements(elements, limit - len(found)) if len(found) < limit else found

    def sync(self) -> None:
        """See `Index.sync`; what changed in the base store is looked for too.

        When that is gone, a warning says so: what was written can still be stored, though nothing that refers to it.
        """
        super().sync()
        try:
            self._keep_up()
            self._trouble = ""
        except MissingObjectError as error:
            if str(error) != self._trouble:
                log.warning("%s", error)
            self._trouble = str(error)

    def _keep_up(self) -> None:
        try:
            self._follow()
        except MoonclipError as error:
            raise MissingObjectError(f"{self._name} cannot be read: {error}") from error


def _is_whole(object_id: ObjectId, known: dict[ObjectId, ObjectId]) -> bool:
    """Whether the bases of an object, as `known` tells them, lead to one without a base."""
    for _ in range(limits.CHAIN_READ_DEPTH + 1):
        if object_id not in known:
            return False
        object_id = known[object_id]
        if object_id == NO_ID:
            return True
    return False
