"""Open files of a layer: reading and writing bytes, cutting files off, and when the journal learns of it.

What was read first is answered from where it was then: a generation that is deleted meanwhile lives as long as somebody
reads it. A write changes staging first and the content after that, so whoever reads sees the bytes before or after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from moonclipfs import limits
from moonclipfs.errors import CorruptError, DirectoryError, LimitError, MoonclipError, UsageError
from moonclipfs.layers.changes import Changes, without_set_ids
from moonclipfs.layers.content import Part
from moonclipfs.layers.contentlog import ContentLog
from moonclipfs.layers.contents_records import content_of, size_of
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.jobs import Jobs
from moonclipfs.layers.quota import Quota
from moonclipfs.layers.records import PART_HOLE, PART_RECIPE, Record, SetAttributes
from moonclipfs.layers.staging import Generation
from moonclipfs.layers.wholes import Refs, whole_records
from moonclipfs.store.filereader import FileReader
from moonclipfs.types import NO_ID, Buffer, ObjectId


class Files:
    """The files of one layer. Thread-safe."""

    def __init__(self, layer: Changes) -> None:
        self.layer = layer
        self.log = ContentLog(layer)
        self.jobs = Jobs(layer, self.log)
        self.orphans: list[int] = []
        """Numbers of staging files that a replay found unused; they go with the next `sync_all`."""
        self.captured: Callable[[], Iterable[tuple[Record, Refs]]] = list
        """What a journal that is written anew says of captures."""
        self.quota: Quota | None = None
        """Of an overlay."""
        layer.before_rename = self.before_rename
        layer.state.on_gone = self.gone

    def open(self, inode: Inode, *, write: bool, privileged: bool = False, wait: bool = True) -> OpenFile:
        """Open a file. What is opened for writing becomes an own file of the layer.

        `privileged` is for a writer whose writes leave set-user-ID and set-group-ID alone. Raises DirectoryError,
        UsageError for what is no file, NotFoundError for one that is not there any more, NotCachedError.
        """
        require_file(inode)

        def body() -> OpenFile:
            if write:
                self._own(inode)
                inode.writers += 1
                self.jobs.opened(inode)
            inode.handles += 1
            return OpenFile(self, inode, write, privileged)

        return self.layer.run(body, wait)

    def truncate(self, inode: Inode, size: int, now_ns: int, *, privileged: bool = False, wait: bool = True) -> None:
        """Cut a file off at `size` bytes, or extend it with a hole.

        While somebody has the file open for writing, the journal learns of it when that is closed, or synced: a file
        that is cut to nothing and written anew is old or new after a crash. Raises LimitError, NoSpaceError,
        BackendError, and as `open`.
        """
        require_file(inode)
        if size > limits.FILE_BYTES:
            raise LimitError(f"a file of {size} bytes is longer than the limit of {limits.FILE_BYTES}")

        def body() -> None:
            self._own(inode)
            if not privileged:
                self._clear_set_ids(inode, now_ns)
            if size == content_of(inode).size:
                if not inode.writers:
                    self.log.journal(inode)
                self._touch(inode, now_ns)
            elif inode.writers:
                self._resize(inode, size, now_ns)
            else:
                self._resize_closed(inode, size, now_ns)
            if not inode.writers:
                self.jobs.closed(inode)

        self.layer.run(body, wait)

    def sync_all(self) -> None:
        """Make durable what was closed, and keep the journal short. Raises NoSpaceError, BackendError."""
        self.log.sync_all()
        journal = self.layer.journal
        # Bytes that are staged in the journal are soon stored: to copy them would only take time.
        is_cheap = self.layer.staging.in_memory <= limits.REWRITE_STAGED_BYTES
        if journal.wants_rewrite and (is_cheap or journal.size > limits.JOURNAL_BYTES):
            self.checkpoint()
        with self.layer.lock:
            while self.orphans:
                self.layer.staging.remove(self.orphans[-1])
                self.orphans.pop()

    def checkpoint(self) -> None:
        """Write the journal anew, with the state as it is. Raises NoSpaceError, BackendError."""
        self.log.sync_all()
        self.log.settle()
        with self.layer.lock:
            self.log.settle()
            ready = self.log.disposal.begin()
            try:
                self.layer.journal.rewrite(self._records())
            except BaseException:
                self.log.disposal.failed(ready)
                raise
            self.log.disposal.drop(ready)
            self.log.rewritten()

    def _records(self) -> Iterator[tuple[Record, Refs]]:
        state = self.layer.state
        yield from whole_records(state)
        if self.quota is not None:
            yield from ((charged, []) for charged in self.quota.records())
        for inode in state.own.values():
            if inode.content is not None and inode.links:
                yield from self.log.records(inode)
        yield from self.captured()

    def before_rename(self, inode: Inode, replaced: Inode | None) -> None:
        """For the layer, under its lock: a name is about to be given to an inode, in the place of another or not."""
        if not inode.is_file:
            return
        if replaced is not None and replaced.is_file:
            self.jobs.replaces(inode, _recipe(replaced))
        self.log.before_rename(inode, replaced)

    def count(self, limit: int | None) -> None:
        """Count the bytes of the layer's own, which are to be at most `limit`, from its first record on."""
        self.quota = Quota(self.layer, limit)
        self.jobs.charges = self.quota.encoding

    def gone(self, inode: Inode) -> None:
        """For the layer, under its lock: a file has no names and no handles any more."""
        if self.quota is not None:
            self.quota.gone(inode)
        self.jobs.gone(inode)
        self.log.gone(inode)

    # For open files, under the lock

    def begin_write(self, inode: Inode, offset: int, length: int) -> Generation:
        """The generation that takes a write, in a file for a long one: whether its bytes are in memory, and so in the
        records of the journal, changes under the lock only. Raises StagingFullError, QuotaError, NoSpaceError,
        BackendError.
        """
        if self.quota is not None:
            self.quota.admit(inode, ((offset, offset + length),))
        self.layer.staging.admit(length)
        content = content_of(inode)
        self.log.changing(inode)
        generation = content.generation
        if generation is None:
            self.layer.state.generations += 1
            generation = self.layer.staging.create(self.layer.state.generations)
            content.begin(generation)
        if length > limits.INLINE_BYTES:
            generation.leave_memory()
        return generation

    def end_write(
        self, inode: Inode, generation: Generation, offset: int, length: int, now_ns: int, privileged: bool
    ) -> bool:
        """The bytes are in the generation. False when it was frozen or left meanwhile: they have to go into another."""
        if generation.frozen:
            return False
        self.log.changing(inode)  # once more: what was journalled since `begin_write` does not have these bytes
        content_of(inode).wrote(generation, offset, length)
        if self.quota is not None:
            self.quota.wrote(inode, ((offset, offset + length),))
        inode.mtime_ns = inode.ctime_ns = now_ns
        if not privileged:
            self._clear_set_ids(inode, now_ns)
        return True

    def close(self, file: OpenFile) -> None:
        """A handle is closed. Raises as `ContentLog.journal`; it is closed all the same."""
        inode = file.inode
        inode.handles -= 1
        inode.writers -= file.write_open
        try:
            if file.write_open:
                self.log.journal(inode)
        finally:
            is_stored = inode.content is not None and inode.content.exact
            if (file.write_open or is_stored) and not inode.writers and inode.links:
                self.jobs.closed(inode)
            self.layer.state.release(inode)

    def _own(self, inode: Inode) -> None:
        if not inode.own and inode.links:
            self.layer.adopt_inside(inode)

    def _resize_closed(self, inode: Inode, size: int, now_ns: int) -> None:
        """Resize a file that nobody has open for writing: when that cannot be journalled, nothing has changed."""
        content, times = content_of(inode).copy(), (inode.mtime_ns, inode.ctime_ns)
        cleared = self.log.cleared(inode)
        counted = None if self.quota is None else self.quota.saved(inode)
        try:
            self._resize(inode, size, now_ns)
            self.log.journal(inode)
        except BaseException:
            inode.content, (inode.mtime_ns, inode.ctime_ns) = content, times
            self.log.undone(inode, cleared)
            if self.quota is not None:
                self.quota.restore(inode, counted)
            raise

    def _resize(self, inode: Inode, size: int, now_ns: int) -> None:
        content = content_of(inode)
        if self.quota is not None:
            self.quota.cut(inode, size)
        if size:
            self.log.changing(inode)
            content.truncate(size)
        else:
            self.jobs.replaces(inode, content.recipe)
            self.log.clearing(inode)
            kept = content.generations()
            for generation in kept:
                generation.frozen = True  # what a crash brings back is written no more
            self.layer.staging.set_aside(kept)
            content.clear()
        inode.mtime_ns = inode.ctime_ns = now_ns

    def _touch(self, inode: Inode, now_ns: int) -> None:
        self._record(inode, SetAttributes(inode.number, None, None, None, None, now_ns, now_ns))

    def _clear_set_ids(self, inode: Inode, now_ns: int) -> None:
        if inode.mode & 0o6000 and (mode := without_set_ids(inode.mode)) != inode.mode:
            self._record(inode, SetAttributes(inode.number, mode, None, None, None, None, now_ns))

    def _record(self, inode: Inode, record: SetAttributes) -> None:
        if inode.links:
            self.layer.record(record)
        else:
            self.layer.state.apply(record)


