"""Files of one expert each: safetensors, and uncompressed npz in which bfloat16 moments lie as int16.

An npz knows no bfloat16. Moments (`moments.owner`) of that type are kept as int16 arrays of the same bits, as mini-AGI
does; any other bfloat16 tensor as the two-byte void `<V2`, as NumPy's extension type is saved. An array of int16 under
the name of a moment is therefore always read as bfloat16. The bytes are those of `numpy.savez`: members in the order
of the tensors, stored, dated 1980, so the same tensors make the same file.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch

from moonclipfs import limits
from moonclipfs.errors import CorruptError, ParseError, UsageError
from moonclipfs.formats import npy, npz, safetensors, zipdir
from moonclipfs.torch.elements import TORCH_DTYPES, as_bytes, dtype_of, empty, is_transposed, reversed_dimensions
from moonclipfs.torch.moments import owner
from moonclipfs.types import DType

SAFETENSORS = "safetensors"
NPZ = "npz"
FORMATS = (SAFETENSORS, NPZ)
"""Also the suffixes of their files."""

_NPY_HEADER_BYTES = 128
"""What NumPy writes before the elements of an array of few dimensions."""
_BF16_DESCR = "<V2"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor in a file: `length` bytes at `offset`, its dimensions in reverse when `transposed`."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    length: int
    transposed: bool = False


class ExpertFile:
    """An expert's file, open for reading. Only its headers are read, and of the tensors what is asked for.

    Every method raises CorruptError, naming the file, when it is not what its suffix says or is cut short.
    """

    def __init__(self, file: IO[bytes], label: str, file_format: str) -> None:
        self._file = file
        self._label = label
        self.size = file.seek(0, io.SEEK_END)
        self.metadata: Mapping[str, str] = {}
        self._parts: dict[str, Part] = {}
        self._members: dict[str, zipdir.Member] = {}
        try:
            if file_format == NPZ:
                members = sorted(zipdir.read(self), key=lambda member: member.offset)
                self._members = {member.name.removesuffix(npz.SUFFIX): member for member in members}
            else:
                self._read_safetensors()
        except ParseError as error:
            raise self._corrupt(str(error)) from error

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, in the order in which they lie in the file."""
        return self._members.keys() or self._parts.keys()

    def part(self, name: str) -> Part:
        """Return where a tensor of the file is."""
        if name not in self._parts:
            try:
                self._parts[name] = self._array(name, self._members[name])
            except ParseError as error:
                raise self._corrupt(f'"{name}": {error}') from error
        return self._parts[name]

    def load(self, part: Part, *, pinned: bool = False) -> torch.Tensor:
        """Return a tensor of the file in memory of its own."""
        tensor = empty(part.dtype, part.shape[::-1] if part.transposed else part.shape, pinned=pinned)
        self._read_into(part.offset, as_bytes(tensor).data)
        return reversed_dimensions(tensor) if part.transposed else tensor

    def holds(self, part: Part, tensor: torch.Tensor) -> bool:
        """True when a tensor of the file is `tensor`, bit for bit. Reads no further than to the first difference."""
        if tuple(tensor.shape) != part.shape or dtype_of(part.name, tensor) is not part.dtype:
            return False
        given = as_bytes(tensor)
        if part.transposed:
            return np.array_equal(as_bytes(self.load(part)), given)
        window = np.empty(min(part.length, limits.COMPARE_WINDOW_BYTES), np.uint8)
        for start in range(0, part.length, limits.COMPARE_WINDOW_BYTES):
            piece = window[: part.length - start]
            self._read_into(part.offset + start, piece.data)
            if not np.array_equal(piece, given[start : start + len(piece)]):
                return False
        return True

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file: what parsers ask for."""
        data = bytearray(length)
        self._read_into(offset, memoryview(data))
        return bytes(data)

    def _read_into(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        done = 0
        while done < len(data):
            count = self._file.readinto(data[done:])  # type: ignore[attr-defined]
            if not count:
                raise self._corrupt(f"it ends {len(data) - done} bytes early")
            done += count

    def _read_safetensors(self) -> None:
        if self.size < 8:
            raise ParseError("too short for a header")
        layout = safetensors.parse(self)
        if layout.truncated:
            raise ParseError(layout.reason)
        self.metadata = layout.metadata
        for tensor in sorted(layout.tensors, key=lambda tensor: tensor.offset):
            self._check(tensor.name, tensor.dtype, tensor.dtype.name)
            self._parts[tensor.name] = Part(tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.length)

    def _array(self, name: str, member: zipdir.Member) -> Part:
        """Read the header of one array; raises ParseError."""
        if not member.stored:
            raise ParseError("the array is compressed; save it with numpy.savez")
        end = member.offset + member.length
        try:
            header = npy.read_header(self, member.offset, min(end, member.offset + _NPY_HEADER_BYTES))
        except ParseError:
            header = npy.read_header(self, member.offset, end)  # it is longer
        region, tensor = npy.array(name, header)
        if region.end != end:
            raise ParseError(f"{region.length} bytes by its header, {end - region.offset} in the archive")
        self._check(name, header.dtype, header.dtype_name)
        packed = header.dtype is DType.I16 and owner(name, self.names) is not None
        dtype = DType.BF16 if packed else header.dtype
        return Part(name, dtype, header.shape, region.offset, region.length, tensor.strides is not None)

    def _check(self, name: str, dtype: DType, text: str) -> None:
        if dtype not in TORCH_DTYPES:
            raise ParseError(f'"{name}" has elements of type {text}, which torch does not have')

    def _corrupt(self, reason: str) -> CorruptError:
        return CorruptError(f"{self._label}: {reason}")


def write(
    file: IO[bytes], file_format: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file of these tensors, in their order; `metadata` is for safetensors only.

    Raises UsageError for a tensor that the format cannot hold.
    """
    if file_format == NPZ:
        _write_npz(file, tensors)
        return
    try:
        parts = [(name, dtype_of(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()]
        file.write(safetensors.make_header(parts, metadata))
    except ParseError as error:
        raise UsageError(str(error)) from error
    for tensor in tensors.values():
        file.write(as_bytes(tensor).data)


def _write_npz(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
    arrays = [_header(name, tensor, tensors) for name, tensor in tensors.items()]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for (name, tensor), header in zip(tensors.items(), arrays, strict=True):
            # As numpy.savez writes it, whose bytes these are: always with room for 64-bit sizes.
            with archive.open(name + npz.SUFFIX, "w", force_zip64=True) as member:
                member.write(header)
                for piece in _pieces(reversed_dimensions(tensor) if is_transposed(tensor) else tensor):
                    member.write(piece)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    data = as_bytes(tensor).data
    for start in range(0, len(data), limits.OBJECT_BYTES):
        yield data[start : start + limits.OBJECT_BYTES]


def _header(name: str, tensor: torch.Tensor, names: Collection[str]) -> bytes:
    """Return what an npy file has before the elements of this tensor."""
    dtype = dtype_of(name, tensor)
    is_state = owner(name, names) is not None
    if is_state and dtype is DType.I16:
        raise UsageError(f'"{name}" is an int16 tensor under the name of a moment, which is read as bfloat16')
    if dtype is DType.BF16:
        descr = "<i2" if is_state else _BF16_DESCR
    elif dtype.name.startswith("F8"):
        raise UsageError(f'"{name}" has elements of {tensor.dtype}, which an npz cannot hold; use safetensors')
    else:
        descr = torch.empty(0, dtype=tensor.dtype).numpy().dtype.str
    buffer = io.BytesIO()
    header = {"descr": descr, "fortran_order": is_transposed(tensor), "shape": tuple(tensor.shape)}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()
