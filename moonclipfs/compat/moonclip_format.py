"""The stores that moonclip writes (formats 2 and 3, packs since 0.0.3): what is in them, read without moonclip.

    ROOT/manifest.json                    the list of snapshots (format 2: all about their tensors, too)
    ROOT/pins.json                        the steps that are pinned
    ROOT/snapshots/ID/rank_0.pack         the tensors of one rank, and behind them a descriptor of these
    ROOT/snapshots/ID/ranks.json          the same descriptors once more (format 3)

A tensor is stored in full, as the exclusive or with that of the base snapshot, as being the same as there (`Skipped`),
or as being another one of its own snapshot (`Alias`). Its XXH3-128 is that of the bytes as stored, so before a cast is
undone. Where the list of snapshots is lost, the descriptors in the packs say the same.

Nothing here trusts a number of a file before it was compared with what there is; nothing is written.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from moonclipfs import limits
from moonclipfs.errors import CorruptError, FormatVersionError, NotFoundError, ParseError
from moonclipfs.formats import jsontext
from moonclipfs.store.backend import os_errors

log = logging.getLogger(__name__)

_MAGIC = b"MOONPACK"
_HEADER_BYTES = 32
_PACK_VERSION = 1
_FORMATS = (2, 3)
_RANKS = 1 << 16
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_PACK = re.compile(r"rank_(\d{1,5})\.pack")
_HASH = re.compile(r"[0-9a-f]{32}")
STORAGES = ("Full", "DeltaXor", "Skipped", "Alias")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one rank: `dtype` and `raw_size` are those of the stored bytes, `original_dtype` that before a cast
    (None: there was none), `scale` what a cast to 8 bits divided by. `offset` and `compressed_size` are in the pack.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    original_dtype: str | None
    scale: float | None
    storage: str
    alias_of: str | None
    offset: int
    compressed_size: int
    raw_size: int
    hash: str
    shuffled: bool


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank saved: the pack's path, and its tensors by name."""

    number: int
    pack: Path
    tensors: Mapping[str, TensorEntry]


@dataclass(slots=True)
class Head:
    """One snapshot of the list. `inline` are its ranks where the list has them itself."""

    id: str
    step: int
    created_at: str
    base: str | None
    metadata: Mapping[str, str]
    compressed: bool
    finalized: bool
    pinned: bool
    world_size: int
    inline: Mapping[int, object] = field(default_factory=dict)


