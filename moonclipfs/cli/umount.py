"""`moonclipfs umount`: unmount a store."""

from __future__ import annotations

import click

from moonclipfs.cli.progress import left_bar
from moonclipfs.fuse.mount import unmount


@click.command("umount")
@click.argument("directory", type=click.Path())
@click.option(
    "-l", "--lazy", is_flag=True, help="Also while it is used: it vanishes now, and ends when nobody uses it."
)
def command(directory: str, lazy: bool) -> None:
    """Unmount the store at DIRECTORY, and wait until what was written to it is stored; when it is in use, say by whom.

    What cannot be stored is told, and is stored by the next mount of the same layer.

    \b
    Examples:
      moonclipfs umount /mnt/ckpt
      moonclipfs umount --lazy /mnt/ckpt
    """
    with left_bar("storing") as tell:
        unmount(directory, lazy=lazy, waiting=tell)
