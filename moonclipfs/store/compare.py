"""What differs between two sides: tensor by tensor, matched by name whatever the formats, and file by file.

A side is a snapshot, a directory or file inside one, or plain files. A tensor is matched with the one of the same name
in the file of the same path, else with the next one of that name anywhere on the other side. Bytes that both sides
take from the same object are known to be equal and never read.
"""

from __future__ import annotations

import enum
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase

from moonclipfs import limits
from moonclipfs.errors import LimitError
from moonclipfs.formats import torchlegacy, torchzip, zipdir
from moonclipfs.formats.layout import Layout, Region, RegionKind, Tensor
from moonclipfs.store.changes import ValueChange, compare_values, differing_ranges
from moonclipfs.store.cores import usable_cores
from moonclipfs.store.sides import Side, SideFile
from moonclipfs.store.values import is_number
from moonclipfs.types import EntryType, Source

_BATCH = 64
"""Tensors handed to the workers at once."""

Files = Mapping[bytes, SideFile]


class Change(enum.StrEnum):
    """How something differs between the left and the right side."""

    UNCHANGED = "unchanged"
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"
    DTYPE = "dtype"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor on one side."""

    path: bytes
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor; `left` is None when it was added, `right` when it was removed.

    `values` is None when nothing was read: unchanged by object id, added, removed, or of another shape. `note` says
    why a tensor that is reported as changed could not be compared.
    """

    name: str
    change: Change
    left: TensorPlace | None
    right: TensorPlace | None
    values: ValueChange | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class FileDiff:
    """One path; `change` speaks of what is not in tensors: all of a file without any, else what the format tells
    beside them (metadata, the values in a pickle)."""

    path: bytes
    change: Change
    has_tensors: bool


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Everything that was compared, unchanged things too; `violations` are what `expect_unchanged` forbids."""

    tensors: tuple[TensorDiff, ...]
    files: tuple[FileDiff, ...]
    violations: tuple[str, ...]

    @property
    def different(self) -> bool:
        """True when any tensor differs, or anything else that both sides could have in common.

        A file of tensors that stands on one side only is told by its tensors.
        """
        return any(tensor.change is not Change.UNCHANGED for tensor in self.tensors) or any(
            file.change is Change.CHANGED or (file.change is not Change.UNCHANGED and not file.has_tensors)
            for file in self.files
        )


@dataclass(slots=True)
class _Pairs:
    """Matched tensors, and those of one side alone."""

    both: list[tuple[TensorPlace, TensorPlace]] = field(default_factory=list)
    removed: list[TensorPlace] = field(default_factory=list)
    added: list[TensorPlace] = field(default_factory=list)


def diff(
    left: Side,
    right: Side,
    *,
    expect_unchanged: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two sides; `progress` is told (tensors done, tensors in all).

    `expect_unchanged` are globs of tensor names. Memory holds the layouts of both sides, and for each core a
    few windows of COMPARE_WINDOW_BYTES. Raises CorruptError or BackendError when a side cannot be read.
    """
    if left.single and right.single:
        right = Side(dict(zip(left.files, right.files.values(), strict=True)), single=True)
    pairs = _match(left, right)
    total = len(pairs.both) + len(pairs.added) + len(pairs.removed)
    tensors = [TensorDiff(place.tensor.name, Change.REMOVED, place, None) for place in pairs.removed]
    tensors += [TensorDiff(place.tensor.name, Change.ADDED, None, place) for place in pairs.added]
    with ThreadPoolExecutor(usable_cores(), "diff") as pool:
        for at in range(0, len(pairs.both), _BATCH):
            if progress:
                progress(len(tensors), total)
            batch = pairs.both[at : at + _BATCH]
            tensors += pool.map(lambda pair: _compare(left.files, pair[0], right.files, pair[1]), batch)
    if progress:
        progress(total, total)
    tensors.sort(key=lambda found: (_path_of(found), found.name))
    return DiffReport(tuple(tensors), tuple(_compare_files(left, right)), tuple(_violations(tensors, expect_unchanged)))


def _path_of(found: TensorDiff) -> bytes:
    place = found.left or found.right
    return place.path if place else b""


def _places(side: Side) -> list[TensorPlace]:
    return [TensorPlace(path, tensor) for path, file in sorted(side.files.items()) for tensor in file.layout.tensors]


def _match(left: Side, right: Side) -> _Pairs:
    pairs = _Pairs()
    by_place: dict[tuple[bytes, str], TensorPlace] = {(p.path, p.tensor.name): p for p in _places(right)}
    unmatched = []
    for place in _places(left):
        same = by_place.pop((place.path, place.tensor.name), None)
        if same:
            pairs.both.append((place, same))
        else:
            unmatched.append(place)
    by_name: defaultdict[str, list[TensorPlace]] = defaultdict(list)
    for place in reversed(by_place.values()):
        by_name[place.tensor.name].append(place)
    for place in unmatched:
        if others := by_name[place.tensor.name]:
            pairs.both.append((place, others.pop()))
        else:
            pairs.removed.append(place)
    pairs.added = [place for others in by_name.values() for place in reversed(others)]
    return pairs


