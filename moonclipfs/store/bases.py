"""Which stored object a new one is predicted by: the same tensor earlier in its line, one of its name, or one alike.

A line of deltas each against the one before would be cheapest and unreadable; a star of deltas against one anchor is
the opposite. Here object number `generation` after a full one gets the depth that an `Effort` says, against the nearest
earlier one of less depth: chains stay within `limits.CHAIN_DEPTH`, and most deltas span one or two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3

from moonclipfs import limits
from moonclipfs._codec import can_predict
from moonclipfs.codec.choose import Base, predict
from moonclipfs.codec.sketch import NO_SKETCH, SKETCH_BYTES, similarity
from moonclipfs.formats.cut import Piece
from moonclipfs.formats.layout import Layout, Region, RegionKind
from moonclipfs.store.packs import Location
from moonclipfs.store.recipes import Recipe
from moonclipfs.types import NO_ID, Buffer, DType, ObjectId

_GENERATIONS = 252
"""Generations are counted up to this, which a byte holds, and then from 1 again: a multiple of the length of all
`Effort.depths`.
"""
_MASTER_DEPTH = 2
"""Depth at most of a tensor of which narrower copies are kept: those are one link deeper, and cost almost nothing."""
_MOST = 4
"""Candidates that are compared by a sample."""
_ALIKE = 20
"""Places of a sketch that agree, of 32, in tensors that are worth a look. Unrelated ones agree in 2 to 9."""
_ROUNDED = 2
"""Places of a sketch that may differ between a master and its narrower copy."""
_SAME_LABEL_LIMIT = 8
_SAME_SIZE_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Effort:
    """What time is spent on. `depths` are those of the 1st, 2nd, ... object after a full one, begun anew after the
    last; a delta must beat the share `worth` of the full encoding of a sample to be tried. With `plain`, objects are
    not encoded at all: see `tighten.py`.
    """

    depths: tuple[int, ...]
    worth: float
    plain: bool = False


THOROUGH = Effort((1, 2, 3, 2, 3, 3), 0.98)
"""Cost grows with the logarithm of the distance in measured lines, and for lines of 4 to 100 this comes within 2 % of
the best tree of three levels."""
QUICK = Effort((1, 2, 2), 0.95)
"""Where somebody waits: a link less to read, and to decode when the next one is stored, for 1 to 2 % more bytes."""
AT_ONCE = Effort((), 1.0, plain=True)
"""Where somebody waits, and there will be time later."""
NEAR = Effort((1,), 0.98)
"""For what is read the most: one link at most."""


class Known(Protocol):
    """The objects that a new one may refer to."""

    def find(self, object_id: ObjectId) -> Location | None:
        """Return where an object is, or None when it may not be referred to."""
        ...

    def by_label(self, label: int, limit: int) -> Sequence[Location]:
        """Return objects of a label, newest first."""
        ...

    def by_elements(self, elements: int, limit: int) -> Sequence[Location]:
        """Return objects of so many elements that have a sketch, newest first."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A base that may serve: element `i` is predicted by element `start + i` of it.

    `generation` is that of the new object if it becomes a delta of this one.
    """

    location: Location
    start: int
    generation: int


def label_of(piece: Piece) -> int:
    """Return the label of a piece: equal for the same part of a tensor of that name and shape, whatever its dtype."""
    if not piece.name:
        return 0
    text = f"{piece.name}\0{piece.shape}\0{piece.index}"
    return int.from_bytes(blake3(text.encode("utf-8", "surrogateescape")).digest(8), "little") or 1


class Line:
    """The same file in the snapshot before: finds the object that holds a tensor's bytes there."""

    def __init__(self, layout: Layout, recipe: Recipe) -> None:
        self._recipe = recipe
        self._regions = {region.name: region for region in layout.regions if region.kind is RegionKind.TENSOR}

    def find(self, region: Region, offset: int) -> tuple[ObjectId, int] | None:
        """Return (object, its element) that stands in the earlier file where byte `offset` of `region` would be."""
        before = self._regions.get(region.name)
        # The first dimension may differ: a vocabulary that has grown still begins as it was.
        if before is None or before.shape[1:] != region.shape[1:] or not can_predict(region.dtype, before.dtype):
            return None
        at = before.offset + offset // region.dtype.width * before.dtype.width
        if at >= before.end:
            return None
        for extent, inside, _ in self._recipe.locate(at, 1):
            element, rest = divmod(extent.object_offset + inside, before.dtype.width)
            # Blocks of the new object then face whole blocks of the base.
            if extent.object_id is not None and not rest and element % limits.BLOCK_ELEMENTS == 0:
                return extent.object_id, element
        return None


def candidates(
    known: Known, piece: Piece, sketch: bytes, line: tuple[ObjectId, int] | None, effort: Effort = THOROUGH
) -> list[Candidate]:
    """Return bases that may serve, one of the own dtype at most: from the line, by label, by sketch."""
    if sketch == NO_SKETCH or effort.plain:
        return []
    before = None if line is None else known.find(line[0])
    start = 0 if line is None else line[1]
    return candidates_for(known, label_of(piece), piece.dtype, piece.length, sketch, (before, start), effort)


