"""`moonclipfs optimize`: short chains for what is read the most."""

from __future__ import annotations

import click

from moonclipfs.cli.gc import gc_json, print_gc
from moonclipfs.cli.output import emit_json, human, printable
from moonclipfs.cli.progress import byte_bar
from moonclipfs.cli.target import complete_target, many_targets, opened
from moonclipfs.errors import UsageError
from moonclipfs.store.log import parse_spec
from moonclipfs.store.optimize import OptimizeReport, optimize


@click.command("optimize")
@click.argument("targets", metavar="[TARGET]...", nargs=-1, shell_complete=complete_target)
@click.option("--dry-run", is_flag=True, help="Only say what would be stored anew.")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(targets: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Make the newest snapshot of each line quick to read, and free what that leaves.

    A delta that was saved late in a line is decoded through up to three others. The tensors of the newest snapshot are
    stored anew with one link at most. Contents do not change; whoever reads or saves meanwhile is not disturbed. Every
    tensor is verified before and after; a damaged one is left as it is, and told. Older deltas get no shorter, and one
    against a base further back is larger: run it where loads must be quick, not after each save.

    \b
    TARGETs are snapshots, or what lies above them: of each line below, the newest.
    Default: the whole store.

    \b
    Examples:
      moonclipfs optimize /data/store
      moonclipfs optimize --dry-run /data/store:run1

    \b
    Exit code: 1 when something was left as it is, since it is damaged.
    JSON: dry_run, snapshots (NAME@VERSION), links (the most before), objects, bytes (of packs),
          problems, gc (as of `moonclipfs gc --json`, or null)
    """
    wanted = many_targets(targets)
    names = [target.spec for target in wanted if target.spec]
    if numbered := next((name for name in names if parse_spec(name)[1] is not None), None):
        raise UsageError(f"{numbered} is one version: name the snapshot, its newest version is meant")
    with opened(wanted[0], write=not dry_run) as store, byte_bar("optimize") as progress:
        report = optimize(store, names, dry_run=dry_run, progress=progress)
    if as_json:
        emit_json(_json(report))
    else:
        _print(report)
    if report.problems:
        click.get_current_context().exit(1)


def _print(report: OptimizeReport) -> None:
    for version in report.snapshots:
        click.echo(f"{printable(version.path)}@{version.number}")
    many = "object" if report.objects == 1 else "objects"
    before = f"had up to {report.links} links" if report.links else "had no links"
    if report.dry_run:
        click.echo(f"{before}; would store {report.objects} {many} anew")
    elif not report.objects:
        click.echo(f"{before}; nothing to store anew")
    else:
        click.echo(f"{before}; stored {report.objects} {many} anew in {human(report.bytes)}")
    if report.gc is not None:
        print_gc(report.gc)
    for problem in report.problems:
        click.echo(printable(problem), err=True)


def _json(report: OptimizeReport) -> dict[str, object]:
    return {
        "dry_run": report.dry_run,
        "snapshots": [f"{version.path}@{version.number}" for version in report.snapshots],
        "links": report.links,
        "objects": report.objects,
        "bytes": report.bytes,
        "problems": report.problems,
        "gc": None if report.gc is None else gc_json(report.gc),
    }
