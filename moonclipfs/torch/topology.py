"""Which rank of how many this process is: as said, or as the launcher says."""

from __future__ import annotations

import hashlib
import os
from collections import Counter

import torch.distributed as dist

from moonclipfs import limits
from moonclipfs.errors import UsageError

AUTO = "auto"
WAIT = "MOONCLIPFS_RANKS_WAIT"
_LAUNCH = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID")
"""What tells one launch from another."""
_groups: Counter[str] = Counter()


def topology(world_size: int | str | None, rank: int | str | None) -> tuple[int, int]:
    """Number of ranks that save into one store, and which this is: 1 and 0 where nothing is said and nothing launched.

    Raises UsageError for what cannot be, and where a launcher started several and it was not said what to do.
    """
    size, place = launched()
    if world_size is None and rank is None:
        if size > 1:
            raise UsageError(
                f"the launcher says that this is rank {place} of {size}, and a manager that is told nothing is the "
                "only one, rank 0 of 1: give world_size='auto' where all ranks save into one store, world_size=1 and "
                "rank=0 where each has a store of its own"
            )
        return 1, 0
    whole = size if world_size in (AUTO, None) else _number(world_size, "world_size")
    mine = place if rank in (AUTO, None) and (whole == size or rank == AUTO) else rank
    if mine is None:
        if whole == 1:
            return 1, 0
        raise UsageError(f"world_size={whole}, and the launcher says {size}: give the rank too")
    mine = _number(mine, "rank")
    if not 0 <= mine < whole or whole > limits.RANKS:
        raise UsageError(f"rank {mine} of {whole} cannot be: ranks count from 0")
    if 1 < size < whole:
        raise UsageError(f"world_size={whole} is more than the {size} processes that the launcher says there are")
    return whole, mine


def launched() -> tuple[int, int]:
    """Number of processes and rank of this one, by `torch.distributed`, or by what a launcher put into the environment;
    1 and 0 where there is none. Raises UsageError for what is no number there.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return _number(os.environ.get("WORLD_SIZE", "1"), "$WORLD_SIZE"), _number(os.environ.get("RANK", "0"), "$RANK")


def group_name(run: str) -> str:
    """The same for all ranks of one launch that save one run, letters and digits; another for each call.

    It only helps ranks to find each other: which belong together, the attempt says that rank 0 makes up.
    """
    _groups[run] += 1
    said = [os.environ.get(name, "") for name in _LAUNCH]
    return hashlib.sha256("\0".join([run, str(_groups[run]), *said]).encode()).hexdigest()[:16]


def agreed(text: str, size: int, rank: int) -> str:
    """What rank 0 calls with, for all ranks; "" where `torch.distributed` does not join just these."""
    if not (dist.is_available() and dist.is_initialized()) or (dist.get_world_size(), dist.get_rank()) != (size, rank):
        return ""
    told: list[str] = [text]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def wait_seconds() -> float:
    """$MOONCLIPFS_RANKS_WAIT, or how long ranks wait for each other by default. Raises UsageError for no number."""
    wanted = os.environ.get(WAIT, "")
    try:
        seconds = float(wanted or limits.RANKS_WAIT_SECONDS)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise UsageError(f"${WAIT} is {wanted!r}: it must be a number of seconds above 0")
    return seconds


def _number(value: int | str | None, what: str) -> int:
    try:
        return int(value)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise UsageError(f"{what} is {value!r}: give a number, or 'auto' for what the launcher says") from None
