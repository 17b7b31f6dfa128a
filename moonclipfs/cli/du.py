"""`moonclipfs du`: logical, exclusive and shared bytes."""

from __future__ import annotations

import click

from moonclipfs.cli.output import emit_json, human, printable, table
from moonclipfs.cli.target import complete_target, many_targets, opened
from moonclipfs.store.target import select
from moonclipfs.store.usage import SetUsage, VersionUsage, du


@click.command("du")
@click.argument("targets", metavar="[TARGET]...", nargs=-1, shell_complete=complete_target)
@click.option("--json", "as_json", is_flag=True, help="Print an object; keys below.")
def command(targets: tuple[str, ...], as_json: bool) -> None:
    """Show what snapshots cost: SIZE as plain files; STORED in packs, bases included; of that EXCLUSIVE to the
    snapshot, freed if it alone is forgotten; SHARED with other kept versions, or with a
    layer: what is there in a writable mount is not freed with its snapshot.

    TARGET is a store, a snapshot, a version, a prefix or a pattern. The line `total` is the set as a whole: what
    several of its snapshots need counts once, and EXCLUSIVE is freed if all of them are forgotten.

    \b
    Examples:
      moonclipfs du /data/store
      moonclipfs du '/data/store:run1/*'
      moonclipfs du --json /data/store:run1/checkpoint-500@1

    \b
    JSON (bytes):          snapshots (a list), total {logical, stored, exclusive, shared}
    JSON of each snapshot: name, version, logical, stored, exclusive, shared
    """
    wanted = many_targets(targets)
    with opened(wanted[0]) as store:
        names = store.names()
        found = {(v.path, v.number): v for target in wanted for v in select(names, target.spec)}
        usage = du(store, list(found.values()))
    if as_json:
        emit_json({"snapshots": [_json(one) for one in usage.versions], "total": _bytes(usage)})
        return
    rows = [(f"{printable(one.version.path)}@{one.version.number}", *_sizes(one)) for one in usage.versions]
    table([*rows, ("total", *_sizes(usage))], ("SNAPSHOT", "SIZE", "STORED", "EXCLUSIVE", "SHARED"), right=range(1, 5))


def _sizes(usage: VersionUsage | SetUsage) -> list[str]:
    return [human(size) for size in _bytes(usage).values()]


def _bytes(usage: VersionUsage | SetUsage) -> dict[str, int]:
    return {
        "logical": usage.logical,
        "stored": usage.stored,
        "exclusive": usage.exclusive,
        "shared": usage.shared,
    }


def _json(usage: VersionUsage) -> dict[str, object]:
    return {"name": usage.version.path, "version": usage.version.number, **_bytes(usage)}
