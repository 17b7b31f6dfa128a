"""`moonclipfs import-moonclip`: the snapshots of a moonclip store become snapshots here."""

from __future__ import annotations

from pathlib import Path

import click

from moonclipfs.cli.output import emit_json, printable, table
from moonclipfs.cli.progress import count_bar
from moonclipfs.cli.target import opened, whole_store
from moonclipfs.compat.moonclip_import import DEFAULT_NAME, ImportReport, import_store


@click.command("import-moonclip")
@click.argument("source", metavar="DIR")
@click.argument("store", required=False)
@click.option("--as", "name", default=DEFAULT_NAME, metavar="NAME", help=f"Name of the run ({DEFAULT_NAME}).")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(source: str, store: str | None, name: str, as_json: bool) -> None:
    """Import all snapshots of the moonclip store DIR (formats 2 and 3) into STORE, bit for bit.

    Each becomes NAME/step-000500, as a checkpoint manager saves it, with its step, its metadata and its pin; snapshots
    of one step become versions of one name. Every tensor is checked against its hash; a snapshot with one that is
    damaged is left out, and told. DIR is only read. The same command continues an import that was interrupted.

    \b
    Examples:
      moonclipfs import-moonclip ./checkpoints /data/store
      moonclipfs import-moonclip ./checkpoints /data/store --as run1

    \b
    Exit code: 1 when a snapshot was left out.
    JSON: snapshots: list of {id, step, name, version, there (imported before), pinned, reason (why
          it was left out)}
    """
    with opened(whole_store(store), write=True) as target, count_bar("import", "snapshots") as progress:
        report = import_store(Path(source), target, name=name, progress=progress)
    if as_json:
        emit_json(_json(report))
    else:
        _print(report)
    if report.problems:
        click.get_current_context().exit(1)


def _print(report: ImportReport) -> None:
    rows = []
    for one in report.snapshots:
        if one.version is None:
            continue
        verb = "there" if one.there else "imported"
        rows.append(
            (verb, f"{printable(one.version.path)}@{one.version.number}", one.id, "pinned" if one.pinned else "")
        )
    table(rows)
    for problem in report.problems:
        click.echo(f"left out: {printable(problem)}", err=True)
    new = sum(one.version is not None and not one.there for one in report.snapshots)
    click.echo(f"imported {new} of {len(report.snapshots)} snapshots")


def _json(report: ImportReport) -> dict[str, object]:
    return {
        "snapshots": [
            {
                "id": one.id,
                "step": one.step,
                "name": None if one.version is None else one.version.path,
                "version": None if one.version is None else one.version.number,
                "there": one.there,
                "pinned": one.pinned,
                "reason": one.reason,
            }
            for one in report.snapshots
        ]
    }
