"""`moonclipfs export`: write plain files back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

from moonclipfs.cli.output import PROGRAM, human, printable
from moonclipfs.cli.progress import file_bar
from moonclipfs.cli.target import complete_target, many_targets, opened, whole_store
from moonclipfs.errors import CorruptError, MoonclipError, NoSpaceError, UsageError
from moonclipfs.store.export import ExportReport, export
from moonclipfs.store.log import Names
from moonclipfs.store.target import Target, is_pattern, locate, select
from moonclipfs.types import Version


@click.command("export")
@click.argument(
    "targets_and_directory", metavar="TARGET... DIRECTORY", nargs=-1, required=True, shell_complete=complete_target
)
@click.option("--all", "everything", is_flag=True, help="Every current snapshot of a store.")
@click.option("--overwrite", is_flag=True, help="Replace files that are in the way.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Threads that decode; default: one for each core.")
def command(targets_and_directory: tuple[str, ...], everything: bool, overwrite: bool, jobs: int | None) -> int:
    """Write snapshots back as plain files: bytes, holes, modes, times, links and attributes as they were added.

    One snapshot, or a directory or file inside one, is written into DIRECTORY itself; several, a prefix or a pattern
    into DIRECTORY/NAME each. Files that are there already with the right bytes and time are left, so that an
    interrupted export can be repeated.

    Of several snapshots, or with --all, all that can be written is; each file or snapshot that cannot is named, and the
    exit code is that of the first such error, but always 5 when the log is damaged, since snapshots may be missing.

    \b
    Examples:
      moonclipfs export /data/store:run1/checkpoint-500 ./checkpoint-500
      moonclipfs export /data/store:run1/checkpoint-500/model.safetensors .
      moonclipfs export '/data/store:run1/*' ./run1
      moonclipfs export --all /data/store /backup/plain
    """
    *texts, directory = targets_and_directory
    targets = _targets(texts, everything)
    with opened(targets[0]) as store:
        names = store.names()
        parts = plan(names, targets, Path(directory), everything)

        def write(part: Part, failed: Callable[[MoonclipError], None] | None) -> None:
            with file_bar(printable(part.version.path)) as progress:
                report = export(
                    store,
                    part.version,
                    part.destination,
                    path=part.path,
                    inside=Path(directory),
                    progress=progress,
                    overwrite=overwrite,
                    jobs=jobs or 0,
                    failed=failed,
                )
            _print(part, report)

        if [part.destination for part in parts] == [Path(directory)]:
            write(parts[0], None)
            return 0
        errors = _write_all(parts, write)
    if names.damaged:
        raise CorruptError("the log is damaged, so snapshots may be missing here, or older than the last: see `verify`")
    return errors[0].exit_code if errors else 0


class Part(NamedTuple):
    """What is at `path` of a version, and where it goes."""

    version: Version
    path: bytes
    destination: Path


def _targets(texts: list[str], everything: bool) -> list[Target]:
    if everything:
        if len(texts) > 1:
            raise UsageError("--all takes one STORE and one DIRECTORY")
        return [Target(whole_store(texts[0] if texts else None))]
    if not texts:
        raise UsageError("name what to export and a directory to write it into")
    return many_targets(texts)


def plan(names: Names, targets: list[Target], directory: Path, everything: bool) -> list[Part]:
    """What goes where. Raises NotFoundError, UsageError for a whole store without --all."""
    if not everything and any(not target.spec for target in targets):
        raise UsageError("name a snapshot (STORE:NAME), or use --all for every one")
    parts = []
    for target in targets:
        place = None if is_pattern(names, target.spec) else locate(names, target.spec)
        if place is not None and place.version is not None:
            if len(targets) == 1:
                return [Part(place.version, place.path, directory)]
            parts.append(Part(place.version, place.path, directory / place.version.path))
        else:
            parts += [Part(version, b"", directory / version.path) for version in select(names, target.spec)]
    return parts


def _write_all(
    parts: list[Part], write: Callable[[Part, Callable[[MoonclipError], None]], None]
) -> list[MoonclipError]:
    """Write what can be written; return the errors, which are told. Raises NoSpaceError, since all others would too."""
    errors: list[MoonclipError] = []
    for part in parts:
        unwritten: list[MoonclipError] = []
        try:
            write(part, unwritten.append)
        except NoSpaceError:
            raise
        except MoonclipError as error:
            unwritten.append(type(error)(f"{_name(part)}: {error}"))
        finally:
            for one in unwritten:
                _complain(str(one))
        errors += unwritten
    if errors:
        above = "the error" if len(errors) == 1 else f"the {len(errors)} errors"
        _complain(f"not everything was exported: see {above} above")
    return errors


def _complain(message: str) -> None:
    click.echo(f"{PROGRAM}: {printable(message)}", err=True)


def _name(part: Part) -> str:
    return f"{part.version.path}@{part.version.number}" + (f"/{os.fsdecode(part.path)}" if part.path else "")


def _print(part: Part, report: ExportReport) -> None:
    for note in report.notes:
        click.echo(f"note: {printable(note)}", err=True)
    there = f", {report.skipped} already there" if report.skipped else ""
    files = f"{report.files} file{'' if report.files == 1 else 's'}"
    name = printable(_name(part))
    click.echo(f"{name}: {files}, {human(report.bytes)}{there}, in {printable(str(part.destination))}")
