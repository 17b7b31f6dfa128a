"""Where the regions of a file are split into objects.

One function serves every writer, and its rules are part of the store format: the same bytes under the same layout give
the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import TypeAlias

from moonclipfs import _codec, limits
from moonclipfs.errors import LimitError
from moonclipfs.formats.layout import Layout, Region, RegionKind
from moonclipfs.types import DType, Source

_READ_BYTES = 1 * limits.MIB
_CHUNK_LEAST = 64
"""The shortest chunks that the chunker can cut."""


@dataclass(frozen=True, slots=True)
class CutRules:
    """The sizes that decide where cuts are: recorded in a store's config, and never changed there. In bytes, but for
    `object_elements`. Raises LimitError for sizes that cannot be cut by.
    """

    object_bytes: int = limits.OBJECT_BYTES
    object_elements: int = limits.OBJECT_ELEMENTS
    slice_bytes: int = limits.SLICE_BYTES
    small_region_bytes: int = limits.SMALL_REGION_BYTES
    chunk_min: int = limits.CHUNK_MIN
    chunk_average: int = limits.CHUNK_AVERAGE
    chunk_max: int = limits.CHUNK_MAX

    def __post_init__(self) -> None:
        for rule in fields(self):
            if getattr(self, rule.name) < 1:
                raise LimitError(f"cut rule {rule.name} is {getattr(self, rule.name)}: it must be 1 or more")
        if self.object_elements % 8 or self.object_bytes < 16 * 8:
            # Eight elements of any type fill whole bytes, and an object holds at least as many of the widest.
            raise LimitError("cut rules: object_elements must be a multiple of 8, object_bytes at least 128")
        if not _CHUNK_LEAST <= self.chunk_min <= self.chunk_average <= self.chunk_max:
            raise LimitError(f"cut rules: chunk_min, chunk_average and chunk_max must rise, from {_CHUNK_LEAST} on")
        if max(self.chunk_max, self.small_region_bytes) > self.object_bytes:
            raise LimitError("cut rules: chunk_max and small_region_bytes may not exceed object_bytes")


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes of the file at `offset` that become one object.

    `index` counts the pieces of one region from 0. `name` is the region's name (the first one's, for several small
    tensors), empty for bytes that are no tensor. `shape` is in elements of `dtype`: that of the tensor or slice when
    the piece is a whole one.
    """

    offset: int
    length: int
    dtype: DType
    name: str
    shape: tuple[int, ...]
    index: int


KnownCut: TypeAlias = Callable[[Region, int], int]
"""Called with a region that is cut by content and the offset of a cut in it: the length from there to a later cut that
is known without reading, or 0. Between the two there may be more cuts only where all bytes are zero.
"""


def cut(source: Source, layout: Layout, rules: CutRules, known: KnownCut | None = None) -> Iterator[Piece]:
    """Yield the pieces of a file, sorted and covering it. Only bytes cut by content are read, a MiB at a time, and
    only where `known` knows no cut.
    """
    run: list[Region] = []
    for region in layout.regions:
        small = region.length < rules.small_region_bytes
        if run and (not small or region.end - run[0].offset > rules.object_bytes):
            yield _merge(run)
            run = []
        if small:
            run.append(region)
        elif region.kind is RegionKind.TENSOR:
            yield from _cut_tensor(region, rules)
        else:
            yield from _cut_by_content(source, region, rules, known)
    if run:
        yield _merge(run)


def _merge(run: list[Region]) -> Piece:
    """Return neighbouring small regions as one piece.

    A tensor that stands alone keeps what is known of it; tensors of one dtype keep that and the name of the first, so
    that the biases and norms of a layer are predicted by those of another checkpoint.
    """
    first, last = run[0], run[-1]
    if len(run) == 1 and first.kind is RegionKind.TENSOR:
        return Piece(first.offset, first.length, first.dtype, first.name, first.shape, 0)
    length = last.end - first.offset
    if all(region.kind is RegionKind.TENSOR and region.dtype is first.dtype for region in run):
        return Piece(first.offset, length, first.dtype, first.name, (length * 8 // first.dtype.bits,), 0)
    return Piece(first.offset, length, DType.BYTES, "", (length,), 0)


def _cut_tensor(region: Region, rules: CutRules) -> Iterator[Piece]:
    """Cut a tensor, or each of its slices, every so many elements from its start."""
    slices, shape = _slices(region, rules)
    length = region.length // slices
    bits = region.dtype.bits
    # A multiple of 8 elements, so that pieces of elements below a byte start and end at whole bytes.
    step = min(rules.object_elements, rules.object_bytes * 8 // bits // 8 * 8) * bits // 8
    index = 0
    for start in range(region.offset, region.end, length):
        for offset in range(start, start + length, step):
            size = min(step, start + length - offset)
            piece_shape = shape if size == length else (size * 8 // bits,)
            yield Piece(offset, size, region.dtype, region.name, piece_shape, index)
            index += 1


def _slices(region: Region, rules: CutRules) -> tuple[int, tuple[int, ...]]:
    """Return into how many slices a tensor is cut first, and the shape of one: stacked experts have long ones."""
    if len(region.shape) >= 3 and region.shape[0] > 1:
        length, rest = divmod(region.length, region.shape[0])
        if not rest and length >= rules.slice_bytes and length * 8 % region.dtype.bits == 0:
            return region.shape[0], region.shape[1:]
    return 1, region.shape


def _cut_by_content(source: Source, region: Region, rules: CutRules, known: KnownCut | None) -> Iterator[Piece]:
    """Cut bytes of unknown structure where their content says, so that an insertion moves few cuts.

    What follows a cut depends on the bytes behind it alone: so it is known again where cuts fall together.
    """
    start, index = region.offset, 0
    while start < region.end:
        length = 0 if known is None else known(region, start)
        lengths = iter([length]) if length else _chunk_lengths(source, start, region.end, rules)
        for length in lengths:
            yield Piece(start, length, DType.BYTES, "", (length,), index)
            start += length
            index += 1
            if known is not None and start < region.end and known(region, start):
                break


def _chunk_lengths(source: Source, start: int, end: int, rules: CutRules) -> Iterator[int]:
    """Yield the lengths of the chunks from the cut `start` on.

    A gear hash h = (h << 1) + gear[byte] runs over the bytes of a chunk from `chunk_min` on; the chunk ends after the
    byte at which the highest log2(`chunk_average`) + 2 bits of h (from `chunk_average` on: - 2) are zero, and at
    `chunk_max`. `gear` is the first 256 outputs of splitmix64 from the seed 0.
    """
    chunker = _codec.Chunker(rules.chunk_min, rules.chunk_average, rules.chunk_max)
    for at in range(start, end, _READ_BYTES):
        yield from chunker.push(source.read(at, min(_READ_BYTES, end - at)))
    yield from chunker.finish()


@cache
def zero_chunk(rules: CutRules) -> int:
    """Length in bytes of a chunk that holds zeros only, more of which follow."""
    chunker = _codec.Chunker(rules.chunk_min, rules.chunk_average, rules.chunk_max)
    return chunker.push(bytes(rules.chunk_max))[0]
