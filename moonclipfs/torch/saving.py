"""From state dicts to a snapshot: one copy while training waits, the rest in the background."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moonclipfs.errors import CorruptError, NotFoundError
from moonclipfs.store.bases import QUICK, Effort
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.kept import Kept
from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.torch.casting import Cast, CastReader, CastRules, plan
from moonclipfs.torch.dtypes import CARRIERS, carrier_of, dtype_name, memory_of
from moonclipfs.torch.parts import STATE_FILE, Part
from moonclipfs.torch.profile import Profile
from moonclipfs.torch.sharing import Key, groups, same_place
from moonclipfs.torch.staging import HostBuffers, Staged
from moonclipfs.torch.tensorfile import FileTensor, TensorFile, part_files
from moonclipfs.types import Attributes, Buffer, BytesSource, Entry, EntryType, ObjectId, Source, Version

FORMAT = "moonclipfs-state"
VERSION = 1
CAST_PARTS = ("model", "optimizer")
"""The parts whose tensors are cast: a step count or what is in `extra` is not to be rounded. Nor is any scalar."""


@dataclass(slots=True)
class Job:
    """A save of which everything is copied: `staged` are its tensors by part and name."""

    path: str
    step: int
    parts: dict[str, Part]
    staged: dict[str, dict[str, Staged]]
    shared: list[list[list[Any]]]
    extra_files: Mapping[str, bytes]
    metadata: dict[str, Any]
    """What the log record is to say."""
    rules: CastRules
    profile: Profile
    after: Published | None = None
    """The save whose bytes are those of tensors that are `unchanged`."""
    effort: Effort = QUICK

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(one.bytes.numel() for part in self.staged.values() for one in part.values())


@dataclass(frozen=True, slots=True)
class Published:
    """A save that became a version: the recipe of each of its tensor files. `stored` are the bytes that it added."""

    version: Version
    stored: int = 0
    recipes: dict[str, ObjectId] = field(default_factory=dict)


def capture(
    parts: Mapping[str, Part], buffers: HostBuffers, pool: Executor, threads: int
) -> tuple[dict[str, dict[str, Staged]], list[list[list[Any]]]]:
    """Copy the tensors of all parts: training may go on after this. Tensors in the same place are copied once.

    Raises UsageError for a tensor that cannot be stored, before anything is copied.
    """
    tensors: dict[Key, torch.Tensor] = {}
    for name, part in parts.items():
        for tensor_name, tensor in part.tensors.items():
            carrier_of(tensor, f"{name}: {tensor_name}")
            tensors[name, tensor_name] = tensor
    first: dict[tuple[object, ...], Key] = {}
    place_of: dict[Key, Key] = {}
    for key, tensor in tensors.items():
        place_of[key] = first.setdefault(same_place(tensor), key) if tensor.numel() else key
    own = {"\0".join(key): tensors[key] for key, place in place_of.items() if place == key}
    taken = buffers.take(own, pool, threads)
    staged: dict[str, dict[str, Staged]] = {name: {} for name in parts}
    for (name, tensor_name), place in place_of.items():
        staged[name][tensor_name] = taken["\0".join(place)]
    return staged, groups(tensors)


def store_job(store: Store, job: Job, pool: Executor, most_bytes: int) -> Published:
    """Store and publish a save; it is durable when this returns."""
    files, plain = files_of(job, most_bytes)
    with ingesting(store, job, pool) as ingest:
        writing = Writing(store, ingest, job)
        entries = writing.put(files, plain)
        return writing.publish(entries, {entry.name.decode(): entry.child for entry in entries[: len(files)]})


@contextmanager
def ingesting(store: Store, job: Job, pool: Executor) -> Iterator[Ingest]:
    """An ingest that works on a pool, as the save is to be stored, and is measured."""
    with store.ingest() as ingest:
        ingest.use_pool(pool)
        ingest.effort = job.effort
        yield ingest
        job.profile.take_in(ingest)


def files_of(job: Job, most_bytes: int) -> tuple[dict[str, TensorFile], dict[str, bytes]]:
    """The tensor files of a save, and its other files; among these `state.json`."""
    files: dict[str, TensorFile] = {}
    plain = dict(job.extra_files)
    described = {}
    for name, part in job.parts.items():
        casts = _casts(name, job.staged[name], job.rules)
        tensors = [_file_tensor(one, staged, casts.get(one)) for one, staged in job.staged[name].items()]
        mine: dict[str, TensorFile] = {}
        if tensors:
            mine, index = part_files(name, tensors, most_bytes)
            if index:
                plain[f"{name}.safetensors.index.json"] = index
        files |= mine
        described[name] = _described(part, job.staged[name], casts, list(mine))
    state = {
        "format": FORMAT,
        "version": VERSION,
        "step": job.step,
        "metadata": job.metadata.get("user", {}),
        "parts": described,
        "shared": job.shared,
    }
    plain[STATE_FILE] = json.dumps(state, separators=(",", ":"), allow_nan=False).encode()
    return files, plain


def _casts(part: str, staged: Mapping[str, Staged], rules: CastRules) -> dict[str, Cast]:
    """How tensors of a part are cast, by name; nothing is said of those that stay as they are."""
    found = {}
    for name, one in staged.items() if part in CAST_PARTS else ():
        dtype = rules.dtype_for(name, one.dtype, part)
        if dtype is not one.dtype and one.shape:
            how = plan(one.bytes.view(one.dtype), dtype, name)
            if how is not None:
                found[name] = how
    return found


def _described(part: Part, staged: Mapping[str, Staged], casts: Mapping[str, Cast], files: list[str]) -> dict[str, Any]:
    dtypes = {name: dtype_name(one.dtype) for name, one in staged.items() if not CARRIERS[one.dtype].exact}
    about = {"files": files, "parameters": part.parameters, "dtypes": dtypes, "tree": part.tree}
    if casts:
        about["cast"] = {name: [dtype_name(how.source), how.exponent] for name, how in casts.items()}
    return about


def _file_tensor(name: str, staged: Staged, how: Cast | None) -> FileTensor:
    if how is not None:
        reader = CastReader(staged.bytes.view(staged.dtype), how)
        word = CARRIERS[how.dtype].word
        return FileTensor(name, word, staged.shape, reader.length, reader.read, staged.unchanged)
    carrier = CARRIERS[staged.dtype]
    shape = staged.shape if carrier.parts == 1 else (*staged.shape, carrier.parts)
    memory = memory_of(staged.bytes)
    return FileTensor(name, carrier.word, shape, len(memory), partial(_slice, memory), staged.unchanged)


def _slice(memory: memoryview, offset: int, length: int) -> Buffer:
    return memory[offset : offset + length]


class Writing:
    """One save on its way into the store."""

    def __init__(self, store: Store, ingest: Ingest, job: Job, own: str = "") -> None:
        """`own` is the directory that a file may have been in, in the snapshot before."""
        self.ingest = ingest
        self._store = store
        self._job = job
        self._own = own
        self._below: dict[ObjectId, list[Entry]] = {}
        now = time.time_ns()
        umask = _umask()
        self._file_attributes = Attributes(0o666 & ~umask, os.getuid(), os.getgid(), now, now)
        self._root_attributes = Attributes(0o777 & ~umask, os.getuid(), os.getgid(), now, now)
        self._before = newest_of_line(store, job.path)

    def put(self, files: Mapping[str, TensorFile], plain: Mapping[str, bytes]) -> list[Entry]:
        """Store files; returns their entries, in this order."""
        entries = [self._put(name, file, self.kept(name, file)) for name, file in files.items()]
        return entries + [self._put(name, BytesSource(data), None) for name, data in plain.items()]

    def entry(self, name: str, recipe: ObjectId, size: int) -> Entry:
        """The entry of a file that is stored."""
        return Entry(name.encode(), EntryType.FILE, self._file_attributes, size, recipe)

    def directory(self, name: str, entries: list[Entry]) -> Entry:
        """Store a directory; returns its entry."""
        made = self.ingest.put_directory(entries)
        self._below[made] = entries
        return Entry(name.encode(), EntryType.DIRECTORY, self._root_attributes, child=made)

    def publish(self, entries: list[Entry], recipes: dict[str, ObjectId]) -> Published:
        """Make a version of what was put. `recipes` are those of the tensor files that this process knows again."""
        root = self.ingest.put_directory(entries)
        files = [file for entry in entries for file in self._below.get(entry.child, [entry])]
        metadata = {
            **self._job.metadata,
            "step": self._job.step,
            "attributes": root_metadata(self._root_attributes),
            "files": len(files),
            "bytes": sum(file.size for file in files),
        }
        version = self.ingest.publish(self._job.path, root, metadata)
        return Published(version, self.ingest.stats.stored_bytes, recipes)

    def _put(self, name: str, source: Source, kept: Kept | None) -> Entry:
        recipe, size, _ = self.ingest.put_file(source, self._previous(name), kept=kept)
        return self.entry(name, recipe, size)

    def _previous(self, name: str) -> FileReader | None:
        """The file of this name in the snapshot before, which deltas are made against."""
        if self._before is None:
            return None
        for place in ([f"{self._own}/{name}"] if self._own else []) + [name]:
            try:
                return self._store.open_file(self._store.lookup(self._before, place.encode()))
            except NotFoundError:
                continue
            except CorruptError:
                break  # only deltas are lost
        return None

    def kept(self, name: str, file: TensorFile) -> Kept | None:
        """What need not be read, as it is in the save before: only where all of it stands at the same places."""
        after = self._job.after
        if after is None or name not in after.recipes or not (unchanged := file.unchanged()):
            return None
        try:
            before = FileReader(self._store.objects, self._store.recipe_object(after.recipes[name]))
            same_places = before.size == file.size and before.read(0, len(file.header)) == file.header
        except CorruptError:
            return None  # that snapshot was forgotten, and is gone
        return Kept(self._store.config.cut, before, unchanged) if same_places else None


def newest_of_line(store: Store, path: str) -> Version | None:
    """The version that was bound last among those under the parent of `path`."""
    parent = path.rpartition("/")[0]
    siblings = (version for version in store.names().all_versions() if version.path.rpartition("/")[0] == parent)
    return max(siblings, key=lambda version: version.order, default=None)


def _umask() -> int:
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022
