"""A mount at work in the event loop of its process: the parts it has, and the order in which they end.

One that can be written to has more: `liveserving.py`.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import pyfuse3
import trio

from moonclipfs import limits
from moonclipfs.fuse import initflags
from moonclipfs.fuse.control import Answer, ControlServer, Verb
from moonclipfs.fuse.mounts import Mount, is_mounted, mount_at
from moonclipfs.fuse.operations import Operations, ReadOnlyOperations
from moonclipfs.fuse.prepare import MountOptions
from moonclipfs.fuse.reading import Reads
from moonclipfs.fuse.refresh import NameRefresher, Refresher
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.tree import Tree
from moonclipfs.store.cores import usable_cores
from moonclipfs.store.store import Store

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What tells a mount to end."""


class Server:
    """The parts of a mount that is read only, and the tasks that run them."""

    operations: Operations
    refresher: Refresher

    def __init__(self, store: Store, place: str, options: MountOptions, signals: list[int]) -> None:
        """`signals` are those that came so far."""
        self._signals = signals
        self._mounted = True
        self.mount: Mount | None = None
        """As the kernel lists it, once it is made."""
        self.store = store
        self.place = place
        self.problems: list[str] = []
        """What could not be stored at the end."""
        self.holds = Holds(store.lease)
        if store.lease is None:
            log.info("this mount has no lease: what is forgotten may be reclaimed while it is read here")
        self.tree = Tree(store, show_virtual=options.show_virtual)
        self.holds.add(self.tree.view.sequence)
        cores = usable_cores()
        self.reads = Reads(options.cache_bytes, cores)
        self.answers: Mapping[str, Answer] = {"ping": self.ping, "stats": self.stats}
        self.verbs: Mapping[str, Verb] = {}
        self.set_up(options)

    def set_up(self, options: MountOptions) -> None:
        """Make what serves requests and follows the log."""
        operations = ReadOnlyOperations(self.tree, self.holds, self.reads, self.store.path)
        self.operations = operations
        self.refresher = NameRefresher(self.store, self.tree, operations.nodes, operations.handles, self.holds)

    async def run(self, control: ControlServer, ready: Callable[[], None]) -> None:
        """Serve until the mount is gone, and everything that was written is stored."""
        async with trio.open_nursery() as nursery:
            for task in (*self.tasks(), control.serve):
                nursery.start_soon(task)
            nursery.start_soon(self._announce, ready)
            await pyfuse3.main(max_tasks=limits.MOUNT_TASKS)
            await self.finish(control)
            nursery.cancel_scope.cancel()

    def tasks(self) -> list[Callable[[], Awaitable[None]]]:
        """What runs as long as the mount."""
        return [self._stop_on_signals, self.refresher.run, self.reads.work]

    async def finish(self, control: ControlServer) -> None:
        """Do what is left to do once no request comes any more."""

    def unmount(self) -> None:
        """Let go of the kernel, and of the mount if it is there still. Harmless when repeated."""
        if self._mounted:
            self._mounted = False
            pyfuse3.close(unmount=self.is_there())

    def is_there(self) -> bool:
        """Whether what is at the place of this mount is this mount; where the kernel lists none, it is taken for it."""
        return self.mount is None or is_mounted(self.mount)

    def close(self) -> None:
        """Let go of all else."""

    async def _announce(self, ready: Callable[[], None]) -> None:
        await self.operations.answering.wait()
        try:
            await trio.to_thread.run_sync(raise_read_ahead, self.place)
        except Exception:
            log.exception("the kernel's read-ahead stays as it is")
        await self.answering()
        ready()

    async def answering(self) -> None:
        """The mount answers."""

    async def _stop_on_signals(self) -> None:
        with trio.open_signal_receiver(*SIGNALS) as signals:
            if not self._signals:
                self._signals.append(await anext(signals))
            log.info("%s: unmounting %s", signal.Signals(self._signals[0]).name, self.place)
            await self.refresher.stop()
            await self.stopping()
            pyfuse3.terminate()
            await trio.sleep_forever()  # the receiver takes further signals until the loop ends

    async def stopping(self) -> None:
        """This process was told to stop; the mount is served still."""

    def ping(self) -> Mapping[str, Any]:
        """Who serves what, where."""
        return {"pid": os.getpid(), "store": str(self.store.path), "mountpoint": self.place}

    def stats(self) -> Mapping[str, Any]:
        """Counts since the start, and what is held at the moment."""
        operations = self.operations
        return {
            "requests": dict(operations.requests),
            **asdict(self.store.objects.counters),
            "waits": self.reads.waits,
            "prefetches": self.reads.prefetches,
            "nodes": len(operations.nodes),
            "handles": len(operations.handles),
            "in_work": operations.in_work,
            "waiting": self.reads.waiting,
            "sequence": operations.tree.view.sequence,
            "init_flags": initflags.granted(),
        }


def raise_read_ahead(place: str) -> None:
    """Let the kernel read ahead in its longest requests. Only root may; without it, requests are shorter."""
    mount = mount_at(place)
    if mount is None:
        return
    try:
        with open(f"/sys/class/bdi/{mount.device}/read_ahead_kb", "w") as file:
            file.write(str(limits.KERNEL_READ_AHEAD_KIB))
    except OSError as error:
        log.info("the kernel's read-ahead stays as it is: %s", error.strerror)