def _compare(ours: Files, left: TensorPlace, theirs: Files, right: TensorPlace) -> TensorDiff:
    left_file, right_file = ours[left.path], theirs[right.path]
    old, new = left.tensor, right.tensor
    # The formats' own words for one dtype differ; between elements without values they are all that tells them apart.
    same_type = old.dtype == new.dtype and (is_number(old.dtype) or old.dtype_name == new.dtype_name)
    if old.shape != new.shape:
        return TensorDiff(old.name, Change.SHAPE, left, right)
    ranges = [(0, old.length)]
    if same_type and (old.strides, old.length) == (new.strides, new.length):
        ranges = differing_ranges(left_file.recipe, old.offset, right_file.recipe, new.offset, old.length)
        if not ranges:
            return TensorDiff(old.name, Change.UNCHANGED, left, right)
    if not same_type and not (is_number(old.dtype) and is_number(new.dtype)):
        return TensorDiff(old.name, Change.DTYPE, left, right)
    try:
        values = compare_values(left_file.source, old, right_file.source, new, ranges)
    except LimitError as error:
        return TensorDiff(old.name, Change.CHANGED if same_type else Change.DTYPE, left, right, None, str(error))
    change = Change.DTYPE if not same_type else Change.CHANGED if values.changed else Change.UNCHANGED
    return TensorDiff(old.name, change, left, right, values)


def _compare_files(left: Side, right: Side) -> Iterator[FileDiff]:
    for path in sorted(left.files.keys() | right.files.keys()):
        old, new = left.files.get(path), right.files.get(path)
        if old and new:
            has_tensors = bool(old.layout.tensors and new.layout.tensors)
            yield FileDiff(path, Change.UNCHANGED if _same_rest(old, new) else Change.CHANGED, has_tensors)
        elif old:
            yield FileDiff(path, Change.REMOVED, bool(old.layout.tensors))
        elif new:
            yield FileDiff(path, Change.ADDED, bool(new.layout.tensors))


def _same_rest(old: SideFile, new: SideFile) -> bool:
    """True when two files of one path are equal in all but their tensors."""
    if old.type is not new.type or old.type is not EntryType.FILE:
        return (old.type, old.target) == (new.type, new.target)
    if old.source.size == new.source.size:
        if not differing_ranges(old.recipe, 0, new.recipe, 0, old.source.size):
            return True
    elif not old.layout.tensors or not new.layout.tensors:
        return False
    if not (old.layout.tensors and new.layout.tensors):
        whole = (Region(0, old.source.size, RegionKind.OPAQUE),)
        return _same_bytes(old.source, whole, new.source, whole)
    if old.layout.format != new.layout.format:
        return True  # two formats have nothing in common but their tensors
    if old.layout.format == torchzip.FORMAT:
        return _torch_pickle(old.source) == _torch_pickle(new.source)
    if old.layout.format == torchlegacy.FORMAT:
        return _same_bytes(old.source, _rest(old.layout), new.source, _rest(new.layout))
    return old.layout.metadata == new.layout.metadata


def _rest(layout: Layout) -> tuple[Region, ...]:
    return tuple(region for region in layout.regions if region.kind is not RegionKind.TENSOR)


def _torch_pickle(source: Source) -> bytes:
    """The pickle of a torch archive: names of folders and padding differ from save to save, this does not."""
    members = zipdir.read(source)
    root = torchzip.root_of(members) or ""
    for member in members:
        if member.name == f"{root}data.pkl" and member.length <= limits.PICKLE_BYTES:
            return bytes(source.read(member.offset, member.length))
    return b""


def _same_bytes(left: Source, ours: Sequence[Region], right: Source, theirs: Sequence[Region]) -> bool:
    if [region.length for region in ours] != [region.length for region in theirs]:
        return False
    step = limits.COMPARE_WINDOW_BYTES
    for a, b in zip(ours, theirs, strict=True):
        for at in range(0, a.length, step):
            length = min(step, a.length - at)
            if bytes(left.read(a.offset + at, length)) != bytes(right.read(b.offset + at, length)):
                return False
    return True


def _violations(tensors: Sequence[TensorDiff], globs: Sequence[str]) -> Iterator[str]:
    """What `expect_unchanged` forbids; a glob that matches nothing is one too, since it guards nothing."""
    for glob in globs:
        matching = [found for found in tensors if fnmatchcase(found.name, glob)]
        if not matching:
            yield f"{glob}: matches no tensor"
        for found in matching:
            if found.change is not Change.UNCHANGED:
                yield f"{glob}: {found.name} is {_WORDS.get(found.change, found.change.value)}"


_WORDS = {Change.DTYPE: "of another dtype", Change.SHAPE: "of another shape"}


def tensor_json(found: TensorDiff) -> dict[str, object]:
    """JSON values: name, change, left and right {path, dtype, shape} or None, note, values or None."""
    values = found.values
    return {
        "name": found.name,
        "change": str(found.change),
        "left": _place_json(found.left),
        "right": _place_json(found.right),
        "values": None if values is None else {**asdict(values), "share": values.share},
        "note": found.note,
    }


def _place_json(place: TensorPlace | None) -> dict[str, object] | None:
    if place is None:
        return None
    tensor = place.tensor
    word = tensor.dtype_name or tensor.dtype.name
    return {"path": os.fsdecode(place.path), "dtype": word, "shape": list(tensor.shape)}
