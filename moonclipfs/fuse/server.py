"""The life of a mounted store in one process: from the checks before it to the clean-up behind it."""

from __future__ import annotations

import ctypes
import gc
import logging
import logging.handlers
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pyfuse3
import trio

from moonclipfs import limits
from moonclipfs.errors import FuseUnavailableError
from moonclipfs.fuse.control import ControlServer, runtime_path
from moonclipfs.fuse.mounts import FILE_SYSTEM, mount_at, mount_source
from moonclipfs.fuse.operations import Operations
from moonclipfs.fuse.prepare import NO_FUSE_HINT, MountOptions
from moonclipfs.fuse.reading import Reads
from moonclipfs.fuse.refresh import Refresher
from moonclipfs.layers.holds import Holds
from moonclipfs.layers.tree import Tree
from moonclipfs.store.store import Store

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PURPOSE_CHARACTERS = 500
_LOG_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_GC_THRESHOLDS = (100_000, 50, 100)
_MALLOC_OPTIONS = ((-8, 1), (-3, 32 * limits.MIB), (-1, 64 * limits.MIB))
"""M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h."""
_SWITCH_SECONDS = 0.0005
"""A decoding thread lets the event loop go on this soon; Python's own 5 ms would be felt in every request."""


def serve(store_path: str, place: str, options: MountOptions, ready: Callable[[], None]) -> int:
    """Mount a store at a place that `prepare` found fit, and serve it until it is unmounted or told to stop.

    `ready` is called once the mount answers. Returns 0. Raises FuseUnavailableError and the errors of `Store.open`.
    """
    socket_path = runtime_path(place, "sock")
    purpose = f"mount, control socket {socket_path}, at {place}"[:_PURPOSE_CHARACTERS]
    with Store.open(store_path, purpose=purpose, cache_bytes=options.cache_bytes) as store, _signals_noted() as noted:
        server = _Server(store, place, options, noted)
        source = mount_source(os.path.realpath(store_path))
        with ControlServer(socket_path, {"ping": server.ping, "stats": server.stats}) as control:
            _mount(server.operations, place, source, allow_other=options.allow_other)
            try:
                sys.setswitchinterval(_SWITCH_SECONDS)
                _tune_memory()
                trio.run(server.run, control, ready)
            finally:
                for number in _SIGNALS:  # ignored, also by the program that unmounts
                    signal.signal(number, signal.SIG_IGN)
                pyfuse3.close(unmount=True)
    return 0


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Collect the signals that tell a mount to end: one that struck before or after its event loop would leave a dead
    mount. Once one was obeyed they are ignored for good: the process ends well, however often it is told to.
    """
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in _SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if noted else handler or signal.SIG_DFL)


class _Server:
    """The parts of a mount, and the tasks that run them."""

    def __init__(self, store: Store, place: str, options: MountOptions, signals: list[int]) -> None:
        """`signals` are those that came so far."""
        self._signals = signals
        self._store = store
        self._place = place
        self._cores = len(os.sched_getaffinity(0))
        self._holds = Holds(store.lease)
        if store.lease is None:
            log.info("this mount has no lease: what is forgotten may be reclaimed while it is read here")
        tree = Tree(store, show_virtual=options.show_virtual)
        self._holds.add(tree.view.sequence)
        self._reads = Reads(options.cache_bytes, self._cores)
        self.operations = Operations(tree, self._holds, self._reads, store.path)
        self._refresher = Refresher(store, tree, self.operations.nodes, self.operations.handles, self._holds)

    async def run(self, control: ControlServer, ready: Callable[[], None]) -> None:
        """Serve until the mount is gone."""
        async with trio.open_nursery() as nursery:
            for task in (self._stop_on_signals, self._refresher.run, self._reads.work, control.serve):
                nursery.start_soon(task)
            nursery.start_soon(self._announce, ready)
            await pyfuse3.main()
            nursery.cancel_scope.cancel()

    async def _announce(self, ready: Callable[[], None]) -> None:
        await self.operations.answering.wait()
        try:
            await trio.to_thread.run_sync(raise_read_ahead, self._place)
        except Exception:
            log.exception("the kernel's read-ahead stays as it is")
        ready()

    async def _stop_on_signals(self) -> None:
        with trio.open_signal_receiver(*_SIGNALS) as signals:
            if not self._signals:
                self._signals.append(await anext(signals))
            log.info("%s: unmounting %s", signal.Signals(self._signals[0]).name, self._place)
            await self._refresher.stop()
            pyfuse3.terminate()
            await trio.sleep_forever()  # the receiver takes further signals until the loop ends

    def ping(self) -> Mapping[str, Any]:
        """Who serves what, where."""
        return {"pid": os.getpid(), "store": str(self._store.path), "mountpoint": self._place}

    def stats(self) -> Mapping[str, Any]:
        """Counts since the start, and what is held at the moment."""
        operations = self.operations
        return {
            "requests": dict(operations.requests),
            **asdict(self._store.objects.counters),
            "waits": self._reads.waits,
            "prefetches": self._reads.prefetches,
            "nodes": len(operations.nodes),
            "handles": len(operations.handles),
            "in_work": operations.in_work,
            "waiting": self._reads.waiting,
            "sequence": operations.tree.view.sequence,
        }


def set_up_log(path: str | None, place: str, *, background: bool) -> None:
    """Send log lines to a file of bounded size, or to stderr in the foreground."""
    handler: logging.Handler
    if path is None and not background:
        handler = logging.StreamHandler()
    else:
        name = path or str(runtime_path(place, "log"))
        handler = logging.handlers.RotatingFileHandler(name, maxBytes=limits.MOUNT_LOG_BYTES, backupCount=1, delay=True)
    logging.basicConfig(
        level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _mount(operations: Operations, place: str, source: str, *, allow_other: bool) -> None:
    """Make the mount. Raises FuseUnavailableError with what libfuse has to say about it."""
    # `max_read` must not be among these: libfuse 3.14 would let INIT fail.
    options = {"ro", "nosuid", "nodev", "default_permissions", f"fsname={source}", f"subtype={FILE_SYSTEM[5:]}"}
    if allow_other:
        options.add("allow_other")
    with _captured_stderr() as said:
        try:
            pyfuse3.init(operations, place, options)
        except RuntimeError as error:
            raise FuseUnavailableError(f"cannot mount on {place}: {said() or error}; {NO_FUSE_HINT}") from error


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """libfuse prints the reason of a failure, and tells its caller nothing."""
    with tempfile.TemporaryFile() as file:

        def said() -> str:
            file.seek(0)
            return " ".join(file.read().decode(errors="replace").split())

        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _tune_memory() -> None:
    """Look for cycles of garbage seldom: a mount makes none worth mention, and the nodes to look through are many.

    Let malloc use the buffers of blocks again: memory given back to the kernel comes back by page faults, which cost
    as much as decoding. Only glibc has the call.
    """
    gc.set_threshold(*_GC_THRESHOLDS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOC_OPTIONS:
            mallopt(parameter, value)


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
