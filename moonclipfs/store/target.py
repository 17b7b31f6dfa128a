"""What a person names: a store, a snapshot, a version of it, a path inside it; as text, or as a path in a mount.

STORE                              the directory of a store
STORE:NAME[@VERSION][/PATH]        a snapshot, or something inside it
PATH                               a path inside a mounted store
NAME[@VERSION][/PATH]              in the default store, when there is one; `:NAME` always means that
"""

from __future__ import annotations

import difflib
import fnmatch
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from moonclipfs.errors import FormatVersionError, NotFoundError, PermissionDeniedError, UsageError
from moonclipfs.store.log import Names, parse_spec
from moonclipfs.types import Version, natural_key

XATTR_STORE = "user.moonclip.store"
XATTR_SNAPSHOT = "user.moonclip.snapshot"
XATTR_VERSION = "user.moonclip.version"
XATTR_DRY_RUN = "user.moonclip.dry_run"
XATTR_OBJECT = "user.moonclip.object"
"""A mount answers the first for every path below it, the second and third only inside a snapshot, the fourth where
nothing that is written is kept, and the last, in hexadecimal, for what is stored as it is."""
OVERLAYS = "@overlays"
"""The directory of overlays at the root of a mount."""


@dataclass(frozen=True, slots=True)
class Target:
    """A store and what is meant in it: `spec` is NAME[@VERSION][/PATH], a prefix of names, or empty for all of it.

    `dry_run` is for a path in a mount that keeps nothing.
    """

    store: Path
    spec: str = ""
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a spec leads: to `path` inside `version`, or (version None) to all names below `prefix`."""

    version: Version | None
    path: bytes = b""
    prefix: str = ""


def is_store(path: str | os.PathLike[str]) -> bool:
    """True when the directory `path` looks like a store, of whatever version. Raises PermissionDeniedError."""
    try:
        os.stat(os.path.join(path, "config.json"))
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot look into {os.fspath(path)}: {error.strerror}") from error
    except OSError:
        return False
    return os.path.isdir(os.path.join(path, "packs"))


def parse_target(text: str, default: str | os.PathLike[str] | None = None) -> Target:
    """Read `text` as one of the forms above; `default` is the store that a bare NAME belongs to.

    A path that exists wins over a NAME. Raises NotFoundError for what exists nowhere, FormatVersionError for a path
    that is no store, UsageError for `:NAME` without a default store.
    """
    if not text or "\0" in text:
        raise UsageError("the name of a store or snapshot is empty or holds a NUL byte")
    if text.startswith(":"):
        if default is None:
            raise UsageError(f"{text} names a snapshot of no store: write STORE{text}, or set $MOONCLIPFS_STORE")
        return Target(default_store(default), text[1:].strip("/"))
    if os.path.lexists(text) and (found := stored_at(text)):
        return found
    for colon in (number for number, character in enumerate(text) if character == ":"):
        if os.path.lexists(text[:colon]) and (found := stored_at(text[:colon])):
            inner = text[colon + 1 :].strip("/")
            return replace(found, spec=f"{found.spec}/{inner}".strip("/"))
    if default is not None:
        return Target(default_store(default), text.strip("/"))
    if os.path.lexists(text):
        raise FormatVersionError(f"not a store, and not in a mount: {text}; make a store with `moonclipfs init`")
    where = text.split(":")[0]
    if os.path.lexists(where):
        raise FormatVersionError(f"not a store, and not in a mount: {where}; make a store with `moonclipfs init`")
    raise NotFoundError(f"no such store: {where}; make one with `moonclipfs init`")


def default_store(path: str | os.PathLike[str]) -> Path:
    """The store of $MOONCLIPFS_STORE. Raises NotFoundError or FormatVersionError when it is none."""
    if is_store(path):
        return Path(path)
    if os.path.lexists(path):
        raise FormatVersionError(f"not a store: {os.fspath(path)} (from $MOONCLIPFS_STORE)")
    raise NotFoundError(f"no such store: {os.fspath(path)} (from $MOONCLIPFS_STORE)")


def stored_at(path: str) -> Target | None:
    """The store at `path`, or what a mount shows there; None for any other path. Raises PermissionDeniedError."""
    return Target(Path(path)) if is_store(path) else mounted(path)


def mounted(path: str | os.PathLike[str]) -> Target | None:
    """The store and spec behind a path inside a mount; None for any other path. Raises UsageError in an overlay."""
    real = os.path.realpath(path)
    store = _xattr(real, XATTR_STORE)
    if store is None:
        return None
    snapshot, dry_run = _xattr(real, XATTR_SNAPSHOT), _xattr(real, XATTR_DRY_RUN) == "1"
    if snapshot is None:
        return Target(Path(store), _below_mount(real), dry_run)
    version = _xattr(real, XATTR_VERSION)
    inside: list[str] = []
    while True:
        parent, name = os.path.split(real)
        if (_xattr(parent, XATTR_SNAPSHOT), _xattr(parent, XATTR_VERSION)) != (snapshot, version):
            break
        inside.insert(0, name)
        real = parent
    return Target(Path(store), "/".join([f"{snapshot}@{version}", *inside]), dry_run)


def is_unsealed(path: str | os.PathLike[str]) -> bool:
    """Whether what a mount shows at `path` is in no version as it is: written since, or above the snapshots."""
    real = os.path.realpath(path)
    return _xattr(real, XATTR_STORE) is not None and _xattr(real, XATTR_SNAPSHOT) is None


def _below_mount(path: str) -> str:
    """The prefix of names that a directory of a mount shows: virtual ones (`@versions`) stand for all."""
    parts: list[str] = []
    top = path
    while not os.path.ismount(top):
        top, name = os.path.split(top)
        parts.insert(0, name)
    if parts and parts[0] == OVERLAYS:
        if _xattr(path, XATTR_DRY_RUN) == "1":
            raise UsageError(f"{path} is in a dry run, of which nothing is kept: name a store, or a path outside of it")
        raise UsageError(f"{path} is in no snapshot but among overlays: `moonclipfs overlay` works with these")
    return "" if parts and parts[0].startswith("@") else "/".join(parts)


def _xattr(path: str, name: str) -> str | None:
    try:
        return os.fsdecode(os.getxattr(path, name))
    except OSError:
        return None  # no such attribute, or a file system without attributes: not inside a mount


def locate(names: Names, spec: str) -> Place:
    """Find what NAME[@VERSION][/PATH] leads to; the longest bound NAME wins.

    Raises NotFoundError with close names when nothing of that name is bound.
    """
    parts = spec.strip("/").split("/") if spec.strip("/") else []
    bound = names.bound()
    for count in range(len(parts), 0, -1):
        version = _version(names, "/".join(parts[:count]))
        if version is not None:
            return Place(version, os.fsencode("/".join(parts[count:])))
    prefix = "/".join(parts)
    if not parts or any(name.startswith(prefix + "/") for name in bound):
        return Place(None, prefix=prefix)
    raise NotFoundError(_not_found(names, prefix))


def select(names: Names, spec: str) -> list[Version]:
    """The versions that `spec` stands for: one, the current ones below a prefix, or those that match a pattern.

    `*`, `?` and `[...]` match as in a shell, except that they match `/` too. Sorted by name, numbers by value.
    Raises NotFoundError when nothing matches, UsageError when `spec` leads to a path inside a snapshot.
    """
    bound = names.bound()
    if is_pattern(names, spec):
        found = [version for name, version in bound.items() if fnmatch.fnmatchcase(name, spec)]
        if not found:
            raise NotFoundError(f"no snapshot matches {spec}")
    else:
        place = locate(names, spec)
        if place.path:
            raise UsageError(f"{spec} is a path inside a snapshot; a whole snapshot is needed here")
        below = place.prefix + "/" if place.prefix else ""
        found = [place.version] if place.version else [v for name, v in bound.items() if name.startswith(below)]
    return sorted(found, key=lambda version: natural_key(version.path))


def is_pattern(names: Names, spec: str) -> bool:
    """True when `spec` is to be matched with names, and is not a name itself."""
    return any(character in spec for character in "*?[") and spec not in names.bound()


def _version(names: Names, text: str) -> Version | None:
    if text in names.bound():
        return names.bound()[text]
    path, number = parse_spec(text)
    if number is None:
        return None
    versions = names.versions(path)
    for version in versions:
        if version.number == number:
            return version
    if versions:
        kept = ", ".join(str(version.number) for version in versions[-10:])
        raise NotFoundError(f"{path} has no version {number}; kept: {kept}")
    return None


def _not_found(names: Names, spec: str) -> str:
    removed = [version.number for version in names.versions(parse_spec(spec)[0])]
    if removed:
        return f"{spec} was removed; its last kept version is {spec}@{removed[-1]}"
    close = close_names(spec, names.bound())
    hint = f"did you mean {' or '.join(close)}?" if close else "what a mount has becomes one once it is sealed"
    return f"no snapshot {spec}; {hint}"


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three of `known` that look like `name`."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