class MoonclipStore:
    """A store of moonclip, opened for reading. `heads` are its snapshots in the order in which they were written."""

    def __init__(self, root: Path) -> None:
        """Raises NotFoundError when there is none, FormatVersionError for one that is not known, CorruptError when
        neither its list nor its packs can be read."""
        self.root = root
        if not (root / "manifest.json").exists() and not (root / "snapshots").is_dir():
            raise NotFoundError(f"no moonclip store at {root}: it has neither manifest.json nor snapshots/")
        try:
            self.heads = self._listed()
        except FormatVersionError:
            raise
        except (CorruptError, NotFoundError) as error:
            log.warning("%s: the list of snapshots is made anew from the packs", error)
            self.heads = self._found_in_packs()
        self._by_id = {head.id: head for head in self.heads}
        self._ranks: dict[str, Mapping[int, Rank]] = {}

    def head(self, snapshot: str) -> Head | None:
        """The snapshot of an id."""
        return self._by_id.get(snapshot)

    def pinned(self) -> list[Head]:
        """The pinned snapshots: of each pinned step the one that was saved last."""
        try:
            steps = _load(self.root / "pins.json", limits.MIB)
        except NotFoundError:
            return [head for head in self.heads if head.pinned]
        except CorruptError as error:
            log.warning("%s: the pins are those of the list of snapshots", error)
            return [head for head in self.heads if head.pinned]
        wanted = {step for step in steps if isinstance(step, int)} if isinstance(steps, list) else set()
        last = {head.step: head for head in self.heads if head.finalized}
        return [head for step, head in last.items() if step in wanted]

    def ranks(self, head: Head) -> Mapping[int, Rank]:
        """The ranks of a snapshot. Raises CorruptError when one cannot be read, or is not there."""
        known = self._ranks.get(head.id)
        if known is None:
            known = self._ranks[head.id] = self._read_ranks(head)
        return known

    # The list

    def _listed(self) -> list[Head]:
        path = self.root / "manifest.json"
        document = _fields(_load(path, limits.INDEX_BYTES), str(path))
        version = document.get("format_version")
        if version not in _FORMATS:
            raise FormatVersionError(f"{path}: format {version!r} of moonclip is not read, only 2 and 3")
        world_size = _number(document, "world_size", path, _RANKS)
        rows = document.get("snapshots")
        if not isinstance(rows, list) or len(rows) > limits.FOREIGN_SNAPSHOTS:
            raise CorruptError(f"{path}: no list of snapshots")
        return [_head(_fields(row, str(path)), path, world_size) for row in rows]

    def _found_in_packs(self) -> list[Head]:
        """The snapshots of which all packs are there, by the time of their making."""
        found = []
        with os_errors(f"list {self.root / 'snapshots'}"):
            names = sorted(os.listdir(self.root / "snapshots"))
        for name in names[: limits.FOREIGN_SNAPSHOTS]:
            try:
                descriptors = dict(self._descriptors(name)) if _UUID.fullmatch(name) else {}
            except CorruptError as error:
                log.warning("snapshot %s is left out: %s", name, error)
                continue
            if not descriptors:
                continue
            path = self.root / "snapshots" / name
            first = next(iter(descriptors.values()))
            size = _number(first, "world_size", path, _RANKS)
            complete = {**first, "id": first.get("snapshot_id"), "finalized": sorted(descriptors) == list(range(size))}
            head = _head(complete, path, size)
            if head.id == name:
                found.append(head)
        return sorted(found, key=lambda head: head.created_at)

    def _descriptors(self, snapshot: str) -> Iterator[tuple[int, dict[str, object]]]:
        directory = self.root / "snapshots" / snapshot
        with os_errors(f"list {directory}"):
            names = sorted(os.listdir(directory))
        for name in names:
            if match := _PACK.fullmatch(name):
                yield int(match[1]), _descriptor(directory / name)

    # Ranks

    def _read_ranks(self, head: Head) -> Mapping[int, Rank]:
        try:
            ranks = self._told_ranks(head, head.inline or self._ranks_file(head))
        except (CorruptError, NotFoundError) as error:
            log.warning("%s: what it says is taken from the packs", error)
            found = self._descriptors(head.id)
            ranks = self._told_ranks(head, {number: descriptor.get("rank") for number, descriptor in found})
        there = {number for number, rank in ranks.items() if rank.pack.exists()}
        missing = sorted(set(range(head.world_size)) - there)
        if missing:
            raise CorruptError(f"snapshot {head.id} of step {head.step} lacks rank {', '.join(map(str, missing))}")
        return ranks

    def _ranks_file(self, head: Head) -> Mapping[int, object]:
        path = self.root / "snapshots" / head.id / "ranks.json"
        document = _fields(_load(path, limits.INDEX_BYTES), str(path))
        if document.get("snapshot_id") != head.id:
            raise CorruptError(f"{path}: it is of another snapshot")
        return _rank_rows(document.get("ranks"), path)

    def _told_ranks(self, head: Head, rows: Mapping[int, object]) -> dict[int, Rank]:
        return {number: self._rank(head, number, row) for number, row in sorted(rows.items())}

    def _rank(self, head: Head, number: int, row: object) -> Rank:
        pack = self.root / "snapshots" / head.id / f"rank_{number}.pack"
        fields = _fields(row, str(pack))
        rows = fields.get("tensors")
        if fields.get("rank") != number or not isinstance(rows, list) or len(rows) > limits.TENSORS:
            raise CorruptError(f"{pack}: what is told of rank {number} is not understood")
        if fields.get("pack_file") not in (f"snapshots/{head.id}/rank_{number}.pack", None):
            raise CorruptError(f"{pack}: the tensors of rank {number} are said to be in {fields.get('pack_file')!r}")
        tensors: dict[str, TensorEntry] = {}
        for entry in (_tensor(_fields(one, str(pack)), pack) for one in rows):
            if entry.name in tensors:
                raise CorruptError(f"{pack}: two tensors are called {entry.name!r}")
            tensors[entry.name] = entry
        return Rank(number, pack, tensors)


def read_blob(pack: Path, entry: TensorEntry) -> bytes:
    """The bytes of a tensor in a pack, as compressed. Raises CorruptError, NotFoundError."""
    with _opened(pack) as file:
        size = os.fstat(file.fileno()).st_size
        if file.read(8) != _MAGIC:
            raise CorruptError(f"{pack} is no pack of moonclip 0.0.3 or newer")
        if not _HEADER_BYTES <= entry.offset <= entry.offset + entry.compressed_size <= size:
            raise CorruptError(f"{pack}: {entry.name} lies outside it")
        file.seek(entry.offset)
        data = file.read(entry.compressed_size)
    if len(data) != entry.compressed_size:
        raise CorruptError(f"{pack}: {entry.name} is cut off")
    return data


