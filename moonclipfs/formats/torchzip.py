"""The zip archive of torch.save and TorchScript: a pickle, and each storage as a stored member."""

from __future__ import annotations

from collections.abc import Sequence

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.layout import Layout, Region, RegionKind, Tensor, cover
from moonclipfs.formats.pickle_names import NamedView, read_tensors
from moonclipfs.formats.storages import Span, place
from moonclipfs.formats.window import Window
from moonclipfs.formats.zipdir import Member
from moonclipfs.types import Source

FORMAT = "torch"

_PICKLE = "data.pkl"
_BYTE_ORDER = "byteorder"
_BYTE_ORDER_BYTES = 16
_COLLECTIONS = (("data", ""), ("constants", "constants."))
"""Each pickle with a folder of storages beside it, and what goes before the names of its tensors."""


def root_of(members: Sequence[Member]) -> str | None:
    """Return the folder, with its slash, that holds the pickle; None if the archive is not torch's."""
    for member in members:
        folder, slash, name = member.name.partition("/")
        if slash and name == _PICKLE:
            return folder + slash
    return None


def parse(source: Source, members: Sequence[Member], root: str) -> Layout:
    """Return the layout of a torch archive whose records are in the folder `root`; raises ParseError.

    Where the pickle is not understood, the storages are regions all the same, named by their number.
    """
    by_name = {member.name: member for member in members}
    _check_byte_order(source, by_name.get(root + _BYTE_ORDER))
    regions: dict[int, Region] = {}
    tensors: list[Tensor] = []
    reasons: list[str] = []
    for collection, prefix in _COLLECTIONS:
        spans = _spans(members, f"{root}{collection}/", prefix)
        named, reason = _named(source, by_name.get(f"{root}{collection}.pkl"), prefix)
        found, placed, problem = place(spans, named)
        regions |= {region.offset: region for region in found if region.length}
        tensors += placed
        reasons += filter(None, (reason, problem))
    for member in members:
        if member.length and member.offset not in regions:
            regions[member.offset] = Region(member.offset, member.length, member.kind)
    covered = cover(source.size, regions.values(), RegionKind.HEADER)
    return Layout(FORMAT, covered, tuple(tensors), {"archive": root.rstrip("/")}, "; ".join(reasons))


def _check_byte_order(source: Source, member: Member | None) -> None:
    """Raise ParseError unless the storages are little-endian, as they are when nothing is said."""
    if member is not None:
        order = bytes(source.read(member.offset, min(member.length, _BYTE_ORDER_BYTES)))
        if order != b"little":
            raise ParseError(f"byte order {order!r}: only little-endian storages are read")


def _spans(members: Sequence[Member], folder: str, prefix: str) -> dict[str, Span]:
    """Return the stored members of `folder` by their name in it, which is the key of a storage."""
    spans = {}
    for member in members:
        if member.stored and member.name.startswith(folder):
            key = member.name.removeprefix(folder)
            spans[key] = Span(member.offset, member.length, f"{prefix}storage/{key}"[: limits.TENSOR_NAME_BYTES])
    return spans


def _named(source: Source, member: Member | None, prefix: str) -> tuple[list[NamedView], str]:
    """Return the tensors that a pickle names, and why they could not be read."""
    if member is None:
        return [], ""
    if not member.stored or member.length > limits.PICKLE_BYTES:
        return [], f"{member.name} is compressed or over {limits.PICKLE_BYTES} bytes: tensors have no names"
    try:
        pickle = read_tensors(Window(source, member.offset, member.offset + member.length))
    except ParseError as error:
        return [], f"{member.name}: {error}: tensors have no names"
    return [NamedView(prefix + name, view) for name, view in pickle.tensors], ""
