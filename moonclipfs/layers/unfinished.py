"""What a layer that nobody mounts still has to do, read from its journal alone. Changes nothing."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.layers.inodes import ROOT_NUMBER
from moonclipfs.layers.journalreading import read_journal, this_boot
from moonclipfs.layers.records import (
    PART_STAGED,
    Adopt,
    Captured,
    Contents,
    Dropped,
    Link,
    Make,
    Record,
    Remove,
    Rename,
    Sealed,
    Stored,
    Whole,
)
from moonclipfs.store.health import Finding, State
from moonclipfs.store.layerdirs import DIRECTORY, layer_holder, layer_id, layer_names
from moonclipfs.store.overlaydirs import is_overlay_layer, overlay_infos


class Unfinished(NamedTuple):
    """Files that are not encoded yet, their bytes, and captures that are not sealed yet."""

    files: int
    bytes: int
    captures: int


def unfinished(root: Path, name: str) -> Unfinished:
    """Read the journal of the layer `name` of the store at `root`. Raises CorruptError, FormatVersionError,
    NotFoundError, BackendError.
    """
    found = _Unfinished()
    journal = read_journal(Path(root) / DIRECTORY / name / "journal", layer_id(root, name), this_boot())
    for record in journal.records():
        found.apply(record)
    sizes = [found.sizes[number] for number, staged in found.staged.items() if staged and found.has_name(number)]
    return Unfinished(len(sizes), sum(sizes), len(found.captures))


class _Unfinished:
    """As much of a layer's state as it takes to tell which files are staged and have a name."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, bytes], int] = {}
        """By directory and name."""
        self.links: defaultdict[int, set[tuple[int, bytes]]] = defaultdict(set)
        self.staged: defaultdict[int, set[int]] = defaultdict(set)
        """Generations of each file."""
        self.sizes: dict[int, int] = {}
        self.captures: set[int] = set()

    def apply(self, record: Record) -> None:
        match record:
            case Make() | Adopt() | Link():
                self._set(record.parent, record.name, record.number)
            case Whole():
                for parent, name in record.links:
                    self._set(parent, name, record.number)
            case Remove() | Dropped():
                self._set(record.parent, record.name, None)
            case Rename():
                other = self.numbers.get((record.new_parent, record.new_name)) if record.exchange else None
                moved = self._set(record.parent, record.name, other)
                self._set(record.new_parent, record.new_name, moved)
            case Contents():
                if record.whole:
                    self.staged[record.number].clear()
                self.staged[record.number].update(part[3] for part in record.parts if part[2] == PART_STAGED)
                self.sizes[record.number] = record.size
            case Stored():
                staged = self.staged[record.number]
                staged.difference_update([one for one in staged if one <= record.generation])
            case Captured():
                self.captures.add(record.capture)
            case Sealed():
                self.captures.discard(record.capture)
            case _:
                pass  # says nothing of names, contents or captures

    def _set(self, parent: int, name: bytes, number: int | None) -> int | None:
        """Let a name lead to an inode, or to none; returns where it led before."""
        before = self.numbers.pop((parent, name), None)
        if before is not None:
            self.links[before].discard((parent, name))
        if number is not None:
            self.numbers[parent, name] = number
            self.links[number].add((parent, name))
        return before

    def has_name(self, number: int) -> bool:
        """Whether a name leads to an inode, from the root or from a directory that the journal does not know."""
        seen: set[int] = set()
        todo = [number]
        while todo:
            number = todo.pop()
            if number == ROOT_NUMBER or number not in self.links:
                return True
            if number not in seen:
                seen.add(number)
                todo += [parent for parent, _ in self.links[number]]
        return False


def check_layers(root: Path) -> list[Finding]:
    """What doctor says of the layers of a store; never raises MoonclipError."""
    try:
        overlays = {info.layer: info.name for info in overlay_infos(root)}
        return [_check(root, name, overlays.get(name)) for name in layer_names(root)]
    except MoonclipError as error:
        return [Finding("layers", State.PROBLEM, str(error), "check the permissions of its directory layers/")]


def _check(root: Path, name: str, overlay: str | None) -> Finding:
    what = f"layer {name}" if overlay is None else f"overlay {overlay}"
    try:
        holder = layer_holder(Path(root) / DIRECTORY / name)
        if holder is not None:
            where = f" at {holder['mountpoint']}" if holder.get("mountpoint") else ""
            return Finding(what, State.OK, f"mounted{where} by process {holder.get('pid', '?')}")
        left = unfinished(root, name)
    except MoonclipError as error:
        return Finding(
            what, State.PROBLEM, str(error), "restore what is damaged from a copy: until then gc does nothing"
        )
    if overlay is None and is_overlay_layer(name):
        advice = "the next mount of the store, or `moonclipfs overlay list`, clears it away"
        return Finding(what, State.NOTE, "belongs to an overlay or a dry run that ended in the middle", advice)
    parts = []
    if left.files:
        parts.append(f"{left.files} files of {left.bytes / limits.MIB:.1f} MiB are not encoded yet")
    if left.captures:
        parts.append(f"{left.captures} directories are not sealed yet")
    if parts:
        advice = f"`moonclipfs mount --layer {name}` goes on with it; `moonclipfs flush` waits for it"
        if overlay is not None:
            advice = "it is encoded when the overlay is committed, or has much more of it"
        return Finding(what, State.NOTE, ", ".join(parts), advice)
    return Finding(what, State.OK, "not mounted; all that it holds is encoded")
