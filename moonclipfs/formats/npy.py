"""NumPy's .npy: a magic, a header that is a Python dict literal, the array's bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.layout import (
    Layout,
    Region,
    RegionKind,
    Tensor,
    checked_name,
    cover,
    quoted,
    short_by,
    tensor_bytes,
)
from moonclipfs.formats.window import Window
from moonclipfs.types import DType, Source

FORMAT = "npy"
MAGIC = b"\x93NUMPY"

ARRAY_NAME = "array"
"""The name of the only tensor of a .npy file."""

_HEADER = re.compile(
    r"\{\s*'descr':\s*(?P<descr>'[^']{1,64}'|\[.*\]),\s*'fortran_order':\s*(?P<fortran>True|False),"
    r"\s*'shape':\s*\((?P<shape>[0-9L, ]*)\),?\s*\}\s*",
    re.DOTALL,
)
_DESCR = re.compile(r"([<>|=])([?bBiufcSUVMm])(\d{1,9})(\[.{1,20}\])?")
_DTYPES = {
    "b1": DType.BOOL, "i1": DType.I8, "i2": DType.I16, "i4": DType.I32, "i8": DType.I64,
    "u1": DType.U8, "u2": DType.U16, "u4": DType.U32, "u8": DType.U64,
    "f2": DType.F16, "f4": DType.F32, "f8": DType.F64, "c8": DType.C64, "c16": DType.C128,
    "M8": DType.I64, "m8": DType.I64,
    # NumPy has no bfloat16: arrays of the common extension type are saved as two-byte voids.
    "V2": DType.BF16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    """What a .npy header says. `item_bytes` is 0 when the elements are not plain bytes (objects, records)."""

    dtype: DType
    dtype_name: str
    item_bytes: int
    shape: tuple[int, ...]
    fortran: bool
    data_offset: int


def parse(source: Source) -> Layout:
    """Return the layout of a .npy file; raises ParseError."""
    header = read_header(source, 0, source.size)
    regions = [Region(0, header.data_offset, RegionKind.HEADER)]
    if not header.item_bytes:
        regions.append(Region(header.data_offset, source.size - header.data_offset, RegionKind.OPAQUE))
        return Layout(FORMAT, cover(source.size, regions), reason=f"elements of type {header.dtype_name}")
    missing = header.data_offset + array_bytes(ARRAY_NAME, header) - source.size
    if missing > 0:
        return Layout(FORMAT, cover(source.size, regions), reason=short_by(missing), truncated=True)
    region, tensor = array(ARRAY_NAME, header)
    return Layout(FORMAT, cover(source.size, [*regions, region]), (tensor,))


def read_header(source: Source, start: int, end: int) -> Header:
    """Read the header of an array that lies at bytes `start` to `end`; raises ParseError."""
    window = Window(source, start, end)
    if window.take(len(MAGIC)) != MAGIC:
        raise ParseError("no magic of an array")
    major = window.byte()
    window.skip(1)
    if major not in (1, 2, 3):
        raise ParseError(f"version {major} of the array header is unknown")
    length = window.u16() if major == 1 else window.u32()
    if length > limits.NPY_HEADER_BYTES:
        raise ParseError(f"array header of {length} bytes, at most {limits.NPY_HEADER_BYTES} are read")
    text = window.take(length).decode("utf-8" if major == 3 else "latin-1", "replace")
    match = _HEADER.fullmatch(text)
    if match is None:
        raise ParseError("the array header is not a literal with descr, fortran_order and shape")
    numbers = [number.strip(" L") for number in match["shape"].split(",")]
    if any(len(number) > 20 or " " in number or "L" in number for number in numbers) or "" in numbers[:-1]:
        raise ParseError("the shape in the array header is malformed")
    shape = tuple(int(number) for number in numbers if number)
    dtype, item_bytes = _element(match["descr"])
    name = match["descr"].strip("'")[:64]
    return Header(dtype, name, item_bytes, shape, match["fortran"] == "True", window.position)


def array_bytes(name: str, header: Header) -> int:
    """Return the bytes of the array's elements; raises ParseError on overflow."""
    return tensor_bytes(name, header.shape, header.item_bytes * 8)


def array(name: str, header: Header) -> tuple[Region, Tensor]:
    """Return the region and the tensor of an array that lies whole in the file; raises ParseError."""
    checked_name(name)
    length = array_bytes(name, header)
    memory_shape = header.shape[::-1] if header.fortran else header.shape
    region_shape = memory_shape if header.dtype is not DType.BYTES else (*memory_shape, header.item_bytes)
    region = Region(header.data_offset, length, RegionKind.TENSOR, name, header.dtype, region_shape)
    strides = None
    if header.fortran and len(header.shape) > 1:
        strides = tuple(math.prod(header.shape[:axis]) for axis in range(len(header.shape)))
    return region, Tensor(name, header.dtype, header.shape, header.data_offset, length, strides, header.dtype_name)


def _element(descr: str) -> tuple[DType, int]:
    """Return the element type and its bytes: BYTES where no DType fits, 0 bytes where elements are not plain."""
    match = _DESCR.fullmatch(descr.strip("'"))
    if match is None:
        if descr.startswith("[") or descr.strip("'") in ("O", "|O"):
            return DType.BYTES, 0
        raise ParseError(f"the element type {quoted(descr)} is unknown")
    order, kind, size = match[1], match[2], int(match[3])
    item_bytes = size * 4 if kind == "U" else size
    dtype = _DTYPES.get(f"{kind}{size}", DType.BYTES)
    if order == ">" and dtype.bits > 8:
        dtype = DType.BYTES
    return dtype, item_bytes
