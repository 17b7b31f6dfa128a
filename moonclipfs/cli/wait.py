"""`moonclipfs wait`: tell each new snapshot as it comes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from moonclipfs.cli.inside import source_name
from moonclipfs.cli.output import printable, version_json
from moonclipfs.cli.target import complete_target, opened, same_path
from moonclipfs.cli.values import duration, time_text
from moonclipfs.errors import NotFoundError, UsageError
from moonclipfs.fuse.mounts import find_mounts
from moonclipfs.layers.dryness import is_dry_run
from moonclipfs.store.log import Names, parse_spec
from moonclipfs.store.replay import is_at_or_below
from moonclipfs.store.store import Store
from moonclipfs.types import Version

_POLL_SECONDS = 0.5
_SHOWN_SECONDS = 2.0
"""A mount follows the log within half a second; one that takes longer is not waited for."""
_LOOK_SECONDS = 0.05


@click.command("wait")
@click.argument("target", metavar="NAME", shell_complete=complete_target)
@click.option("--follow", is_flag=True, help="Go on for ever, one line for each.")
@click.option("--after", metavar="NAME@N", help="Everything newer than this version counts as new.")
@click.option("--timeout", type=duration, metavar="TIME", help="Give up after this: 90, 30m, 12h.")
@click.option("--json", "as_json", is_flag=True, help="Print each as one line of JSON; keys below.")
def command(target: str, follow: bool, after: str | None, timeout: float | None, as_json: bool) -> None:
    """Wait for the next complete snapshot of NAME or below it, and print it as NAME@N.

    NAME need not be there yet; a whole STORE waits for any. New is what is published after the command has started,
    or after the version of --after, so that a loop misses none. NAME@N waits until that version is there. Snapshots
    marked incomplete are passed over. Your mounts of the store show a snapshot before it is printed. The end of
    --timeout is exit code 3.

    \b
    Examples:
      moonclipfs wait /data/store:run1
      moonclipfs wait --follow /data/store:run1 | while read -r name; do ./evaluate "$name"; done
      moonclipfs wait --after run1/checkpoint-500@1 --timeout 12h /data/store:run1

    \b
    JSON: name, version, files, bytes, time_ns
    """
    where, _ = source_name(target)
    deadline = None if timeout is None else time.monotonic() + timeout
    with opened(where) as store:
        for version in arrivals(store, where.spec, after, deadline):
            wait_for_mounts(version.path, version.number, where.store)
            if as_json:
                click.echo(json.dumps(version_json(version)))
            else:
                click.echo(printable(f"{version.path}@{version.number}"))
            if not follow:
                return
    raise NotFoundError(f"no new snapshot of {target} within {time_text(timeout or 0)} seconds")


def arrivals(store: Store, spec: str, after: str | None, deadline: float | None) -> Iterator[Version]:
    """Each complete snapshot as it is bound, until `deadline` on the monotonic clock. Raises NotFoundError."""
    name, number = parse_spec(spec)
    names = store.names()
    seen = 0 if number is not None else names.sequence
    if after is not None:
        seen = _sequence(names, after)
    while True:
        for version in _bound_after(names, seen):
            if number is not None:
                if (version.path, version.number) == (name, number):
                    yield version
            elif not name or is_at_or_below(version.path, name):
                yield version
        seen = max(seen, names.sequence)
        if deadline is not None and time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        store.renew_lease()
        names = store.names()


def wait_for_mounts(name: str, number: int, store: Path) -> None:
    """Return when the mounts of a store that this user made show a version, at the latest after _SHOWN_SECONDS."""
    mounts = [mount for mount in find_mounts() if mount.owner in (None, os.geteuid())]
    places = [mount.mountpoint for mount in mounts if same_path(Path(mount.store), store)]
    # On a thread that may be left behind: a server may hang.
    thread = threading.Thread(target=_look, args=(name, number, places, time.monotonic() + _SHOWN_SECONDS), daemon=True)
    thread.start()
    thread.join(_SHOWN_SECONDS)


def _look(name: str, number: int, mountpoints: Sequence[str], deadline: float) -> None:
    for mountpoint in mountpoints:
        if is_dry_run(mountpoint):
            continue  # it shows the names as they were when it began
        for path in (f"@versions/{name}/{number}", name):
            while time.monotonic() < deadline and not _is_known(os.path.join(mountpoint, path)):
                time.sleep(_LOOK_SECONDS)


def _is_known(path: str) -> bool:
    """False for what is not there yet, True also for what cannot be looked at."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _bound_after(names: Names, sequence: int) -> list[Version]:
    """Complete versions of names that are there, bound by log records after `sequence`, in that order."""
    found = [
        version
        for version in names.all_versions()
        if version.sequence > sequence and not version.removed and not version.metadata.get("incomplete")
    ]
    return sorted(found, key=lambda version: version.sequence)


def _sequence(names: Names, spec: str) -> int:
    """The log record that bound NAME@N. Raises NotFoundError, UsageError."""
    name, number = parse_spec(spec)
    if number is None:
        raise UsageError(f"--after takes a version as this command prints it, NAME@N, not {spec}")
    for version in names.versions(name):
        if version.number == number:
            return version.sequence
    raise NotFoundError(f"{spec} is not kept any more, so what came after it cannot be told: leave --after away")
