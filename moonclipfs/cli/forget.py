"""`moonclipfs forget`: drop snapshots for good, and free their space."""

from __future__ import annotations

import click

from moonclipfs.cli.gc import gc_json, print_gc
from moonclipfs.cli.output import emit_json, human, printable, table
from moonclipfs.cli.progress import byte_bar
from moonclipfs.cli.target import complete_target, many_targets, opened
from moonclipfs.errors import UsageError
from moonclipfs.store.forget import ForgetReport, forget, held
from moonclipfs.store.retention import Plan, Rules, plan


@click.command("forget")
@click.argument("targets", metavar="[TARGET]...", nargs=-1, shell_complete=complete_target)
@click.option("--keep-last", type=int, metavar="N", help="Keep the last N snapshots of each line.")
@click.option("--keep-every", type=int, metavar="STEP", help="Keep snapshots whose step is a multiple of STEP.")
@click.option("--keep-every-last", type=int, metavar="K", help="Of those, only the newest K (0: none).")
@click.option("--keep-best", type=int, metavar="N", help="Keep the best N by each metric saved (1; 0: none).")
@click.option("--keep-total", type=int, metavar="N", help="No more than N of a line in all: past it, the oldest go.")
@click.option("--keep-versions", type=int, default=1, metavar="N", help="Of what is kept, the newest N versions (1).")
@click.option("--pin", "pinned", multiple=True, metavar="NAME", help="Never forget these: NAME, NAME@N or a pattern.")
@click.option("--dry-run", is_flag=True, help="Only say what would go, and what that would free.")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(
    targets: tuple[str, ...],
    keep_last: int | None,
    keep_every: int | None,
    keep_every_last: int | None,
    keep_best: int | None,
    keep_total: int | None,
    keep_versions: int,
    pinned: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Drop snapshots for good, with all their versions, and free what only they need.

    TARGETs without a --keep rule are what goes: snapshots, versions (NAME@N), prefixes or patterns. With a --keep rule,
    the rules choose among TARGETs (default: the whole store), line by line: a line is the snapshots side by side under
    one parent, in the order in which they were added. What any rule keeps stays. The newest of a line, its best by each
    metric, what is pinned and what overlays stand on stay always, whatever the total. --dry-run tells why each one
    stays or goes.

    \b
    Examples:
      moonclipfs forget /data/store:run1/checkpoint-500
      moonclipfs forget /data/store run1/checkpoint-500@1 'run2/*'
      moonclipfs forget --keep-last 3 --keep-every 1000 --keep-every-last 5 /data/store:run1
      moonclipfs forget --dry-run --keep-last 5 /data/store

    \b
    JSON: dry_run, exclusive (bytes that only the forgotten need),
          keep and drop: lists of {name, version, reasons}, gc: as of `moonclipfs gc --json`
    """
    wanted = many_targets(targets)
    names = tuple(target.spec for target in wanted if target.spec)
    rules = Rules(
        keep_last, keep_every, keep_every_last, keep_best, keep_total, keep_versions, names=names, pinned=pinned
    )
    if targets and not names and not rules.has_keep_rule:
        raise UsageError("name what to forget (STORE:NAME), or give a rule such as --keep-last")
    with opened(wanted[0], reclaim=not dry_run) as store, byte_bar("gc") as progress:
        chosen = plan(store.names(), rules, held(store))
        report = forget(store, chosen.drop, dry_run=dry_run, progress=progress)
    if as_json:
        emit_json(_json(chosen, report, dry_run))
    else:
        _print(chosen, report, dry_run)


def _print(chosen: Plan, report: ForgetReport, dry_run: bool) -> None:
    verb = "would forget" if dry_run else "forgot"
    table(
        ("keep" if one.keep else verb, f"{printable(one.version.path)}@{one.version.number}", ", ".join(one.reasons))
        for one in chosen.decisions
    )
    count = len(chosen.drop)
    only = "unknown, since one is damaged" if report.exclusive is None else human(report.exclusive)
    click.echo(f"{verb} {count} version{'' if count == 1 else 's'}; only they need: {only}")
    print_gc(report.gc)


def _json(chosen: Plan, report: ForgetReport, dry_run: bool) -> dict[str, object]:
    def listed(keep: bool) -> list[dict[str, object]]:
        return [
            {"name": one.version.path, "version": one.version.number, "reasons": list(one.reasons)}
            for one in chosen.decisions
            if one.keep is keep
        ]

    return {
        "dry_run": dry_run,
        "exclusive": report.exclusive,
        "keep": listed(True),
        "drop": listed(False),
        "gc": gc_json(report.gc),
    }
