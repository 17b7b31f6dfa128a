"""Reading a store from Python, without a mount: files as binary file objects, tensors as arrays.

Everything here may be used from several threads. Errors are those of `moonclipfs.errors`; file objects raise OSError
with the errno of these instead. What is open stays readable when it is forgotten, until it is closed or collected.
"""

from __future__ import annotations

import errno
import io
import math
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
from moonclipfs.errors import CorruptError, LimitError, NotFoundError, UsageError, as_os_errors
from moonclipfs.formats.layout import Tensor
from moonclipfs.layers.claims import Claim, Claims
from moonclipfs.layers.links import follow as walk_links
from moonclipfs.store.cores import usable_cores
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.store import Store
from moonclipfs.store.target import close_names, locate, parse_target
from moonclipfs.types import NO_ID, DType, Entry, EntryType, Version, natural_key

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


STATUS_SECONDS = 30.0
"""A mount that does not tell its status within this is in trouble."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a snapshot: `dtype` is the file format's own word for it (`BF16`, `Q4_K`), `size` is in bytes."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@overload
def open(store: Store, snapshot: None = None) -> StoreReader: ...
@overload
def open(store: str | os.PathLike[str], snapshot: None = None) -> Any: ...  # the text says which of the two
@overload
def open(store: str | os.PathLike[str] | Store, snapshot: str) -> Snapshot: ...
def open(store: str | os.PathLike[str] | Store, snapshot: str | None = None) -> StoreReader | Snapshot:
    """Open a store for reading, or one snapshot in it: NAME for the current version, NAME@VERSION for another.

    The store is its directory or an open `Store`; STORE:NAME[@VERSION] and a path inside a mount, which mean a snapshot
    by themselves; or STORE:PREFIX and a directory of names in a mount, below which `snapshot` is looked up. Both
    results are context managers; closing them closes the store, unless an open `Store` was given. Raises
    NotFoundError, FormatVersionError, PermissionDeniedError, CorruptError, or UsageError for a path inside a snapshot.
    """
    target = None if isinstance(store, Store) else parse_target(os.fspath(store))
    spec = "/".join(part for part in (target.spec if target else "", snapshot) if part)
    reader = StoreReader(target.store if target else store)
    if not spec:
        return reader
    try:
        found = reader.snapshot(spec)
    except BaseException:
        reader.close()
        raise
    found._owner = reader
    return found


def seal(path: str | os.PathLike[str], *, wait: bool = True) -> str | None:
    """Make a directory inside a mount the next version of the snapshot of its name; returns it as NAME@N.

    Without `wait` it is captured now, published soon after, and None is returned. Raises UsageError for a path outside
    of a mount, NotFoundError, BusyError while a file in it is written to, and what keeps it from being stored.
    """
    from moonclipfs.fuse.control import ask
    from moonclipfs.fuse.inside import sealable

    inside = sealable(os.fspath(path))
    answer = ask(inside.mount.mountpoint, "seal", None, path=inside.path, wait=wait)
    return f"{answer['path']}@{answer['number']}" if "number" in answer else None


def flush(path: str | os.PathLike[str]) -> None:
    """Return when all that was written to the mount of `path`, or to the overlay that it lies in, is encoded and
    durable. Raises what kept it from that, UsageError in a dry run."""
    from moonclipfs.fuse.control import ask
    from moonclipfs.fuse.inside import flushable

    inside, verb, arguments = flushable(os.fspath(path))
    if inside.mount.writable:
        ask(inside.mount.mountpoint, verb, None, **arguments)


def status(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the mount of `path` has staged, stored and failed to store, by the keys of `moonclipfs status --json`.

    Raises UsageError outside of a mount, MountError when it does not answer.
    """
    from moonclipfs.fuse.control import ask
    from moonclipfs.fuse.inside import need_mount

    mount = need_mount(os.fspath(path), "status tells of a mount").mount
    about = {"store": mount.store, "mountpoint": mount.mountpoint, "read_only": not mount.writable}
    return {**about, **(ask(mount.mountpoint, "status", STATUS_SECONDS) if mount.writable else {})}


