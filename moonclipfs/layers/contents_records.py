"""Contents of files as journal records: how they are written down, and what they mean when they are replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moonclipfs.layers.content import Content, Part
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.records import PART_STAGED, Contents, Stored
from moonclipfs.layers.staging import Generation, Staging
from moonclipfs.layers.state import State
from moonclipfs.types import NO_ID, Kind, ObjectId


class Snapshot(NamedTuple):
    """All of a file's content at one moment, times in nanoseconds."""

    size: int
    mtime_ns: int
    ctime_ns: int
    recipe: ObjectId
    parts: tuple[Part, ...]
    change: int

    @property
    def generations(self) -> set[Generation]:
        """Those that bytes of it are staged in."""
        return {part.generation for part in self.parts if part.generation is not None}


def snapshot(inode: Inode) -> Snapshot:
    """What a file with a content consists of now."""
    content = content_of(inode)
    parts = tuple(content.parts(0, content.size))
    return Snapshot(content.size, inode.mtime_ns, inode.ctime_ns, content.recipe, parts, inode.changed)


def content_of(inode: Inode) -> Content:
    """The content of a file; it has one from here on."""
    content = inode.content
    if content is None:
        content = inode.content = Content(inode.size, inode.child)
    return content


def size_of(inode: Inode) -> int:
    """The size of a file in bytes."""
    return inode.size if inode.content is None else inode.content.size


def contents_record(number: int, now: Snapshot, *, whole: bool, synced: bool) -> Contents:
    """The record of `now.parts`: all of the file, or with `whole` false what changed of it. Raises CorruptError when
    bytes that are staged in memory are gone.
    """
    parts = tuple(
        (part.offset, part.length, part.kind, 0 if part.generation is None else part.generation.number)
        for part in now.parts
    )
    data = tuple(
        (part.generation.number, part.offset, _bytes(part.generation, part.offset, part.length))
        for part in now.parts
        if part.generation is not None and part.generation.path is None
    )
    size, mtime_ns, ctime_ns, recipe = now[:4]
    return Contents(number, size, mtime_ns, ctime_ns, whole, recipe, parts, data, synced, now.change)


def contents_refs(record: Contents | Stored) -> list[tuple[Kind, ObjectId]]:
    """The objects that a record of contents needs."""
    return [] if record.recipe == NO_ID else [(Kind.RECIPE, record.recipe)]


def _bytes(generation: Generation, offset: int, length: int) -> bytes:
    out = bytearray(length)
    generation.read_into(offset, memoryview(out))
    return bytes(out)


class ContentReplay:
    """Applies records of contents while a journal is replayed.

    Bytes that travelled in the journal are put back in memory. A generation that some record names without its bytes
    is in a file, which begins with what it held before it was one.
    """

    def __init__(self, state: State, staging: Staging) -> None:
        self._state = state
        self._staging = staging
        self.unsynced: dict[Inode, set[Generation]] = {}
        """Files whose last record counts for this boot only, with what their states since the last synced one need."""
        self.generations: dict[int, Generation] = {}
        """All that records of contents named, by number."""
        self.sizes: dict[ObjectId, int] = {}
        """The sizes of files that were stored, by recipe."""

    def contents(self, record: Contents) -> None:
        """A file consists of something else from here on. Raises KeyError for one that is not there."""
        inode = self._state.own[record.number]
        state = self._state
        content = content_of(inode)
        if record.synced:
            self.unsynced.pop(inode, None)
        else:
            self.unsynced.setdefault(inode, set()).update(content.generations())
        parts = [self._part(part, record.data) for part in record.parts]
        content.apply(record.whole, record.recipe, record.size, parts, synced=record.synced)
        if record.whole and record.synced:
            self._free(content.unused())
        inode.mtime_ns, inode.ctime_ns = record.mtime_ns, record.ctime_ns
        state.change = max(state.change, record.change)
        _note_change(inode, record.change)

    def gone(self, inode: Inode) -> None:
        """A file was removed; its staging files are found to be unused in the end."""
        held = self.unsynced.pop(inode, set())
        if inode.content is not None:
            self._free({*held, *inode.content.generations(), *inode.content.unused()})
            inode.content = None

    def stored(self, record: Stored) -> None:
        """A frozen content is encoded: a record of contents follows where the file still has it."""
        self._state.generations = max(self._state.generations, record.generation)
        if record.generation:
            self.sizes[record.recipe] = record.size

    def forget(self) -> None:
        """The replay is over: what is kept of a staging file here would keep its space when it is deleted."""
        self.unsynced.clear()
        self.generations.clear()
        self.sizes.clear()

    def _free(self, generations: Iterable[Generation]) -> None:
        """No state of a file that counts needs these: those in memory go at once, else all that the journal ever had
        would be there in the end.
        """
        for generation in generations:
            if generation.path is None:
                self.generations.pop(generation.number, None)
                self._staging.delete(generation)

    def _part(self, part: Sequence[int], data: Iterable[tuple[int, int, bytes]]) -> Part:
        offset, length, kind, number = part
        if kind != PART_STAGED:
            return Part(offset, length, kind)
        self._state.generations = max(self._state.generations, number)
        pieces = [(at, piece) for generation, at, piece in data if generation == number]
        generation = self._staging.restore(number, pieces) if pieces else self._staging.open(number)
        self.generations[number] = generation
        return Part(offset, length, kind, generation)


def _note_change(inode: Inode, change: int) -> None:
    """The contents changed with the layer's change number `change`."""
    inode.changed = max(inode.changed, change)
    todo = [inode]
    while todo:
        inode = todo.pop()
        if inode.below < change:
            inode.below = change
            todo += [parent for parent, _ in inode.links]
