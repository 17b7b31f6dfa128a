"""Whether what is written at a path is thrown away in the end: those who save ask before they do."""

from __future__ import annotations

import os

from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.tree import XATTR_PREFIX

ATTRIBUTE = XATTR_PREFIX + b"dry_run"
"""Computed on everything in a layer that keeps nothing: `1` there, and no such attribute elsewhere."""


def is_dry_run(path: str | os.PathLike[str] | LayerPath) -> bool:
    """Whether `path`, which need not be there yet, lies in a dry run that was not asked to allow a commit."""
    if isinstance(path, LayerPath):
        while (value := path.attribute(ATTRIBUTE)) is None and path.parent != path:
            path = path.parent
        return value == b"1"
    real = os.path.realpath(path)
    while not os.path.lexists(real) and os.path.dirname(real) != real:
        real = os.path.dirname(real)
    try:
        return os.getxattr(real, ATTRIBUTE) == b"1"
    except OSError:
        return False  # no such attribute, or a file system without attributes
