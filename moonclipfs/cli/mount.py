"""`moonclipfs mount`: mount a store as a file system."""

from __future__ import annotations

from typing import Any

import click

from moonclipfs.cli.mounting import mount_options, with_mount_options
from moonclipfs.cli.output import printable
from moonclipfs.cli.target import complete_target, whole_store
from moonclipfs.errors import UsageError
from moonclipfs.fuse.mount import mount


@click.command("mount")
@click.argument(
    "store_and_directory", metavar="STORE DIRECTORY", nargs=-1, required=True, shell_complete=complete_target
)
@click.option("-f", "--foreground", is_flag=True, help="Stay until unmounted; Ctrl-C unmounts.")
@click.option("--dry-run", is_flag=True, help="Everything can be written, and nothing of it is kept.")
@with_mount_options
def command(store_and_directory: tuple[str, ...], foreground: bool, dry_run: bool, **chosen: Any) -> int:
    """Mount STORE (or $MOONCLIPFS_STORE) at DIRECTORY, which must be empty, to read and to write.

    Every snapshot is a directory at its name; @versions/NAME/N is a version of it, @latest/DIR the newest below DIR.
    What programs write is kept in a layer until it is sealed: by itself, once a checkpoint is complete and was quiet
    for --seal-after, or by `moonclipfs seal`. A host has one layer of each store; --layer gives a second mount its own.
    Overlays, for experiments over a fixed base, are at @overlays/NAME (`moonclipfs overlay`). With --dry-run nothing
    that is written is kept, or seen by anybody else, and nothing can be sealed; the mount shows what was sealed.

    The command returns when the mount answers; a failure is told here, by its exit code.

    \b
    Examples:
      moonclipfs mount /data/store /mnt/ckpt
      moonclipfs mount --read-only /data/store /mnt/ckpt
      moonclipfs mount --layer trial2 --staging /local/nvme --seal-after off /data/store /mnt/trial2
      moonclipfs mount --dry-run /data/store /mnt/try
      moonclipfs mount --foreground --log mount.log /data/store /mnt/ckpt
      moonclipfs umount /mnt/ckpt
    """
    if len(store_and_directory) > 2:
        raise UsageError("mount takes a store and a directory")
    *store, directory = store_and_directory
    options = mount_options(foreground=foreground, dry_run=dry_run, **chosen)
    path = whole_store(store[0] if store else None)
    code = mount(path, directory, options)
    if not foreground:
        click.echo(f"mounted {printable(str(path))} at {printable(directory)}")
    return code
