"""Whether the files of a directory tree are whole: truncated files, stale shard indexes, missing shards and ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats import jsontext
from moonclipfs.formats.layout import OPAQUE_FORMAT, Layout, quoted
from moonclipfs.formats.pickle_reader import Node, Pairs, PickleReader, Value
from moonclipfs.formats.window import Window
from moonclipfs.types import Source


class Files(Protocol):
    """A tree of files. Paths are relative, with "/" between names."""

    def paths(self) -> Iterable[str]:
        """Return the path of every file."""
        ...

    def layout(self, path: str) -> Layout:
        """Return the layout of a file."""
        ...

    def source(self, path: str) -> Source:
        """Return the bytes of a file."""
        ...


class Finding(NamedTuple):
    """Something that is wrong with what a tree holds: where, and what."""

    path: str
    message: str

    @property
    def is_unfinished(self) -> bool:
        """True where a writer may still bring what is missing; odd and left-over files are no sign of that."""
        return not self.message.startswith((_UNREADABLE, _UNREFERENCED))


_UNREADABLE = "not readable: "
_UNREFERENCED = "unreferenced: "
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{2,9})-of-(?P<total>\d{2,9})(?P<suffix>\.[A-Za-z]+)")
_RANK = re.compile(r"(?P<word>[A-Za-z_]*rank_?|rng_state_)(?P<number>\d{1,9})")
_RANKED_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npz")
_MODEL_PARALLEL = ("mp_rank", "tp_rank", "pp_rank")
"""Ranks of these are not those of the world, so the number of all ranks says nothing about them."""
_STRICT_SUFFIXES = (".safetensors", ".gguf")
"""Files with these names are of that format, or something is wrong."""
_MAGIC = {
    ".pt": (b"PK", b"\x80"),
    ".pth": (b"PK", b"\x80"),
    ".npz": (b"PK",),
    ".npy": (b"\x93NUMPY",),
}
"""What files with these names begin with: an archive, a pickle, an array. They may be of a kind not understood here."""
_NAMES_IN_MESSAGE = 5


def findings(files: Files, ranks: int | None = None) -> list[Finding]:
    """Return what is wrong in the tree, sorted by path; `ranks` is the number of ranks that saved it, if known.

    Only headers and indexes are read. What `files` raises passes through.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for path in files.paths():
        folder, _, name = path.rpartition("/")
        by_folder[folder].append(name)
    found = []
    for folder, names in by_folder.items():
        prefix = f"{folder}/" if folder else ""
        for check in (_damaged, _shards, _distributed):
            found += [Finding(prefix + name, message) for name, message in check(files, prefix, sorted(names))]
    found += _ranks(by_folder, ranks)
    return sorted(found)


def _damaged(files: Files, prefix: str, names: list[str]) -> Iterator[Finding]:
    """Find truncated files, and files that are not of the format that their name says."""
    for name in names:
        layout = files.layout(prefix + name)
        if layout.truncated:
            yield Finding(name, f"truncated: {layout.reason}")
        elif layout.format == OPAQUE_FORMAT and name.endswith(_STRICT_SUFFIXES):
            yield Finding(name, f"{_UNREADABLE}{layout.reason}")
        elif layout.format == OPAQUE_FORMAT and not _has_magic(files, prefix, name):
            yield Finding(name, _UNREADABLE + "it does not begin as a file of this name does")


def _has_magic(files: Files, prefix: str, name: str) -> bool:
    magics = _MAGIC.get(name[name.rfind(".") :] if "." in name else "")
    if magics is None:
        return True
    source = files.source(prefix + name)
    return bytes(source.read(0, min(source.size, 8))).startswith(magics)


def _shards(files: Files, prefix: str, names: list[str]) -> Iterator[Finding]:
    """Find indexes that disagree with the shards beside them, and gaps in numbered shards without an index."""
    present = set(names)
    indexed_suffixes: set[str] = set()
    referenced: set[str] = set()
    for name in names:
        if ".index." not in name or not name.endswith(".json"):
            continue
        try:
            weights = _weight_map(files.source(prefix + name))
        except ParseError as error:
            yield Finding(name, f"not a readable index of shards: {error}")
            continue
        shards = set(weights.values())
        referenced |= shards
        indexed_suffixes |= {shard[shard.rfind(".") :] for shard in shards}
        if shards - present:
            yield Finding(name, f"index names missing {_listed(shards - present)}")
        yield from _misplaced(files, prefix, name, weights, present)
    sets: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is None:
            continue
        if match["suffix"] not in indexed_suffixes:
            sets[match["stem"], match["suffix"], int(match["total"])].add(int(match["number"]))
        elif name not in referenced:
            yield Finding(name, _UNREFERENCED + "no index in this directory names it")
    for (stem, suffix, total), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        missing = _gaps(numbers, first, first + total)
        if missing:
            yield Finding(f"{stem}-*-of-{total:05}{suffix}", f"shards {missing} of {total} are missing")


