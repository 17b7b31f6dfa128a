"""Where a layer stages bytes, and which of its files are there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from moonclipfs.errors import UsageError
from moonclipfs.store.backend import os_errors

NAME_DIGITS = 16
"""Hex digits of a staging file's name, which is the number of its generation."""


def note_place(directory: Path, place: Path) -> None:
    """Note in the directory of a layer that its bytes are staged at `place` from now on. Raises UsageError when some
    wait at another place: nobody would find them.
    """
    default, note = directory / "staging", directory / "staged-in"
    with os_errors(f"note in {note} where files are staged"):
        before = Path(os.readlink(note)) if note.is_symlink() else default
        if before == place:
            return
        if before.is_dir() and staged_numbers(before):
            option = "without --staging" if before == default else f"with --staging {before.parent}"
            raise UsageError(f"files of layer {directory.name} wait in {before}: mount it {option}, and unmount it")
        with suppress(FileNotFoundError):
            note.unlink()
        if place != default:
            note.symlink_to(place)


def staged_numbers(directory: Path) -> set[int]:
    """Numbers of the generations that have files in a directory. Raises BackendError."""
    with os_errors(f"list {directory}"):
        names = [name for name in os.listdir(directory) if len(name) == NAME_DIGITS]
    return {number for name in names if (number := _parse(name)) is not None}


def _parse(name: str) -> int | None:
    try:
        return int(name, 16)
    except ValueError:
        return None
