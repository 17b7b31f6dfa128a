"""`moonclipfs umount`: unmount a store."""

from __future__ import annotations

import click

from moonclipfs.fuse.mount import unmount


@click.command("umount")
@click.argument("directory", type=click.Path())
@click.option(
    "-l", "--lazy", is_flag=True, help="Also while it is used: it vanishes now, and ends when nobody uses it."
)
def command(directory: str, lazy: bool) -> None:
    """Unmount the store at DIRECTORY; when it is in use, say by whom.

    \b
    Examples:
      moonclipfs umount /mnt/checkpoints
      moonclipfs umount --lazy /mnt/checkpoints
    """
    unmount(directory, lazy=lazy)
