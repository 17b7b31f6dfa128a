"""A moonclip store becomes snapshots of a checkpoint manager: all of them, bit for bit, with step, metadata and pins.

A snapshot is `NAME/step-000500`, as the manager saves it: what several ranks have alike stands there once, the rest in
`rank-00000/`, ... for each. Snapshots of one step become versions of one name. Every tensor is checked against its hash
before its snapshot is bound; a snapshot with any that does not pass is left out, and told. What is there already, by
its id, is not imported again, so an import that was interrupted is continued by the same call.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moonclipfs import limits
from moonclipfs.compat.moonclip_format import Head, MoonclipStore
from moonclipfs.compat.moonclip_state import Known, Placed, StatePart, take_apart
from moonclipfs.compat.moonclip_tensors import DTYPES, Tensors
from moonclipfs.errors import CorruptError, NotFoundError, UsageError
from moonclipfs.formats.safetensors import make_header
from moonclipfs.store import pins
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.paths import check_path
from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.types import Attributes, Buffer, BytesSource, Entry, EntryType, Source, Version

KEY = "moonclip"
"""Of the metadata of an imported version: the `id` that the snapshot had, `created_at`, `world_size`."""
DEFAULT_NAME = "run"
_STATE = {"format": "moonclipfs-state", "version": 1}
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_METRIC = re.compile(r"-?\d+\.\d{6}")


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of one snapshot: `version` is None when it is left out, for `reason`; `there` says that it was
    imported before."""

    id: str
    step: int
    version: Version | None
    reason: str = ""
    there: bool = False
    pinned: bool = False


@dataclass(slots=True)
class ImportReport:
    """The snapshots of the store, in the order in which moonclip wrote them."""

    snapshots: list[Imported] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Why snapshots were left out, but for those that moonclip itself never finished."""
        return [f"{one.id} (step {one.step}): {one.reason}" for one in self.snapshots if one.reason]


def import_store(
    source: Path,
    store: Store,
    *,
    name: str = DEFAULT_NAME,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ImportReport:
    """Import all finished snapshots of the moonclip store at `source` as `name/step-...`; `progress` is told snapshots.

    Raises NotFoundError, FormatVersionError for what is no such store, CorruptError when nothing of it can be read,
    UsageError for a name that no snapshot can have, and what `Ingest.publish` raises.
    """
    check_path(name)
    work = _Import(MoonclipStore(source), store, name)
    heads = [head for head in work.source.heads if head.finalized]
    report = ImportReport()
    for done, head in enumerate(heads):
        progress(done, len(heads))
        report.snapshots.append(work.take(head))
    progress(len(heads), len(heads))
    return report


class _Import:
    """One import on its way."""

    def __init__(self, source: MoonclipStore, store: Store, name: str) -> None:
        self.source = source
        self._store = store
        self._name = name
        self._tensors = Tensors(source)
        self._pinned = {head.id for head in source.pinned()}
        self._goals = _goals(source.heads)
        self._before: Version | None = None
        self._there = {
            str(about["id"]): version
            for version in store.names().all_versions()
            if version.path.rpartition("/")[0] == name and isinstance(about := version.metadata.get(KEY), Mapping)
        }

    def take(self, head: Head) -> Imported:
        """Import one snapshot, and pin it if it is pinned."""
        version = self._there.get(head.id)
        there = version is not None
        if version is None:
            try:
                version = self._publish(head)
            except (CorruptError, NotFoundError, UsageError) as error:
                return Imported(head.id, head.step, None, str(error))
        self._before = version
        pinned = head.id in self._pinned
        if pinned:
            pins.pin(self._store, [(version.path, version.number)])
        return Imported(head.id, head.step, version, there=there, pinned=pinned)

    def _publish(self, head: Head) -> Version:
        written = _time_ns(head.created_at)
        files = self._files(head)
        directory = Attributes(0o755, os.getuid(), os.getgid(), written, written)
        with self._store.ingest() as ingest:
            root = _Tree(self._store, ingest, self._before, written).put(files)
            metadata: dict[str, object] = {
                "manager": {"imported": KEY},
                "user": dict(head.metadata),
                "step": head.step,
                "attributes": root_metadata(directory),
                "files": len(files),
                "bytes": sum(one.size for one in files.values()),
                KEY: {"id": head.id, "created_at": head.created_at, "world_size": head.world_size},
            }
            if head.world_size > 1:
                metadata["world_size"] = head.world_size
            if (metric := _metric(head, self._goals)) is not None:
                metadata["metric"] = metric
            return ingest.publish(f"{self._name}/step-{head.step:06}", root, metadata)

    def _files(self, head: Head) -> dict[str, Source]:
        """The files of a snapshot by their paths: what all ranks have alike, and the rest in a directory of each."""
        ranks = [self._rank(head, number) for number in self.source.ranks(head)]
        first = ranks[0]
        common = [name for name in first.parts if all(one.is_same(first, name) for one in ranks[1:])]
        state: dict[str, object] = {**_STATE, "step": head.step, "metadata": dict(head.metadata), "shared": []}
        files: dict[str, Source] = {}
        if len(ranks) > 1:
            ranked = sorted({name for one in ranks for name in one.parts} - set(common))
            state |= {"world_size": len(ranks), "ranked": ranked}
            for one in ranks:
                own = [name for name in one.parts if name not in common]
                below = one.files(own, {**_STATE, "step": head.step, "world_size": len(ranks)}, head.metadata)
                files |= {f"rank-{one.number:05}/{name}": source for name, source in below.items() if own}
        return files | first.files(common, state, head.metadata)

    def _rank(self, head: Head, number: int) -> _Rank:
        entries = self.source.ranks(head)[number].tensors
        known = {
            name: Known(dtype := self._tensors.dtype(entry), entry.shape, _length(entry.raw_size, entry.dtype, dtype))
            for name, entry in entries.items()
        }
        load = partial(self._tensors.load, head, number)
        marks = {name: (entry.hash, entry.dtype, entry.scale) for name, entry in entries.items()}
        return _Rank(number, take_apart(known, load), load, marks)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank saved: its parts, and what tells the bytes of each tensor without reading them."""

    number: int
    parts: Mapping[str, StatePart]
    load: Callable[[str], bytes]
    marks: Mapping[str, object]

    def is_same(self, other: _Rank, name: str) -> bool:
        """Whether both have a part alike: its structure, and every bit of its tensors."""
        if name not in self.parts or name not in other.parts:
            return False
        return self._bits(name) == other._bits(name)

    def _bits(self, name: str) -> object:
        part = self.parts[name]
        bits = {
            tensor: (one.dtype, one.shape, self.marks[one.key] if one.key else one.data)
            for tensor, one in part.tensors.items()
        }
        return part.tree, part.parameters, bits

    def files(self, names: Sequence[str], state: Mapping[str, object], told: Mapping[str, str]) -> dict[str, Source]:
        """The files of some parts, and a `state.json` of these."""
        files: dict[str, Source] = {}
        described = {}
        for name in names:
            mine = _part_files(name, self.parts[name], self.load)
            described[name] = _described(self.parts[name], [one for one in mine if not one.endswith(".json")])
            files |= mine
        whole = {**state, "metadata": dict(told), "parts": described, "shared": []}
        files["state.json"] = BytesSource(json.dumps(whole, separators=(",", ":"), allow_nan=False).encode())
        return files


