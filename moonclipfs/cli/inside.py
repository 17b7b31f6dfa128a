"""Arguments that name snapshots which need not be there yet, some of them as paths inside a mount."""

from __future__ import annotations

import os
from pathlib import Path

from moonclipfs.cli.target import one_target, same_path
from moonclipfs.errors import MoonclipError, UsageError
from moonclipfs.fuse.inside import Inside, inside_mount
from moonclipfs.store.target import Target, default_store, parse_target


def source_name(text: str | None) -> tuple[Target, Inside | None]:
    """The snapshot that `text` means, bound or removed: a path inside a mount, STORE:NAME[@N], or NAME[@N].

    A path below @versions means that version. Raises what `one_target` raises.
    """
    inside = inside_mount(text) if text else None
    if inside is None:
        return one_target(text), None
    return Target(default_store(inside.mount.store), _version_spec(inside.path)), inside


def new_name(text: str, store: Path) -> tuple[str, Inside | None]:
    """The name in `store` that `text` means: a path inside a mount of it, STORE:NAME, or a NAME.

    Raises UsageError for a path outside of a mount, and for another store.
    """
    inside = inside_mount(text)
    if inside is not None:
        target = Target(Path(inside.mount.store), inside.path)
    elif text.startswith(("/", "./", "../")) or text in (".", "..") or os.path.lexists(text):
        target = _stored(text)
    else:
        target = parse_target(text, store)
    if not same_path(target.store, store):
        raise UsageError(f"{text} is in another store than {store}: `moonclipfs export`, then `moonclipfs add` there")
    return target.spec, inside


def _stored(text: str) -> Target:
    """STORE:NAME where STORE is a path. Raises UsageError for any other path."""
    try:
        target = parse_target(text)
    except MoonclipError:
        target = Target(Path())
    if not target.spec:
        raise UsageError(
            f"{text} is not inside a mount, and this binds a name in the store: "
            "`moonclipfs export STORE:NAME DIRECTORY` writes plain files"
        )
    return target


def _version_spec(path: str) -> str:
    """`@versions/NAME/N` as NAME@N; any other path as it is."""
    name, _, number = path.removeprefix("@versions/").rpartition("/")
    return f"{name}@{number}" if path.startswith("@versions/") and name and number.isdigit() else path
