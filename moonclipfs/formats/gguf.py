"""GGUF, versions 2 and 3, little-endian: counts, key-value metadata, tensor infos, aligned tensor bytes.

Quantised types have no `DType`: their regions are BYTES whose shape counts the bytes of whole rows of blocks.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from moonclipfs import limits
from moonclipfs.errors import ParseError
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
)
from moonclipfs.formats.window import Window
from moonclipfs.types import DType, Source

FORMAT = "gguf"
MAGIC = b"GGUF"

_ALIGNMENT_KEY = "general.alignment"
_ALIGNMENT = 32
_ALIGNMENT_MAX = 1 << 20
_ARRAY_DEPTH = 4
_READ_BYTES = 1 * limits.MIB
_STRING = 8
_ARRAY = 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class _Type(NamedTuple):
    """A GGML type: `block_bytes` hold `block` elements of a row."""

    name: str
    block: int
    block_bytes: int
    dtype: DType = DType.BYTES


_TYPES = {
    0: _Type("F32", 1, 4, DType.F32), 1: _Type("F16", 1, 2, DType.F16), 24: _Type("I8", 1, 1, DType.I8),
    25: _Type("I16", 1, 2, DType.I16), 26: _Type("I32", 1, 4, DType.I32), 27: _Type("I64", 1, 8, DType.I64),
    28: _Type("F64", 1, 8, DType.F64), 30: _Type("BF16", 1, 2, DType.BF16),
    2: _Type("Q4_0", 32, 18), 3: _Type("Q4_1", 32, 20), 6: _Type("Q5_0", 32, 22), 7: _Type("Q5_1", 32, 24),
    8: _Type("Q8_0", 32, 34), 9: _Type("Q8_1", 32, 40), 10: _Type("Q2_K", 256, 84), 11: _Type("Q3_K", 256, 110),
    12: _Type("Q4_K", 256, 144), 13: _Type("Q5_K", 256, 176), 14: _Type("Q6_K", 256, 210), 15: _Type("Q8_K", 256, 292),
    16: _Type("IQ2_XXS", 256, 66), 17: _Type("IQ2_XS", 256, 74), 18: _Type("IQ3_XXS", 256, 98),
    19: _Type("IQ1_S", 256, 50), 20: _Type("IQ4_NL", 32, 18), 21: _Type("IQ3_S", 256, 110),
    22: _Type("IQ2_S", 256, 82), 23: _Type("IQ4_XS", 256, 136), 29: _Type("IQ1_M", 256, 56),
    31: _Type("Q4_0_4_4", 32, 18), 32: _Type("Q4_0_4_8", 32, 18), 33: _Type("Q4_0_8_8", 32, 18),
    34: _Type("TQ1_0", 256, 54), 35: _Type("TQ2_0", 256, 66), 39: _Type("MXFP4", 32, 17),
    40: _Type("NVFP4", 64, 36), 41: _Type("Q1_0", 128, 18),
}  # fmt: skip


class _Info(NamedTuple):
    """One tensor as the header tells it; `offset` counts from the start of the data."""

    name: str
    type: _Type
    shape: tuple[int, ...]
    offset: int
    length: int


def parse(source: Source) -> Layout:
    """Return the layout of a GGUF file; raises ParseError, TruncatedError when the header is cut short."""
    window = Window(source, len(MAGIC), limits.HEADER_BYTES)
    version = window.u32()
    if version not in (2, 3):
        raise ParseError(f"version {version:#x}: only 2 and 3, little-endian, are read")
    tensor_count, pair_count = window.u64(), window.u64()
    if tensor_count > limits.TENSORS:
        raise ParseError(f"{tensor_count} tensors, at most {limits.TENSORS} are read")
    if pair_count > limits.METADATA_PAIRS:
        raise ParseError(f"{pair_count} pairs of metadata, at most {limits.METADATA_PAIRS} are read")
    metadata = _metadata(source, window, pair_count)
    infos = [_info(window) for _ in range(tensor_count)]
    if len({info.name for info in infos}) != len(infos):
        raise ParseError("two tensors have the same name")
    data = -(-window.position // _alignment(metadata)) * _alignment(metadata)
    regions = [Region(0, window.position, RegionKind.HEADER)]
    tensors = []
    for info in infos:
        if data + info.offset + info.length <= source.size:
            regions.append(_region(info, data + info.offset))
            tensors.append(_tensor(info, data + info.offset))
    missing = max((data + info.offset + info.length for info in infos), default=0) - source.size
    reason = short_by(missing) if missing > 0 else ""
    return Layout(FORMAT, cover(source.size, regions), tuple(tensors), metadata, reason, truncated=missing > 0)


def _region(info: _Info, offset: int) -> Region:
    shape = info.shape
    if info.type.dtype is DType.BYTES and shape:
        shape = (*shape[:-1], shape[-1] // info.type.block * info.type.block_bytes)
    return Region(offset, info.length, RegionKind.TENSOR, info.name, info.type.dtype, shape)


def _tensor(info: _Info, offset: int) -> Tensor:
    return Tensor(info.name, info.type.dtype, info.shape, offset, info.length, dtype_name=info.type.name)


def _alignment(metadata: dict[str, str]) -> int:
    """Return the alignment of the tensors' bytes."""
    text = metadata.get(_ALIGNMENT_KEY, str(_ALIGNMENT))
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 0 < value <= _ALIGNMENT_MAX:
        raise ParseError(f"{_ALIGNMENT_KEY} is {quoted(text)}")
    return value


