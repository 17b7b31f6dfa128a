"""What a parser says of a file: its regions, the tensors in it, and why it was not understood."""

from __future__ import annotations

import enum
import hashlib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.types import Buffer, DType

OPAQUE_FORMAT = "opaque"
"""`Layout.format` of a file that is one run of bytes without known structure."""

_PART_BYTES = 384
_NUMBER_BYTES = 40
_PAIR_BYTES = 128


class RegionKind(enum.IntEnum):
    """What the bytes of a region are."""

    HEADER = 1
    TENSOR = 2
    PADDING = 3
    OPAQUE = 4


@dataclass(frozen=True, slots=True)
class Region:
    """`length` bytes of a file at `offset`.

    `name` is that of a TENSOR region, which a file may leave empty; the product of `shape` times the bits of `dtype`
    is exactly `length` bytes. Elements that no `DType` describes (quantised blocks, strings) are BYTES, and `shape`
    then counts bytes.
    """

    offset: int
    length: int
    kind: RegionKind
    name: str = ""
    dtype: DType = DType.BYTES
    shape: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Offset of the first byte after the region."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named view of bytes of the file; several may share bytes.

    `shape` is logical. `strides` are in elements, None when the elements are C-contiguous; `length` then spans the
    first to the last element. `dtype_name` is the format's own word, such as "Q4_K"; where no `DType` describes the
    elements, `dtype` is BYTES.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    length: int
    strides: tuple[int, ...] | None = None
    dtype_name: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """The structure of one file.

    `regions` are sorted and cover the file without gap or overlap; none is empty. `reason` is empty for a file that
    was understood, else it says what is wrong; `format` is "opaque" when nothing could be used. `truncated` is True
    when bytes that the file itself announces are missing.
    """

    format: str
    regions: tuple[Region, ...]
    tensors: tuple[Tensor, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    truncated: bool = False

    @property
    def weight(self) -> int:
        """Bytes of memory that it takes, at most."""
        parts: tuple[Region | Tensor, ...] = (*self.regions, *self.tensors)
        return (
            _PART_BYTES * (1 + len(parts))
            + _NUMBER_BYTES * sum(len(part.shape) for part in parts)
            + _NUMBER_BYTES * sum(len(tensor.strides or ()) for tensor in self.tensors)
            + sum(sys.getsizeof(part.name) for part in parts)
            + sum(_PAIR_BYTES + sys.getsizeof(key) + sys.getsizeof(text) for key, text in self.metadata.items())
            + sys.getsizeof(self.reason)
        )


def opaque(size: int, reason: str, *, truncated: bool = False) -> Layout:
    """Return the layout of a file of `size` bytes that was not understood."""
    regions = (Region(0, size, RegionKind.OPAQUE),) if size else ()
    return Layout(OPAQUE_FORMAT, regions, reason=reason, truncated=truncated)


def cover(size: int, regions: Iterable[Region], filler: RegionKind = RegionKind.PADDING) -> tuple[Region, ...]:
    """Sort `regions`, drop the empty ones and fill what they leave of `size` bytes with `filler` regions.

    Raises ParseError when two regions overlap, or one does not lie inside the file.
    """
    covered: list[Region] = []
    end = 0
    for region in sorted((region for region in regions if region.length), key=lambda region: region.offset):
        if region.offset < end:
            before = quoted(covered[-1].name) if covered[-1].name else "the header"
            raise ParseError(f"Overlap({quoted(region.name)}): starts at byte {region.offset}, inside {before}")
        if region.length < 0 or region.end > size:
            raise ParseError(f"{quoted(region.name)} ends at byte {region.end} of a file of {size}")
        if region.offset > end:
            covered.append(Region(end, region.offset - end, filler))
        covered.append(region)
        end = region.end
    if end < size:
        covered.append(Region(end, size - end, filler))
    return tuple(covered)


def quoted(name: str) -> str:
    """Return `name` in double quotes for a message: shortened, and printable whatever it holds."""
    if len(name) > 200:
        name = name[:200] + "..."
    return '"' + "".join(c if c.isprintable() else repr(c)[1:-1] for c in name) + '"'


def described(length: str, data: Iterable[Buffer]) -> str:
    """Return what stands for metadata that is too long to keep, of `length` ("9 bytes"): other words for other data."""
    digest = hashlib.sha256()
    for part in data:
        digest.update(part)
    return f"({length}, SHA-256 {digest.hexdigest()})"


def checked_name(name: str) -> str:
    """Return `name` if it is usable as a tensor's name; raises ParseError when it is too long or not text."""
    if len(name) > limits.TENSOR_NAME_BYTES:
        raise ParseError(f"{quoted(name)}: a tensor's name is longer than {limits.TENSOR_NAME_BYTES} bytes")
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ParseError(f"{quoted(name)}: a tensor's name is not Unicode text") from error
    return name


def tensor_bytes(name: str, shape: tuple[int, ...], bits: int) -> int:
    """Return the bytes of a contiguous tensor of `shape` whose elements have `bits`.

    Raises ParseError: Overflow past 64 bits, MisalignedSize when the elements do not fill whole bytes.
    """
    if len(shape) > limits.DIMENSIONS:
        raise ParseError(f"{quoted(name)}: {len(shape)} dimensions, at most {limits.DIMENSIONS} are read")
    total = math.prod(shape) * bits
    if total >= 1 << 64:
        raise ParseError(f"Overflow({quoted(name)}): shape {list(shape)} exceeds 64 bits")
    if total % 8:
        raise ParseError(f"MisalignedSize({quoted(name)}): shape {list(shape)} of {bits} bits fills no whole bytes")
    return total // 8


def short_by(missing: int) -> str:
    """Return the words for a file that lacks `missing` bytes at its end."""
    return f"data short by {missing} byte{'s' if missing != 1 else ''}"
