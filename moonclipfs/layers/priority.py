"""How much of the machine a thread asks for. Linux keeps this for each thread; asking for more again is forbidden to
most users, so threads that are to be polite are made so once, and others made for what is urgent.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

NICE = 15
"""Of threads that are polite: busy loops on all cores lost 4 % of their speed to them with 10, and 1 % with 15."""


def yield_to_others() -> None:
    """Let this thread, and those that it starts, run after whatever else wants the processor."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # a container may forbid it; then encoding competes as an equal, on few cores


def set_group(*, polite: bool) -> None:
    """Where the kernel shares the processor between sessions first, say the same of this process's own session."""
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(NICE if polite else 0))
    except OSError:
        pass  # a kernel without it, or asked too often: the threads' own priority stands


def thread_pool(count: int, name: str, *, polite: bool) -> ThreadPoolExecutor:
    """A pool whose threads all exist already: later ones would inherit from whoever hands in work."""
    pool = ThreadPoolExecutor(count, name, initializer=yield_to_others if polite else None)
    together = threading.Barrier(count)
    for started in [pool.submit(together.wait) for _ in range(count)]:
        started.result()
    return pool
