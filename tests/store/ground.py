"""Packs of single objects and an index over them, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.index import Index
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location, PackReader, PackWriter, pack_key
from moonclipfs.types import Kind, ObjectId
from tests.faults import UnsyncedOps


class CountingPacks(PackReader):
    """Counts the footers read."""

    def __init__(self, backend: LocalBackend) -> None:
        super().__init__(backend)
        self.footers = 0

    def entries(self, pack: str) -> NDArray[np.void]:
        self.footers += 1
        return super().entries(pack)


class Ground:
    """A directory of packs, and what an index over it needs."""

    def __init__(self, root: Path) -> None:
        for name in ("packs", "tmp"):
            (root / name).mkdir(parents=True)
        self.root = root
        self.file = root / "index.sqlite"
        self.backend = LocalBackend(root, UnsyncedOps())
        self.opened: list[Index] = []

    def pack(self, *datas: bytes, **fields: object) -> list[Location]:
        """Publish a pack of these objects; `fields` are those of `PackWriter.add`."""
        writer = PackWriter(self.backend, lambda pack, entries: None)
        locations = [
            writer.add(data, object_id=name(data), kind=Kind.DATA, raw_length=len(data), **fields)  # type: ignore[arg-type]
            for data in datas
        ]
        writer.flush()
        return locations

    def index(self, *, store_id: str = "id", memory: bool = False) -> Index:
        """Open an index over the packs."""
        self.packs = CountingPacks(self.backend)
        index = Index(None if memory else self.file, self.backend, self.packs, store_id)
        self.opened.append(index)
        return index

    def delete(self, pack: str) -> None:
        """Delete a pack, as gc of another process does."""
        self.backend.delete(pack_key(pack))


def name(data: bytes) -> ObjectId:
    """The id of a data object."""
    return object_id(Kind.DATA, data)
