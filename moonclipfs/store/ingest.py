"""Bytes in: files are cut, hashed, deduplicated, encoded against a base, and published under a name."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields

from moonclipfs import limits
from moonclipfs.codec.sketch import sketch
from moonclipfs.errors import CorruptError
from moonclipfs.formats.cut import CutRules, Piece, cut
from moonclipfs.formats.layout import Region
from moonclipfs.formats.sniff import parse
from moonclipfs.store.bases import THOROUGH, Line, candidates, label_of
from moonclipfs.store.cores import usable_cores
from moonclipfs.store.directories import encode_directory
from moonclipfs.store.kept import Kept, Previous
from moonclipfs.store.objects import object_id
from moonclipfs.store.packfile import ENTRY, RECORD_BYTES
from moonclipfs.store.packs import Location
from moonclipfs.store.recipes import Recipe, encode_recipe
from moonclipfs.store.sinks import Hints, Sink
from moonclipfs.types import NO_ID, Buffer, Entry, Extent, Kind, ObjectId, Source

log = logging.getLogger(__name__)

_COST = 4
"""Bytes of memory that one raw byte of a piece in work takes: itself, its base, its encoding, the check."""
_OVERHEAD = RECORD_BYTES + ENTRY.itemsize
"""Bytes that an object takes in a pack beside its encoding."""
_AHEAD = 1024
"""Pieces that wait for a worker at one time, at most."""


@dataclass(slots=True)
class IngestStats:
    """What became of the bytes of files: `*_bytes` are raw bytes, `*_stored` what they take in packs.

    `shared_bytes` were there already, `literal_bytes` stand in recipes, `tree_stored` are recipes and directories.
    """

    files: int = 0
    objects: int = 0
    raw_bytes: int = 0
    shared_bytes: int = 0
    hole_bytes: int = 0
    literal_bytes: int = 0
    delta_bytes: int = 0
    delta_stored: int = 0
    full_bytes: int = 0
    full_stored: int = 0
    tree_stored: int = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes that were added to packs."""
        return self.delta_stored + self.full_stored + self.tree_stored

    def add(self, other: IngestStats) -> None:
        """Count another's numbers in."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class Intake:
    """Turns files and directories into objects of a sink.

    Workers hash and encode pieces side by side, within `limits.INGEST_BYTES` of memory. One thread uses it at a time,
    but for `use_pool`.
    """

    effort = THOROUGH
    """What time is spent on."""

    def __init__(self, sink: Sink, rules: CutRules) -> None:
        """Has a thread for each core that this process may use, as far as the memory is enough: see `use_pool`."""
        self._sink = sink
        self._rules = rules
        self._own_pool = ThreadPoolExecutor(worker_count(), "ingest")
        self._pool: Executor = self._own_pool
        self._lock = threading.Lock()
        self._flights: dict[ObjectId, Future[Location]] = {}
        self.hash_seconds = self.put_seconds = 0.0
        """What all threads together spent on ids of objects, and on encoding and writing new ones."""
        self.stats = IngestStats()

    def close(self) -> None:
        """Stop the workers."""
        self._own_pool.shutdown(cancel_futures=True)

    def use_pool(self, pool: Executor) -> None:
        """Let the threads of `pool`, which stays the caller's, do what is begun from here on. Thread-safe."""
        self._pool = pool

    def put_file(
        self,
        source: Source,
        previous: Previous | None = None,
        progress: Callable[[int], None] | None = None,
        kept: Kept | None = None,
    ) -> tuple[ObjectId, int, IngestStats]:
        """Store a file; return the id of its recipe (`NO_ID` for a file of no bytes), its size, and what it took.

        `previous` offers bases by tensor name. `progress` is called with counts of bytes that are done. `kept` tells
        what need not be read; the recipe is the same as without. What `source.read` raises passes through, and
        nothing is referred to then.
        """
        recipe, stats = self.put_contents(source, previous, progress, kept)
        return self.put_recipe(recipe, stats), recipe.size, stats

    def put_contents(
        self,
        source: Source,
        previous: Previous | None = None,
        progress: Callable[[int], None] | None = None,
        kept: Kept | None = None,
    ) -> tuple[Recipe, IngestStats]:
        """Store the data objects of a file; see `put_file`. `put_recipe` completes it."""
        stats = IngestStats(files=1, raw_bytes=source.size)
        line = _line(previous)
        extents: list[Extent] = []
        for extent, part in self._extents(source, line, kept):
            extents.append(extent)
            stats.add(part)
            if progress is not None:
                progress(extent.length)
        return Recipe(_joined(extents)), stats

    def put_recipe(self, recipe: Recipe, stats: IngestStats) -> ObjectId:
        """Store a file's recipe, and count `stats`, those of its contents, in."""
        identity = NO_ID if not recipe.size else self._put_tree(Kind.RECIPE, encode_recipe(recipe), stats)
        self.stats.add(stats)
        return identity

    def put_directory(self, entries: Iterable[Entry]) -> ObjectId:
        """Store a directory object. Raises LimitError for names that cannot be."""
        stats = IngestStats()
        identity = self._put_tree(Kind.DIRECTORY, encode_directory(entries), stats)
        self.stats.add(stats)
        return identity

    def _extents(self, source: Source, line: Line | None, kept: Kept | None) -> Iterator[tuple[Extent, IngestStats]]:
        """The extents of a file in order, as the workers finish them."""
        working: deque[tuple[Future[tuple[Extent, IngestStats]], int]] = deque()
        in_work = 0
        try:
            for piece, base in _pieces(source, self._rules, line, kept):
                known = None if kept is None else kept.extent(piece)
                cost = _COST * piece.length if known is None else 0
                while working and (in_work + cost > limits.INGEST_BYTES or len(working) == _AHEAD):
                    future, freed = working.popleft()
                    yield future.result()
                    in_work -= freed
                if known is None and _is_literal(source, piece):
                    # Not worth handing over, where most files are this short.
                    done: Future[tuple[Extent, IngestStats]] = Future()
                    done.set_result(self._put_piece(source, piece, base))
                    working.append((done, cost))
                elif known is None:
                    working.append((self._pool.submit(self._put_piece, source, piece, base), cost))
                else:
                    working.append((self._pool.submit(self._keep_piece, source, piece, base, known), cost))
                in_work += cost
            while working:
                yield working.popleft()[0].result()
        finally:
            # After an error the source may be closed: no worker may still be reading it.
            wait([future for future, _ in working if not future.cancel()])

    def _keep_piece(
        self, source: Source, piece: Piece, before: tuple[ObjectId, int] | None, known: Extent
    ) -> tuple[Extent, IngestStats]:
        """Take over the extent that a piece had before, if it may be referred to still."""
        if known.object_id is None:
            return known, IngestStats(hole_bytes=known.length)
        location = self._sink.find(known.object_id)
        if location is None or location.raw_length != known.length or _is_literal(source, piece):
            return self._put_piece(source, piece, before)
        return known, IngestStats(shared_bytes=known.length)

    def _put_piece(
        self, source: Source, piece: Piece, before: tuple[ObjectId, int] | None
    ) -> tuple[Extent, IngestStats]:
        raw = source.read(piece.offset, piece.length)
        length = piece.length
        if _is_zero(raw):
            return Extent(length), IngestStats(hole_bytes=length)
        if _is_literal(source, piece):
            return Extent(length, literal=bytes(raw)), IngestStats(literal_bytes=length)

        def hints() -> Hints:
            marks = sketch(raw, piece.dtype)
            bases = candidates(self._sink, piece, marks, before, self.effort)
            return Hints(piece.dtype, label_of(piece), marks, tuple(bases), self.effort, (source, piece.offset))

        location, new = self._put_object(Kind.DATA, raw, hints)
        extent = Extent(length, location.object_id)
        stored = location.encoded_length + _OVERHEAD
        if not new:
            return extent, IngestStats(shared_bytes=length)
        if location.base != NO_ID:
            return extent, IngestStats(objects=1, delta_bytes=length, delta_stored=stored)
        return extent, IngestStats(objects=1, full_bytes=length, full_stored=stored)

    def _put_tree(self, kind: Kind, data: bytes, stats: IngestStats) -> ObjectId:
        location, new = self._put_object(kind, data, Hints)
        if new:
            stats.objects += 1
            stats.tree_stored += location.encoded_length + _OVERHEAD
        return location.object_id

    def _put_object(self, kind: Kind, raw: Buffer, hints: Callable[[], Hints]) -> tuple[Location, bool]:
        """Find or store an object; of threads that bring the same one, one encodes and the others wait for it."""
        began = time.perf_counter()
        identity = object_id(kind, raw)
        hashed = time.perf_counter()
        with self._lock:
            self.hash_seconds += hashed - began
            other = self._flights.get(identity)
            if other is None:
                mine = self._flights[identity] = Future()
        if other is not None:
            return other.result(), False
        try:
            location = self._sink.find(identity)
            new = location is None
            if location is None:
                location = self._sink.put(kind, raw, identity, hints())
            mine.set_result(location)
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                self.put_seconds += time.perf_counter() - hashed
                del self._flights[identity]
        return location, new


