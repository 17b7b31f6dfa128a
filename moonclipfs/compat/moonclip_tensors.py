"""The bytes of tensors in a moonclip store: decompressed, taken from their base, checked, and cast back."""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs._codec import cast
from moonclipfs.compat.moonclip_format import Head, MoonclipStore, TensorEntry, read_blob
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.store.cache import BoundedCache
from moonclipfs.store.values import element_codes, to_numbers
from moonclipfs.types import DType

_HOPS = 8
"""Aliases and bases behind one tensor at most."""
_STEP = 4 * limits.MIB


@dataclass(frozen=True, slots=True)
class Carried:
    """How a dtype of torch lies in a safetensors file: as elements of `dtype`, `parts` of them for each of its own.
    Where `parts` is above 1 the shape has one dimension more. `exact`: the file's word tells the dtype."""

    dtype: DType
    parts: int = 1
    exact: bool = True


DTYPES = {
    "float64": Carried(DType.F64), "float32": Carried(DType.F32), "float16": Carried(DType.F16),
    "bfloat16": Carried(DType.BF16), "int64": Carried(DType.I64), "int32": Carried(DType.I32),
    "int16": Carried(DType.I16), "int8": Carried(DType.I8), "uint64": Carried(DType.U64),
    "uint32": Carried(DType.U32), "uint16": Carried(DType.U16), "uint8": Carried(DType.U8),
    "bool": Carried(DType.BOOL), "float8_e4m3fn": Carried(DType.F8_E4M3), "float8_e5m2": Carried(DType.F8_E5M2),
    "float8_e4m3fnuz": Carried(DType.F8_E4M3FNUZ), "float8_e5m2fnuz": Carried(DType.F8_E5M2FNUZ),
    "float8_e8m0fnu": Carried(DType.U8, 1, False), "float4_e2m1fn_x2": Carried(DType.U8, 1, False),
    "complex64": Carried(DType.C64), "complex128": Carried(DType.F64, 2, False),
    "complex32": Carried(DType.F16, 2, False),
}  # fmt: skip
"""By torch's name."""
_FLOATS = {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


def width_of(dtype: str, where: str) -> int:
    """The bytes of one element of a dtype. Raises CorruptError for one that is not known."""
    found = DTYPES.get(dtype)
    if found is None:
        raise CorruptError(f"{where} has the dtype {dtype!r}, which is not known")
    return found.dtype.bits // 8 * found.parts


_Key = tuple[str, int, str]


class Tensors:
    """Decodes the tensors of a store. Thread-safe, one at a time; what was decoded last is kept for whoever reads on,
    and for those stored against it."""

    def __init__(self, store: MoonclipStore) -> None:
        """Raises UsageError where the libraries that it needs are not installed."""
        try:
            import xxhash
            import zstandard
        except ImportError as error:
            raise UsageError("reading a moonclip store needs pip install 'moonclipfs[moonclip]'") from error
        self._store = store
        self._hash = xxhash.xxh3_128_hexdigest
        self._zstd: Any = zstandard
        self._cache: BoundedCache[_Key, bytes] = BoundedCache(limits.FOREIGN_CACHE_BYTES)
        self._cast: tuple[_Key, bytes] | None = None
        """The last tensor of which a cast was undone."""
        self._last: tuple[_Key, bytes] | None = None
        """The last one of all: one that is too large for the cache is read in many pieces, too."""
        self._lock = threading.Lock()

    def dtype(self, entry: TensorEntry) -> str:
        """The dtype that a load gives."""
        return entry.original_dtype or entry.dtype

    def load(self, head: Head, rank: int, name: str) -> bytes:
        """The bytes of a tensor as it was saved, a cast undone. Raises CorruptError, which names it."""
        where = f"{name} in snapshot {head.id} of step {head.step}"
        key = (head.id, rank, name)
        with self._lock:
            entry = self._entry(head, rank, name, where)
            if self._cast is None or self._cast[0] != key:
                stored = self._stored(head, rank, name, where, 0)
                if entry.original_dtype in (None, entry.dtype):
                    return stored
                self._cast = key, _uncast(stored, entry, where)
            return self._cast[1]

    def _entry(self, head: Head, rank: int, name: str, where: str) -> TensorEntry:
        ranks = self._store.ranks(head)
        entry = ranks[rank].tensors.get(name) if rank in ranks else None
        if entry is None:
            raise CorruptError(f"{where} is not there")
        return entry

    def _stored(self, head: Head, rank: int, name: str, where: str, hops: int) -> bytes:
        """The bytes before a cast is undone, checked."""
        key = (head.id, rank, name)
        known = self._last[1] if self._last is not None and self._last[0] == key else self._cache.get(key)
        if known is not None:
            return known
        if hops > _HOPS:
            raise CorruptError(f"{where} has more than {_HOPS} others behind it")
        entry = self._entry(head, rank, name, where)
        if entry.storage == "Alias":
            data = self._stored(head, rank, entry.alias_of or "", where, hops + 1)
        elif entry.storage == "Skipped":
            data = self._base(head, rank, name, where, hops)
        else:
            data = self._decompressed(head, self._store.ranks(head)[rank].pack, entry, where)
            if entry.shuffled:
                data = _unshuffled(data, width_of(entry.dtype, where))
            if entry.storage == "DeltaXor":
                data = _xor(data, self._base(head, rank, name, where, hops), where)
        if len(data) != entry.raw_size or self._hash(data) != entry.hash:
            raise CorruptError(f"{where} does not pass its checksum")
        self._cache.put(key, data, len(data) + 1)
        self._last = key, data
        return data

    def _base(self, head: Head, rank: int, name: str, where: str, hops: int) -> bytes:
        base = self._store.head(head.base) if head.base else None
        if base is None:
            raise CorruptError(f"{where} is stored against snapshot {head.base}, which is not there")
        return self._stored(base, rank, name, f"{where}, through its base {base.id}", hops + 1)

    def _decompressed(self, head: Head, pack: Any, entry: TensorEntry, where: str) -> bytes:
        data = read_blob(pack, entry)
        if not head.compressed:
            return data
        out = io.BytesIO()
        try:
            reader = self._zstd.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
            while part := reader.read(min(_STEP, entry.raw_size + 1 - out.tell())):
                out.write(part)
        except self._zstd.ZstdError as error:
            raise CorruptError(f"{where} does not decompress: {error}") from error
        return out.getvalue()


def _unshuffled(data: bytes, width: int) -> bytes:
    """The bytes of elements that stand in planes, byte 0 of all first; what is left over stays at the end."""
    count = len(data) // width
    planes = np.frombuffer(data, np.uint8, count * width).reshape(width, count)
    return planes.T.tobytes() + data[count * width :]


def _xor(data: bytes, base: bytes, where: str) -> bytes:
    if len(data) != len(base):
        raise CorruptError(f"{where} and its base differ in length")
    result: NDArray[np.uint8] = np.frombuffer(data, np.uint8) ^ np.frombuffer(base, np.uint8)
    return result.tobytes()


def _uncast(data: bytes, entry: TensorEntry, where: str) -> bytes:
    """The elements in their original dtype: through fp32, as moonclip does; subnormal fp16 as what they are."""
    if entry.original_dtype is None or entry.dtype not in _FLOATS or entry.original_dtype not in _FLOATS:
        raise CorruptError(f"{where} was cast from {entry.original_dtype} to {entry.dtype}, which cannot be undone")
    width_of(entry.original_dtype, where)
    if len(data) % width_of(entry.dtype, where):
        raise CorruptError(f"{where} is no whole number of elements")
    source, target = DTYPES[entry.dtype].dtype, DTYPES[entry.original_dtype].dtype
    values = _to_fp32(data, source)
    if entry.scale is not None:
        values = values * np.float32(entry.scale)
    return _from_fp32(values, target)


def _to_fp32(data: bytes, source: DType) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        if source is DType.F32:
            return np.frombuffer(data, np.float32)
        if source is DType.BF16:
            return (np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        if source is DType.F16:
            return np.frombuffer(data, np.float16).astype(np.float32)
        if source is DType.F64:
            return np.frombuffer(data, np.float64).astype(np.float32)
        codes = element_codes(data, source)
        values: NDArray[np.float32] = to_numbers(codes, source).astype(np.float32)
        return np.copysign(values, np.where(codes & 0x80, np.float32(-1), np.float32(1)))  # a NaN has a sign, too


def _from_fp32(values: NDArray[np.float32], target: DType) -> bytes:
    with np.errstate(over="ignore", invalid="ignore"):
        if target is DType.F32:
            return values.tobytes()
        if target is DType.F64:
            return values.astype(np.float64).tobytes()
        if target is DType.F16:
            return values.astype(np.float16).tobytes()
        if target is DType.BF16:
            return _to_bf16(values.view(np.uint32)).tobytes()
        return cast(values.tobytes(), DType.F32, target)


def _to_bf16(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """fp32 rounded to nearest, ties to even; a NaN keeps its sign and what there is room for of its payload."""
    upper = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    is_nan = bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
    return np.where(is_nan, upper | np.uint32(0x40), rounded).astype(np.uint16)
