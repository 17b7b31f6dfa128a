"""Where each byte of a file comes from: a hole, its recipe in the store, or a staging generation of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from itertools import count
from typing import NamedTuple

from moonclipfs.layers.ranges import END, RangeMap
from moonclipfs.layers.records import PART_HOLE, PART_RECIPE, PART_STAGED
from moonclipfs.layers.staging import Generation
from moonclipfs.types import NO_ID, ObjectId

_STAMPS = count(1)
_CLEAN = 0
_JOURNALLED = 1
"""In the journal, but not known to be on the disk."""
_CHANGED = 2
"""In memory only."""


class Part(NamedTuple):
    """`length` bytes of a file from `offset` on. `kind` is one of the PART_ constants of `records.py`.

    Bytes of a recipe or a generation are found there at the file's own offsets. `generation` is None except for
    PART_STAGED.
    """

    offset: int
    length: int
    kind: int
    generation: Generation | None = None


class Content:
    """The bytes of one file, by where they come from. Everything here happens under the layer's lock.

    `size` is in bytes; `recipe` is what PART_RECIPE means, NO_ID when there is none. Offsets past `size` are holes at
    any time, so what is cut off never comes back.
    """

    __slots__ = (
        "_ambiguous",
        "_changes",
        "_dropped",
        "_exact",
        "_frozen",
        "_generations",
        "_held",
        "_intact",
        "_map",
        "_staged",
        "_stored",
        "_whole",
        "_writable",
        "newest",
        "recipe",
        "size",
        "stamp",
    )

    def __init__(self, size: int = 0, recipe: ObjectId = NO_ID) -> None:
        self.size = size
        self.recipe = recipe
        self.stamp = next(_STAMPS)
        """Another one, never used before, with every change of bytes or size."""
        self.newest = 0
        """The largest number of a generation or freeze so far: the one by which a job tells what it encodes."""
        self._map = RangeMap(PART_HOLE)
        """PART_HOLE, PART_RECIPE, or PART_STAGED plus the number of a generation, for each offset."""
        self._held = 0
        self._staged: Counter[int] = Counter()
        """How many bytes come from each generation, by number."""
        self._generations: dict[int, Generation] = {}
        """Those that the map may name."""
        self._dropped: list[Generation] = []
        """Those that it does not name any more, but the journal may."""
        self._writable: Generation | None = None
        self._stored = 0
        """The largest number given to `stored`."""
        self._exact = True
        self._frozen = -1
        """Number of the last freeze."""
        self._intact = False
        """Whether nothing was changed since the last freeze."""
        self._ambiguous = False
        """Whether there was an earlier freeze of other contents with the same number."""
        self._changes = RangeMap(_CLEAN)
        self._whole = _CLEAN
        self._put(0, size, PART_RECIPE if recipe != NO_ID else PART_HOLE)

    def copy(self) -> Content:
        """The same content, to go back to when a change of this one cannot be journalled."""
        other = copy(self)
        other._map, other._changes = self._map.copy(), self._changes.copy()
        other._staged, other._generations = self._staged.copy(), self._generations.copy()
        other._dropped = self._dropped[:]
        return other

    @property
    def generation(self) -> Generation | None:
        """The generation that takes writes, None when the next write needs a new one."""
        if self._writable is not None and self._writable.frozen:
            self._writable = None
        return self._writable

    @property
    def held(self) -> int:
        """Bytes that are not in holes."""
        return self._held

    @property
    def is_staged(self) -> bool:
        """Whether some of the bytes are in staging."""
        return any(self._staged.values())

    @property
    def frozen(self) -> int:
        """The number of the last freeze, -1 before any."""
        return self._frozen

    def staged_bytes(self, last: int | None = None) -> int:
        """How many of the bytes are in staging, of all generations, or of those up to the number `last`."""
        return sum(count for number, count in self._staged.items() if last is None or number <= last)

    @property
    def exact(self) -> bool:
        """Whether the recipe alone is this content (NO_ID for no bytes), so that nothing is to be encoded.

        Not staged and not exact is a file that was only cut off or extended. What is replayed may count as not exact
        though it is.
        """
        return self._exact or not self.size

    def parts(self, offset: int, length: int) -> list[Part]:
        """What a range, clipped to the size, consists of: in order, without gaps, neighbours of one kind merged."""
        known = self._generations.get
        return [
            Part(start, end - start, min(value, PART_STAGED), known(value - PART_STAGED))
            for start, end, value in self._map.runs(offset, min(offset + length, self.size))
        ]

    def generations(self) -> list[Generation]:
        """Those that bytes come from, in the order of their numbers."""
        self._prune()
        return [self._generations[number] for number in sorted(self._generations)]

    def begin(self, generation: Generation) -> None:
        """A new generation takes the writes from now on. If none succeeds, `unused` returns it."""
        self._take(generation)

    def wrote(self, generation: Generation, offset: int, length: int) -> None:
        """A range was written to `generation`, which takes the writes from now on. A gap before it is a hole."""
        assert not generation.frozen, f"{generation} is frozen: the write needs a new one"
        if not length:
            return
        self._take(generation)
        end = offset + length
        self._put(offset, end, PART_STAGED + generation.number)
        self._changed(offset, end)
        self.size = max(self.size, end)

    def truncate(self, size: int) -> None:
        """Cut the file off at `size`, or extend it with a hole. Cutting to nothing is the same as `clear`."""
        if not size:
            self.clear()
        elif size != self.size:
            self._changed(min(size, self.size), max(size, self.size))
            self._resize(size)

    def clear(self) -> None:
        """Cut the file to nothing. The next write needs a new generation: the journal may need the bytes before."""
        self._reset()
        self.stamp = next(_STAMPS)
        self._changes = RangeMap(_CLEAN)
        self._whole = _CHANGED
        self._intact = self._exact = False

    def freeze(self, number: int = 0) -> tuple[Part, ...]:
        """Return all parts, and freeze their generations: what they name never changes.

        `number` stands for this moment in `stored`: a fresh one from the counter of generations. With 0 it is
        `newest`; then a content that was only truncated since the freeze before has the same number as that one, and
        does not become exact.
        """
        number = number or self.newest
        self._ambiguous = number == self._frozen and (self._ambiguous or not self._intact)
        self._frozen = self.newest = number
        self._intact = True
        for generation in self.generations():
            generation.frozen = True
        return tuple(self.parts(0, self.size))

    def stored(self, generation_number: int, recipe: ObjectId, recipe_size: int) -> list[Generation]:
        """What the freeze with this number returned is encoded as `recipe`, of `recipe_size` bytes.

        Of it, what is still there comes from `recipe` now; holes stay holes. Returns the generations that are in use
        no more; they may be deleted when the journal holds durably what `changes(synced=True)` tells next, which is
        the whole content. The answer of an older freeze than the last one stored is ignored.
        """
        if generation_number < self._stored:
            return []
        self._stored = generation_number
        old = [number for number in self._generations if number <= generation_number]
        self._map.replace({PART_STAGED + number: PART_RECIPE for number in old})
        for number in old:
            del self._staged[number]
        freed = [self._generations.pop(number) for number in old]
        freed += [dropped for dropped in self._dropped if dropped.number <= generation_number]
        self._dropped = [dropped for dropped in self._dropped if dropped.number > generation_number]
        if self._writable in freed:
            self._writable = None
        if self.size:
            self.recipe = recipe
        self._whole = _CHANGED
        same = generation_number == self._frozen and self._intact and not self._ambiguous
        self._exact = same and self.size == recipe_size
        return freed

    def unused(self) -> list[Generation]:
        """Return, once, the generations whose bytes were all overwritten or cut off.

        They may be deleted when the journal holds durably what `changes(synced=True)` tells next.
        """
        self._prune()
        dropped, self._dropped = self._dropped, []
        return dropped

    def changes(self, *, synced: bool = False) -> tuple[bool, list[Part]]:
        """What a `Contents` record has to say: whether it replaces the whole content, and the parts of its ranges.

        It is what changed since the last call; with `synced`, since the last call with `synced`, since records that
        are not synced do not count after a power failure. That the size shrank is not in the parts.
        """
        least = _JOURNALLED if synced else _CHANGED
        whole = self._whole >= least
        ranges = [(0, self.size)] if whole else [(a, b) for a, b, v in self._changes.runs(0, self.size) if v >= least]
        parts = [part for start, end in ranges for part in self.parts(start, end - start)]
        if synced:
            self._changes = RangeMap(_CLEAN)
            self._whole = _CLEAN
        else:
            self._changes.replace({_CHANGED: _JOURNALLED})
            self._whole = min(self._whole, _JOURNALLED)
        return whole, parts

    def apply(self, whole: bool, recipe: ObjectId, size: int, parts: Iterable[Part], *, synced: bool = False) -> None:
        """Replay a `Contents` record. Without `synced`, the next `changes(synced=True)` tells it again."""
        if whole:
            self._reset()
            self._whole = _JOURNALLED
        self._changes.set(min(size, self.size), max(size, self.size), _JOURNALLED)
        self._resize(size)
        self.recipe = recipe
        for offset, length, kind, generation in parts:
            value = kind
            if generation is not None:
                generation.mark(offset, length)
                self._take(generation)
                value = PART_STAGED + generation.number
            self._put(offset, offset + length, value)
            self._changes.set(offset, offset + length, _JOURNALLED)
        if synced:
            self._changes = RangeMap(_CLEAN)
            self._whole = _CLEAN
        self._intact = self._exact = False

    def _take(self, generation: Generation) -> None:
        if self._writable is not generation:
            self._generations[generation.number] = generation
            self.newest = max(self.newest, generation.number)
            if not generation.frozen and generation.number == self.newest:
                self._writable = generation

    def _put(self, start: int, end: int, value: int) -> None:
        for at, stop, before in self._map.runs(start, end):
            self._count(before, at - stop)
        self._count(value, end - start)
        self._map.set(start, end, value)

    def _count(self, value: int, growth: int) -> None:
        if value != PART_HOLE:
            self._held += growth
        if value >= PART_STAGED:
            self._staged[value - PART_STAGED] += growth

    def _changed(self, start: int, end: int) -> None:
        self.stamp = next(_STAMPS)
        self._changes.set(start, end, _CHANGED)
        self._intact = self._exact = False

    def _resize(self, size: int) -> None:
        if size < self.size:
            self._put(size, END, PART_HOLE)
        self.size = size

    def _reset(self) -> None:
        self._map = RangeMap(PART_HOLE)
        self._writable = None
        self.recipe = NO_ID
        self.size = self._held = 0
        self._staged.clear()

    def _prune(self) -> None:
        """Drop generations that the map does not name; where that is the one that takes writes, the next is new."""
        for number in [number for number in self._generations if not self._staged[number]]:
            del self._staged[number]
            generation = self._generations.pop(number)
            generation.frozen = True  # a write that is under way must not bring it back
            self._dropped.append(generation)
