"""Which objects a save would add, told without storing any: ranks tell each other, so that one of them stores each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

from moonclipfs.store.ingest import Intake
from moonclipfs.store.kept import Kept
from moonclipfs.store.packs import Location
from moonclipfs.store.sinks import Hints
from moonclipfs.store.store import Store
from moonclipfs.types import Buffer, DType, Kind, ObjectId, Source


class _Counting:
    """A sink that keeps nothing. Thread-safe: adding to a set is."""

    def __init__(self, store: Store) -> None:
        self._index = store.index
        self.new: set[ObjectId] = set()

    def find(self, object_id: ObjectId) -> Location:
        """Note what the store does not have; for whoever asks, everything is there."""
        found = self._index.find(object_id, usable=True)
        if found is None:
            self.new.add(object_id)
            return placeholder(object_id)
        return found

    def by_label(self, label: int, limit: int) -> Sequence[Location]:
        """Nothing is stored against anything."""
        return ()

    def by_elements(self, elements: int, limit: int) -> Sequence[Location]:
        """Nothing is stored against anything."""
        return ()

    def put(self, kind: Kind, raw: Buffer, object_id: ObjectId, hints: Hints) -> Location:
        """Nothing comes here: `find` finds it all."""
        return placeholder(object_id)


def new_objects(store: Store, files: Iterable[tuple[Source, Kept | None]], pool: Executor) -> set[ObjectId]:
    """The objects of files, and of their recipes, that the store does not have; an ingest of the caller is open."""
    counting = _Counting(store)
    intake = Intake(counting, store.config.cut)
    intake.use_pool(pool)
    try:
        for source, kept in files:
            intake.put_file(source, kept=kept)
    finally:
        intake.close()
    return counting.new


def placeholder(object_id: ObjectId) -> Location:
    """Stands for where an object is that another process stores."""
    return Location(object_id, "", 0, 0, 0, Kind.DATA, DType.BYTES)
