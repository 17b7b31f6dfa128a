"""Writing objects into packs, and reading them by their location."""

from __future__ import annotations

import re
import secrets
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.codec.sketch import NO_SKETCH
from moonclipfs.errors import CorruptError, MissingObjectError, NotFoundError
from moonclipfs.store import packfile
from moonclipfs.store.backend import Backend, Upload, Value
from moonclipfs.types import NO_ID, Buffer, DType, Kind, ObjectId

_ENTRY = struct.Struct("<32s32s32sQQQQQBBBBI")
"""`packfile.ENTRY`, one at a time."""
_KEY = re.compile(r"packs/([0-9a-f]{32})\.pack")
_TAIL_BYTES = 64 * limits.KIB
"""Read at once from the end of a pack: most footers are shorter."""
_WHOLE_BYTES = 64 * limits.KIB
"""Up to this length, a record header and the bytes behind it come in one read."""
_SCAN_BYTES = 1 * limits.MIB

PLAIN = 255
"""The generation of an object that is stored as it is, for now: nothing is to be stored against it before it is stored
anew. See `tighten.py`.
"""


def pack_key(pack: str) -> str:
    """Key of the pack with this id (32 hexadecimal digits)."""
    return f"packs/{pack}.pack"


def pack_of_key(key: str) -> str | None:
    """Id of the pack that a key belongs to, or None for anything else in the directory of packs."""
    found = _KEY.fullmatch(key)
    return found[1] if found else None


def require_packs(backend: Backend, packs: Iterable[str]) -> None:
    """Raise MissingObjectError, which names it, when one of `packs` is not there: each is opened, none is listed."""
    for pack in packs:
        try:
            backend.size(pack_key(pack))
        except NotFoundError as error:
            raise MissingObjectError(
                f"pack {backend.path(pack_key(pack))} is gone, and with it what was stored before: try again to store "
                "that anew, and run `moonclipfs verify`"
            ) from error


