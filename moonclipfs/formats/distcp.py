"""A shard of a distributed checkpoint of torch (`__0_0.distcp`): torch archives one after the other, each of one value.

Where each begins is told by the `.metadata` beside it only; here it is found from the end, archive by archive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats import torchzip, zipdir
from moonclipfs.formats.layout import Layout, Region, RegionKind, Tensor, cover
from moonclipfs.types import Buffer, Source

FORMAT = "distcp"


class _Part:
    """Bytes `start` to `end` of a source, as a source."""

    def __init__(self, source: Source, start: int, end: int) -> None:
        self._source = source
        self.start = start
        self.size = end - start

    def read(self, offset: int, length: int) -> Buffer:
        """Return `length` bytes at `offset` of the part."""
        return self._source.read(self.start + offset, length)


def is_shard(source: Source) -> bool:
    """Return whether something comes before the archive that ends the file."""
    try:
        return zipdir.last_length(source) < source.size
    except ParseError:
        return False


def parse(source: Source) -> Layout:
    """Return the layout of a file that torch archives fill; raises ParseError.

    The names of tensors are in another file. Here they begin with the number of their archive, which is the same in
    each checkpoint of a run.
    """
    regions: list[Region] = []
    tensors: list[Tensor] = []
    reasons: list[str] = []
    for number, part in enumerate(reversed(list(_parts(source)))):
        members = zipdir.read(part)
        root = torchzip.root_of(members)
        if root is None:
            raise ParseError(f"archive {number} is not torch's")
        layout = torchzip.parse(part, members, root)
        for region in layout.regions:
            name = f"{number}.{region.name}" if region.kind is RegionKind.TENSOR else region.name
            regions.append(replace(region, offset=part.start + region.offset, name=name))
        tensors += [
            replace(tensor, offset=part.start + tensor.offset, name=f"{number}.{tensor.name}")
            for tensor in layout.tensors
        ]
        if layout.reason:
            reasons.append(f"archive {number}: {layout.reason}")
    return Layout(FORMAT, cover(source.size, regions), tuple(tensors), reason="; ".join(reasons[:3]))


def _parts(source: Source) -> Iterator[_Part]:
    """Yield the archives, the last one first."""
    end = source.size
    for _ in range(limits.ZIP_ENTRIES):
        if not end:
            return
        start = end - zipdir.last_length(_Part(source, 0, end))
        yield _Part(source, start, end)
        end = start
    raise ParseError(f"more than {limits.ZIP_ENTRIES} archives")
