"""`moonclipfs run --dry-run`: what its command is given, and what is told and asked when it has ended."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import click

from moonclipfs.cli.overlaywords import print_commit, print_diff
from moonclipfs.dryrun import dry_run_name
from moonclipfs.errors import MoonclipError, UsageError
from moonclipfs.fuse.attached import AttachedMount
from moonclipfs.store.backend import os_errors
from moonclipfs.store.paths import check_path
from moonclipfs.store.target import OVERLAYS

DIRECTORY_VARIABLE = "MOONCLIPFS_DRY_RUN"
"""In the environment of the command: the directory that it works in."""
PLACEHOLDER = "{dir}"
"""Stands for that directory in the words of the command."""
_WHOLE = "/"
"""As a base: all that the mount shows."""


@dataclass(frozen=True, slots=True)
class DryRunOptions:
    """What was asked for. `base` is None for the whole store, `name` that of the snapshot to commit as."""

    base: str | None = None
    quota: int | None = None
    commit: bool = False
    name: str | None = None
    report: str | None = None
    read_only: bool = False
    """Whether the store can only be read: then nothing can be committed."""

    def check(self) -> None:
        """Raise UsageError for what does not go together."""
        if self.base is not None and self.base.startswith("/"):
            raise UsageError(f"{self.base} of a mount cannot be the base of another: seal it, and name the snapshot")
        if self.base is None and (self.commit or self.quota is not None):
            raise UsageError(f"--{'commit' if self.commit else 'quota'} is for one overlay: name its --base")
        if self.read_only and (self.commit or self.base is None):
            raise UsageError(
                "the store can only be read: a dry run needs a --base, and what is to be kept an overlay, by "
                "`moonclipfs overlay create --state DIR`"
            )
        if self.name is not None:
            if not self.commit:
                raise UsageError("--as names what --commit makes: give both")
            check_path(self.name.strip("/"))


class DryRunOf:
    """The dry run of one command, in a mount that was made for it."""

    def __init__(self, mount: AttachedMount, options: DryRunOptions) -> None:
        """Raises NotFoundError for a base that is not there, and what else an overlay cannot be made for."""
        self._mount = mount
        self._options = options
        self._name = dry_run_name(options.base or "")
        mount.ask(
            "overlay_create",
            name=self._name,
            base=options.base or _WHOLE,
            quota=options.quota,
            committable=options.commit,
        )
        whole = options.base is None
        self.directory = mount.place if whole else f"{mount.place}/{OVERLAYS}/{self._name}"
        self._diff_verb = "dry_run_diff" if whole else "overlay_diff"

    def words(self, words: list[str]) -> list[str]:
        """The words of the command, with its directory."""
        return [word.replace(PLACEHOLDER, self.directory) for word in words]

    @property
    def environment(self) -> dict[str, str]:
        """Of the command."""
        return {**self._mount.environment, DIRECTORY_VARIABLE: self.directory}

    def finish(self, code: int, mask: Collection[int], say: Callable[[str], None]) -> int:
        """Tell what was changed, and commit that or offer to; returns the exit code. Signals are as in `mask`."""
        before = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            return self._finish(code, say) or code
        except KeyboardInterrupt:
            say("interrupted: nothing of the dry run is kept")
        except MoonclipError as error:
            say(f"{error}; nothing of the dry run is kept")
            return code or error.exit_code
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return code

    def _finish(self, code: int, say: Callable[[str], None]) -> int:
        options = self._options
        found = self._mount.ask(self._diff_verb, name=self._name)
        if options.report is not None:
            with os_errors(f"write {options.report}"), open(options.report, "w") as file:
                json.dump(found, file, indent=2)
        print_diff(found, err=True)
        if not options.commit:
            return self._offer(found, say)
        if code:
            say(f"the command failed ({code}): nothing is committed, and nothing of the dry run is kept")
        else:
            self._commit(options.name)
        return 0

    def _offer(self, found: Mapping[str, Any], say: Callable[[str], None]) -> int:
        """On a terminal, ask whether to keep what was changed."""
        if not found["different"] or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return 0
        if self._options.read_only:
            say("nothing of this is kept: the store can only be read")
            return 0
        if self._options.base is None:
            say("nothing of this is kept; with --base SNAPSHOT it could be")
            return 0
        try:
            answer = click.prompt(
                "Commit it as a snapshot? Its name (nothing: discard)", default="", show_default=False, err=True
            )
        except click.Abort:
            click.echo(err=True)
            return 0
        if answer.strip():
            self._commit(answer.strip())
        return 0

    def _commit(self, name: str | None) -> None:
        answer = self._mount.ask("overlay_commit", name=self._name, allow=True, **{"as": name})
        print_commit(answer, err=True)
