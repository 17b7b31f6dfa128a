"""`moonclipfs seal`: make a directory of a mount a snapshot."""

from __future__ import annotations

import click

from moonclipfs.cli.flush import ask_long
from moonclipfs.cli.output import printable
from moonclipfs.fuse.inside import sealable


@click.command("seal")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@click.option("--no-wait", is_flag=True, help="Return once it is captured; it is stored and published soon after.")
def command(paths: tuple[str, ...], no_wait: bool) -> None:
    """Make each PATH, a directory inside a mount, the next version of the snapshot of that name.

    What is in it at this moment is in the version; what is written later is not. Nothing is new when nothing has
    changed since the last one. Versions that are sealed by this command are kept until they are forgotten.

    \b
    Examples:
      moonclipfs seal /mnt/ckpt/run1/checkpoint-500
      moonclipfs seal --no-wait /mnt/ckpt/run1
    """
    for path in paths:
        inside = sealable(path)
        answer = ask_long(inside, "seal", "storing", path=inside.path, wait=not no_wait)
        if "number" in answer:
            click.echo(f"{printable(answer['path'])}@{answer['number']}")
        else:
            click.echo(f"{printable(inside.path)}: {'captured' if no_wait else 'there is nothing to seal'}")
