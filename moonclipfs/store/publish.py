"""Ingest into a store: what was put in becomes a version of a snapshot, or leaves nothing that is visible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from moonclipfs import limits
from moonclipfs.errors import BusyError, MissingObjectError
from moonclipfs.formats.cut import CutRules
from moonclipfs.store.backend import Backend
from moonclipfs.store.directories import decode_directory
from moonclipfs.store.index import Index
from moonclipfs.store.ingest import Intake
from moonclipfs.store.leases import Lease
from moonclipfs.store.log import Log, Names
from moonclipfs.store.packs import Location, PackReader
from moonclipfs.store.reader import Chain, ObjectReader
from moonclipfs.store.recipes import decode_recipe
from moonclipfs.store.sinks import Hints, PackSink
from moonclipfs.types import NO_ID, Buffer, EntryType, Kind, ObjectId, Version

_KINDS = {EntryType.FILE: Kind.RECIPE, EntryType.DIRECTORY: Kind.DIRECTORY}


class _CondemnedError(Exception):
    """Since the last look, gc condemned packs that may hold what is about to be published."""


class Ingest(Intake):
    """Puts files into a store and publishes them. A context manager; one thread uses it at a time.

    While it lives, nothing that exists now is deleted. An ingest that ends without `publish` leaves only objects that
    nothing refers to; the next one finds them again, until gc takes them.
    """

    def __init__(
        self, backend: Backend, index: Index, packs: PackReader, log: Log, lease: Lease, rules: CutRules
    ) -> None:
        """Raises LeaseLostError, BackendError."""
        self._index = index
        self._log = log
        self._lease = lease
        # In this order: what the index calls usable stays true only while the lease holds the log's state.
        self._hold = lease.hold(log.names.sequence)
        try:
            names = log.refresh()
            self._condemned = set(names.condemned())
            index.set_condemned(self._condemned)
            index.sync()
            self._packs_sink = PackSink(backend, index, packs)
            super().__init__(self._packs_sink, rules)
        except BaseException:
            self._hold.release()
            raise

    def __enter__(self) -> Ingest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it: what was put but not published is dropped."""
        super().close()
        self._packs_sink.abort()
        self._hold.release()

    def finds(self, object_id: ObjectId) -> bool:
        """Whether an object is here and may be referred to; it counts as referred to then."""
        return self._packs_sink.find(object_id) is not None

    def adopt(self, location: Location, encoded: Buffer) -> bool:
        """Store an object that another store holds at `location` as it is encoded there; its base has to be here.

        Returns False, and does nothing, when its chain would be too long. Raises MissingObjectError without its base.
        """
        depth = 0
        if location.base != NO_ID:
            base = self._packs_sink.find(location.base)
            if base is None:
                raise MissingObjectError(f"{location}: its base {location.base.hex()} is not there to refer to")
            depth = base.depth + 1
        if depth <= limits.CHAIN_DEPTH:
            self._packs_sink.adopt(location, encoded, depth)
        return depth <= limits.CHAIN_DEPTH

    def adopt_whole(self, location: Location, raw: Buffer) -> None:
        """Store an object that another store holds at `location` in full."""
        hints = Hints(location.dtype, location.label, location.sketch)
        self._packs_sink.put(location.kind, raw, location.object_id, hints)

    def publish(
        self,
        path: str,
        root: ObjectId,
        metadata: Mapping[str, object],
        check: Callable[[Names], None] | None = None,
    ) -> Version:
        """Make everything durable and bind the directory object `root` to `path`, as a new version of it.

        `check` sees the newest names before the record is written, after each lost race, and may raise to give up.
        Raises LeaseLostError when this process was taken for dead, MissingObjectError when a pack is gone that held
        what was found here; nothing was published then.
        """

        def guard(names: Names) -> None:
            self._lease.check()
            if check is not None:
                check(names)
            if not self._condemned.issuperset(names.condemned()):
                raise _CondemnedError

        while True:
            self._packs_sink.flush()
            self._packs_sink.require_found()
            try:
                return self._log.bind(path, root, metadata, check=guard)
            except _CondemnedError:
                self._follow(self._log.names)
                self._rescue([(Kind.DIRECTORY, root)])

    def complete(self, roots: Iterable[tuple[Kind, ObjectId]]) -> None:
        """Make everything durable without a name: what `roots` need then lies in no pack that was condemned by now.

        It is kept from gc by the hold of this ingest, so until `close`: by then a journal has to name the roots.
        May be called again after more was put. Raises LeaseLostError, MissingObjectError as `publish` does.
        """
        roots = [(kind, root) for kind, root in roots if root != NO_ID]
        while True:
            self._packs_sink.flush()
            self._packs_sink.require_found()
            names = self._log.refresh()
            self._lease.check()
            if self._condemned.issuperset(names.condemned()):
                return
            self._follow(names)
            self._rescue(roots)

    def leave_out(self, object_ids: Iterable[ObjectId]) -> None:
        """Let files refer to these objects where they are not here: another process stores them for the same snapshot,
        and whoever publishes it has to `take_over` the files.
        """
        self._packs_sink.leave_out(object_ids)

    def hand_over(self) -> None:
        """Make everything durable for another process to take over. Until `close`, as long as this process lives, the
        hold of this ingest keeps it from gc. Raises LeaseLostError, MissingObjectError.
        """
        self._packs_sink.flush()
        self._packs_sink.require_found()
        self._lease.check()

    def take_over(self, roots: Iterable[tuple[Kind, ObjectId]]) -> None:
        """Refer to what other processes have handed over, all of whom live still after this ingest was made: from then
        on our hold keeps it too. What lies in packs that were condemned meanwhile is stored again.

        Raises MissingObjectError for what none of them has stored.
        """
        self._packs_sink.leave_out(())
        self._index.sync()
        reader = ObjectReader(self._packs_sink, self._packs_sink, 0)
        copied: set[ObjectId] = set()
        for object_id in self._needed((kind, root) for kind, root in roots if root != NO_ID):
            if self._packs_sink.find(object_id) is None:
                self._copy_chain(reader.chain(object_id), copied)

    def _follow(self, names: Names) -> None:
        """Refer to nothing more that was condemned meanwhile."""
        self._condemned.update(names.condemned())
        self._index.set_condemned(self._condemned)

    def _rescue(self, roots: Iterable[tuple[Kind, ObjectId]]) -> None:
        """Store again whatever `roots` need that lies in condemned packs. They exist still: our lease keeps them."""
        # Packs that were condemned before we came may have gone since: without them, and without memory of them.
        self._index.sync()
        reader = ObjectReader(self._packs_sink, self._packs_sink, 0)
        copied: set[ObjectId] = set()
        try:
            for object_id in self._needed(roots):
                if self._index.find(object_id, usable=True) is None:
                    self._copy_chain(reader.chain(object_id), copied)
        except MissingObjectError as error:
            raise BusyError(f"what this refers to was reclaimed meanwhile; try again ({error})") from error

    def _needed(self, roots: Iterable[tuple[Kind, ObjectId]]) -> Iterable[ObjectId]:
        """Every object that `roots` lead to, themselves included; their bases are not."""
        reader = self._packs_sink.objects
        todo = list(dict.fromkeys(roots))
        seen = {root for _, root in todo}
        while todo:
            kind, object_id = todo.pop()
            yield object_id
            if kind is Kind.DATA:
                continue
            if kind is Kind.RECIPE:
                below = [(Kind.DATA, data) for data in decode_recipe(reader.load(object_id, kind)).object_ids()]
            else:
                entries = decode_directory(reader.load(object_id, kind)).values()
                below = [(_KINDS[entry.type], entry.child) for entry in entries if entry.child != NO_ID]
            todo += [(kind, child) for kind, child in below if child not in seen]
            seen.update(child for _, child in below)

    def _copy_chain(self, chain: Chain, copied: set[ObjectId]) -> None:
        """Copy an object and the bases behind it, as encoded, out of condemned packs, unless they are in `copied`."""
        for link in chain:
            location = link.location
            if location.pack in self._condemned and location.object_id not in copied:
                self._packs_sink.copy(location)
                copied.add(location.object_id)
