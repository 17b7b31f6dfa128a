"""What the tests of formats share: sources that count, hand-made files, and the rules that every layout keeps."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from moonclipfs.formats.cut import CutRules, Piece, cut
from moonclipfs.formats.layout import Layout, RegionKind, Tensor
from moonclipfs.formats.sniff import parse
from moonclipfs.types import Buffer, BytesSource, DType

CORPUS = Path(__file__).parent.parent / "corpus" / "formats"
CORPUS_FILES = sorted(path for path in CORPUS.iterdir() if path.is_file())
HOSTILE_FILES = sorted((CORPUS / "hostile").iterdir())

SMALL_RULES = CutRules(
    object_bytes=512, object_elements=64, slice_bytes=64, small_region_bytes=32, chunk_min=64, chunk_average=128,
    chunk_max=256,
)  # fmt: skip
"""Rules under which a file of a few hundred bytes is cut in every way."""


class CountingSource:
    """A sparse source: `parts` at their offsets, zeros elsewhere. Counts what is read of it."""

    def __init__(self, size: int, parts: Mapping[int, bytes]) -> None:
        self.size = size
        self.parts = dict(parts)
        self.reads = 0
        self.bytes_read = 0
        self.longest = 0

    def read(self, offset: int, length: int) -> Buffer:
        """Return bytes of the file; refuses what a caller may not ask for."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise AssertionError(f"read of {length} bytes at {offset} outside a file of {self.size}")
        self.reads += 1
        self.bytes_read += length
        self.longest = max(self.longest, length)
        data = bytearray(length)
        for at, part in self.parts.items():
            start, end = max(at, offset), min(at + len(part), offset + length)
            if start < end:
                data[start - offset : end - offset] = part[start - at : end - at]
        return data


def counting(data: bytes) -> CountingSource:
    """Return a counting source over bytes."""
    return CountingSource(len(data), {0: data})


def layout_of(data: bytes) -> Layout:
    """Parse `data` and check the rules that every layout keeps."""
    layout = parse(BytesSource(data))
    check_layout(layout, len(data))
    return layout


def check_layout(layout: Layout, size: int) -> None:
    """Fail unless `layout` covers a file of `size` bytes and every part of it makes sense."""
    position = 0
    for region in layout.regions:
        assert region.offset == position and region.length > 0
        position = region.end
        if region.kind is RegionKind.TENSOR:
            assert math.prod(region.shape) * region.dtype.bits == region.length * 8
        else:
            assert region.dtype is DType.BYTES
    assert position == size
    for tensor in layout.tensors:
        assert tensor.offset >= 0 and tensor.offset + tensor.length <= size
        tensor.name.encode("utf-8", "surrogateescape")
    if layout.format == "opaque":
        assert layout.reason and len(layout.regions) <= 1


def check_pieces(data: bytes, layout: Layout, rules: CutRules = SMALL_RULES) -> list[Piece]:
    """Fail unless the pieces of `data` cover it; return them."""
    pieces = list(cut(BytesSource(data), layout, rules))
    position = 0
    for piece in pieces:
        assert piece.offset == position and 0 < piece.length <= rules.object_bytes
        assert math.prod(piece.shape) * piece.dtype.bits == piece.length * 8
        position += piece.length
    assert position == len(data)
    return pieces