def _head(fields: Mapping[str, object], path: Path, world_size: int) -> Head:
    identity, base, metadata = fields.get("id"), fields.get("base_snapshot_id"), fields.get("metadata", ())
    if not isinstance(identity, str) or not _UUID.fullmatch(identity):
        raise CorruptError(f"{path}: {identity!r} is no id of a snapshot")
    if base is not None and (not isinstance(base, str) or not _UUID.fullmatch(base)):
        raise CorruptError(f"{path}: {base!r} is no id of a base")
    told = {key: str(value) for key, value in _fields(metadata, str(path)).items()}
    inline = fields.get("ranks")
    return Head(
        identity,
        _number(fields, "step", path, (1 << 63) - 1),
        str(fields.get("created_at", "")),
        base,
        told,
        fields.get("compression") != "None",
        fields.get("finalized") is True,
        fields.get("pinned") is True,
        world_size,
        {} if inline is None else _rank_rows(inline, path),
    )


def _rank_rows(value: object, path: Path) -> dict[int, object]:
    rows = _fields(value, str(path))
    if not all(key.isascii() and key.isdecimal() and len(key) <= 5 for key in rows):
        raise CorruptError(f"{path}: its ranks are not numbers")
    return {int(key): row for key, row in rows.items()}


def _tensor(fields: Mapping[str, object], pack: Path) -> TensorEntry:
    name, storage = fields.get("name"), fields.get("storage")
    digest = fields.get("hash_raw", fields.get("sha256_raw"))
    shape, scale = fields.get("shape"), fields.get("quant_scale")
    if not isinstance(name, str) or len(name.encode("utf-8", "surrogatepass")) > limits.TENSOR_NAME_BYTES:
        raise CorruptError(f"{pack}: a tensor without a name, or with one that is too long")
    if storage not in STORAGES or not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise CorruptError(f"{pack}: how {name} is stored is not understood")
    if not isinstance(shape, list) or len(shape) > limits.DIMENSIONS:
        raise CorruptError(f"{pack}: {name} has no shape")
    if any(type(one) is not int or not 0 <= one < 1 << 48 for one in shape):
        raise CorruptError(f"{pack}: {name} has the shape {shape}")
    if scale is not None and not isinstance(scale, int | float):
        raise CorruptError(f"{pack}: {name} has the scale {scale!r}")
    return TensorEntry(
        name,
        tuple(shape),
        _word(fields, "dtype", pack) or "",
        _word(fields, "original_dtype", pack),
        None if scale is None else float(scale),
        str(storage),
        _word(fields, "alias_of", pack),
        _number(fields, "offset", pack, 1 << 62, 0),
        _number(fields, "compressed_size", pack, 1 << 62),
        _number(fields, "raw_size", pack, limits.FOREIGN_TENSOR_BYTES),
        digest,
        fields.get("shuffled") is True,
    )


def _word(fields: Mapping[str, object], key: str, path: Path) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise CorruptError(f"{path}: {key} is {value!r}")
    return value


def _number(fields: Mapping[str, object], key: str, path: Path, most: int, default: int | None = None) -> int:
    value = fields.get(key, default)
    if type(value) is not int or not 0 <= value <= most:
        raise CorruptError(f"{path}: {key} is {value!r}")
    return value


def _descriptor(pack: Path) -> dict[str, object]:
    """What a pack says of its snapshot and its tensors. Raises CorruptError."""
    with _opened(pack) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEADER_BYTES)
        version = int.from_bytes(head[8:12], "little")
        offset, length = int.from_bytes(head[16:24], "little"), int.from_bytes(head[24:32], "little")
        if head[:8] != _MAGIC or version != _PACK_VERSION:
            raise CorruptError(f"{pack} is no pack of moonclip 0.0.3 or newer")
        if not _HEADER_BYTES <= offset <= offset + length <= size or length > limits.INDEX_BYTES:
            raise CorruptError(f"{pack}: its descriptor lies outside it")
        file.seek(offset)
        return _fields(_json(file.read(length), str(pack)), str(pack))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, not what a link leads to. Raises NotFoundError, CorruptError, PermissionDeniedError."""
    with os_errors(f"read {path}"):
        if path.is_symlink():
            raise CorruptError(f"{path} is a symbolic link")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CorruptError(f"{path} is no regular file")
            yield file


def _fields(value: object, where: str) -> dict[str, object]:
    try:
        return jsontext.fields(value, where)
    except ParseError as error:
        raise CorruptError(f"{where}: {error}") from error


def _json(data: bytes, where: str) -> object:
    try:
        return jsontext.load(data.rstrip(b"\0"))
    except ParseError as error:
        raise CorruptError(f"{where}: {error}") from error


def _load(path: Path, most: int) -> object:
    """The JSON of a file, which moonclip fills up with zeros."""
    with _opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CorruptError(f"{path}: longer than {most} bytes")
    return _json(data, str(path))
