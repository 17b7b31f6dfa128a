"""`moonclipfs thin`: drop the optimizer's state from older snapshots."""

from __future__ import annotations

import click

from moonclipfs.cli.gc import gc_json, print_gc
from moonclipfs.cli.output import emit_json, human, printable, table
from moonclipfs.cli.progress import byte_bar
from moonclipfs.cli.target import complete_target, one_target, opened
from moonclipfs.errors import UsageError
from moonclipfs.store.log import parse_spec
from moonclipfs.store.thin import ThinReport, thin


@click.command("thin")
@click.argument("run", metavar="RUN", shell_complete=complete_target)
@click.option(
    "--keep-optimizer-last",
    type=int,
    required=True,
    metavar="N",
    help="Leave the last N of each line whole (1 or more).",
)
@click.option("--also", multiple=True, metavar="PATTERN", help="Drop files and directories called so, too.")
@click.option("--dry-run", is_flag=True, help="Only say what would be dropped, and what that would free.")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(run: str, keep_optimizer_last: int, also: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Drop optimizer, random number and ZeRO state from older snapshots of RUN, and keep their weights.

    What is left becomes the next version of each snapshot, in its place in the line; the version before is forgotten.
    Nothing can be resumed from a thinned snapshot. What is pinned, or stood on by an overlay, stays whole, and so does
    what would be left without any weights.

    RUN is a snapshot, or what lies above some (STORE:NAME); each line below it counts for itself.

    \b
    Examples:
      moonclipfs thin --keep-optimizer-last 2 /data/store:run1
      moonclipfs thin --keep-optimizer-last 1 --also 'scheduler.*' --dry-run /data/store:run1

    \b
    JSON: dry_run, snapshots: list of {name, version, dropped (paths), bytes, reason (why it
          stays whole)}, gc: as of `moonclipfs gc --json`, or null
    """
    target = one_target(run)
    if not target.spec:
        raise UsageError("name a run (STORE:NAME): a whole store is not thinned at once")
    if parse_spec(target.spec)[1] is not None:
        raise UsageError(f"{target.spec} is one version: name the snapshot, or what lies above it")
    with opened(target, write=not dry_run) as store, byte_bar("gc") as progress:
        report = thin(
            store, target.spec, keep_optimizer_last=keep_optimizer_last, also=also, dry_run=dry_run, progress=progress
        )
    if as_json:
        emit_json(_json(report))
    else:
        _print(report)


def _print(report: ThinReport) -> None:
    verb = "would thin" if report.dry_run else "thinned"
    rows = []
    for one in report.snapshots:
        what = f"{human(one.bytes)} of {', '.join(one.dropped)}" if one.dropped else one.reason
        rows.append((verb if one.dropped else "keep", printable(one.version.path), printable(what)))
    table(rows)
    count = sum(bool(one.dropped) for one in report.snapshots)
    click.echo(f"{verb} {count} snapshot{'' if count == 1 else 's'}")
    if report.gc is not None:
        print_gc(report.gc)


def _json(report: ThinReport) -> dict[str, object]:
    return {
        "dry_run": report.dry_run,
        "snapshots": [
            {
                "name": one.version.path,
                "version": one.version.number,
                "dropped": list(one.dropped),
                "bytes": one.bytes,
                "reason": one.reason,
            }
            for one in report.snapshots
        ],
        "gc": None if report.gc is None else gc_json(report.gc),
    }
