"""Whether what is written at a path is thrown away in the end: those who save ask before they do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moonclipfs.errors import UsageError
from moonclipfs.store.target import XATTR_DRY_RUN

if TYPE_CHECKING:
    from moonclipfs.layers.layerpath import LayerPath


def require_kept(path: str | os.PathLike[str] | LayerPath) -> None:
    """Raise UsageError for a path in a dry run: what is to be kept does not come from there, nor go there."""
    if is_dry_run(path):
        raise UsageError(f"{path} is in a dry run, of which nothing is kept: begin it with --commit to keep some of it")


def is_dry_run(path: str | os.PathLike[str] | LayerPath) -> bool:
    """Whether `path`, which need not be there yet, lies in a dry run that was not asked to allow a commit."""
    if not isinstance(path, str | os.PathLike):
        while (value := path.attribute(XATTR_DRY_RUN.encode())) is None and path.parent != path:
            path = path.parent
        return value == b"1"
    real = os.path.realpath(path)
    while not os.path.lexists(real) and os.path.dirname(real) != real:
        real = os.path.dirname(real)
    try:
        return os.getxattr(real, XATTR_DRY_RUN) == b"1"
    except OSError:
        return False  # no such attribute, or a file system without attributes
