"""`moonclipfs ls`: list snapshots, or the files of one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import click

from moonclipfs.cli.output import emit_json, human, number, printable, table, version_json, when
from moonclipfs.cli.target import complete_target, one_target, opened
from moonclipfs.errors import NotFoundError
from moonclipfs.store.log import Names
from moonclipfs.store.store import Store
from moonclipfs.store.target import Place, is_pattern, locate, select
from moonclipfs.types import Entry, EntryType, Version, natural_key


@click.command("ls")
@click.argument("target", required=False, shell_complete=complete_target)
@click.option("-R", "--recursive", is_flag=True, help="List the files of all directories below.")
@click.option("--json", "as_json", is_flag=True, help="Print a list; keys below.")
def command(target: str | None, recursive: bool, as_json: bool) -> None:
    """List the snapshots of TARGET, or the files when it is one snapshot or a directory inside one; after these the
    snapshots whose names lie below it.

    \b
    Examples:
      moonclipfs ls /data/store
      moonclipfs ls '/data/store:run1/checkpoint-*'
      moonclipfs ls -R /data/store:run1/checkpoint-500
      moonclipfs ls /mnt/checkpoints/run1

    \b
    JSON of a snapshot: name, version, files, bytes, time_ns
    JSON of a file:     path, type, size, mode, uid, gid, mtime_ns, target (symlinks)
    """
    wanted = one_target(target)
    with opened(wanted) as store:
        names = store.names()
        place = Place(None) if is_pattern(names, wanted.spec) else locate(names, wanted.spec)
        if place.version is None:
            list_versions(select(names, wanted.spec), as_json)
        else:
            below = snapshots_below(names, place)
            try:
                found = list(entries(store, place.version, place.path, recursive))
            except NotFoundError:
                if not below:
                    raise
                found = []  # a directory that is made by names alone
            if as_json:
                emit_json([*(_entry_json(path, entry) for path, entry in found), *map(version_json, below)])
                return
            list_entries(found)
            if below:
                click.echo()
                list_versions(below, as_json)


def snapshots_below(names: Names, place: Place) -> list[Version]:
    """The bound snapshots whose names go on from a directory in a snapshot; none below one that is not current."""
    version = place.version
    if version is None or version != names.bound().get(version.path):
        return []
    start = os.path.join(version.path, os.fsdecode(place.path), "")
    found = (below for name, below in names.bound().items() if name.startswith(start))
    return sorted(found, key=lambda below: natural_key(below.path))


def entries(store: Store, version: Version, path: bytes, recursive: bool) -> Iterator[tuple[bytes, Entry]]:
    """The entries of the directory at `path` with their paths below it, or the file at `path` itself."""
    top = store.lookup(version, path)
    if top.type is not EntryType.DIRECTORY:
        yield os.path.basename(path), top
        return
    for name, entry in sorted(store.directory(top.child).items()):
        yield name, entry
        if recursive and entry.type is EntryType.DIRECTORY:
            for below, found in entries(store, version, os.path.join(path, name), recursive):
                yield os.path.join(name, below), found


def list_versions(versions: list[Version], as_json: bool) -> None:
    """Print one line a snapshot."""
    if as_json:
        emit_json([version_json(version) for version in versions])
        return
    table(
        (
            (printable(v.path), str(v.number), str(number(v, "files")), human(number(v, "bytes")), when(v.time_ns))
            for v in versions
        ),
        ("SNAPSHOT", "VERSION", "FILES", "SIZE", "ADDED"),
        right=(1, 2, 3),
    )


def list_entries(found: list[tuple[bytes, Entry]]) -> None:
    """Print one line an entry, as `ls -l` does."""
    rows = []
    for path, entry in found:
        mode = stat.filemode(entry.type.st_mode | entry.attributes.mode)
        link = f" -> {printable(entry.target)}" if entry.type is EntryType.SYMLINK else ""
        size = human(entry.size) if entry.type is EntryType.FILE else "-"
        rows.append((mode, size, when(entry.attributes.mtime_ns), printable(path) + link))
    table(rows, right=(1,))


def _entry_json(path: bytes, entry: Entry) -> dict[str, object]:
    attributes = entry.attributes
    found: dict[str, object] = {
        "path": os.fsdecode(path), "type": entry.type.name.lower(), "size": entry.size, "mode": attributes.mode,
        "uid": attributes.uid, "gid": attributes.gid, "mtime_ns": attributes.mtime_ns,
    }  # fmt: skip
    if entry.type is EntryType.SYMLINK:
        found["target"] = os.fsdecode(entry.target)
    return found
