"""`moonclipfs mount`: mount a store as a file system."""

from __future__ import annotations

from pathlib import Path

import click

from moonclipfs import limits
from moonclipfs.cli.output import printable
from moonclipfs.cli.target import complete_target, whole_store
from moonclipfs.errors import UsageError
from moonclipfs.fuse.mount import mount
from moonclipfs.fuse.prepare import MountOptions


@click.command("mount")
@click.argument(
    "store_and_directory", metavar="STORE DIRECTORY", nargs=-1, required=True, shell_complete=complete_target
)
@click.option("-f", "--foreground", is_flag=True, help="Stay until unmounted; Ctrl-C unmounts.")
@click.option("--log", type=click.Path(dir_okay=False), help="File for the log of the mount.")
@click.option("--allow-other", is_flag=True, help="Let other users in; the store must be private.")
@click.option("--show-virtual", is_flag=True, help="List @latest and @versions at the root, too.")
@click.option(
    "--cache",
    "cache_mib",
    metavar="MIB",
    type=click.IntRange(min=1),
    help="Decoded bytes kept in memory (default 256).",
)
def command(
    store_and_directory: tuple[str, ...],
    foreground: bool,
    log: str | None,
    allow_other: bool,
    show_virtual: bool,
    cache_mib: int | None,
) -> int:
    """Mount STORE (or $MOONCLIPFS_STORE) read-only at DIRECTORY, which must be empty.

    Every snapshot is a directory at its name; @versions/NAME/N is a version of it, @latest/DIR the newest below DIR.
    The command returns when the mount answers; a failure is told here, by its exit code.

    \b
    Examples:
      moonclipfs mount /data/store /mnt/checkpoints
      moonclipfs mount --foreground --log mount.log /data/store /mnt/checkpoints
      moonclipfs umount /mnt/checkpoints
    """
    if len(store_and_directory) > 2:
        raise UsageError("mount takes a store and a directory")
    *store, directory = store_and_directory
    options = MountOptions(
        foreground=foreground,
        log=str(Path(log).absolute()) if log else None,
        allow_other=allow_other,
        show_virtual=show_virtual,
        cache_bytes=cache_mib * limits.MIB if cache_mib else limits.BLOCK_CACHE_BYTES,
    )
    path = whole_store(store[0] if store else None)
    code = mount(path, directory, options)
    if not foreground:
        click.echo(f"mounted {printable(str(path))} at {printable(directory)}")
    return code