class OpenFile:
    """One open file; it reads as a `store.filereader.FileReader` does. Thread-safe."""

    __slots__ = ("_closed", "_files", "_privileged", "_reader", "inode", "write_open")

    def __init__(self, files: Files, inode: Inode, write: bool, privileged: bool) -> None:
        """Use `Files.open`."""
        self.inode = inode
        self.write_open = write
        self._files = files
        self._privileged = privileged
        self._reader: tuple[ObjectId, FileReader] | None = None
        self._closed = False

    @property
    def size(self) -> int:
        """Length in bytes, now."""
        return size_of(self.inode)

    # Reading

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes at `offset`, fewer only at the end of the file. Raises CorruptError."""
        out = bytearray(max(0, min(length, self.size - offset)))
        count = self.read_into(offset, memoryview(out))
        return bytes(out) if count == len(out) else bytes(out[:count])

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset` on, up to the end of the file; return the count of bytes.

        Raises CorruptError, BackendError.
        """
        while True:
            parts, recipe = self._locate(offset, len(out))
            try:
                return self._fill(offset, out, parts, recipe)
            except MoonclipError:
                # What the file does not need any more may be reclaimed while it is read.
                if recipe == self._locate(offset, 0)[1]:
                    raise

    def cached(self, offset: int, length: int) -> Buffer | None:
        """Return what `read` would if that waits for nothing, else None."""
        parts, recipe = self._locate(offset, length)
        found: list[Buffer] = []
        for part in parts:
            data = self._cached_part(part, recipe)
            if data is None:
                return None
            found.append(data)
        return found[0] if len(found) == 1 else b"".join(found)

    def prefetch(self, offset: int, length: int) -> None:
        """Decode a range, clipped to the file, into the cache of blocks. Raises CorruptError."""
        parts, recipe = self._locate(offset, length)
        for part in parts:
            if part.kind == PART_RECIPE:
                self._recipe_reader(recipe).prefetch(part.offset, part.length)

    def _locate(self, offset: int, length: int) -> tuple[list[Part], ObjectId]:
        """Where a range, clipped to the file, comes from at this moment."""
        inode = self.inode
        with self._files.layer.lock:
            if inode.content is not None:
                return inode.content.parts(offset, length), inode.content.recipe
            length = min(offset + length, inode.size) - offset
            kind = PART_HOLE if inode.child == NO_ID else PART_RECIPE
            return [Part(offset, length, kind)] if length > 0 else [], inode.child

    def _fill(self, offset: int, out: memoryview, parts: list[Part], recipe: ObjectId) -> int:
        at = 0
        for part in parts:
            view = out[at : at + part.length]
            if part.generation is not None:
                part.generation.read_into(part.offset, view)
            elif part.kind == PART_HOLE:
                view[:] = bytes(part.length)
            elif self._recipe_reader(recipe).read_into(part.offset, view) != part.length:
                raise CorruptError(f"recipe {recipe.hex()} ends before byte {part.offset + part.length}")
            at += part.length
        return at

    def _cached_part(self, part: Part, recipe: ObjectId) -> Buffer | None:
        if part.generation is not None:
            return part.generation.cached(part.offset, part.length)
        if part.kind == PART_HOLE:
            return bytes(part.length)
        known = self._reader
        if known is None or known[0] != recipe:
            return None
        data = known[1].cached(part.offset, part.length)
        return data if data is not None and len(data) == part.length else None

    def _recipe_reader(self, recipe: ObjectId) -> FileReader:
        known = self._reader
        if known is None or known[0] != recipe:
            store = self._files.layer.store
            known = self._reader = recipe, FileReader(store.objects, store.recipe_object(recipe))
        return known[1]

    # Writing

    def write(self, offset: int, data: Buffer, now_ns: int) -> int:
        """Write all of `data` at `offset`; returns its length. The file's size grows with it.

        Raises StagingFullError, after which the same may be tried again when something was encoded; NoSpaceError,
        BackendError, LimitError past the longest file, UsageError when the file is not open for writing.
        """
        files, inode = self._files, self.inode
        lock, length = files.layer.lock, memoryview(data).nbytes
        if not self.write_open or self._closed:
            raise UsageError(f"{inode} is not open for writing")
        if offset + length > limits.FILE_BYTES:
            raise LimitError(f"a write up to byte {offset + length}: files end at {limits.FILE_BYTES}")
        if not length:
            return 0
        while True:
            with lock:
                generation = files.begin_write(inode, offset, length)
                if length <= limits.INLINE_BYTES:
                    generation.write(offset, data)
                    files.end_write(inode, generation, offset, length, now_ns, self._privileged)
                    return length
            # Without the lock: it may be frozen meanwhile, as captured or encoded bytes are; then once more.
            if not generation.try_write(offset, data):
                continue
            with lock:
                if files.end_write(inode, generation, offset, length, now_ns, self._privileged):
                    return length

    # Journalling

    def flush(self) -> None:
        """For close(2) of any duplicate: the journal has what was written. Raises NoSpaceError, BackendError."""
        if self.write_open:
            with self._files.layer.lock:
                self._files.log.journal(self.inode)

    def sync(self, data_only: bool = False) -> None:
        """Contents, attributes and names are durable when this returns. Raises NoSpaceError, BackendError.

        `data_only` makes no difference: one record of the journal tells both.
        """
        self._files.log.sync(self.inode)
        self._files.log.commit()

    def close(self) -> None:
        """The handle is used no more; harmless when repeated. Raises as `flush`, but the handle is closed then too."""
        with self._files.layer.lock:
            if not self._closed:
                self._closed = True
                self._files.close(self)


def require_file(inode: Inode) -> None:
    """Raise DirectoryError or UsageError for what is no regular file."""
    if inode.is_directory:
        raise DirectoryError(f"{inode} is a directory")
    if not inode.is_file:
        raise UsageError(f"{inode} is no regular file")


def _recipe(inode: Inode) -> ObjectId:
    return inode.child if inode.content is None else inode.content.recipe