class StoreReader:
    """The snapshots of a store."""

    def __init__(self, store: str | os.PathLike[str] | Store) -> None:
        self._owned = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else Store.open(store, purpose="python")
        self._claims = Claims(self.store, owned=self._owned)
        self._claim: Claim | None = self._claims.claim(NO_ID, 0)

    def snapshots(self, prefix: str = "") -> list[str]:
        """The bound names that start with `prefix`, numbers sorted by value."""
        return sorted((name for name in self.store.names().bound() if name.startswith(prefix)), key=natural_key)

    def versions(self, name: str) -> list[int]:
        """The kept version numbers of `name`, oldest first, those of a removed name too."""
        return [version.number for version in self.store.names().versions(name)]

    def snapshot(self, name: str) -> Snapshot:
        """The snapshot NAME or NAME@VERSION. Raises NotFoundError, UsageError for a path inside one."""
        with self._claims.held() as sequence:
            place = locate(self.store.names(), name)
            if place.version is None:
                raise NotFoundError(f"no snapshot {name}; there are snapshots below it")
            if place.path:
                found = f"{place.version.path}@{place.version.number}"
                raise UsageError(f"{name} is a path inside a snapshot: open {found}, and the path in it")
            return Snapshot(self.store, place.version, self._claims.claim(place.version.root, sequence))

    def close(self) -> None:
        """Close the store, if it was opened here."""
        self._claim = None
        if self._owned:
            self._claims.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Snapshot:
    """The files and tensors of one version of a snapshot; they never change."""

    def __init__(self, store: Store, version: Version, claim: Claim) -> None:
        """Use `open` or `StoreReader.snapshot`."""
        self.store = store
        self.version = version
        self._claim: Claim | None = claim
        self._owner: StoreReader | None = None
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
        """Random access to the file at `path`, for as long as this snapshot is open.

        Raises NotFoundError, UsageError when it is no regular file or the snapshot is closed.
        """
        if self._claim is None:
            raise UsageError(f"{self.name} is closed: open it again")
        entry = self.entry(path)
        if entry.type is not EntryType.FILE:
            raise UsageError(f"{path} in {self.name} is a {entry.type.name.lower()}, not a file")
        return self.store.open_file(entry)

    def open(self, path: str) -> io.BufferedReader:
        """The file at `path` as a binary file object: seekable, buffered, good after the snapshot is gone too.

        Raises NotFoundError, UsageError.
        """
        return io.BufferedReader(RawFile(self.reader(path), path, self._claim), limits.BLOCK_BYTES)

    def read(self, path: str) -> bytes:
        """All bytes of the file at `path`. Raises NotFoundError, UsageError, CorruptError."""
        reader = self.reader(path)
        return read_bytes(reader, 0, reader.size)

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
        """Let go of what is forgotten; close the store, if `moonclipfs.open` opened it for this snapshot."""
        self._claim = None
        if self._owner is not None:
            self._owner.close()

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
    """Read one tensor of a file into a new C-contiguous array; see `Snapshot.tensor` for the types.

    Raises CorruptError when shape, strides and length contradict each other or the file, LimitError for a tensor whose
    elements overlap and take too much memory side by side.
    """
    if not 0 <= tensor.offset <= tensor.offset + tensor.length <= reader.size:
        raise CorruptError(f"tensor {tensor.name}: its bytes lie outside a file of {reader.size}")
    strides = _checked_strides(tensor) if tensor.dtype in _NUMPY else ()
    raw = np.empty(tensor.length, np.uint8)
    read_whole(reader, tensor.offset, raw.data)
    if tensor.dtype not in _NUMPY:
        return raw
    values = raw.view(_NUMPY[tensor.dtype])
    if tensor.strides is None or 0 in tensor.shape:
        return values.reshape(tensor.shape)
    in_bytes = tuple(stride * values.itemsize for stride in strides)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(values, tensor.shape, in_bytes, writeable=False))


