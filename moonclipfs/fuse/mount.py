"""Mounting and unmounting, as a command does it: in the background or not, and back when it is done."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from moonclipfs import errors, limits
from moonclipfs.errors import BusyError, MoonclipError, MountError, NotFoundError
from moonclipfs.fuse import initflags
from moonclipfs.fuse.control import ask, runtime_path, server_pid
from moonclipfs.fuse.holders import find_holders
from moonclipfs.fuse.mounts import Mount, find_mounts, mount_at, real_place
from moonclipfs.fuse.prepare import MountOptions, detach, prepare

__all__ = ["Mount", "MountOptions", "find_mounts", "mount", "unmount"]

_EXIT_SECONDS = 30.0
_TELL_SECONDS = 1.0
_SERVER = Path(__file__).with_name("__main__.py")


def mount(
    store_path: str | os.PathLike[str], mountpoint: str | os.PathLike[str], options: MountOptions | None = None
) -> int:
    """Mount a store; return 0 once the mount answers, or, with `foreground`, when it was unmounted.

    Raises BusyError, FormatVersionError, FuseUnavailableError, MountError, NotFoundError, PermissionDeniedError,
    UsageError: nothing is mounted then, and no process left.
    """
    options = options or MountOptions()
    store = os.path.abspath(store_path)
    place = prepare(store, os.fspath(mountpoint), options)
    if not options.foreground:
        return _mount_in_background(store, place, options)

    initflags.load()
    from moonclipfs.fuse.server import serve, set_up_log

    set_up_log(options.log, place, background=False)
    return serve(store, place, options, ready=lambda: None)


def unmount(
    mountpoint: str | os.PathLike[str], *, lazy: bool = False, waiting: Callable[[int], None] | None = None
) -> None:
    """Unmount, and wait until what was written is stored and the server is gone. `waiting` is called now and then
    with the bytes that are still to be stored. `lazy` returns at once, and serves what is open until it is closed.

    Raises NotFoundError when no store is mounted there, BusyError naming who uses it, MountError, also when something
    could not be stored: it is staged then.
    """
    place = real_place(os.fspath(mountpoint))
    found = mount_at(place)
    if found is None or not found.is_ours:
        raise NotFoundError(f"no store is mounted at {place}")
    pid = server_pid(place)
    result = detach(place, lazy=lazy)
    if result.returncode:
        if "busy" in result.stderr:
            raise BusyError(_busy(found))
        raise MountError(f"cannot unmount {place}: {result.stderr.strip()}")
    if pid is not None and not lazy:
        problems = _wait_for_end(place, waiting) if found.writable else []
        _wait_for_exit(pid)
        if problems:
            raise MountError(f"unmounted, but not everything is stored, and stays staged: {'; '.join(problems)}")
    if server_pid(place) is None:
        runtime_path(place, "sock").unlink(missing_ok=True)  # of a server that was killed


def _wait_for_end(place: str, waiting: Callable[[int], None] | None) -> list[str]:
    """Return when a server has stored what was written, with what it could not store."""
    problems: list[str] = []

    def ended() -> None:
        try:
            problems.extend(ask(place, "ended", None)["problems"])
        except MoonclipError:
            pass  # it is gone already; what went wrong is in its log

    thread = threading.Thread(target=ended, daemon=True)
    thread.start()
    thread.join(_TELL_SECONDS)
    while thread.is_alive():
        if waiting is not None:
            try:
                waiting(int(ask(place, "status")["staged_bytes"]))
            except MoonclipError:
                pass  # it has just ended
        thread.join(_TELL_SECONDS)
    return problems


def _mount_in_background(store: str, place: str, options: MountOptions) -> int:
    reading, writing = os.pipe()
    request = {"store": store, "place": place, "options": asdict(options), "report_fd": writing}
    with open(reading, "rb") as reports, tempfile.TemporaryFile() as said:
        try:
            subprocess.run(
                # -P: the current directory may be anybody's, and must not be searched for modules.
                [sys.executable, "-P", _SERVER, json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                pass_fds=(writing,),
                check=False,
            )
        finally:
            os.close(writing)
        report = reports.read()
        if not report:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise MountError(f"the server of {place} ended before it answered: {last or 'it said nothing'}")
    answer = json.loads(report)
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return 0


def _busy(mount: Mount) -> str:
    holders = find_holders(mount)
    lines = [f"{mount.mountpoint} is in use; close these, or unmount with --lazy:"]
    lines += [f"  pid {holder.pid} ({holder.command}): {holder.path}" for holder in holders[: limits.HOLDERS_NAMED]]
    if len(holders) > limits.HOLDERS_NAMED:
        lines.append(f"  and {len(holders) - limits.HOLDERS_NAMED} more")
    if not holders:
        lines.append("  (a process that this user may not look at)")
    return "\n".join(lines)


def _wait_for_exit(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with open(descriptor, "rb", buffering=0) as process:
        ended, _, _ = select.select([process], [], [], _EXIT_SECONDS)
    if not ended:
        raise MountError(f"unmounted, but the server (pid {pid}) has not ended within {_EXIT_SECONDS:.0f} seconds")
