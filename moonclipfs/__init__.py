"""moonclipfs keeps ML checkpoints once, and changed tensors as small lossless deltas.

    import moonclipfs

    with moonclipfs.open("/data/store", "run1/checkpoint-500") as snapshot:
        for path in snapshot.files():
            print(path)
        weights = snapshot.tensor("lm_head.weight")

    moonclipfs.seal("/mnt/ckpt/run1/checkpoint-500")  # in a mount: a version of it, now

    moonclipfs.thin("/data/store:run1", keep_optimizer_last=2)  # older snapshots keep their weights only

    with moonclipfs.dry_run("/data/store", "run1/checkpoint-500") as path:  # to work on as if it were one's own
        train(path)

Importing this module imports nothing else; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonclipfs.api import Snapshot, StoreReader, TensorInfo, flush, open, seal, status
    from moonclipfs.dryrun import DryRun, dry_run
    from moonclipfs.errors import MoonclipError
    from moonclipfs.expertsapi import experts
    from moonclipfs.layers.dryness import is_dry_run
    from moonclipfs.overlayapi import Overlay, create_overlay, overlay, overlays
    from moonclipfs.store.retention import Rules
    from moonclipfs.tidying import optimize, optimize_aside, thin
    from moonclipfs.torch.manager import CheckpointManager

__version__ = "0.3.0"

__all__ = [
    "CheckpointManager",
    "DryRun",
    "MoonclipError",
    "Overlay",
    "Rules",
    "Snapshot",
    "StoreReader",
    "TensorInfo",
    "__version__",
    "create_overlay",
    "dry_run",
    "experts",
    "flush",
    "is_dry_run",
    "open",
    "optimize",
    "optimize_aside",
    "overlay",
    "overlays",
    "seal",
    "status",
    "thin",
]

_HOMES = {
    "CheckpointManager": "moonclipfs.torch.manager",
    "DryRun": "moonclipfs.dryrun",
    "MoonclipError": "moonclipfs.errors",
    "Overlay": "moonclipfs.overlayapi",
    "Rules": "moonclipfs.store.retention",
    "Snapshot": "moonclipfs.api",
    "StoreReader": "moonclipfs.api",
    "TensorInfo": "moonclipfs.api",
    "create_overlay": "moonclipfs.overlayapi",
    "dry_run": "moonclipfs.dryrun",
    "experts": "moonclipfs.expertsapi",
    "flush": "moonclipfs.api",
    "is_dry_run": "moonclipfs.layers.dryness",
    "open": "moonclipfs.api",
    "optimize": "moonclipfs.tidying",
    "optimize_aside": "moonclipfs.tidying",
    "overlay": "moonclipfs.overlayapi",
    "overlays": "moonclipfs.overlayapi",
    "seal": "moonclipfs.api",
    "status": "moonclipfs.api",
    "thin": "moonclipfs.tidying",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'moonclipfs' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
