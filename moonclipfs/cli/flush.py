"""`moonclipfs flush`: wait until everything that was written is stored and durable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from moonclipfs.cli.progress import with_left_bar
from moonclipfs.errors import MoonclipError
from moonclipfs.fuse.control import ask
from moonclipfs.fuse.inside import Inside, flushable


@click.command("flush")
@click.argument("directory", type=click.Path())
def command(directory: str) -> None:
    """Wait until all that was written to the mount of DIRECTORY is encoded and durable in the store.

    Of an overlay, only what was written there.

    Encoding takes all cores then. It says what could not be stored, and by its exit code; that is kept as it was
    written, and can be read.

    \b
    Examples:
      moonclipfs flush /mnt/ckpt
    """
    inside, verb, arguments = flushable(directory)
    if inside.mount.writable:
        ask_long(inside, verb, "storing", **arguments)


def ask_long(inside: Inside, operation: str, title: str, **arguments: Any) -> dict[str, Any]:
    """Ask a mount for what may take long; on a terminal, show how much is staged meanwhile. Raises as `ask`."""
    place = inside.mount.mountpoint
    return with_left_bar(title, lambda: ask(place, operation, None, **arguments), lambda: _staged(place))


def _staged(place: str) -> int:
    try:
        answer: Mapping[str, Any] = ask(place, "status")
    except MoonclipError:
        return 0  # the answer to the question itself tells what is wrong
    return int(answer.get("staged_bytes", 0))
