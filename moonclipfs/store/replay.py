"""What the log records say together: the names that they make, one after the other.

A path is bound when its newest kept version has not been removed. The earlier versions of a bound path are kept
beside it until they are forgotten; `unbind` marks them all as removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.store.paths import check_path
from moonclipfs.types import ID_BYTES, ObjectId, Version


@dataclass(slots=True)
class State:
    """The state after log record `sequence`. `checkpoint` is the newest checkpoint among the records up to there.

    `versions` holds the kept versions of each path, oldest first; `highest` the last number that a path ever used;
    `condemned` the record that condemned each pack; `pins` why a version, by path and number, is never forgotten.
    """

    sequence: int = 0
    checkpoint: int = 0
    versions: dict[str, tuple[Version, ...]] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)
    condemned: dict[str, int] = field(default_factory=dict)
    pins: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)

    def copy(self) -> State:
        """A state that can be changed without changing this one."""
        return State(
            self.sequence, self.checkpoint, dict(self.versions), dict(self.highest), dict(self.condemned),
            dict(self.pins),
        )  # fmt: skip

    def bound(self, path: str) -> Version | None:
        """The version that a path leads to."""
        versions = self.versions.get(path)
        return versions[-1] if versions and not versions[-1].removed else None

    def apply(self, record: Mapping[str, Any]) -> None:
        """Take in the next record. Raises CorruptError, perhaps half done, when it contradicts the state."""
        self.sequence = record["sequence"]
        try:
            _APPLY[record["type"]](self, record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(
                f"log record {self.sequence}: it does not fit the records before it ({error!r})"
            ) from error
        except UsageError as error:
            raise CorruptError(f"log record {self.sequence}: {error}") from error

    def _bind(self, record: Mapping[str, Any]) -> None:
        path, number = check_path(record["path"]), record["number"]
        if number <= self.highest.get(path, 0):
            raise ValueError(f"version {number} of {path!r} comes twice")
        metadata = dict(record["metadata"])
        version = Version(path, number, _object_id(record["root"]), self.sequence, record["time_ns"], metadata)
        self.versions[path] = (*self.versions.get(path, ()), version)
        self.highest[path] = number

    def _unbind(self, record: Mapping[str, Any]) -> None:
        for path in record["paths"]:
            if self.bound(path) is None:
                raise ValueError(f"{path!r} is not bound")
            self._remove(path, record)

    def _move(self, record: Mapping[str, Any]) -> None:
        moved: list[Version] = []
        pins: dict[tuple[str, int], tuple[str, ...]] = {}
        for path, number, new_path, new_number in record["versions"]:
            checked = check_path(new_path)
            moved.append(replace(self._take(path, number), path=checked, number=new_number))
            if (path, number) in self.pins:
                pins[checked, new_number] = self.pins.pop((path, number))
        for version in moved:
            if version.number <= self.highest.get(version.path, 0):
                raise ValueError(f"version {version.number} of {version.path!r} comes twice")
            self.versions[version.path] = (*self.versions.get(version.path, ()), version)
            self.highest[version.path] = version.number
        self.pins |= pins

    def _forget(self, record: Mapping[str, Any]) -> None:
        for path, number in record["versions"]:
            bound = self.bound(path)
            self._take(path, number)
            self.pins.pop((path, number), None)
            if bound is not None and bound.number == number:
                self._remove(path, record)

    def _pin(self, record: Mapping[str, Any]) -> None:
        for path, number, reason in record["remove"]:
            left = tuple(one for one in self.pins.get((path, number), ()) if one != reason)
            if left:
                self.pins[path, number] = left
            else:
                self.pins.pop((path, number), None)
        for path, number, reason in record["add"]:
            if all(version.number != number for version in self.versions.get(path, ())):
                raise ValueError(f"{path!r} has no version {number}")
            reasons = self.pins.get((path, number), ())
            if reason not in reasons:
                self.pins[path, number] = (*reasons, str(reason))

    def _condemn(self, record: Mapping[str, Any]) -> None:
        for pack in record["packs"]:
            self.condemned.setdefault(pack, self.sequence)

    def _checkpoint(self, record: Mapping[str, Any]) -> None:
        versions: dict[str, tuple[Version, ...]] = {}
        for row in record["versions"]:
            path = check_path(row["path"])
            version = Version(
                path, row["number"], _object_id(row["root"]), row["sequence"], row["time_ns"], dict(row["metadata"]),
                row["removed"], int(row.get("removed_ns", 0)),
            )  # fmt: skip
            versions[path] = (*versions.get(path, ()), version)
        self.versions, self.highest = versions, dict(record["highest"])
        self.condemned, self.checkpoint = dict(record["condemned"]), self.sequence
        self.pins = {
            (path, number): tuple(reasons)
            for path, number, reasons in record.get("pins", ())
            if any(version.number == number for version in versions.get(path, ()))
        }

    def _take(self, path: str, number: int) -> Version:
        """Take one version out of its path."""
        kept = self.versions[path]
        found = [version for version in kept if version.number == number]
        if len(found) != 1:
            raise ValueError(f"{path!r} has no version {number}")
        rest = tuple(version for version in kept if version.number != number)
        if rest:
            self.versions[path] = rest
        else:
            del self.versions[path]
        return found[0]

    def _remove(self, path: str, record: Mapping[str, Any]) -> None:
        if path in self.versions:
            when = int(record.get("time_ns", 0))
            self.versions[path] = tuple(
                version if version.removed else replace(version, removed=self.sequence, removed_ns=when)
                for version in self.versions[path]
            )

    def to_checkpoint(self, packs: Sequence[str]) -> dict[str, Any]:
        """The body of a checkpoint of this state; of condemned packs, it keeps those that are among `packs`."""
        present = set(packs)
        return {
            "versions": [
                {
                    "path": version.path,
                    "number": version.number,
                    "root": version.root.hex(),
                    "sequence": version.sequence,
                    "time_ns": version.time_ns,
                    "metadata": version.metadata,
                    "removed": version.removed,
                    "removed_ns": version.removed_ns,
                }
                for versions in self.versions.values()
                for version in versions
            ],
            "highest": self.highest,
            "condemned": {pack: sequence for pack, sequence in self.condemned.items() if pack in present},
            **({"pins": [[*key, reasons] for key, reasons in self.pins.items()]} if self.pins else {}),
        }

    def moves(self, old: str, new: str) -> list[tuple[str, int, str, int]]:
        """The (path, number, new path, new number) of every version that goes along when `old` is called `new`.

        Bound paths at and below `old` move with their kept versions; what was removed before stays where it was.
        """
        rows = []
        for path in sorted(self.versions):
            if self.bound(path) is None or not is_at_or_below(path, old):
                continue
            target = new + path[len(old) :]
            number = self.highest.get(target, 0)
            for version in self.versions[path]:
                if not version.removed:
                    number = max(number + 1, version.number)
                    rows.append((path, version.number, target, number))
        return rows


def is_at_or_below(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or lies below it."""
    return path == prefix or path.startswith(prefix + "/")


def _object_id(text: str) -> ObjectId:
    object_id = bytes.fromhex(text)
    if len(object_id) != ID_BYTES:
        raise ValueError(f"{text!r} is no object id")
    return object_id


_APPLY: dict[str, Callable[[State, Mapping[str, Any]], None]] = {
    "bind": State._bind,
    "unbind": State._unbind,
    "move": State._move,
    "forget": State._forget,
    "pin": State._pin,
    "condemn": State._condemn,
    "checkpoint": State._checkpoint,
}