def candidates_for(
    known: Known,
    label_number: int,
    dtype: DType,
    length: int,
    sketch: bytes,
    line: tuple[Location | None, int],
    effort: Effort,
) -> list[Candidate]:
    """The same for an object of which this is known; `line` is what stands in its place in its line, and where."""
    before, line_start = line
    label = _leanable(known.by_label(label_number, _SAME_LABEL_LIMIT))
    width = dtype.width
    found = _most_alike([*_leanable([] if before is None else [before]), *label], sketch, 0, width)
    if not found:
        same_size = _leanable(known.by_elements(length // width, _SAME_SIZE_LIMIT))
        found = _most_alike(same_size, sketch, _ALIKE, width)
    has_copies = any(other.dtype.width < width for other in label)
    options: list[Candidate] = []
    # Where a sample shows no difference, the widest wins: a master is exact everywhere.
    for location in sorted(found, key=lambda one: -one.dtype.width)[:_MOST]:
        start = line_start if location is before else 0
        wider = location.dtype.width > width
        depth = _depth_after(location, effort, wider=wider, has_copies=has_copies)
        candidate = _climb(known, location, start, depth)
        if candidate is not None and can_predict(dtype, candidate.location.dtype):
            options.append(candidate)
    return options


def pick(
    options: Sequence[Candidate],
    raw: Buffer,
    dtype: DType,
    read: Callable[[Candidate, int, int], Buffer],
    effort: Effort = THOROUGH,
) -> Candidate | None:
    """Return the candidate that predicts a sample of `raw` best, or None when none seems to beat no base at all.

    `read(candidate, offset, length)` gives raw bytes of a base, clipped to it.
    """
    view = memoryview(raw).cast("B")
    elements = len(view) // dtype.width
    if not options or (len(options) == 1 and elements <= limits.BLOCK_ELEMENTS):
        return options[0] if options else None  # encoding both ways is as cheap as a sample
    if len(options) == 1 and options[0].generation > 1 and effort is QUICK:
        return options[0]  # it was worth it for the one before; what encodes it still looks at both ways
    first = elements // 2 // limits.BLOCK_ELEMENTS * limits.BLOCK_ELEMENTS
    count = min(limits.BLOCK_ELEMENTS, elements - first)
    sample = view[first * dtype.width : (first + count) * dtype.width]
    best, least = None, predict(sample, dtype) * effort.worth
    for option in options:
        width = option.location.dtype.width
        base = Base(read(option, (option.start + first) * width, count * width), option.location.dtype)
        size = predict(sample, dtype, [base])
        if size < least:
            best, least = option, size
    return best


def _leanable(locations: Sequence[Location]) -> list[Location]:
    """Those that deltas may be made against: what is plain gets a base of its own later, which might be the delta."""
    return [one for one in locations if not one.is_plain]


def _most_alike(locations: Sequence[Location], sketch: bytes, least: int, width: int) -> list[Location]:
    """For each dtype the one whose sketch is most like `sketch`, in `least` places or more; of equals the first.

    Of dtypes wider than `width` all that come near: only one of them is the master, and rounding may have changed a
    place or two of the sketch.
    """
    if not locations:
        return []
    sketches = np.frombuffer(b"".join(one.sketch for one in locations), np.uint8).reshape(-1, SKETCH_BYTES)
    alike: dict[DType, list[tuple[int, Location]]] = {}
    for places, location in zip(similarity(sketch, sketches).tolist(), locations, strict=True):
        if places >= least:
            alike.setdefault(location.dtype, []).append((places, location))
    found: list[Location] = []
    for dtype, rows in alike.items():
        most = max(places for places, _ in rows)
        if dtype.width > width:
            found += [location for places, location in rows if places >= most - _ROUNDED]
        else:
            found.append(next(location for places, location in rows if places == most))
    return found


def _depth_after(newest: Location, effort: Effort, *, wider: bool, has_copies: bool) -> int:
    """The depth that an object gets which comes after `newest` in a line."""
    if wider:
        return limits.CHAIN_DEPTH  # a narrower copy: nothing is nearer than its master
    depth = effort.depths[newest.generation % len(effort.depths)]
    return min(depth, _MASTER_DEPTH) if has_copies else depth


def _climb(known: Known, newest: Location, start: int, depth: int) -> Candidate | None:
    """Return the nearest object on a chain, from `newest` on, that an object of `depth` may be based on.

    None when the chain behind it is not whole.
    """
    generation = newest.generation % _GENERATIONS + 1
    chosen: Candidate | None = None
    location, seen = newest, {newest.object_id}
    while True:
        if chosen is None and location.depth < depth:
            chosen = Candidate(location, start, generation)
        if location.base == NO_ID:
            return chosen
        start += location.base_start
        behind = known.find(location.base)
        if behind is None or behind.object_id in seen or behind.depth >= location.depth:
            return None
        seen.add(behind.object_id)
        location = behind
