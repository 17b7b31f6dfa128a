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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyfuse3
import trio

from moonclipfs import limits
from moonclipfs.errors import FuseUnavailableError, MountError, NoSpaceError
from moonclipfs.fuse import initflags
from moonclipfs.fuse.control import ControlServer, runtime_path
from moonclipfs.fuse.mounts import FILE_SYSTEM, mount_at, mount_source
from moonclipfs.fuse.operations import Operations
from moonclipfs.fuse.prepare import NO_FUSE_HINT, MountOptions
from moonclipfs.fuse.serving import SIGNALS, Server
from moonclipfs.store import reserve
from moonclipfs.store.store import Store

log = logging.getLogger(__name__)

_PURPOSE_CHARACTERS = 500
_LOG_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_GC_THRESHOLDS = (100_000, 50, 100)
_MALLOC_OPTIONS = ((-8, 1), (-3, 32 * limits.MIB), (-1, 64 * limits.MIB))
"""M_ARENA_MAX, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h."""
_SWITCH_SECONDS = 0.0005
"""A decoding thread lets the event loop go on this soon; Python's own 5 ms would be felt in every request."""


def serve(store_path: str, place: str, options: MountOptions, ready: Callable[[], None]) -> int:
    """Mount a store at a place that `prepare` found fit, and serve it until it is unmounted or told to stop.

    `initflags.load` comes before the import of this module. `ready` is called once the mount answers. Returns an exit
    code: not 0 when something that was written could not be stored; it is staged then. Raises BusyError for a layer
    that another process has, FuseUnavailableError and the errors of `Store.open`.
    """
    socket_path = runtime_path(place, "sock")
    purpose = f"mount, control socket {socket_path}, at {place}"[:_PURPOSE_CHARACTERS]
    with _opened(store_path, options, purpose) as store, _signals_noted() as noted:
        server = _server_class(options)(store, place, options, noted)
        source = mount_source(os.path.realpath(store_path))
        try:
            with ControlServer(socket_path, server.answers, server.verbs) as control:
                _mount(server.operations, place, source, options)
                try:
                    server.mount = mount_at(place)
                    sys.setswitchinterval(_SWITCH_SECONDS)
                    _tune_memory()
                    trio.run(server.run, control, ready)
                finally:
                    for number in SIGNALS:  # ignored, also by the program that unmounts
                        signal.signal(number, signal.SIG_IGN)
                    server.unmount()
        finally:
            server.close()
    return MountError.exit_code if server.problems else 0


def _opened(path: str, options: MountOptions, purpose: str) -> Store:
    """The store, also on a full disk: what is to make room there can be removed through a mount only."""
    opening = partial(Store.open, path, write=not options.read_only, purpose=purpose, cache_bytes=options.cache_bytes)
    try:
        return opening()
    except NoSpaceError:
        if not reserve.lend(Path(path)):
            raise
        return opening()


def _server_class(options: MountOptions) -> type[Server]:
    """What serves the mount. What writing takes is loaded only for that."""
    if options.read_only:
        return Server
    from moonclipfs.fuse.liveserving import LiveServer

    return LiveServer


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Collect the signals that tell a mount to end: one that struck before or after its event loop would leave a dead
    mount. Once one was obeyed they are ignored for good: the process ends well, however often it is told to.
    """
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if noted else handler or signal.SIG_DFL)


def set_up_log(path: str | None, place: str, *, background: bool) -> None:
    """Send log lines to a file of bounded size, or to stderr in the foreground."""
    handler: logging.Handler
    if path is None and not background:
        handler = logging.StreamHandler()
    else:
        name = path or str(runtime_path(place, "log"))
        handler = logging.handlers.RotatingFileHandler(name, maxBytes=limits.MOUNT_LOG_BYTES, backupCount=1, delay=True)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format=_LOG_LINE)
    threading.excepthook = _log_thread_error


def _log_thread_error(arguments: threading.ExceptHookArgs) -> None:
    """In the background nobody reads what Python prints."""
    if arguments.exc_value is not None:
        name = arguments.thread.name if arguments.thread is not None else "a thread"
        log.error("%s ended by an unexpected error", name, exc_info=arguments.exc_value)


def _mount(operations: Operations, place: str, source: str, options: MountOptions) -> None:
    """Make the mount. Raises FuseUnavailableError with what libfuse has to say about it."""
    # `max_read` must not be among these: libfuse 3.14 would let INIT fail.
    flags = {"nosuid", "nodev", "default_permissions", f"fsname={source}", f"subtype={FILE_SYSTEM[5:]}"}
    flags.add("ro" if options.read_only else "noatime")
    if options.allow_other:
        flags.add("allow_other")
    initflags.arm(writable=not options.read_only)
    with _captured_stderr() as said:
        try:
            pyfuse3.init(operations, place, flags)
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
