"""Mounting and unmounting, as a command does it: in the background or not, and back when it is done."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from moonclipfs import errors, limits
from moonclipfs.errors import BusyError, MountError, NotFoundError
from moonclipfs.fuse.control import runtime_path, server_pid
from moonclipfs.fuse.holders import find_holders
from moonclipfs.fuse.mounts import Mount, find_mounts, mount_at, real_place
from moonclipfs.fuse.prepare import MountOptions, detach, prepare

__all__ = ["Mount", "MountOptions", "find_mounts", "mount", "unmount"]

_EXIT_SECONDS = 30.0
_SERVER = Path(__file__).with_name("__main__.py")


def mount(
    store_path: str | os.PathLike[str], mountpoint: str | os.PathLike[str], options: MountOptions | None = None
) -> int:
    """Mount a store, read-only; return 0 once the mount answers, or, with `foreground`, when it was unmounted.

    Raises BusyError, FormatVersionError, FuseUnavailableError, MountError, NotFoundError, PermissionDeniedError,
    UsageError: nothing is mounted then, and no process left.
    """
    options = options or MountOptions()
    store = os.path.abspath(store_path)
    place = prepare(store, os.fspath(mountpoint), options)
    if not options.foreground:
        return _mount_in_background(store, place, options)

    from moonclipfs.fuse.server import serve, set_up_log

    set_up_log(options.log, place, background=False)
    return serve(store, place, options, ready=lambda: None)


def unmount(mountpoint: str | os.PathLike[str], *, lazy: bool = False) -> None:
    """Unmount, and wait until the server is gone. `lazy` returns at once, and serves what is open until it is closed.

    Raises NotFoundError when no store is mounted there, BusyError naming who uses it, MountError.
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
        _wait_for_exit(pid)
    if server_pid(place) is None:
        runtime_path(place, "sock").unlink(missing_ok=True)  # of a server that was killed


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
