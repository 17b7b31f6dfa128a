"""`moonclipfs watch`: absorb the finished checkpoints of a plain directory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from moonclipfs import limits
from moonclipfs.cli.output import PROGRAM, printable
from moonclipfs.cli.target import complete_target, one_target, opened
from moonclipfs.cli.values import duration, time_text
from moonclipfs.errors import UsageError
from moonclipfs.layers.dryness import require_kept
from moonclipfs.layers.watching import Absorbed, Watcher, watch, watch_once
from moonclipfs.store.log import parse_spec
from moonclipfs.store.provenance import collect
from moonclipfs.types import Version

_LOOK_SECONDS = 0.5


@click.command("watch")
@click.argument("directory", type=click.Path())
@click.argument("store", required=False, shell_complete=complete_target)
@click.option("--as", "name", metavar="NAME", help="Snapshots lie below this name (default: that of the directory).")
@click.option(
    "--keep-plain", metavar="K", type=click.IntRange(min=0), help="Delete all but the newest K checkpoints once stored."
)
@click.option("--once", is_flag=True, help="Absorb what is finished now, and end.")
@click.option(
    "--quiet",
    metavar="TIME",
    type=duration,
    default=time_text(limits.WATCH_QUIET_SECONDS),
    help=f"How long a checkpoint must not have changed (default {time_text(limits.WATCH_QUIET_SECONDS)}).",
)
@click.option("--no-provenance", is_flag=True, help="Keep no command line, git commit, job, host and user.")
@click.pass_context
def command(
    context: click.Context,
    /,
    directory: str,
    store: str | None,
    name: str | None,
    keep_plain: int | None,
    once: bool,
    quiet: float,
    no_provenance: bool,
) -> int:
    """Store each checkpoint that a program leaves in DIRECTORY, as soon as it is finished; needs no mount.

    Finished is a directory of checkpoint files that nobody writes to, that was quiet for a moment, and in which
    nothing is missing that an index or its siblings name. Each becomes the snapshot NAME/PATH, is read back and
    compared. With --keep-plain, those beside each other are deleted then, but for the newest K. It may be stopped and
    started at any time, also before there is a DIRECTORY; SIGTERM and Ctrl-C end it after the file in work.

    With --once, the exit code is 1 when something is not finished, and was left.

    \b
    Examples:
      moonclipfs watch out/run1 /data/store --keep-plain 2
      moonclipfs watch out/run1 /data/store --as team/run1 --keep-plain 1 &
      moonclipfs watch --once out/run1 /data/store
    """
    require_kept(directory)
    target = one_target(store)
    if target.spec and name is not None:
        raise UsageError(f"the name is given twice: {target.spec} and --as {name}")
    if parse_spec(target.spec)[1] is not None:
        raise UsageError(f"{target.spec} is one version: new ones get their numbers by themselves")
    with opened(target, write=True) as opened_store, _stopped_by_signals() as stop:
        if not once and not _wait_for(directory, stop):
            return 0
        watcher = Watcher(
            Path(directory),
            opened_store,
            as_name=target.spec or name,
            keep_plain=keep_plain,
            quiet=quiet,
            deleted=_print_deleted,
            provenance=None if no_provenance else collect([PROGRAM, *context.obj], Path.cwd()),
        )
        for absorbed in (watch_once if once else watch)(watcher, stop):
            _print(absorbed)
        unfinished = watcher.missing()
    if not once:
        return 0
    for path, what in sorted(unfinished.items()):
        click.echo(f"not finished: {printable(path)}: {printable(', '.join(what))}", err=True)
    return int(bool(unfinished) or watcher.pending)


def _wait_for(directory: str, stop: threading.Event) -> bool:
    """Wait until something is there; whether that was before `stop`."""
    if not os.path.lexists(directory):
        click.echo(f"{printable(directory)} does not exist yet: waiting for it", err=True)
    while not os.path.exists(directory) and not stop.wait(_LOOK_SECONDS):
        pass
    return not stop.is_set()


def _print(absorbed: Absorbed) -> None:
    name = f"{absorbed.version.path}@{absorbed.version.number}"
    how = "stored and verified" if absorbed.new else "there already, verified"
    click.echo(f"{printable(str(absorbed.path))}: {how} as {printable(name)}")


def _print_deleted(path: Path, version: Version) -> None:
    click.echo(f"{printable(str(path))}: deleted, {printable(version.path)}@{version.number} has it")


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that the first signal to end sets; the second one acts as it would without this."""
    stop = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(*_: object) -> None:
        stop.set()
        restore()

    for number in numbers:
        signal.signal(number, end)
    try:
        yield stop
    finally:
        restore()
