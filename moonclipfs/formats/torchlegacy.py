"""The files of torch.save before its zip format: pickles one after the other, then the storages.

magic number, protocol version, system info, the object, the keys of the storages; then for each key, in that order,
an 8-byte number of elements and the elements.
"""

from __future__ import annotations

from collections.abc import Mapping

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.layout import Layout, Region, RegionKind, cover, short_by
from moonclipfs.formats.pickle_names import StorageUse, read_tensors
from moonclipfs.formats.pickle_reader import Pairs, PickleReader, Value
from moonclipfs.formats.storages import Span, element_of, place
from moonclipfs.formats.window import Window
from moonclipfs.types import Source

FORMAT = "torch-legacy"

_MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_OPCODE = b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
_PROTOCOL = 1001
_COUNT_BYTES = 8


def is_magic(head: bytes) -> bool:
    """Tell whether `head`, the first bytes of a file, pickles torch's magic number in any binary protocol."""
    return head[:1] == b"\x80" and 2 <= head.find(_MAGIC_OPCODE) <= 11


def parse(source: Source) -> Layout:
    """Return the layout of a legacy torch file; raises ParseError, TruncatedError when it ends in the pickles."""
    window = Window(source, 0, limits.PICKLE_BYTES)
    magic, protocol, system = (PickleReader(window).read() for _ in range(3))
    if (magic, protocol) != (_MAGIC, _PROTOCOL):
        raise ParseError("the magic number or the protocol version is not torch's")
    if not isinstance(system, Pairs) or ("little_endian", True) not in system:
        raise ParseError("only little-endian storages are read")
    tensors, storages = read_tensors(window)
    keys = PickleReader(window).read()
    header = Region(0, window.position, RegionKind.HEADER)
    spans, missing = _spans(source, window.position, keys, storages)
    if missing:
        tensors = [named for named in tensors if named.view.storage.key in spans]
    regions, placed, problem = place(spans, tensors)
    reason = short_by(missing) if missing else problem
    return Layout(FORMAT, cover(source.size, [header, *regions]), tuple(placed), {}, reason, truncated=missing > 0)


def _spans(
    source: Source, position: int, keys: Value, storages: Mapping[str, StorageUse]
) -> tuple[dict[str, Span], int]:
    """Return where the storages are that lie whole in the file, and how many bytes the file is short by."""
    if not isinstance(keys, list) or isinstance(keys, Pairs):
        raise ParseError("the keys of the storages are not a list")
    spans: dict[str, Span] = {}
    for number, key in enumerate(keys):
        use = storages.get(key) if isinstance(key, str) else None
        element = element_of(use.type_name) if use else None
        if use is None or element is None or use.key in spans:
            raise ParseError(f"storage {number} has no known element type")
        start, length = position + _COUNT_BYTES, use.elements * element.width
        position = start + length
        if position <= source.size:
            if int.from_bytes(source.read(start - _COUNT_BYTES, _COUNT_BYTES), "little") != use.elements:
                raise ParseError(f"storage {number} has another length than the pickle says")
            spans[use.key] = Span(start, length, f"storage/{number}")
    return spans, max(0, position - source.size)
