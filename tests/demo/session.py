"""Run moonclipfs as a person would, and leave no mount and no process, however the demo ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NO_FUSE = 10
"""Exit code of `moonclipfs mount` where FUSE is not to be had."""


class CommandError(Exception):
    """A moonclipfs command failed."""

    def __init__(self, command: list[str], code: int, message: str) -> None:
        super().__init__(f"`{' '.join(command)}` failed with exit code {code}: {message.strip()}")
        self.code = code


def moonclipfs(*arguments: str | Path, show: bool = True, own_session: bool = False) -> str:
    """Run one command and return what it prints; raises CommandError.

    With `own_session` the keys of the terminal (Ctrl-C) do not reach it.
    """
    command = ["moonclipfs", *map(str, arguments)]
    if show:
        print("$ " + " ".join(os.path.relpath(word) if word.startswith("/") else word for word in command), flush=True)
    program = Path(sys.executable).with_name("moonclipfs")
    done = subprocess.run(
        [program, *command[1:]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=own_session,
    )
    if done.returncode != 0:
        raise CommandError(command, done.returncode, done.stderr)
    return done.stdout


def moonclipfs_json(*arguments: str | Path) -> dict[str, object]:
    """Run one command with --json and return what it says."""
    result = json.loads(moonclipfs(*arguments, "--json"))
    if not isinstance(result, dict):
        raise CommandError(["moonclipfs", *map(str, arguments)], 0, "it printed no JSON object")
    return result


def stop_on_signals() -> None:
    """Make every signal that asks the demo to end unwind it like Ctrl-C does."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep signals until the end of the block. They are handled, not blocked: a child would inherit a block."""
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, remember) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            raise KeyboardInterrupt


def is_mounted(directory: Path) -> bool:
    """Whether something is mounted there, asked of the kernel's table and not of a mount that may hang."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return str(directory).replace(" ", "\\040") in mounted


@contextmanager
def mounted(store: Path, directory: Path) -> Iterator[bool]:
    """Mount the store for the length of the block; yields False where this machine cannot mount."""
    directory.mkdir(exist_ok=True)
    try:
        with _uninterrupted():
            try:
                moonclipfs("mount", store, directory, own_session=True)
            except CommandError as error:
                if error.code != NO_FUSE:
                    raise
                print(error)
        yield is_mounted(directory)
    finally:
        with _uninterrupted():
            if is_mounted(directory):
                _unmount(directory)


def _unmount(directory: Path) -> None:
    try:
        moonclipfs("umount", directory, own_session=True)
    except CommandError:
        # A failed load can leave a mapping behind; the mount must go all the same.
        moonclipfs("umount", "--lazy", directory, own_session=True)
