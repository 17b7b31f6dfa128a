"""`moonclipfs pin`: keep versions whatever the rules say."""

from __future__ import annotations

import click

from moonclipfs.cli.output import emit_json, printable, table
from moonclipfs.cli.target import complete_target, many_targets, opened
from moonclipfs.errors import UsageError
from moonclipfs.store.pins import pin, unpin


@click.command("pin")
@click.argument("targets", metavar="TARGET...", nargs=-1, shell_complete=complete_target)
@click.option("--undo", is_flag=True, help="Let rules have them back.")
@click.option("--json", "as_json", is_flag=True, help="Print one document; keys below.")
def command(targets: tuple[str, ...], undo: bool, as_json: bool) -> None:
    """Keep versions of snapshots, whatever `forget`, a manager or a full disk would drop.

    TARGETs are snapshots (their newest version is pinned) or versions (NAME@N). A pin is part of the store: every
    process sees it, and it goes along when the snapshot is renamed. Without a NAME, the pins that there are are listed.

    \b
    Examples:
      moonclipfs pin /data/store:run1/checkpoint-500
      moonclipfs pin --undo /data/store run1/checkpoint-500@1
      moonclipfs pin /data/store

    \b
    JSON: pins: list of {name, version, reasons}, all that there are then
    """
    wanted = many_targets(targets)
    names = [target.spec for target in wanted if target.spec]
    if undo and not names:
        raise UsageError("name what to unpin (STORE:NAME)")
    with opened(wanted[0], write=bool(names)) as store:
        found = [store.resolve(name) for name in names]
        keys = [(version.path, version.number) for version in found]
        if keys:
            (unpin if undo else pin)(store, keys)
        pins = store.names().pins()
    if as_json:
        told = [{"name": path, "version": number, "reasons": list(why)} for (path, number), why in sorted(pins.items())]
        emit_json({"pins": told})
    else:
        table(
            (f"{printable(path)}@{number}", printable(", ".join(why))) for (path, number), why in sorted(pins.items())
        )
