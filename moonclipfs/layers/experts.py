"""The directories of `@experts`: a file for each expert that the files of a stored directory hold, made of their bytes.

What a directory object holds never changes, so what is known of it is kept by its id, as far as there is room.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce

from moonclipfs import limits
from moonclipfs.errors import NotFoundError
from moonclipfs.formats.experts import Parts, header, header_length, recognise
from moonclipfs.formats.layout import Layout
from moonclipfs.store.cache import BoundedCache
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, Buffer, Entry, EntryType, Extent, ObjectId

_CHECKPOINT_SUFFIXES = (b".safetensors", b".gguf", b".pt", b".pth", b".bin", b".ckpt", b".npz")
"""Files with other names are not looked at."""
_OWN_FILE = re.compile(rb"e[0-9]{5,9}\.(safetensors|npz|pt)")
"""What files are called that hold one expert as they are."""
_READ = 0o444
_OTHERS_READ = 0o004


@dataclass(frozen=True, slots=True)
class ExpertEntry(Entry):
    """The directory of a layer, or a file in it. `home` is the directory object that holds the checkpoint, `layer` the
    name of the layer's directory.
    """

    home: ObjectId = NO_ID
    layer: bytes = b""


class ExpertTable:
    """The experts of one directory of a checkpoint, and the entries that show them."""

    def __init__(self, home: ObjectId, files: Mapping[bytes, Entry], layers: Mapping[str, Mapping[int, Parts]]) -> None:
        """`files` is what the directory holds, `layers` what was recognised in it."""
        self.weight = 1
        self._experts: dict[bytes, dict[bytes, tuple[str, int, Parts]]] = {}
        self._entries: dict[bytes, Mapping[bytes, Entry]] = {}
        top: dict[bytes, Entry] = {name: entry for name, entry in files.items() if _shows(name, entry)}
        for layer, experts in layers.items():
            name = layer.encode()
            sources = {part.file for parts in experts.values() for part in parts}
            attributes = {file: files[os.fsencode(file)].attributes for file in sources}
            shown: dict[bytes, Entry] = {}
            known = self._experts[name] = {}
            for number, parts in experts.items():
                file = expert_name(number)
                size = header_length(layer, number, parts) + sum(part.length for part in parts)
                of_file = _attributes([attributes[one] for one in dict.fromkeys(part.file for part in parts)])
                shown[file] = ExpertEntry(file, EntryType.FILE, of_file, size, home=home, layer=name)
                known[file] = (layer, number, parts)
                self.weight += 1 + len(parts)
            self._entries[name] = shown
            of_layer = _attributes(list(attributes.values()))
            of_layer = replace(of_layer, mode=of_layer.mode | (of_layer.mode & _READ) >> 2)  # who may read may enter
            top[name] = ExpertEntry(name, EntryType.DIRECTORY, of_layer, home=home, layer=name)
        self._entries[b""] = dict(sorted(top.items()))
        self.weight += len(top)

    def entries(self, layer: bytes) -> Mapping[bytes, Entry]:
        """What is in the directory of a layer, or, for the empty name, in the one that holds them."""
        return self._entries.get(layer, {})

    def find(self, entry: ExpertEntry) -> tuple[bytes, Parts]:
        """The head of an expert's file, and its tensors. Raises NotFoundError."""
        found = self._experts.get(entry.layer, {}).get(entry.name)
        if found is None:
            raise NotFoundError(f"no expert {os.fsdecode(entry.layer + b'/' + entry.name)}")
        return header(*found), found[2]


class Experts:
    """The experts of all directories of a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: BoundedCache[ObjectId, ExpertTable] = BoundedCache(limits.EXPERT_CACHE_PARTS)
        self._loading = threading.Lock()

    def known(self, home: ObjectId) -> ExpertTable | None:
        """What is known of a directory object, without waiting."""
        return self._tables.get(home)

    def load(self, home: ObjectId, files: Mapping[bytes, Entry]) -> ExpertTable:
        """Find out what experts a directory object holds, which has these entries. Raises CorruptError."""
        with self._loading:  # whoever asks for the same meanwhile need not read it again
            table = self._tables.get(home)
            if table is None:
                table = ExpertTable(home, files, recognise(self._layouts(files)))
                self._tables.put(home, table, min(table.weight, limits.EXPERT_CACHE_PARTS // 2))
        return table

    def open(self, entry: ExpertEntry, files: Mapping[bytes, Entry]) -> FileReader:
        """The bytes of an expert's file; `files` are the entries of its home. Raises CorruptError, NotFoundError."""
        head, parts = self.load(entry.home, files).find(entry)
        names = {part.file for part in parts}
        recipes = {name: self._store.recipe(files[os.fsencode(name)]) for name in names}
        return FileReader(self._store.objects, expert_recipe(head, parts, recipes))

    def _layouts(self, files: Mapping[bytes, Entry]) -> Iterable[tuple[str, Layout]]:
        for name, entry in files.items():
            if entry.type is EntryType.FILE and holds_tensors(name):
                yield os.fsdecode(name), self._store.layout(entry)


def expert_name(number: int) -> bytes:
    """What the file of an expert is called."""
    return b"e%05d.safetensors" % number


def holds_tensors(name: bytes) -> bool:
    """Whether a file may hold tensors of several experts, by its name."""
    return name.endswith(_CHECKPOINT_SUFFIXES) and not is_own_file(name)


def is_own_file(name: bytes) -> bool:
    """Whether a file holds one expert as it is, by its name."""
    return bool(_OWN_FILE.fullmatch(name))


def expert_recipe(head: Buffer, parts: Parts, recipes: Mapping[str, Recipe]) -> Recipe:
    """The extents of an expert's file: `head`, and then what `recipes` have of each part."""
    extents = [Extent(len(head), literal=bytes(head))]
    for part in parts:
        for extent, inside, length in recipes[part.file].locate(part.offset, part.length):
            if extent.literal is not None:
                extents.append(Extent(length, literal=extent.literal[inside : inside + length]))
            elif extent.object_id is not None:
                extents.append(Extent(length, extent.object_id, extent.object_offset + inside))
            else:
                extents.append(Extent(length))
    return Recipe(extents)


def _shows(name: bytes, entry: Entry) -> bool:
    """Whether an entry of a snapshot is in `@experts` as it is: a directory, or the file of an expert."""
    return entry.type is EntryType.DIRECTORY or (entry.type is EntryType.FILE and is_own_file(name))


def _attributes(sources: list[Attributes]) -> Attributes:
    """Of what is made of several files: who may read all of them may read it; the latest times."""
    first = sources[0]
    mode = reduce(int.__and__, (source.mode for source in sources), _READ)
    if any((source.uid, source.gid) != (first.uid, first.gid) for source in sources):
        mode = (mode & _OTHERS_READ) * 0o111
    mtime, ctime = max(source.mtime_ns for source in sources), max(source.ctime_ns for source in sources)
    return Attributes(mode, first.uid, first.gid, mtime, ctime)
