"""`moonclipfs gc`: free the space of what nothing refers to."""

from __future__ import annotations

from dataclasses import asdict

import click

from moonclipfs.cli.output import emit_json, human, printable
from moonclipfs.cli.progress import byte_bar
from moonclipfs.cli.target import complete_target, opened, whole_store
from moonclipfs.store.gc import GcReport, collect


@click.command("gc")
@click.argument("store", required=False, shell_complete=complete_target)
@click.option("--dry-run", is_flag=True, help="Only say what would be freed.")
@click.option("--no-repack", is_flag=True, help="Delete only what is dead as a whole; copy nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(store: str | None, dry_run: bool, no_repack: bool, as_json: bool) -> None:
    """Free what no kept version needs. Safe beside anything else that uses the store; works on a full disk.

    What a running process may still need waits, and goes in a later run.

    \b
    Examples:
      moonclipfs gc /data/store
      moonclipfs gc --dry-run --json /data/store

    \b
    JSON (sizes in bytes): dry_run, live_objects, live_bytes, dead_bytes, deleted_packs,
          deleted_bytes, copied_bytes, rebased_objects, rebased_bytes, freed_bytes, waiting_packs,
          waiting_bytes, waiting_for, leftovers, log_records, problems
    """
    with opened(whole_store(store), reclaim=not dry_run) as opened_store, byte_bar("gc") as progress:
        report = collect(opened_store, progress=progress, dry_run=dry_run, repack=not no_repack)
    if as_json:
        emit_json(gc_json(report))
    else:
        print_gc(report)


def gc_json(report: GcReport) -> dict[str, object]:
    """The JSON of a run of gc."""
    return {**asdict(report), "freed_bytes": report.freed_bytes}


def print_gc(report: GcReport) -> None:
    """Tell what a run of gc did."""
    verb = "would free" if report.dry_run else "freed"
    done = f"{verb} {human(report.freed_bytes)} in {report.deleted_packs} packs"
    if report.freed_bytes < 0:  # what is copied from may have to wait for who adds to the store
        done = f"copied {human(-report.freed_bytes)}, so that a later run can free more"
    click.echo(f"{done}; {human(report.live_bytes)} in use")
    if report.waiting_packs:
        click.echo(f"{human(report.waiting_bytes)} in {report.waiting_packs} packs wait for:")
        for holder in report.waiting_for:
            click.echo(f"  {printable(holder)}")
    for problem in report.problems:
        click.echo(f"left alone: {printable(problem)}", err=True)
