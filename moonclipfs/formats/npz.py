"""NumPy's .npz: a zip of .npy members. Stored arrays are tensors; compressed ones stay opaque."""

from __future__ import annotations

from collections.abc import Sequence

from moonclipfs.errors import ParseError
from moonclipfs.formats import npy
from moonclipfs.formats.layout import Layout, Region, RegionKind, Tensor, cover, quoted
from moonclipfs.formats.zipdir import Member
from moonclipfs.types import Source

FORMAT = "npz"
SUFFIX = ".npy"


def parse(source: Source, members: Sequence[Member]) -> Layout:
    """Return the layout of an archive of arrays; raises ParseError when none of them is usable."""
    regions: list[Region] = []
    tensors: list[Tensor] = []
    problems: list[str] = []
    for member in members:
        try:
            found, tensor = _array(source, member)
        except ParseError as error:
            problems.append(f"{quoted(member.name)}: {error}")
            regions.append(Region(member.offset, member.length, RegionKind.OPAQUE))
            continue
        regions += found
        tensors.append(tensor)
    if not tensors:
        raise ParseError(problems[0])
    reason = f"{len(problems)} of {len(members)} members kept as bytes: {problems[0]}" if problems else ""
    return Layout(FORMAT, cover(source.size, regions, RegionKind.HEADER), tuple(tensors), reason=reason)


def _array(source: Source, member: Member) -> tuple[list[Region], Tensor]:
    """Return the regions and the tensor of one member; raises ParseError when it is no plain stored array."""
    if not member.stored:
        raise ParseError("the member is compressed")
    end = member.offset + member.length
    header = npy.read_header(source, member.offset, end)
    if not header.item_bytes:
        raise ParseError(f"elements of type {header.dtype_name}")
    region, tensor = npy.array(member.name.removesuffix(SUFFIX), header)
    if region.end > end:
        raise ParseError("the array is longer than its member")
    prefix = Region(member.offset, header.data_offset - member.offset, RegionKind.HEADER)
    return [prefix, region], tensor
