"""moonclipfs keeps ML checkpoints once, and changed tensors as small lossless deltas.

    import moonclipfs

    with moonclipfs.open("/data/store", "run1/checkpoint-500") as snapshot:
        for path in snapshot.files():
            print(path)
        weights = snapshot.tensor("lm_head.weight")

    moonclipfs.seal("/mnt/ckpt/run1/checkpoint-500")  # in a mount: a version of it, now

Importing this module imports nothing else; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonclipfs.api import Snapshot, StoreReader, TensorInfo, flush, open, seal, status
    from moonclipfs.errors import MoonclipError
    from moonclipfs.torch.manager import CheckpointManager

__version__ = "0.2.0"

__all__ = [
    "CheckpointManager",
    "MoonclipError",
    "Snapshot",
    "StoreReader",
    "TensorInfo",
    "__version__",
    "flush",
    "open",
    "seal",
    "status",
]

_HOMES = {
    "CheckpointManager": "moonclipfs.torch.manager",
    "MoonclipError": "moonclipfs.errors",
    "Snapshot": "moonclipfs.api",
    "StoreReader": "moonclipfs.api",
    "TensorInfo": "moonclipfs.api",
    "flush": "moonclipfs.api",
    "open": "moonclipfs.api",
    "seal": "moonclipfs.api",
    "status": "moonclipfs.api",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'moonclipfs' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
