"""`moonclipfs umount`: unmount a store."""

from __future__ import annotations

import click

from moonclipfs.cli.output import human
from moonclipfs.fuse.mount import unmount


@click.command("umount")
@click.argument("directory", type=click.Path())
@click.option(
    "-l", "--lazy", is_flag=True, help="Also while it is used: it vanishes now, and ends when nobody uses it."
)
def command(directory: str, lazy: bool) -> None:
    """Unmount the store at DIRECTORY; when it is in use, say by whom. What was written to it is stored first.

    \b
    Examples:
      moonclipfs umount /mnt/checkpoints
      moonclipfs umount --lazy /mnt/checkpoints
    """
    unmount(directory, lazy=lazy, waiting=_tell)


def _tell(left: int) -> None:
    click.echo(f"waiting until {human(left)} are stored", err=True)
