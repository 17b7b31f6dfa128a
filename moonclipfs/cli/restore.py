"""`moonclipfs restore`: bind an old version again."""

from __future__ import annotations

import click

from moonclipfs.cli.inside import new_name, source_name
from moonclipfs.cli.output import printable
from moonclipfs.cli.target import complete_target, opened
from moonclipfs.errors import UsageError
from moonclipfs.fuse.control import ask
from moonclipfs.fuse.inside import Inside
from moonclipfs.store.log import parse_spec
from moonclipfs.store.rebind import restore


@click.command("restore")
@click.argument("target", metavar="NAME[@N]", shell_complete=complete_target)
@click.option("--to", metavar="NAME", help="Bind it under another name, which must be free.")
def command(target: str, to: str | None) -> None:
    """Bind version N of a snapshot again, as its newest one; without @N, the last one of a name that was removed.

    Nothing is copied, and no version is lost: what was the newest is kept as a version, too; in a mount also what was
    written since. There the directory shows the restored files, as new files, a moment later. Versions are listed by
    `moonclipfs log STORE:NAME`, and in @versions/NAME of a mount.

    \b
    Examples:
      moonclipfs restore /data/store:run1/last.ckpt@3
      moonclipfs restore /data/store:run1/removed
      moonclipfs restore /mnt/ckpt/run1/last.ckpt@3 --to /mnt/ckpt/run1/before-divergence
    """
    source, inside = source_name(target)
    if not source.spec:
        raise UsageError(f"{target} is a whole store: name a snapshot, STORE:NAME@N")
    name, number = parse_spec(source.spec)
    new, inside_new = (None, None) if to is None else new_name(to, source.store)
    mount = writable(inside, inside_new)
    if mount is None:
        with opened(source, write=True) as store:
            version = restore(store, name, number, to=new)
        report(version.path, version.number)
    else:
        answer = ask(mount, "restore", None, name=name, number=number, to=new)
        report(answer["path"], answer["number"])


def writable(*places: Inside | None) -> str | None:
    """The mountpoint of the first of the places that is in a mount which writes: its layer has to know."""
    return next((place.mount.mountpoint for place in places if place and place.mount.writable), None)


def report(path: str, number: int) -> None:
    """Say what was bound."""
    click.echo(f"{printable(path)}@{number}")
