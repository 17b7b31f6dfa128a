"""Which directories become snapshots by themselves: the topmost ones that hold a checkpoint.

Only names are looked at here. What a unit must hold to be sealed is for `completeness.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

_SUFFIXES = (b".safetensors", b".pt", b".pth", b".bin", b".ckpt", b".npz", b".gguf", b".index.json")
_NAMES = frozenset({b"model_index.json", b"trainer_state.json", b".metadata"})
_TEMPORARY_PREFIXES = (b"tmp", b".tmp")
_TEMPORARY_SUFFIXES = (b".tmp", b".incomplete")
_NUMBERED = re.compile(rb"checkpoint[-_]\d+")
_DIGITS = re.compile(rb"\d+")


class Folder(Protocol):
    """A directory as the rule of units sees it."""

    @property
    def is_top(self) -> bool:
        """True for the root of the mount, or the directory that is watched: it can be no snapshot by itself."""
        ...

    def files(self) -> Iterable[bytes]:
        """Return the names of the regular files in it."""
        ...

    def folders(self) -> Iterable[bytes]:
        """Return the names of the directories in it."""
        ...

    def has_snapshots_below(self) -> bool:
        """Return whether a snapshot is bound anywhere below it."""
        ...


AnyFolder = TypeVar("AnyFolder", bound="Branch")


class Branch(Folder, Protocol):
    """A folder that can be gone down from."""

    def open(self: AnyFolder, name: bytes) -> AnyFolder | None:
        """Return one of `folders`, or None where there is nothing of interest below it."""
        ...


def is_checkpoint_file(name: bytes) -> bool:
    """Return whether a regular file of this name is a checkpoint, or the index of one."""
    return (name.endswith(_SUFFIXES) or name in _NAMES) and not is_temporary(name)


def is_temporary(name: bytes) -> bool:
    """Return whether a file or directory of this name is still being written, and gets another name afterwards."""
    return name.startswith(_TEMPORARY_PREFIXES) or is_partial(name)


def is_partial(name: bytes) -> bool:
    """Return whether a name is that of a file in the making beside its later name: a part of a unit is missing then.

    One that only begins as a temporary one may be left of a writer that was killed, and keeps nothing from a seal.
    """
    return name.endswith(_TEMPORARY_SUFFIXES)


def is_run(folder: Folder) -> bool:
    """Return whether a directory holds numbered checkpoints (`checkpoint-500`), whatever else lies beside them.

    `Trainer` puts its last model and state there too: as one unit it would take in every checkpoint once more.
    """
    return any(_NUMBERED.fullmatch(name) for name in folder.folders())


def is_unit(folder: Folder) -> bool:
    """Return whether a directory is a unit, when no directory above it is one."""
    if folder.is_top or not any(map(is_checkpoint_file, folder.files())):
        return False
    return not is_run(folder) and not folder.has_snapshots_below()


def units(top: AnyFolder) -> Iterator[AnyFolder]:
    """Yield the units at and below a folder; nothing below one is another. Temporary names are passed over."""
    todo = [top]
    while todo:
        folder = todo.pop()
        if is_unit(folder):
            yield folder
            continue
        below = (folder.open(name) for name in folder.folders() if not is_temporary(name))
        todo += [one for one in below if one is not None]


def masked(name: bytes) -> bytes:
    """Return a name with each run of digits as `#`: what names of one line, and of their files, have in common."""
    return _DIGITS.sub(b"#", name)
