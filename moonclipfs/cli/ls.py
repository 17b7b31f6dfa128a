"""`moonclipfs ls`: list snapshots, or the files of one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import click

from moonclipfs.cli.output import emit_json, human, number, printable, table, version_json, when
from moonclipfs.cli.target import complete_target, one_target, opened
from moonclipfs.store.store import Store
from moonclipfs.store.target import Place, is_pattern, locate, select
from moonclipfs.types import Entry, EntryType, Version


@click.command("ls")
@click.argument("target", required=False, shell_complete=complete_target)
@click.option("-R", "--recursive", is_flag=True, help="List the files of all directories below.")
@click.option("--json", "as_json", is_flag=True, help="Print a list; keys below.")
def command(target: str | None, recursive: bool, as_json: bool) -> None:
    """List the snapshots of TARGET, or the files when it is one snapshot or a directory inside one.

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
            list_entries(list(entries(store, place.version, place.path, recursive)), as_json)


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


def list_entries(found: list[tuple[bytes, Entry]], as_json: bool) -> None:
    """Print one line an entry, as `ls -l` does."""
    if as_json:
        emit_json([_entry_json(path, entry) for path, entry in found])
        return
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
