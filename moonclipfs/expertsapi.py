"""Where the experts of a checkpoint are, in a mount and without one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import overload

from moonclipfs.errors import UsageError
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.names import Area

_STORE = "user.moonclip.store"
_EXPERTS = os.fsdecode(Area.EXPERTS.value)
_OVERLAYS = "@overlays"


@overload
def experts(path: LayerPath) -> LayerPath: ...
@overload
def experts(path: str | os.PathLike[str]) -> Path: ...


def experts(path: str | os.PathLike[str] | LayerPath) -> Path | LayerPath:
    """Return the directory that has a file for each expert of the checkpoint in the directory `path`.

    That is a snapshot or a directory in it, or one of an overlay: then its experts can be written to. `path` is in a
    mount, or one of `dry_run` without a mount. Raises UsageError for a path elsewhere.
    """
    if isinstance(path, LayerPath):
        return path.experts()
    place = Path(os.path.abspath(path))
    root = place
    while not os.path.ismount(root):
        root = root.parent
    inner = place.relative_to(root).parts
    if inner[:1] == (_EXPERTS,):
        return place
    if not _is_ours(root) or (inner and inner[0].startswith("@") and inner[0] != _OVERLAYS):
        raise UsageError(f"{path} is no snapshot and no overlay in a mount of moonclipfs, so it has no expert files")
    return root.joinpath(_EXPERTS, *inner)


def _is_ours(root: Path) -> bool:
    try:
        return bool(os.getxattr(root, _STORE))
    except OSError:
        return False