def _weight_map(source: Source) -> dict[str, str]:
    """Return which shard holds each tensor, by an index's `weight_map`; raises ParseError."""
    if source.size > limits.INDEX_BYTES:
        raise ParseError(f"{source.size} bytes, at most {limits.INDEX_BYTES} are read")
    index = jsontext.fields(jsontext.load(bytes(source.read(0, source.size))), "index")
    weights = {}
    for name, shard in jsontext.fields(index.get("weight_map"), "weight_map").items():
        if not isinstance(shard, str):
            raise ParseError(f"the shard of {quoted(name)} is not a string")
        weights[name] = shard
    return weights


def _misplaced(files: Files, prefix: str, index: str, weights: dict[str, str], present: set[str]) -> Iterator[Finding]:
    """Find tensors that an index expects in a shard that is whole and does not hold them."""
    by_shard: dict[str, set[str]] = defaultdict(set)
    for name, shard in weights.items():
        if shard in present:
            by_shard[shard].add(name)
    for shard, expected in by_shard.items():
        layout = files.layout(prefix + shard)
        if layout.tensors and not layout.reason:
            absent = expected - {tensor.name for tensor in layout.tensors}
            if absent:
                yield Finding(index, f"{shard} does not hold {_listed(absent)}")


def _distributed(files: Files, prefix: str, names: list[str]) -> Iterator[Finding]:
    """Find files that the metadata of a distributed checkpoint names and that are not there."""
    present = {name for name in names if name.endswith(".distcp")}
    if not present and ".metadata" not in names:
        return
    if ".metadata" not in names:
        yield Finding(".metadata", f"missing beside {len(present)} .distcp files: the save did not finish")
        return
    try:
        named = _relative_paths(files.source(f"{prefix}.metadata"))
    except ParseError:
        # Only torch's metadata is a pickle; other tools keep other files under this name.
        return
    missing = {name for name in named if "/" not in name} - set(names)
    if missing:
        yield Finding(".metadata", f"names missing {_listed(missing)}")


def _relative_paths(source: Source) -> set[str]:
    """Return every `relative_path` attribute of the objects in a pickle, by its opcodes; raises ParseError."""
    root = PickleReader(Window(source, 0, limits.INDEX_BYTES)).read()
    paths: set[str] = set()
    seen: set[int] = set()
    left: list[Value] = [root]
    while left:
        value = left.pop()
        if id(value) in seen or not isinstance(value, (Node, list, tuple)):
            continue
        seen.add(id(value))
        if isinstance(value, Node):
            left += (value.arguments, value.state, value.items, value.pairs)
        else:
            left += value
        if isinstance(value, Pairs):
            paths |= {text for key, text in value if key == "relative_path" and isinstance(text, str)}
    return paths


def _ranks(by_folder: dict[str, list[str]], ranks: int | None) -> Iterator[Finding]:
    """Find gaps in sets of files or directories that differ only in the number of a rank."""
    entries = {
        (folder, name) for folder, names in by_folder.items() for name in names if name.endswith(_RANKED_SUFFIXES)
    }
    for folder in by_folder:
        while folder:
            folder, _, name = folder.rpartition("/")
            entries.add((folder, name))
    sets: dict[tuple[str, str, str, str], set[int]] = defaultdict(set)
    highest: dict[tuple[str, str], int] = defaultdict(int)
    for folder, name in entries:
        for match in _RANK.finditer(name):
            word, number = match["word"].strip("_"), int(match["number"])
            sets[folder, name[: match.start("number")], name[match.end("number") :], word].add(number)
            highest[folder, word] = max(highest[folder, word], number)
    for (folder, before, after, word), numbers in sets.items():
        count = highest[folder, word] + 1
        if ranks is not None and word not in _MODEL_PARALLEL:
            count = max(count, ranks)
        missing = _gaps(numbers, 0, count)
        if missing:
            path = f"{folder}/{before}*{after}" if folder else f"{before}*{after}"
            yield Finding(path, f"ranks {missing} of {count} are missing")


def _gaps(numbers: set[int], first: int, end: int) -> str:
    """Return the numbers from `first` to `end` that are not in `numbers`, as words; empty if there are none."""
    missing: list[str] = []
    for number in sorted({number for number in numbers if number < end} | {end}):
        run = number - first
        missing += [str(first + i) for i in range(run)] if run < 3 else [f"{first}-{number - 1}"]
        first = number + 1
    return _shortened(missing)


def _listed(names: Iterable[str]) -> str:
    """Return a few of `names`, sorted, and how many more there are."""
    return _shortened([quoted(name) for name in sorted(names)])


def _shortened(words: list[str]) -> str:
    more = len(words) - _NAMES_IN_MESSAGE
    return ", ".join(words[:_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