class _Tree:
    """The files of one snapshot put into the store, each against that of the snapshot before."""

    def __init__(self, store: Store, ingest: Ingest, before: Version | None, written: int) -> None:
        self._store = store
        self._ingest = ingest
        self._before = before
        self._attributes = Attributes(0o644, os.getuid(), os.getgid(), written, written)
        self._directory = Attributes(0o755, os.getuid(), os.getgid(), written, written)

    def put(self, files: Mapping[str, Source]) -> bytes:
        """Store files, and the directories above them; returns the id of the root."""
        entries = [self._file(path, source) for path, source in files.items() if "/" not in path]
        for name in sorted({path.partition("/")[0] for path in files if "/" in path}):
            below = [self._file(path, source) for path, source in files.items() if path.startswith(name + "/")]
            child = self._ingest.put_directory(below)
            entries.append(Entry(name.encode(), EntryType.DIRECTORY, self._directory, child=child))
        return self._ingest.put_directory(entries)

    def _file(self, path: str, source: Source) -> Entry:
        child, size, _ = self._ingest.put_file(source, self._previous(path))
        return Entry(os.fsencode(path.rpartition("/")[2]), EntryType.FILE, self._attributes, size, child)

    def _previous(self, path: str) -> FileReader | None:
        if self._before is None:
            return None
        try:
            return self._store.open_file(self._store.lookup(self._before, os.fsencode(path)))
        except (NotFoundError, CorruptError):
            return None  # only deltas are lost