def bytes_of(data: bytes, tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor."""
    assert tensor.strides is None
    return data[tensor.offset : tensor.offset + tensor.length]


def by_name(layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of a layout by name, which are unique."""
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    assert len(tensors) == len(layout.tensors)
    return tensors


def safetensors(header: object, data: bytes = b"") -> bytes:
    """Return a file with this header: text, bytes or something for json.dumps."""
    text = (
        header
        if isinstance(header, bytes)
        else header.encode()
        if isinstance(header, str)
        else json.dumps(header).encode()
    )
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    """Return the header's words on one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def sparse_zip(members: Mapping[str, bytes | int], *, descriptor: bool = False) -> tuple[int, dict[int, bytes]]:
    """Return the size and the parts of a stored zip64 archive; a member given as a number is that many zeros.

    With `descriptor`, lengths and checksums are in the central directory and after the data only, as torch does it.
    """
    parts: dict[int, bytes] = {}
    central = b""
    position = 0
    flags = 0x0808 if descriptor else 0x0800
    for name, content in members.items():
        length, crc = (content, 0) if isinstance(content, int) else (len(content), zlib.crc32(content))
        known = (0, 0, 0) if descriptor else (crc, 0xFFFFFFFF, 0xFFFFFFFF)
        extra = struct.pack("<HHQQ", 1, 16, length, length)
        local = struct.pack("<4s5H3I2H", b"PK\3\4", 45, flags, 0, 0, 0, *known, len(name), len(extra))
        parts[position] = local + name.encode() + extra
        start = position + len(parts[position])
        if not isinstance(content, int):
            parts[start] = content
        central_extra = struct.pack("<HHQQQ", 1, 24, length, length, position)
        central += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 45, 45, flags, 0, 0, 0, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(name),
            len(central_extra), 0, 0, 0, 0, 0xFFFFFFFF,
        ) + name.encode() + central_extra  # fmt: skip
        position = start + length
        if descriptor:
            parts[position] = struct.pack("<4sIQQ", b"PK\7\10", crc, length, length)
            position += 24
    count = len(members)
    end = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(central), position)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, position + len(central), 1)
    end += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    parts[position] = central + end
    return position + len(central) + len(end), parts


def zip_bytes(members: Mapping[str, bytes | int], *, descriptor: bool = False) -> bytes:
    """Return a whole archive of `sparse_zip`."""
    size, parts = sparse_zip(members, descriptor=descriptor)
    return bytes(CountingSource(size, parts).read(0, size))


class Opcodes:
    """Writes pickles opcode by opcode, so that tests can say what no pickler would."""

    def __init__(self) -> None:
        self.data = b"\x80\x02"

    def text(self, value: str) -> Opcodes:
        """Push a string."""
        encoded = value.encode()
        self.data += b"X" + struct.pack("<I", len(encoded)) + encoded
        return self

    def number(self, value: int) -> Opcodes:
        """Push an integer of up to 8 bytes."""
        self.data += b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
        return self

    def name(self, module: str, name: str) -> Opcodes:
        """Push a global."""
        self.data += f"c{module}\n{name}\n".encode()
        return self

    def sizes(self, values: tuple[int, ...]) -> Opcodes:
        """Push a tuple of integers."""
        self.data += b"("
        for value in values:
            self.number(value)
        self.data += b"t"
        return self

    def tensor(
        self, key: str, elements: int, shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0,
        storage: str = "FloatStorage",
    ) -> Opcodes:  # fmt: skip
        """Push a tensor as torch writes it."""
        self.name("torch._utils", "_rebuild_tensor_v2").op(b"((")
        self.text("storage").name("torch", storage).text(key).text("cpu").number(elements).op(b"tQ")
        return self.number(offset).sizes(shape).sizes(strides).op(b"\x89}tR")

    def op(self, opcode: bytes) -> Opcodes:
        """Append raw opcodes."""
        self.data += opcode
        return self

    def done(self) -> bytes:
        """Return the pickle."""
        return self.data + b"."


def torch_zip(pickle: bytes, storages: Mapping[str, bytes | int], root: str = "archive") -> dict[str, bytes | int]:
    """Return the members of a torch archive."""
    members: dict[str, bytes | int] = {f"{root}/data.pkl": pickle, f"{root}/byteorder": b"little"}
    return members | {f"{root}/data/{key}": content for key, content in storages.items()}


def torch_legacy(pickle: bytes, keys: list[str], storages: list[bytes], counts: list[int]) -> bytes:
    """Return a torch file of the format before zip."""
    data = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + b"\x80\x02M\xe9\x03."
    data += Opcodes().op(b"}(").text("little_endian").op(b"\x88u").done() + pickle
    key_list = Opcodes().op(b"](")
    for key in keys:
        key_list.text(key)
    data += key_list.op(b"e").done()
    for content, count in zip(storages, counts, strict=True):
        data += struct.pack("<q", count) + content
    return data


def mutations(data: bytes, choices: list[tuple[int, int, int]]) -> Iterator[bytes]:
    """Yield `data` changed by each of `choices` in turn: (what is done, where, with which value)."""
    values = (0, 1, 7, 0x7F, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
    for kind, where, value in choices:
        at = where % max(1, len(data))
        number = values[value % len(values)]
        if kind == 0:
            data = data[:at] + bytes([value & 0xFF]) + data[at + 1 :]
        elif kind in (1, 2, 3):
            width = 1 << kind
            data = data[:at] + (number & ((1 << 8 * width) - 1)).to_bytes(width, "little") + data[at + width :]
        elif kind == 4:
            data = data[:at] + data[at + value % 64 :]
        elif kind == 5:
            data = data[:at] + data[at : at + value % 64] + data[at:]
        elif kind == 6:
            data = data[:at]
        else:
            data = data[:at] + str(number).encode() + data[at + 1 :]
        yield data
