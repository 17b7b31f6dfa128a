"""Reading a store from Python, without a mount: files as binary file objects, tensors as arrays.

Everything here may be used from several threads. Errors are those of `moonclipfs.errors`.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.errors import CorruptError, NotFoundError, UsageError
from moonclipfs.formats.layout import Tensor
from moonclipfs.layers.links import follow as walk_links
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.store import Store
from moonclipfs.store.target import close_names, locate
from moonclipfs.types import DType, Entry, EntryType, Version, natural_key

if TYPE_CHECKING:
    from torch import Tensor as TorchTensor

_NUMPY = {
    DType.BOOL: "?", DType.U8: "u1", DType.I8: "i1", DType.U16: "<u2", DType.I16: "<i2", DType.U32: "<u4",
    DType.I32: "<i4", DType.U64: "<u8", DType.I64: "<i8", DType.F16: "<f2", DType.BF16: "<u2", DType.F32: "<f4",
    DType.F64: "<f8", DType.F8_E4M3: "u1", DType.F8_E5M2: "u1", DType.F8_E8M0: "u1", DType.F8_E4M3FNUZ: "u1",
    DType.F8_E5M2FNUZ: "u1", DType.C64: "<c8", DType.C128: "<c16",
}  # fmt: skip
_TORCH = {
    DType.BF16: "bfloat16", DType.F8_E4M3: "float8_e4m3fn", DType.F8_E5M2: "float8_e5m2",
    DType.F8_E8M0: "float8_e8m0fnu", DType.F8_E4M3FNUZ: "float8_e4m3fnuz", DType.F8_E5M2FNUZ: "float8_e5m2fnuz",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a snapshot: `dtype` is the file format's own word for it (`BF16`, `Q4_K`), `size` is in bytes."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@overload
def open(store: str | os.PathLike[str] | Store, snapshot: None = None) -> StoreReader: ...
@overload
def open(store: str | os.PathLike[str] | Store, snapshot: str) -> Snapshot: ...
def open(store: str | os.PathLike[str] | Store, snapshot: str | None = None) -> StoreReader | Snapshot:
    """Open a store for reading, or one snapshot in it: NAME for the current version, NAME@VERSION for another.

    Both results are context managers; closing them closes the store, unless an open `Store` was given. Raises
    NotFoundError, FormatVersionError, PermissionDeniedError or CorruptError.
    """
    reader = StoreReader(store)
    if snapshot is None:
        return reader
    try:
        found = reader.snapshot(snapshot)
    except BaseException:
        reader.close()
        raise
    found._owned = reader
    return found


class StoreReader:
    """The snapshots of a store."""

    def __init__(self, store: str | os.PathLike[str] | Store) -> None:
        self._owned = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else Store.open(store, purpose="python")

    def snapshots(self, prefix: str = "") -> list[str]:
        """The bound names that start with `prefix`, numbers sorted by value."""
        return sorted((name for name in self.store.names().bound() if name.startswith(prefix)), key=natural_key)

    def versions(self, name: str) -> list[int]:
        """The kept version numbers of `name`, oldest first, those of a removed name too."""
        return [version.number for version in self.store.names().versions(name)]

    def snapshot(self, name: str) -> Snapshot:
        """The snapshot NAME or NAME@VERSION. Raises NotFoundError."""
        place = locate(self.store.names(), name)
        if place.version is None or place.path:
            raise NotFoundError(f"no snapshot {name}")
        return Snapshot(self.store, place.version)

    def close(self) -> None:
        """Close the store, if it was opened here."""
        if self._owned:
            self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Snapshot:
    """The files and tensors of one version of a snapshot; they never change."""

    def __init__(self, store: Store, version: Version) -> None:
        self.store = store
        self.version = version
        self._owned: StoreReader | None = None
        self._lock = threading.Lock()
        self._tensors: dict[str, list[tuple[str, Tensor]]] | None = None

    @property
    def name(self) -> str:
        """The name under which the snapshot is bound."""
        return self.version.path

    @property
    def metadata(self) -> Mapping[str, object]:
        """What its log record says of it, provenance included."""
        return self.version.metadata

    def files(self) -> list[str]:
        """The paths of its regular files, relative, sorted; bytes that are not UTF-8 as Python's surrogateescape."""
        return [os.fsdecode(path) for path, entry in self.store.walk(self.version) if entry.type is EntryType.FILE]

    def entry(self, path: str, *, follow: bool = True) -> Entry:
        """The entry at a relative `path`, symbolic links inside the snapshot followed (the last one if `follow`).

        Raises NotFoundError, also for a link that leads out of the snapshot.
        """
        top = self.store.root_entry(self.version)
        return walk_links(top, os.fsencode(path), self._child, _link_text, last=follow)

    def _child(self, directory: Entry, name: bytes) -> Entry:
        entries = self.store.directory(directory.child) if directory.type is EntryType.DIRECTORY else {}
        if name not in entries:
            raise NotFoundError(f"no {os.fsdecode(name)} in {os.fsdecode(directory.name) or self.name}")
        return entries[name]

    def reader(self, path: str) -> FileReader:
        """Random access to the file at `path`. Raises NotFoundError, UsageError when it is no regular file."""
        entry = self.entry(path)
        if entry.type is not EntryType.FILE:
            raise UsageError(f"{path} in {self.name} is a {entry.type.name.lower()}, not a file")
        return self.store.open_file(entry)

    def open(self, path: str) -> io.BufferedReader:
        """The file at `path` as a binary file object: seekable, buffered. Raises NotFoundError, UsageError."""
        return io.BufferedReader(RawFile(self.reader(path)), limits.BLOCK_BYTES)

    def read(self, path: str) -> bytes:
        """All bytes of the file at `path`. Raises NotFoundError, UsageError, CorruptError."""
        reader = self.reader(path)
        out = bytearray(reader.size)
        read_whole(reader, 0, memoryview(out))
        return bytes(out)

    def tensors(self, file: str | None = None) -> list[TensorInfo]:
        """The tensors of all files, or of one, in the order of the files."""
        found = (place for places in self._by_name().values() for place in places)
        return [_info(tensor, where) for where, tensor in found if file in (None, where)]

    def tensor(self, name: str, file: str | None = None) -> NDArray[Any]:
        """The values of one tensor as a new array of its shape.

        NumPy's own types come as themselves. BF16 comes as its bits in uint16, the 8-bit floats as theirs in uint8;
        what has no element type of whole bytes (4- and 6-bit floats, quantised blocks) comes as its bytes, flat.
        Raises NotFoundError; UsageError when several files have the name and `file` does not say which.
        """
        return self._load(name, file)[1]

    def torch(self, name: str, file: str | None = None) -> TorchTensor:
        """The same as a torch tensor of its own dtype. Raises UsageError where torch has no such dtype."""
        import torch

        tensor, values = self._load(name, file)
        wanted = _TORCH.get(tensor.dtype)
        if tensor.dtype not in _NUMPY or (wanted and not hasattr(torch, wanted)):
            raise UsageError(
                f"{name}: this torch has no dtype for {tensor.dtype_name or tensor.dtype.name}; use tensor()"
            )
        if not wanted:
            return torch.from_numpy(values)
        return torch.from_numpy(values.view(f"i{values.itemsize}")).view(getattr(torch, wanted))

    def close(self) -> None:
        """Close the store, if `moonclipfs.open` opened it for this snapshot."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _by_name(self) -> dict[str, list[tuple[str, Tensor]]]:
        """The file and layout of each tensor, by its name."""
        with self._lock:
            if self._tensors is None:
                found: dict[str, list[tuple[str, Tensor]]] = {}
                for file in self.files():
                    for tensor in self.store.layout(self.entry(file)).tensors:
                        found.setdefault(tensor.name, []).append((file, tensor))
                self._tensors = found
            return self._tensors

    def _load(self, name: str, file: str | None) -> tuple[Tensor, NDArray[Any]]:
        known = self._by_name()
        places = [place for place in known.get(name, []) if file in (None, place[0])]
        if not places:
            close = close_names(name, known)
            where = f" in {file}" if file else ""
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise NotFoundError(f"no tensor {name} in {self.name}{where}{hint}")
        if len(places) > 1:
            files = " and ".join(where for where, _ in places)
            raise UsageError(f"tensor {name} is in {files} of {self.name}: say which with file=")
        where, tensor = places[0]
        return tensor, read_tensor(self.reader(where), tensor)


def _info(tensor: Tensor, file: str) -> TensorInfo:
    return TensorInfo(tensor.name, file, tensor.dtype_name or tensor.dtype.name, tensor.shape, tensor.length)


def _link_text(entry: Entry) -> bytes | None:
    return entry.target if entry.type is EntryType.SYMLINK else None


def read_tensor(reader: FileReader, tensor: Tensor) -> NDArray[Any]:
    """Read one tensor of a file into a new C-contiguous array; see `Snapshot.tensor` for the types."""
    raw = np.empty(tensor.length, np.uint8)
    read_whole(reader, tensor.offset, raw.data)
    if tensor.dtype not in _NUMPY:
        return raw
    values = raw.view(_NUMPY[tensor.dtype])
    if tensor.strides is None:
        return values.reshape(tensor.shape)
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.strides, strict=True))
    if 0 in tensor.shape:
        return np.empty(tensor.shape, values.dtype)
    if min(tensor.strides, default=0) < 0 or last >= len(values):
        raise CorruptError(f"tensor {tensor.name}: its strides lead outside its {tensor.length} bytes")
    strides = tuple(stride * values.itemsize for stride in tensor.strides)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False))


def read_whole(reader: FileReader, offset: int, out: memoryview) -> None:
    """Fill `out` from `offset` of a file; what is long is decoded by all cores, past the cache. Raises CorruptError."""
    step = limits.PREFETCH_BYTES
    if len(out) < limits.BLOCK_BYTES:
        reader.read_into(offset, out)  # small tensors share their blocks with others: the cache serves those
    elif len(out) <= step:
        reader.stream_into(offset, out)
    else:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "read") as pool:
            parts = range(0, len(out), step)
            for _ in pool.map(lambda at: reader.stream_into(offset + at, out[at : at + step]), parts):
                pass


class RawFile(io.RawIOBase):
    """An unbuffered binary file object over a `FileReader`, with a position of its own."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the position on; fewer bytes at the end of the file. Raises CorruptError."""
        count = self._reader.read_into(self._position, memoryview(buffer).cast("B"))
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position; past the end is allowed, and reads nothing. Raises OSError before the beginning."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._reader.size}.get(whence)
        if start is None or start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """The position in bytes."""
        return self._position
