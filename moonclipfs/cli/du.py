"""`moonclipfs du`: logical, exclusive and shared bytes."""

from __future__ import annotations

import click

from moonclipfs.cli.output import emit_json, human, printable, table
from moonclipfs.cli.target import complete_target, many_targets, opened
from moonclipfs.store.target import select
from moonclipfs.store.usage import VersionUsage, du


@click.command("du")
@click.argument("targets", metavar="[TARGET]...", nargs=-1, shell_complete=complete_target)
@click.option("--json", "as_json", is_flag=True, help="Print a list; keys below.")
def command(targets: tuple[str, ...], as_json: bool) -> None:
    """Show what snapshots cost: SIZE as plain files; STORED in packs, bases included; of that EXCLUSIVE to the
    snapshot, freed if it alone is forgotten; SHARED with other kept versions.

    TARGET is a store, a snapshot, a version, a prefix or a pattern. To see what several would free together:
    `moonclipfs forget --dry-run`.

    \b
    Examples:
      moonclipfs du /data/store
      moonclipfs du '/data/store:run1/*'
      moonclipfs du --json /data/store:run1/checkpoint-500@1

    \b
    JSON (bytes): name, version, logical, stored, exclusive, shared
    """
    wanted = many_targets(targets)
    with opened(wanted[0]) as store:
        names = store.names()
        found = {(v.path, v.number): v for target in wanted for v in select(names, target.spec)}
        usages = du(store, list(found.values()))
    if as_json:
        emit_json([_json(usage) for usage in usages])
        return
    table(
        (_row(usage) for usage in usages),
        ("SNAPSHOT", "SIZE", "STORED", "EXCLUSIVE", "SHARED"),
        right=range(1, 5),
    )


def _row(usage: VersionUsage) -> tuple[str, ...]:
    return (
        f"{printable(usage.version.path)}@{usage.version.number}",
        human(usage.logical),
        human(usage.stored),
        human(usage.exclusive),
        human(usage.shared),
    )


def _json(usage: VersionUsage) -> dict[str, object]:
    return {
        "name": usage.version.path,
        "version": usage.version.number,
        "logical": usage.logical,
        "stored": usage.stored,
        "exclusive": usage.exclusive,
        "shared": usage.shared,
    }