def _checked_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides by which NumPy finds every element inside the tensor's bytes; see `read_tensor` for what is raised.

    A dimension of one element may have any stride, and gets 0. All sums are of Python's unbounded integers.
    """
    size = np.dtype(_NUMPY[tensor.dtype]).itemsize
    if min(tensor.shape, default=1) < 0 or tensor.length % size:
        raise CorruptError(f"tensor {tensor.name}: {tensor.length} bytes cannot have the shape {tensor.shape}")
    if math.prod(max(1, count) for count in tensor.shape) * size > max(tensor.length, limits.TENSOR_SPREAD_BYTES):
        raise LimitError(
            f"tensor {tensor.name}: the shape {tensor.shape} takes too much memory for {tensor.length} bytes"
        )
    if tensor.strides is None or 0 in tensor.shape:
        if math.prod(tensor.shape) * size != tensor.length:
            raise CorruptError(f"tensor {tensor.name}: {tensor.length} bytes cannot have the shape {tensor.shape}")
        return ()
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.strides, strict=True))
    strides = [stride if count > 1 else 0 for count, stride in zip(tensor.shape, tensor.strides, strict=True)]
    if min(strides, default=0) < 0 or last >= tensor.length // size:
        raise CorruptError(f"tensor {tensor.name}: its strides lead outside its {tensor.length} bytes")
    return tuple(strides)


def read_bytes(reader: FileReader, offset: int, length: int) -> bytes:
    """Exactly `length` bytes from `offset` of a file. Raises CorruptError."""
    whole = io.BytesIO(bytes(length))  # unlike a bytearray it gives its bytes away without a copy
    with whole.getbuffer() as out:
        read_whole(reader, offset, out)
    return whole.getvalue()


def read_whole(reader: FileReader, offset: int, out: memoryview) -> None:
    """Fill `out` from `offset` of a file; what is long is decoded by all cores, past the cache. Raises CorruptError."""
    step = limits.PREFETCH_BYTES
    if len(out) < limits.BLOCK_BYTES:
        reader.read_into(offset, out)  # small tensors share their blocks with others: the cache serves those
    elif len(out) <= step:
        reader.stream_into(offset, out)
    else:
        with ThreadPoolExecutor(usable_cores(), "read") as pool:
            parts = range(0, len(out), step)
            for _ in pool.map(lambda at: reader.stream_into(offset + at, out[at : at + step]), parts):
                pass


class RawFile(io.RawIOBase):
    """An unbuffered binary file object over a `FileReader`, with a position of its own. Raises OSError only."""

    def __init__(self, reader: FileReader, path: str, claim: Claim | None = None) -> None:
        """`claim` is kept until the file is closed; `path` is for messages."""
        self._reader = reader
        self._path = path
        self._claim = claim
        self._position = 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the position on; fewer bytes at the end of the file."""
        self._check_open()
        out = memoryview(buffer).cast("B")[: max(0, self._reader.size - self._position)]
        with as_os_errors(self._path):
            if len(out) < limits.PREFETCH_STEP_BYTES:  # the next read may begin in the same block: through the cache
                self._reader.read_into(self._position, out)
            else:
                read_whole(self._reader, self._position, out)
        self._position += len(out)
        return len(out)

    def readall(self) -> bytes:
        """All bytes from the position on."""
        self._check_open()
        with as_os_errors(self._path):
            data = read_bytes(self._reader, self._position, max(0, self._reader.size - self._position))
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position; past the end is allowed, and reads nothing. Raises OSError before the beginning."""
        self._check_open()
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._reader.size}.get(whence)
        if start is None or start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """The position in bytes."""
        return self._position

    def close(self) -> None:
        """Close the file; what it claimed may be reclaimed."""
        self._claim = None
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
