"""What the arguments of moonclip's manager mean for ours."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonclipfs.errors import UsageError
from moonclipfs.store.retention import Rules
from moonclipfs.store.target import is_store

log = logging.getLogger(__name__)

_MEANINGLESS = {
    "compression_level": (3, "how a tensor is stored is chosen for each block"),
    "full_every_steps": (5000, "a chain has three links at most, whatever the step"),
    "delta_max_ratio": (0.95, "of a delta and a full tensor the smaller is stored"),
    "merge_max_chain": (10, "a chain has three links at most"),
    "keep_base_in_memory": (True, "bases are read block by block"),
    "pin_device_copies": (True, "copies from a device always go to pinned memory"),
    "sync_every_n_saves": (100, "nothing is copied to a bucket"),
}
"""Arguments without a meaning here: the default, and why."""
_REMOTE = {
    "s3_bucket": None, "s3_region": "us-east-1", "s3_prefix": "", "s3_endpoint": None, "s3_access_key": None,
    "s3_secret_key": None, "s3_path_style": False, "s3_session_token": None,
}  # fmt: skip
FURTHER = {"rollback_interval_steps": 10000, "max_rollback_snapshots": 3, "sync_every_n_saves": 100, **_REMOTE}
"""What moonclip takes by name only, and the defaults."""
_told: set[str] = set()


def topology(world_size: int | str | None, rank: int | str | None) -> tuple[int, int]:
    """What is said, `auto` as the launcher says. Raises ValueError where that is left open under a launcher."""
    launched_size, launched_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    world_size = launched_size if world_size == "auto" else world_size
    rank = launched_rank if rank == "auto" else rank
    if launched_size > 1 and (world_size is None or rank is None):
        raise ValueError(
            f"the launcher says that this is rank {launched_rank} of {launched_size}, and the manager was not told "
            f"which topology it is for: give world_size=1, rank=0 for a store of each rank's own, "
            f"world_size={launched_size}, rank={launched_rank} (or 'auto' for both) for one that they share"
        )
    return int(1 if world_size is None else world_size), int(0 if rank is None else rank)


def rules(full: int, deltas: int, total: int | None, further: Mapping[str, Any]) -> Rules:
    """The same snapshots stay as with moonclip, or more: there, only full ones are rollback points."""
    last = full * (1 + deltas) if total is None else total
    interval, points = further["rollback_interval_steps"], further["max_rollback_snapshots"]
    if interval <= 0 or points <= 0:
        return Rules(keep_last=max(1, last))
    return Rules(keep_last=max(1, last), keep_every=interval, keep_every_last=points)


def cast_rules(rules: str | Mapping[str, str] | None) -> str | dict[str, str] | None:
    """Patterns as ours: only `*` is more than itself, and `none` keeps a tensor as it is."""
    if rules is None or rules == "none":
        return None
    if isinstance(rules, str):
        return rules
    escaped = {pattern.replace("[", "[[]").replace("?", "[?]"): word for pattern, word in rules.items()}
    return {pattern: "keep" if word == "none" else word for pattern, word in escaped.items()}


def check_place(root: Path, further: Mapping[str, Any]) -> None:
    """Make what is above a new store. Raises UsageError for a bucket, and for a store of moonclip itself."""
    if any(further[name] != default for name, default in _REMOTE.items()):
        raise UsageError(
            "s3_bucket and the like: checkpoints are not copied to a bucket here; copy the store's directory to one, "
            "which is valid also while it is written to, and leave these arguments out"
        )
    if (root / "manifest.json").exists() and not is_store(root):
        raise UsageError(
            f"{root} is a store of moonclip: import it with `moonclipfs import-moonclip {root} NEW`, and give NEW"
        )
    root.parent.mkdir(parents=True, exist_ok=True)


def tell_meaningless(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        default, why = _MEANINGLESS[name]
        if value != default and name not in _told:
            _told.add(name)
            log.warning("%s=%r has no meaning here: %s", name, value, why)