@dataclass(frozen=True, slots=True)
class Location:
    """Where one object is stored, and how. Lengths and `offset` (of the encoded bytes, in the pack) are in bytes.

    `base` is `NO_ID` for a full encoding, `label` 0 and `sketch` zeros where there is none.
    """

    object_id: ObjectId
    pack: str
    offset: int
    encoded_length: int
    raw_length: int
    kind: Kind
    dtype: DType
    depth: int = 0
    base: ObjectId = NO_ID
    base_start: int = 0
    label: int = 0
    sketch: bytes = NO_SKETCH
    generation: int = 0

    @classmethod
    def from_entry(cls, pack: str, entry: Buffer) -> Location:
        """The location that the 144 bytes of a checked ENTRY tell. Raises CorruptError for an unknown kind or type."""
        (object_id, base, sketch, label, offset, encoded_length, raw_length, base_start,
         kind, dtype, depth, generation, _) = _ENTRY.unpack(entry)  # fmt: skip
        try:
            return cls(
                object_id, pack, offset, encoded_length, raw_length, Kind(kind), DType(dtype), depth,
                base, base_start, label, sketch, generation,
            )  # fmt: skip
        except ValueError as error:
            raise CorruptError(f"pack {pack}: {error}") from error

    def to_entry(self, check: int) -> bytes:
        """The bytes of the ENTRY for this location; `check` is `packfile.check_of` its encoded bytes."""
        return _ENTRY.pack(
            self.object_id, self.base, self.sketch, self.label, self.offset, self.encoded_length, self.raw_length,
            self.base_start, self.kind, self.dtype, self.depth, self.generation, check,
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether it is stored as it is only until there is time to encode it."""
        return self.generation == PLAIN

    def __str__(self) -> str:
        return f"object {self.object_id.hex()} in pack {self.pack} at byte {self.offset}"


class _OpenPack:
    """A pack being written: its upload and the entries so far."""

    def __init__(self, backend: Backend) -> None:
        self.name = secrets.token_hex(16)
        self.table = bytearray()
        self.upload: Upload = backend.upload()
        try:
            self.upload.write(packfile.pack_header())
        except BaseException:
            self.upload.abort()
            raise

    @property
    def full(self) -> bool:
        """Whether it has the size at which packs are closed."""
        return self.upload.offset + len(self.table) >= limits.PACK_BYTES

    def publish(self) -> NDArray[np.void]:
        """Write the footer, make the pack durable and visible, and return its entries."""
        entries = np.frombuffer(bytes(self.table), packfile.ENTRY)
        self.upload.write(packfile.footer(entries, self.upload.offset))
        self.upload.publish(pack_key(self.name))
        return entries


class PackWriter:
    """Writes objects into packs, closing each at `limits.PACK_BYTES`. Thread-safe.

    What was added is durable, and visible to others, after `flush`. When anything fails, every later call raises
    the same error: call `abort`, which leaves only packs that nothing refers to.
    """

    def __init__(self, backend: Backend, on_publish: Callable[[str, NDArray[np.void]], None]) -> None:
        """`on_publish(pack, entries)` is called after each pack is published, on the thread that filled it."""
        self._backend = backend
        self._on_publish = on_publish
        self._changed = threading.Condition()
        self._current: _OpenPack | None = None
        self._pending: dict[str, _OpenPack] = {}
        self._publishing = 0
        self._published: list[str] = []
        self._failure: BaseException | None = None

    def add(
        self,
        encoded: Buffer,
        *,
        object_id: ObjectId,
        kind: Kind,
        raw_length: int,
        dtype: DType = DType.BYTES,
        depth: int = 0,
        base: ObjectId = NO_ID,
        base_start: int = 0,
        label: int = 0,
        sketch: bytes = NO_SKETCH,
        generation: int = 0,
    ) -> Location:
        """Append one object and return where it is going to be. Raises NoSpaceError or BackendError."""
        view = memoryview(encoded).cast("B")
        check = packfile.check_of(view)
        with self._changed:
            self._raise_failure()
            try:
                pack = self._current or self._begin()
                offset = pack.upload.offset + packfile.RECORD_BYTES
                location = Location(
                    object_id, pack.name, offset, len(view), raw_length, kind, dtype,
                    depth, base, base_start, label, sketch, generation,
                )  # fmt: skip
                entry = location.to_entry(check)
                header = packfile.record_header(np.frombuffer(entry, packfile.ENTRY))
                if len(view) <= _WHOLE_BYTES:
                    pack.upload.write(header + view)
                else:
                    pack.upload.write(header)
                    pack.upload.write(view)
                pack.table += entry
            except BaseException as error:
                self._fail(error)
                raise
            closing = self._take() if pack.full else None
        if closing is not None:
            self._publish(closing)
        return location

    def read(self, location: Location, offset: int, length: int) -> bytes | None:
        """Return a range of the encoded bytes of an object whose pack is not published yet; None when it is."""
        with self._changed:
            pack = self._pending.get(location.pack)
        return None if pack is None else pack.upload.read(location.offset + offset, length)

    def flush(self) -> list[str]:
        """Publish what was added, and return the packs published so far. Raises NoSpaceError or BackendError."""
        with self._changed:
            self._raise_failure()
            closing = self._take()
        if closing is not None:
            self._publish(closing)
        with self._changed:
            self._changed.wait_for(lambda: not self._publishing)
            self._raise_failure()
            return list(self._published)

    def abort(self) -> None:
        """Throw away what is not published; packs that are stay, for gc to collect. Harmless after `flush`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._publishing)
            self._current = None
            for pack in self._pending.values():
                pack.upload.abort()
            self._pending.clear()

    def _begin(self) -> _OpenPack:
        self._current = _OpenPack(self._backend)
        self._pending[self._current.name] = self._current
        return self._current

    def _take(self) -> _OpenPack | None:
        """Stop writing to the current pack. The caller publishes it, outside the lock: others go on meanwhile."""
        pack, self._current = self._current, None
        if pack is not None:
            self._publishing += 1
        return pack

    def _publish(self, pack: _OpenPack) -> None:
        try:
            self._on_publish(pack.name, pack.publish())
        except BaseException as error:
            with self._changed:
                self._publishing -= 1
                self._fail(error)
            raise
        with self._changed:
            self._publishing -= 1
            self._published.append(pack.name)
            del self._pending[pack.name]
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class PackReader:
    """Reads encoded bytes by location, with a bounded number of packs open. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Value] = OrderedDict()

    def read(self, location: Location, offset: int, length: int) -> bytes:
        """Return `length` encoded bytes of an object from `offset` on, which must lie in it (else ValueError).

        A read from offset 0 also checks that the record there is the one that `location` tells of, and a read of
        the whole that its bytes are those that were written. Raises MissingObjectError when the pack is gone,
        CorruptError for damage.
        """
        if not 0 <= offset <= offset + length <= location.encoded_length:
            raise ValueError(f"{location}: {length} bytes at {offset} of {location.encoded_length} are wanted")
        value = self._value(location.pack, str(location))
        try:
            if offset:
                return _exactly(value, location.offset + offset, length, location)
            return _whole_or_start(value, location, length)
        except NotFoundError as error:
            self.forget([location.pack])
            raise MissingObjectError(f"{location}: {error}") from error

    def require(self, packs: Iterable[str]) -> None:
        """See `require_packs`."""
        require_packs(self._backend, packs)

    def entries(self, pack: str) -> NDArray[np.void]:
        """The checked footer of a pack. Raises MissingObjectError when the pack is gone, CorruptError for damage."""
        value = self._value(pack, f"pack {pack}")
        try:
            size = value.size()
            tail = value.read(max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
            offset, count, digest = packfile.parse_trailer(tail[-packfile.TRAILER.size :], size)
            length = count * packfile.ENTRY.itemsize
            if length + packfile.TRAILER.size > len(tail):
                table = value.read(offset, length)
            else:
                table = tail[len(tail) - packfile.TRAILER.size - length : len(tail) - packfile.TRAILER.size]
            return packfile.parse_footer(table, count, digest, offset)
        except CorruptError as error:
            raise CorruptError(f"pack {pack}: {error}") from error

    def scan(self, pack: str) -> NDArray[np.void]:
        """The entries of all whole records, found by their headers alone: for a pack whose footer is damaged.

        Past a damaged header it looks for the next one. Raises MissingObjectError when the pack is gone.
        """
        value = self._value(pack, f"pack {pack}")
        size, at = value.size(), packfile.HEADER.size
        found = []
        while at + packfile.RECORD_BYTES <= size:
            entry = _record_at(value, at, size)
            if entry is None:
                at = _next_magic(value, at + 1, size)
            else:
                found.append(entry)
                at = int(entry["offset"][0]) + int(entry["encoded_length"][0])
        return np.concatenate(found) if found else np.zeros(0, packfile.ENTRY)

    def forget(self, packs: Iterable[str]) -> None:
        """Let go of packs that were deleted, so that their space is freed."""
        with self._lock:
            for pack in packs:
                self._open.pop(pack, None)

    def forget_deleted(self) -> None:
        """Let go of packs that anybody deleted: one system call for each open pack."""
        with self._lock:
            held = list(self._open.items())
        self.forget([pack for pack, value in held if value.deleted()])

    def close(self) -> None:
        """Let go of every pack. Reading opens them again."""
        with self._lock:
            self._open.clear()

    def _value(self, pack: str, wanted: str) -> Value:
        with self._lock:
            value = self._open.get(pack)
            if value is not None:
                self._open.move_to_end(pack)
                return value
        try:
            value = self._backend.open(pack_key(pack))
        except NotFoundError as error:
            raise MissingObjectError(f"{wanted}: {self._backend.path(pack_key(pack))} does not exist") from error
        with self._lock:
            self._open[pack] = value
            while len(self._open) > limits.OPEN_PACKS:
                self._open.popitem(last=False)
        return value


def _exactly(value: Value, offset: int, length: int, location: Location) -> bytes:
    if not 0 <= offset <= offset + length <= value.size():
        raise CorruptError(f"{location}: the pack has {value.size()} bytes, and {length} at {offset} are wanted")
    data = value.read(offset, length)
    if len(data) != length:
        raise CorruptError(f"{location}: the pack was cut off at byte {offset + len(data)}")
    return data


def _whole_or_start(value: Value, location: Location, length: int) -> bytes:
    """The first bytes of an object, after a look at its record header."""
    start = location.offset - packfile.RECORD_BYTES
    # Long bytes are read after the header was checked: their length comes from an index that may be wrong.
    more = length if length <= _WHOLE_BYTES else 0
    both = _exactly(value, start, packfile.RECORD_BYTES + more, location)
    check = _check_header(location, both[: packfile.RECORD_BYTES])
    data = both[packfile.RECORD_BYTES :] if more else _exactly(value, location.offset, length, location)
    if length == location.encoded_length and packfile.check_of(data) != check:
        raise CorruptError(f"{location}: its encoded bytes do not pass their check")
    return data


def _check_header(location: Location, header: bytes) -> int:
    """Compare a record header with a location; return the entry's `check`."""
    try:
        entry = packfile.parse_record_header(header)
    except CorruptError as error:
        raise CorruptError(f"{location}: {error}") from error
    if Location.from_entry(location.pack, entry.tobytes()) != location:
        raise CorruptError(f"{location}: the record there is another one")
    return int(entry["check"][0])


def _record_at(value: Value, at: int, size: int) -> NDArray[np.void] | None:
    """The entry of the record whose header begins at `at`, or None when none does.

    An entry names its own offset, so a pack that was stored inside an object is not taken for records.
    """
    try:
        entry = packfile.parse_record_header(value.read(at, packfile.RECORD_BYTES))
        packfile.check_entries(entry, size)
    except CorruptError:
        return None
    return entry if int(entry["offset"][0]) == at + packfile.RECORD_BYTES else None


def _next_magic(value: Value, at: int, size: int) -> int:
    while at < size:
        window = value.read(at, min(_SCAN_BYTES, size - at))
        found = window.find(packfile.RECORD_MAGIC)
        if found >= 0:
            return at + found
        # The magic may lie across two windows.
        at += max(1, len(window) - len(packfile.RECORD_MAGIC) + 1)
    return size
