"""From the storages of a torch file and the tensors over them to regions and tensors of the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from moonclipfs.errors import ParseError
from moonclipfs.formats.layout import Region, RegionKind, Tensor, quoted
from moonclipfs.formats.pickle_names import NamedView, View
from moonclipfs.types import DType


class Span(NamedTuple):
    """Where the bytes of a storage are in the file, and the name of its region if no tensor names it."""

    offset: int
    length: int
    name: str


class Element(NamedTuple):
    """An element type: its DType (BYTES where none fits), and the bytes of one element."""

    dtype: DType
    width: int


_STORAGE_CLASSES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "QUInt8Storage": "quint8", "QInt8Storage": "qint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
_ELEMENTS = {
    "float64": Element(DType.F64, 8), "float32": Element(DType.F32, 4), "float16": Element(DType.F16, 2),
    "bfloat16": Element(DType.BF16, 2), "int64": Element(DType.I64, 8), "int32": Element(DType.I32, 4),
    "int16": Element(DType.I16, 2), "int8": Element(DType.I8, 1), "uint64": Element(DType.U64, 8),
    "uint32": Element(DType.U32, 4), "uint16": Element(DType.U16, 2), "uint8": Element(DType.U8, 1),
    "bool": Element(DType.BOOL, 1), "complex128": Element(DType.C128, 16), "complex64": Element(DType.C64, 8),
    "complex32": Element(DType.BYTES, 4), "float8_e4m3fn": Element(DType.F8_E4M3, 1),
    "float8_e5m2": Element(DType.F8_E5M2, 1), "float8_e4m3fnuz": Element(DType.F8_E4M3FNUZ, 1),
    "float8_e5m2fnuz": Element(DType.F8_E5M2FNUZ, 1), "float8_e8m0fnu": Element(DType.F8_E8M0, 1),
    # Each element is a byte that holds two numbers of 4 bits; the shapes count bytes.
    "float4_e2m1fn_x2": Element(DType.U8, 1),
    "quint8": Element(DType.U8, 1), "qint8": Element(DType.I8, 1), "qint32": Element(DType.I32, 4),
    "quint4x2": Element(DType.U8, 1), "quint2x4": Element(DType.U8, 1),
    "UntypedStorage": Element(DType.BYTES, 1),
}  # fmt: skip


def element_of(type_name: str) -> Element | None:
    """Return the element type of a storage class or a dtype, None when it is unknown."""
    return _ELEMENTS.get(_STORAGE_CLASSES.get(type_name, type_name))


def place(spans: Mapping[str, Span], named: Iterable[NamedView]) -> tuple[list[Region], list[Tensor], str]:
    """Return a region for every storage of `spans` (by key), the tensors of `named`, and what does not fit.

    A region is named after the first tensor over its storage. A tensor that lies outside its storage is left out.
    """
    regions: dict[str, Region] = {}
    tensors: list[Tensor] = []
    problems: list[str] = []
    for name, view in _unique(named):
        try:
            span = spans.get(view.storage.key)
            if span is None:
                raise ParseError(f"{quoted(name)}: storage {quoted(view.storage.key)} is not in the file")
            tensor = _tensor(name, view, span)
        except ParseError as error:
            problems.append(str(error))
            continue
        tensors.append(tensor)
        if view.storage.key not in regions:
            regions[view.storage.key] = _region(tensor, view, span)
    for key, span in spans.items():
        if key not in regions:
            regions[key] = Region(span.offset, span.length, RegionKind.TENSOR, span.name, shape=(span.length,))
    reason = f"{len(problems)} tensors left out: {problems[0]}" if problems else ""
    return list(regions.values()), tensors, reason


def _unique(named: Iterable[NamedView]) -> Iterator[NamedView]:
    """Yield `named` with "#2", "#3" and so on after a name that was there before."""
    counts: dict[str, int] = {}
    for name, view in named:
        counts[name] = counts.get(name, 0) + 1
        yield NamedView(f"{name}#{counts[name]}" if counts[name] > 1 else name, view)


def _tensor(name: str, view: View, span: Span) -> Tensor:
    """Return `view` as bytes of the file; raises ParseError when they are not inside `span`."""
    type_name = view.dtype_name or view.storage.type_name
    type_name = _STORAGE_CLASSES.get(type_name, type_name)
    element = element_of(type_name)
    if element is None:
        raise ParseError(f"{quoted(name)} has the unknown element type {quoted(type_name)}")
    dtype, width = element
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    length = (last + 1) * width if 0 not in view.shape else 0
    if view.offset * width + length > span.length:
        raise ParseError(f"{quoted(name)} ends outside its storage of {span.length} bytes")
    strides = None if _is_contiguous(view) else view.strides
    return Tensor(name, dtype, view.shape, span.offset + view.offset * width, length, strides, type_name)


def _is_contiguous(view: View) -> bool:
    """Tell whether the elements follow each other in C order."""
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1:
            if stride != expected:
                return 0 in view.shape
            expected *= size
    return True


def _region(tensor: Tensor, view: View, span: Span) -> Region:
    """Return the region of a storage, named after `tensor`, which is the first one over it."""
    dtype, width = tensor.dtype, tensor.dtype.bits // 8
    if span.length % width:
        dtype, width = DType.BYTES, 1
    shape: tuple[int, ...] = (span.length // width,)
    if dtype is not DType.BYTES and tensor.strides is None and math.prod(view.shape) == shape[0]:
        shape = view.shape
    return Region(span.offset, span.length, RegionKind.TENSOR, tensor.name, dtype, shape)
