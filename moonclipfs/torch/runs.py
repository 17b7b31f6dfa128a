"""The snapshots of a run: which there are, which one an id or a step means, and which is the newest."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonclipfs.errors import NotFoundError, UsageError
from moonclipfs.store.log import Names, parse_spec
from moonclipfs.store.retention import metric_of, step_of
from moonclipfs.types import Version

MANAGER = "manager"
"""Key of a version's metadata that a manager's saves have."""
USER = "user"
"""Key of what the caller of `save` said."""
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One saved snapshot: `id` is what `load` takes, `bytes` the length of its files, `thinned` those that were dropped
    from it.
    """

    id: str
    step: int
    created: datetime.datetime
    metadata: Mapping[str, Any]
    metric: Mapping[str, Any] | None
    bytes: int
    pinned: bool
    thinned: tuple[str, ...]


def path_of(run: str, step: int) -> str:
    """The path of the snapshot of a step."""
    return f"{run}/step-{step:0{_DIGITS}}"


def id_of(version: Version) -> str:
    """What names a version for good."""
    return f"{version.path}@{version.number}"


def saved_versions(names: Names, run: str) -> list[Version]:
    """The bound snapshots of a run that a manager saved, in the order of saving."""
    found = (
        version
        for path, version in names.bound().items()
        if path.rpartition("/")[0] == run and MANAGER in version.metadata
    )
    return sorted(found, key=lambda version: version.order)


def checked_step(step: Any) -> int:
    """A step as a plain number, also where it is one of NumPy or torch. Raises UsageError."""
    try:
        found = None if isinstance(step, bool) else operator.index(step)
    except TypeError:
        found = None
    if found is None:
        raise UsageError(f"step {step!r} is a {type(step).__qualname__}: a step is a whole number")
    if found < 0:
        raise UsageError(f"step {found}: a step is 0 or more")
    return found


def find(names: Names, run: str, wanted: int | str) -> Version:
    """The version that a step, NAME, RUN/NAME or one of these with @N means. Raises NotFoundError, UsageError."""
    if not isinstance(wanted, str):
        wanted = checked_step(wanted)
        steps = [version for version in saved_versions(names, run) if step_of(version) == wanted]
        if steps:
            return steps[-1]
        have = ", ".join(str(step_of(version)) for version in saved_versions(names, run)[-5:]) or "none"
        raise NotFoundError(f"{run} has no snapshot of step {wanted}; the last are: {have}")
    path, number = parse_spec(wanted)
    for candidate in (path, f"{run}/{path}"):
        versions = names.versions(candidate)
        if number is None and candidate in names.bound():
            return names.bound()[candidate]
        for version in versions:
            if version.number == number:
                return version
    raise NotFoundError(f"no snapshot {wanted} of {run}; list_snapshots() has them all")


def best(names: Names, run: str, metric: str) -> Version | None:
    """The best of a run's snapshots by a metric; of equals the first."""
    rated = []
    for version in saved_versions(names, run):
        found = metric_of(version)
        if found is not None and found[0] == metric:
            rated.append((found[1], version))
    return min(rated, key=lambda pair: pair[0])[1] if rated else None


def bytes_of(version: Version) -> int:
    """The length of a version's files together."""
    size = version.metadata.get("bytes")
    return size if isinstance(size, int) else 0


def thinned_of(version: Version) -> tuple[str, ...]:
    """The files that were dropped from a version."""
    dropped = version.metadata.get("thinned")
    return tuple(map(str, dropped)) if isinstance(dropped, list | tuple) else ()


def info_of(names: Names, version: Version) -> SnapshotInfo:
    """What the log tells of a version."""
    metadata = version.metadata
    metric = metadata.get("metric")
    user = metadata.get(USER)
    return SnapshotInfo(
        id_of(version),
        step_of(version) or 0,
        datetime.datetime.fromtimestamp(version.time_ns / 1e9, datetime.UTC),
        user if isinstance(user, Mapping) else {},
        metric if isinstance(metric, Mapping) else None,
        bytes_of(version),
        (version.path, version.number) in names.pins(),
        thinned_of(version),
    )
