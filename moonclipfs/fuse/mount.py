"""Mounting and unmounting, as a command does it: in the background or not, and back when it is done."""

from __future__ import annotations

import json
import os
import pwd
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from moonclipfs import errors, limits
from moonclipfs.errors import BusyError, MoonclipError, MountError, NotFoundError, PermissionDeniedError
from moonclipfs.fuse import initflags
from moonclipfs.fuse.control import ask, ask_on, connect, peer_pid, runtime_path, server_pid
from moonclipfs.fuse.holders import find_holders
from moonclipfs.fuse.killed import abort, killed_server
from moonclipfs.fuse.mounts import Mount, find_mounts, mount_at, real_place
from moonclipfs.fuse.prepare import MountOptions, detach, prepare
from moonclipfs.store.layerdirs import DIRECTORY, layer_holder, layer_names
from moonclipfs.store.overlaydirs import is_overlay_layer

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

    A server that this user or this environment cannot ask is waited for all the same; its log tells what went wrong.
    Raises NotFoundError when no store is mounted there, BusyError naming who uses it, PermissionDeniedError naming
    whose it is, MountError, also when something could not be stored, or its server was killed before: it is staged
    then.
    """
    place = real_place(os.fspath(mountpoint))
    found = mount_at(place)
    if found is None or not found.is_ours:
        raise NotFoundError(f"no store is mounted at {place}")
    waits = found.writable and not lazy
    if (killed := killed_server(found)) is not None:
        abort(found, killed)  # else whoever waits for it would do so for ever
    with ExitStack() as stack:
        # The server does not end before whoever is connected has asked what could not be stored.
        server = _connected(place)
        pid = None if server is None else peer_pid(stack.enter_context(server))
        layer, holder = _layer_of(found) if waits and server is None else (None, None)
        result = detach(place, lazy=lazy)
        if result.returncode and (killed is None or mount_at(place) == found):  # else the abort has unmounted it
            if "busy" in result.stderr:
                raise BusyError(_busy(found))
            if found.owner is not None and os.geteuid() not in (0, found.owner):
                raise PermissionDeniedError(
                    f"{place} was mounted by {_user(found.owner)}: only that user and root can unmount it"
                )
            raise MountError(f"cannot unmount {place}: {result.stderr.strip()}")
        problems = _wait_for_end(server, place, waiting) if waits and server is not None else []
    if pid is not None and not lazy:
        _wait_for_exit(pid)
    if problems:
        raise MountError(f"unmounted, but not everything is stored, and stays staged: {'; '.join(problems)}")
    while layer is not None and layer_holder(layer) == holder:
        time.sleep(_TELL_SECONDS / 10)
    left = runtime_path(place, "sock")
    if server_pid(place) is None and left.exists():  # of a server that was killed
        left.unlink(missing_ok=True)
        if server is not None and waits:
            raise MountError(
                "unmounted, but the server was killed before everything was stored: what is not stays staged, and the "
                "next mount of the same layer stores it"
            )


def _connected(place: str) -> socket.socket | None:
    try:
        return connect(place)
    except (NotFoundError, PermissionDeniedError):
        return None


def _layer_of(mount: Mount) -> tuple[Path, Mapping[str, object]] | tuple[None, None]:
    """The directory of the live layer of a mount, and what its server says of itself there, as far as that can be told
    without asking the server.
    """
    found = []
    try:
        for name in layer_names(Path(mount.store)):
            if is_overlay_layer(name):
                continue
            layer = Path(mount.store, DIRECTORY, name)
            holder = layer_holder(layer)
            if holder is not None and holder.get("mountpoint") == mount.mountpoint:
                found.append((layer, holder))
    except MoonclipError:  # of somebody else
        return None, None
    return found[0] if len(found) == 1 else (None, None)  # other namespaces may have a mount at the same path


def _wait_for_end(server: socket.socket, place: str, waiting: Callable[[int], None] | None) -> list[str]:
    """Return when a server has stored what was written, with what it could not store."""
    problems: list[str] = []

    def ended() -> None:
        try:
            problems.extend(ask_on(server, place, "ended", None)["problems"])
        except MoonclipError:
            pass  # it was killed

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


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (user {number})"
    except KeyError:
        return f"user {number}"


def _busy(mount: Mount) -> str:
    holders = find_holders(mount)
    # This process may use it by its working directory, with the shell that started it.
    holders = [holder for holder in holders if holder.pid != os.getpid()] or holders
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
