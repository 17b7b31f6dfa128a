"""Safetensors: an 8-byte header length, a JSON header, the tensors' bytes.

Stricter than the format on what a name means (no duplicates, no overlaps, sizes that agree), and more lenient on what
does no harm: any key order, gaps between tensors and bytes after them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from moonclipfs import limits
from moonclipfs.errors import ParseError, TruncatedError
from moonclipfs.formats import jsontext
from moonclipfs.formats.layout import (
    Layout,
    Region,
    RegionKind,
    Tensor,
    checked_name,
    cover,
    described,
    quoted,
    short_by,
    tensor_bytes,
)
from moonclipfs.types import DType, Source

FORMAT = "safetensors"
METADATA = "__metadata__"
"""The key of the header that names no tensor."""

_LENGTH_BYTES = 8
_DTYPES = {
    name: DType[name]
    for name in (
        "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
        "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
    )
}  # fmt: skip
DTYPES = frozenset(_DTYPES.values())
"""The element types that the format has."""


class _Entry(NamedTuple):
    """One tensor as the header tells it; `start` and `end` count from the end of the header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    start: int
    end: int


def parse(source: Source) -> Layout:
    """Return the layout of a safetensors file.

    Raises ParseError when the header is wrong, TruncatedError when it is cut short. A file whose data is short has a
    layout of the tensors that are whole.
    """
    header_end = _LENGTH_BYTES + int.from_bytes(source.read(0, _LENGTH_BYTES), "little")
    if header_end - _LENGTH_BYTES > limits.HEADER_BYTES:
        raise ParseError(f"header of {header_end - _LENGTH_BYTES} bytes, at most {limits.HEADER_BYTES} are read")
    if header_end > source.size:
        raise TruncatedError(f"header short by {header_end - source.size} bytes")
    header = jsontext.fields(jsontext.load(bytes(source.read(_LENGTH_BYTES, header_end - _LENGTH_BYTES))), "header")
    metadata = _metadata(header.pop(METADATA, ()))
    if len(header) > limits.TENSORS:
        raise ParseError(f"{len(header)} tensors, at most {limits.TENSORS} are read")
    # Each value of the header is let go as soon as its smaller entry is made.
    entries = [_entry(name, header.pop(name)) for name in list(header)]
    whole = [entry for entry in entries if header_end + entry.end <= source.size]
    regions = [Region(0, header_end, RegionKind.HEADER)]
    tensors = []
    for entry in whole:
        offset, length = header_end + entry.start, entry.end - entry.start
        regions.append(Region(offset, length, RegionKind.TENSOR, entry.name, entry.dtype, entry.shape))
        tensors.append(Tensor(entry.name, entry.dtype, entry.shape, offset, length, dtype_name=entry.dtype.name))
    covered = cover(source.size, regions)
    missing = max((header_end + entry.end for entry in entries), default=0) - source.size
    reason = short_by(missing) if missing > 0 else ""
    return Layout(FORMAT, covered, tuple(tensors), metadata, reason, truncated=missing > 0)


def make_header(
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the first bytes of a file of these tensors (name, dtype, shape), whose data follow without gaps.

    They are those that the safetensors library writes for tensors in this order: it puts wider elements first, then
    sorts by name. Raises ParseError for a tensor that the format cannot hold.
    """
    text = header_text(tensors, metadata)
    text += b" " * (header_length(len(text)) - _LENGTH_BYTES - len(text))
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def header_length(text: int) -> int:
    """How many bytes `make_header` returns when `header_text` has so many."""
    return _LENGTH_BYTES + text + -text % _LENGTH_BYTES


def header_text(
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What `make_header` writes between the length and the padding."""
    fields: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        if name in fields or name == METADATA or _DTYPES.get(dtype.name) is not dtype:
            raise ParseError(f"{quoted(name)} of type {dtype.name}: a safetensors file cannot hold it")
        start, end = end, end + tensor_bytes(name, shape, dtype.bits)
        fields[name] = {"dtype": dtype.name, "shape": list(shape), "data_offsets": [start, end]}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def _metadata(value: object) -> Mapping[str, str]:
    """Return `__metadata__`, which may be empty but holds strings only: long ones are described."""
    result: dict[str, str] = {}
    pairs = jsontext.fields(value, METADATA)
    if len(pairs) > limits.METADATA_PAIRS:
        raise ParseError(f"{METADATA} has {len(pairs)} keys, at most {limits.METADATA_PAIRS} are read")
    for key, text in pairs.items():
        if not isinstance(text, str):
            raise ParseError(f"{METADATA}: the value of {quoted(key)} is not a string")
        data = text.encode("utf-8", "surrogatepass")
        result[checked_name(key)] = (
            described(f"{len(data)} bytes", [data]) if len(data) > limits.METADATA_BYTES else text
        )
    return result


def _entry(name: str, value: object) -> _Entry:
    """Check one tensor of the header."""
    checked_name(name)
    fields = jsontext.fields(value, name)
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise ParseError(f"{quoted(name)} has the fields {', '.join(map(quoted, sorted(fields)[:9]))}")
    dtype_name = fields["dtype"]
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ParseError(f"UnknownDtype({quoted(name)}): {quoted(str(dtype_name))}")
    shape = _numbers(name, fields["shape"])
    offsets = _numbers(name, fields["data_offsets"])
    if len(offsets) != 2:
        raise ParseError(f"{quoted(name)}: data_offsets are not two numbers")
    start, end = offsets
    if start > end:
        raise ParseError(f"ReversedRange({quoted(name)}): data_offsets are [{start}, {end}]")
    needed = tensor_bytes(name, shape, dtype.bits)
    if needed != end - start:
        raise ParseError(f"ShapeMismatch({quoted(name)}): shape needs {needed} bytes, data_offsets span {end - start}")
    return _Entry(name, dtype, shape, start, end)


def _numbers(name: str, value: object) -> tuple[int, ...]:
    """Return a JSON array of numbers from 0 to 2^64 - 1."""
    numbers = tuple(value) if isinstance(value, list) else (None,)
    for number in numbers:  # there may be half a million of them: no generator
        if type(number) is not int or not 0 <= number < 1 << 64:
            raise ParseError(f"{quoted(name)}: shape or data_offsets are not an array of unsigned 64-bit numbers")
    return numbers