def worker_count(share: float = 1.0) -> int:
    """How many threads one ingest uses: a share of the cores that this process may use, as far as memory is enough."""
    most = max(1, limits.INGEST_BYTES // (_COST * limits.OBJECT_BYTES))
    return max(1, min(most, int(usable_cores() * share)))


def _line(previous: Previous | None) -> Line | None:
    """The tensors of the file before; None when there is none, or it cannot be read: it is but a hint."""
    try:
        return None if previous is None else Line(parse(previous), previous.recipe)
    except CorruptError as error:
        log.warning("the file before is damaged, so no tensor is stored as a delta against it: %s", error)
        return None


def _pieces(
    source: Source, rules: CutRules, line: Line | None, kept: Kept | None
) -> Iterator[tuple[Piece, tuple[ObjectId, int] | None]]:
    """The pieces of a file, each with the object of the line that stands in its place."""
    layout = parse(source)
    regions = iter(layout.regions)
    region: Region | None = None
    for piece in cut(source, layout, rules, None if kept is None else kept.next_cut):
        while region is None or region.end <= piece.offset:
            region = next(regions)
        known = line is not None and piece.name
        yield piece, line.find(region, piece.offset - region.offset) if line is not None and known else None


def _is_literal(source: Source, piece: Piece) -> bool:
    """Whether the recipe itself holds the bytes of a piece."""
    return piece.length <= limits.LITERAL_BYTES or source.size <= limits.LITERAL_FILE_BYTES


def _is_zero(raw: Buffer) -> bool:
    """True when there is no byte but zeros."""
    view = memoryview(raw)
    return not any(view[:64]) and bytes(view).count(0) == len(view)


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    """Extents with neighbouring holes made one."""
    joined: list[Extent] = []
    for extent in extents:
        last = joined[-1] if joined else None
        if last is not None and last.is_hole and extent.is_hole:
            joined[-1] = Extent(last.length + extent.length)
        else:
            joined.append(extent)
    return joined