class _TensorFile:
    """A safetensors file of tensors that are decoded when they are read: a `types.Source`."""

    def __init__(self, tensors: Sequence[tuple[str, Placed]], load: Callable[[str], bytes]) -> None:
        self._load = load
        self._tensors = [placed for _, placed in sorted(tensors, key=_order)]
        self._header = make_header(
            ((name, DTYPES[one.dtype].dtype, _file_shape(one)) for name, one in sorted(tensors, key=_order)),
            {"format": "pt"},
        )
        self._starts = []
        at = len(self._header)
        for placed in self._tensors:
            self._starts.append(at)
            at += _bytes_of(placed)
        self.size = at

    def read(self, offset: int, length: int) -> Buffer:
        """Exactly `length` bytes at `offset`. Raises CorruptError for a tensor that is damaged."""
        end = offset + length
        parts: list[Buffer] = [self._header[offset:end]] if offset < len(self._header) else []
        at = max(0, bisect_right(self._starts, offset) - 1)
        while at < len(self._tensors) and self._starts[at] < end:
            start, placed = self._starts[at], self._tensors[at]
            low, high = max(offset, start), min(end, start + _bytes_of(placed))
            if low < high:
                data = self._load(placed.key) if placed.key else placed.data
                if len(data) != _bytes_of(placed):
                    raise CorruptError(f"{placed.key} has {len(data)} bytes, not {_bytes_of(placed)}")
                parts.append(memoryview(data)[low - start : high - start])
            at += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _part_files(name: str, part: StatePart, load: Callable[[str], bytes]) -> dict[str, Source]:
    """The tensor files of a part, as the manager calls them; with an index where there are several."""
    tensors = sorted(part.tensors.items())
    groups: list[list[tuple[str, Placed]]] = [[]]
    size = 0
    for one in tensors:
        if groups[-1] and size + _bytes_of(one[1]) > limits.SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += _bytes_of(one[1])
    if len(groups) == 1:
        return {f"{name}.safetensors": _TensorFile(groups[0], load)} if tensors else {}
    names = [f"{name}-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    files: dict[str, Source] = {file: _TensorFile(group, load) for file, group in zip(names, groups, strict=True)}
    where = {tensor: file for file, group in zip(names, groups, strict=True) for tensor, _ in group}
    total = sum(_bytes_of(placed) for _, placed in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    files[f"{name}.safetensors.index.json"] = BytesSource(json.dumps(index, indent=2).encode())
    return files


def _described(part: StatePart, files: list[str]) -> dict[str, object]:
    dtypes = {name: placed.dtype for name, placed in part.tensors.items() if not DTYPES[placed.dtype].exact}
    return {"files": files, "parameters": part.parameters, "dtypes": dtypes, "tree": part.tree}


def _order(one: tuple[str, Placed]) -> tuple[int, str]:
    return -DTYPES[one[1].dtype].dtype.bits, one[0]


def _file_shape(placed: Placed) -> tuple[int, ...]:
    parts = DTYPES[placed.dtype].parts
    return placed.shape if parts == 1 else (*placed.shape, parts)


def _bytes_of(placed: Placed) -> int:
    carried = DTYPES[placed.dtype]
    count = carried.dtype.bits // 8 * carried.parts
    for one in placed.shape:
        count *= one
    return count


def _length(raw_size: int, stored: str, original: str) -> int:
    """The bytes of a tensor after a cast is undone; those of an unknown dtype are told when it is used."""
    if stored == original or stored not in DTYPES or original not in DTYPES:
        return raw_size
    return raw_size // (DTYPES[stored].dtype.bits // 8) * (DTYPES[original].dtype.bits // 8)


def _time_ns(text: str) -> int:
    """RFC 3339 as nanoseconds since 1970; 0 for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        return 0
    try:
        whole = datetime.datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
    except ValueError:
        return 0
    return min(int(whole.timestamp()) * 10**9 + int((match[2] or "").ljust(9, "0")), limits.LAST_TIME_NS)


def _goals(heads: Sequence[Head]) -> dict[str, str]:
    """For each metric of the best snapshots whether it is to be small or large: each of them was better than before."""
    values: dict[str, list[float]] = {}
    for head in heads:
        for name, value in _metrics(head):
            values.setdefault(name, []).append(value)
    return {name: "max" if found[-1] > found[0] else "min" for name, found in values.items()}


def _metrics(head: Head) -> list[tuple[str, float]]:
    if head.metadata.get("best") != "true":
        return []
    return [(name, float(text)) for name, text in head.metadata.items() if _METRIC.fullmatch(text)]


def _metric(head: Head, goals: Mapping[str, str]) -> dict[str, object] | None:
    """The metric of a best snapshot, if there is no doubt which of its metadata that is."""
    found = _metrics(head)
    if len(found) != 1:
        return None
    name, value = found[0]
    return {"name": name, "value": value, "goal": goals[name]}
