"""`moonclipfs add`: publish files or directories as a snapshot."""

from __future__ import annotations

import os
from pathlib import Path

import click

from moonclipfs.cli.output import PROGRAM, emit_json, human, printable, ratio
from moonclipfs.cli.progress import file_bar
from moonclipfs.cli.target import complete_target, default_store, opened
from moonclipfs.errors import UsageError
from moonclipfs.layers.dryness import require_kept
from moonclipfs.store.add import Added, AddReport, add
from moonclipfs.store.ingest import IngestStats
from moonclipfs.store.log import parse_spec
from moonclipfs.store.provenance import collect
from moonclipfs.store.target import Target, is_store, parse_target


@click.command("add")
@click.argument("store_and_paths", metavar="STORE PATH...", nargs=-1, required=True, shell_complete=complete_target)
@click.option("--as", "name", metavar="NAME", help="Name of the snapshot; NAME/ keeps each basename below NAME.")
@click.option("--dry-run", is_flag=True, help="Store nothing; predict from samples what it would take.")
@click.option("--move", is_flag=True, help="Read back and verify each snapshot, then delete the original.")
@click.option("--no-provenance", is_flag=True, help="Keep no command line, git commit, job, host and user.")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
@click.pass_context
def command(
    context: click.Context,
    store_and_paths: tuple[str, ...],
    name: str | None,
    dry_run: bool,
    move: bool,
    no_provenance: bool,
    as_json: bool,
) -> None:
    """Publish each PATH, a file or directory, in STORE as a snapshot, or as the next version of one.

    One directory becomes the snapshot NAME (by default its own name); several paths, or a file, become one snapshot
    that holds each under its basename. With `--as run1/` each directory becomes a snapshot run1/BASENAME, in the
    natural order of the names. STORE:NAME is short for STORE and --as NAME; without STORE, $MOONCLIPFS_STORE is meant.

    --move is for full disks: one checkpoint after the other is stored, read back, compared, and then deleted. The same
    command goes on after an interruption. Symbolic links, paths that lie in each other and directories whose symbolic
    links lead out of them are not moved: these links are stored as links, without what they point to.

    \b
    Examples:
      moonclipfs add /data/store out/checkpoint-500 --as run1/checkpoint-500
      moonclipfs add /data/store out/checkpoint-* --as run1/
      moonclipfs add --dry-run /data/store out/checkpoint-* --as run1/
      moonclipfs add --move /data/store:run1/ out/checkpoint-*

    \b
    JSON: dry_run; raw, stored, shared, delta, delta_stored, full, full_stored, literal, holes
          (bytes); snapshots: a list of the same counts and name, version (null in a dry run),
          unchanged, files, bytes
    """
    if move and dry_run:
        raise UsageError("--move and --dry-run exclude each other")
    target, paths = split_arguments(store_and_paths)
    for path in paths:
        require_kept(path)
    with opened(target, write=not dry_run) as store, file_bar("adding", show_ratio=True) as progress:
        report = add(
            store,
            [Path(path) for path in paths],
            name=_name(target, store_and_paths[0], name),
            provenance=None if no_provenance else collect([PROGRAM, *context.obj], Path.cwd()),
            progress=progress,
            dry_run=dry_run,
            move=move,
        )
    if as_json:
        emit_json(_json(report, dry_run))
    else:
        _print(report, dry_run)


def split_arguments(arguments: tuple[str, ...]) -> tuple[Target, tuple[str, ...]]:
    """The store, and the paths to add: all of them when the first is no store and $MOONCLIPFS_STORE names one."""
    first, default = arguments[0], default_store()
    if default is not None and not is_store(first) and (os.path.lexists(first) or ":" not in first):
        target, paths = parse_target(":", default), arguments
    else:
        target, paths = parse_target(first, default), arguments[1:]
    if not paths:
        raise UsageError("nothing to add: name the files or directories after the store")
    return target, paths


def _name(target: Target, first: str, name: str | None) -> str | None:
    if not target.spec:
        return name
    if name is not None:
        raise UsageError(f"the name is given twice: {target.spec} and --as {name}")
    if parse_spec(target.spec)[1] is not None:
        raise UsageError(f"{target.spec} is one version: a new one gets its number by itself")
    return target.spec + ("/" if first.endswith("/") else "")


def _print(report: AddReport, dry_run: bool) -> None:
    for added in report.snapshots:
        click.echo(_line(added, dry_run))
    if len(report.snapshots) > 1:
        click.echo(f"in all: {_sizes(report.stats, dry_run)}")


def _line(added: Added, dry_run: bool) -> str:
    name = printable(added.path)
    if added.version is not None:
        name += f"@{added.version.number}"
    if added.unchanged:
        return f"{name}: unchanged"
    files = f"{added.files} file{'' if added.files == 1 else 's'}"
    return f"{name}: {files}, {_sizes(added.stats, dry_run)}"


def _sizes(stats: IngestStats, dry_run: bool) -> str:
    took = "would take about" if dry_run else "stored in"
    text = f"{human(stats.raw_bytes)} {took} {human(stats.stored_bytes)} ({ratio(stats.raw_bytes, stats.stored_bytes)})"
    parts = [
        f"{human(stats.shared_bytes)} shared" if stats.shared_bytes else "",
        f"{human(stats.delta_bytes)} as deltas of {human(stats.delta_stored)}" if stats.delta_bytes else "",
        f"{human(stats.full_bytes)} in full, {human(stats.full_stored)}" if stats.full_bytes else "",
    ]
    return text + "".join(f"; {part}" for part in parts if part)


def _json(report: AddReport, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        **_stats_json(report.stats),
        "snapshots": [
            {
                "name": added.path,
                "version": added.version.number if added.version else None,
                "unchanged": added.unchanged,
                "files": added.files,
                "bytes": added.bytes,
                **_stats_json(added.stats),
            }
            for added in report.snapshots
        ],
    }


def _stats_json(stats: IngestStats) -> dict[str, int]:
    return {
        "raw": stats.raw_bytes,
        "stored": stats.stored_bytes,
        "shared": stats.shared_bytes,
        "delta": stats.delta_bytes,
        "delta_stored": stats.delta_stored,
        "full": stats.full_bytes,
        "full_stored": stats.full_stored,
        "literal": stats.literal_bytes,
        "holes": stats.hole_bytes,
    }
