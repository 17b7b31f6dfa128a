"""How many cores this process may keep busy."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The cores that it may run on, or fewer where a control group (version 2), as of a container, gives it less time.

    `groups` is where control groups are mounted, `own` the file that names this process's.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota(groups, own)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota(groups: Path, own: Path) -> float | None:
    """The least share of time, in cores, that a group of this process or one above it sets; None for no limit."""
    try:
        lines = own.read_text().splitlines()
    except (OSError, ValueError):
        return None
    # "0::/path" is the only line of version 2; a path that leads out of what is seen here begins with "/..".
    path = next((line[3:] for line in lines if line.startswith("0::/")), None)
    if path is None:
        return None
    group = groups.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
    found = []
    for place in (group, *group.parents):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            quota, period = (place / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
        if place == groups:
            break
    return min(found, default=None)