def _metadata(source: Source, window: Window, count: int) -> dict[str, str]:
    """Read `count` key-value pairs: scalars and short strings as text, the rest as a description."""
    metadata: dict[str, str] = {}
    for _ in range(count):
        key = _name(window)
        if key in metadata:
            raise ParseError(f"DuplicateKey({quoted(key)}): the metadata names it twice")
        metadata[key] = _value(source, window, window.u32())
    return metadata


def _name(window: Window) -> str:
    """Read a string that names something."""
    length = window.u64()
    if length > limits.TENSOR_NAME_BYTES:
        raise ParseError(f"a name of {length} bytes, at most {limits.TENSOR_NAME_BYTES} are read")
    return checked_name(window.take(length).decode("utf-8", "surrogateescape"))


def _value(source: Source, window: Window, kind: int) -> str:
    """Read one metadata value of type `kind` as text."""
    if kind == _STRING:
        text = window.take(window.u64())  # the window is as long as a header may be
        if len(text) > limits.METADATA_BYTES:
            return described(f"{len(text)} bytes", [text])
        return text.decode("utf-8", "surrogateescape")
    if kind == _ARRAY:
        start = window.position
        count = _skip_array(window, _ARRAY_DEPTH)
        parts = range(start, window.position, _READ_BYTES)
        return described(f"{count} values", (source.read(at, min(_READ_BYTES, window.position - at)) for at in parts))
    return str(struct.unpack(_scalar(kind), window.take(struct.calcsize(_scalar(kind))))[0])


def _skip_array(window: Window, depth: int) -> int:
    """Pass over an array and return its number of values."""
    kind = window.u32()
    count = window.u64()
    if kind == _STRING:
        for _ in range(count):
            window.skip(window.u64())
    elif kind == _ARRAY:
        if not depth:
            raise ParseError(f"arrays nested deeper than {_ARRAY_DEPTH}")
        for _ in range(count):
            _skip_array(window, depth - 1)
    else:
        window.skip(count * struct.calcsize(_scalar(kind)))
    return count


def _scalar(kind: int) -> str:
    """Return the struct format of a scalar metadata type."""
    form = _SCALARS.get(kind)
    if form is None:
        raise ParseError(f"metadata type {kind} is unknown")
    return form


def _info(window: Window) -> _Info:
    """Read one tensor info. The file lists the innermost dimension first; `shape` has it last."""
    name = _name(window)
    dimensions = window.u32()
    if dimensions > limits.DIMENSIONS:
        raise ParseError(f"{quoted(name)}: {dimensions} dimensions, at most {limits.DIMENSIONS} are read")
    shape = tuple(window.u64() for _ in range(dimensions))[::-1]
    kind = window.u32()
    offset = window.u64()
    type_ = _TYPES.get(kind)
    if type_ is None:
        raise ParseError(f"{quoted(name)}: GGML type {kind} is unknown")
    row = shape[-1] if shape else 1
    if row % type_.block:
        raise ParseError(f"MisalignedSize({quoted(name)}): rows of {row} are not whole blocks of {type_.block}")
    length = math.prod(shape) // type_.block * type_.block_bytes
    if length >= 1 << 64:
        raise ParseError(f"Overflow({quoted(name)}): shape {list(shape)} exceeds 64 bits")
    return _Info(name, type_, shape, offset, length)
