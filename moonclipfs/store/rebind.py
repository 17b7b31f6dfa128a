"""Old versions bound again: `restore` and `clone`. One log record each, however large the snapshot is."""

from __future__ import annotations

from collections.abc import Mapping

from moonclipfs.errors import ExistsError, NotFoundError, UsageError
from moonclipfs.store.log import Names
from moonclipfs.store.paths import check_path
from moonclipfs.store.store import Store
from moonclipfs.store.target import locate
from moonclipfs.types import Version

_MARKS = ("automatic", "capture", "restored", "cloned", "in_place_of")
"""Metadata that is told anew: what a person binds is not automatic, so that it is kept until it is forgotten."""


def restore(store: Store, name: str, number: int | None = None, *, to: str | None = None) -> Version:
    """Bind version `number` of `name` again, or under the name `to`; returns the new version.

    Without a number, the last version of a name that was removed. The newest version of a bound name that has this
    content already is returned as it is. `store` is open for writing. Raises NotFoundError, UsageError for a bound
    `name` without a number, ExistsError when `to` is another name that is bound, and what `Ingest.publish` raises.
    """
    version = _old_version(store.names(), name, number)
    target = name if to is None else check_path(to.strip("/"))
    current = store.names().bound().get(target)
    if target == name and current is not None and current.root == version.root:
        return current
    return _bind(store, version, target, "restored", replace=target == name)


def clone(store: Store, source: str, target: str) -> Version:
    """Bind the version that `source` (NAME or NAME@NUMBER) means under the new name `target`; returns that version.

    Nothing is copied: both share every object, and change apart from then on. `store` is open for writing. Raises
    NotFoundError, UsageError for a path inside a snapshot, ExistsError, and what `Ingest.publish` raises.
    """
    place = locate(store.names(), source)
    if place.version is None:
        raise NotFoundError(f"no snapshot {source}; there are snapshots below it: clone them one by one")
    if place.path:
        raise UsageError(f"{source} is a path inside a snapshot; a whole snapshot is needed here")
    return _bind(store, place.version, check_path(target.strip("/")), "cloned", replace=False)


def new_metadata(version: Version) -> dict[str, object]:
    """What the metadata of a version says of its content: that of another version with the same one."""
    return {key: value for key, value in version.metadata.items() if key not in _MARKS}


def _old_version(names: Names, name: str, number: int | None) -> Version:
    kept = names.versions(name)
    if not kept:
        locate(names, name)  # says which names are like it
        raise NotFoundError(f"no snapshot {name}; there are snapshots below it: restore them one by one")
    numbers = ", ".join(str(version.number) for version in kept)
    if number is None:
        if name in names.bound():
            raise UsageError(f"{name} is there: say which version to bind again ({name}@N); kept: {numbers}")
        return kept[-1]
    for version in kept:
        if version.number == number:
            return version
    raise NotFoundError(f"{name} has no version {number}; kept: {numbers}")


def _bind(store: Store, version: Version, target: str, how: str, *, replace: bool) -> Version:
    """Bind the content of a version to `target`; over a snapshot that is there only with `replace`."""

    def check(names: Names) -> None:
        # While a version is kept, nothing that it needs is condemned.
        if all(kept.sequence != version.sequence for kept in names.versions(version.path)):
            raise NotFoundError(f"{version.path}@{version.number} was forgotten or moved meanwhile")
        if not replace and target in names.bound():
            raise ExistsError(f"{target} is there already: choose another name, or remove it first")

    metadata: Mapping[str, object] = {**new_metadata(version), how: f"{version.path}@{version.number}"}
    with store.ingest() as ingest:
        return ingest.publish(target, version.root, metadata, check)
