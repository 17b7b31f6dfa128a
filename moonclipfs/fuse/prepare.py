"""What is checked before a mount is made, each with an error that says what to do."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import (
    BusyError,
    FuseUnavailableError,
    MountError,
    NotFoundError,
    PermissionDeniedError,
    ReadOnlyError,
    UsageError,
)
from moonclipfs.fuse.killed import abort, killed_server
from moonclipfs.fuse.mounts import Mount, mount_at, real_place
from moonclipfs.store.backend import os_errors

log = logging.getLogger(__name__)

FUSE_CONFIG = "/etc/fuse.conf"
FUSE_DEVICE = os.makedev(10, 229)
NO_FUSE_HINT = (
    "in a container, start it with `--device /dev/fuse --cap-add SYS_ADMIN`; "
    "without FUSE, `moonclipfs export` and the Python reader give the same bytes"
)
_ANSWER_SECONDS = 5.0
_ASK_AGAIN_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class MountOptions:
    """How to mount. `log` is a file; by default a mount in the background has one beside its control socket.

    Times are in seconds, `seal_after` None for never; `layer` None is the layer that is named after the host.
    """

    foreground: bool = False
    log: str | None = None
    allow_other: bool = False
    show_virtual: bool = False
    cache_bytes: int = limits.BLOCK_CACHE_BYTES
    read_only: bool = False
    layer: str | None = None
    staging: str | None = None
    staging_limit: int = limits.STAGING_BYTES
    seal_after: float | None = limits.SEAL_AFTER_SECONDS
    keep_versions: int = limits.KEEP_VERSIONS
    keep_deleted: float = limits.KEEP_DELETED_SECONDS
    dry_run: bool = False


def prepare(store: str, mountpoint: str, options: MountOptions) -> str:
    """Check everything that can be known before a mount is made; return the real path of its mountpoint.

    Raises the errors of the checks below.
    """
    place = check_mountpoint(store, mountpoint)
    if not options.read_only:
        check_writable(store)
        if options.staging is not None:
            _check_apart(os.path.realpath(options.staging), place, "staging directory")
    if options.allow_other:
        check_allow_other(store)
    if options.log is not None:
        with os_errors(f"write the log {options.log}"), open(options.log, "a"):
            pass
    check_device()
    return place


def check_device(path: str = "/dev/fuse") -> None:
    """Raise FuseUnavailableError unless this process can open the FUSE device."""
    try:
        if os.stat(path).st_rdev != FUSE_DEVICE:
            raise FuseUnavailableError(f"{path} is not the FUSE device: {NO_FUSE_HINT}")
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as error:
        mode = stat.filemode(os.stat(path).st_mode)
        raise FuseUnavailableError(
            f"no permission to open {path} ({mode}): let an administrator `chmod 666 {path}`, or {NO_FUSE_HINT}"
        ) from error
    except OSError as error:
        raise FuseUnavailableError(f"cannot open {path}: {error.strerror}: {NO_FUSE_HINT}") from error


def check_mountpoint(store: str, mountpoint: str) -> str:
    """Return the real path of a directory fit to be mounted on; a dead mount of ours in the way is cleared first.

    Raises BusyError, MountError, NotFoundError, PermissionDeniedError, UsageError.
    """
    place = real_place(mountpoint)
    mount = mount_at(place)
    if mount is not None:
        _check_mount_in_the_way(mount)
    try:
        if not os.path.isdir(place):
            raise (
                UsageError(f"{mountpoint} is not a directory")
                if os.path.lexists(place)
                else NotFoundError(f"{mountpoint} does not exist: make the directory first")
            )
        if os.listdir(place):
            raise UsageError(f"{mountpoint} is not empty: a mount would hide what is in it")
    except OSError as error:
        raise PermissionDeniedError(f"cannot look into {mountpoint}: {error.strerror}") from error
    _check_apart(os.path.realpath(store), place)
    return place


def check_writable(store: str) -> None:
    """Raise ReadOnlyError when a store cannot be written to. What is no store is told when it is opened."""
    if os.path.isdir(store) and not os.access(store, os.W_OK):
        raise ReadOnlyError(f"{store} cannot be written to: mount it with --read-only")


def check_allow_other(store: str) -> None:
    """Raise PermissionDeniedError when a mount for all users would be refused, or would protect nothing."""
    try:
        mode = os.stat(store).st_mode
    except OSError as error:
        raise NotFoundError(f"cannot look at the store {store}: {error.strerror}") from error
    if mode & 0o007:
        raise PermissionDeniedError(
            f"--allow-other: others can get at {store} itself (mode {stat.S_IMODE(mode):04o}), past the modes of the "
            f"files in it: `chmod o-rwx {store}` first"
        )
    if os.geteuid() != 0 and not user_allow_other():
        raise PermissionDeniedError(
            f"--allow-other: an administrator must put the line `user_allow_other` into {FUSE_CONFIG} first"
        )


def detach(place: str, *, lazy: bool) -> subprocess.CompletedProcess[str]:
    """Run the unmount command on a real path; `lazy` detaches a mount in use, which ends with its last open file."""
    program = shutil.which("fusermount3")
    if program is not None:
        command = [program, "-u", *(["-z"] if lazy else []), "--", place]
    else:
        command = ["umount", *(["--lazy"] if lazy else []), "--", place]
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _check_mount_in_the_way(mount: Mount) -> None:
    """Clear a dead mount of ours. Raises BusyError for a living one of ours, MountError for a foreign dead one."""
    state = _settled_answer(mount.mountpoint)
    if state is None and mount.is_ours and (pid := killed_server(mount)) is not None:
        if not abort(mount, pid):
            raise MountError(
                f"the server of {mount.mountpoint} was killed (pid {pid}), and the kernel waits for it: as root, "
                f"`umount --force {mount.mountpoint}`"
            )
        if mount_at(mount.mountpoint) != mount:
            return
        state = _settled_answer(mount.mountpoint)
    if state == errno.ENOTCONN:
        if not mount.is_ours:
            raise MountError(f"a dead mount ({mount.type}, {mount.source}) is at {mount.mountpoint}: unmount it first")
        result = detach(mount.mountpoint, lazy=True)
        if result.returncode:
            raise MountError(f"a dead mount is at {mount.mountpoint}, and cannot be cleared: {result.stderr.strip()}")
        log.warning("cleared a dead mount of %s at %s", mount.store, mount.mountpoint)
    elif mount.is_ours:
        said = "is mounted there already" if state is not None else "is mounted there, and its server does not answer"
        raise BusyError(f"{mount.mountpoint}: {mount.store} {said}; `moonclipfs umount {mount.mountpoint}` first")


def _settled_answer(mountpoint: str) -> int | None:
    """As `_answer_of`; a server that is being killed while it is asked is asked again, until the mount is dead."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while (answer := _answer_of(mountpoint)) == errno.ECONNABORTED and time.monotonic() < deadline:
        time.sleep(_ASK_AGAIN_SECONDS)
    return answer


def _answer_of(mountpoint: str) -> int | None:
    """0 or the errno that a mount answers, None when it does not. A statfs always reaches the server, unlike a stat."""
    answers: list[int] = []

    def question() -> None:
        try:
            os.statvfs(mountpoint)
            answers.append(0)
        except OSError as error:
            answers.append(error.errno or errno.EIO)

    thread = threading.Thread(target=question, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answers[0] if answers else None


def _check_apart(store: str, place: str, what: str = "store") -> None:
    for inner, outer, text in (
        (store, place, f"the {what} lies below its own mountpoint, which would hide it"),
        (place, store, f"the mountpoint lies inside the {what}"),
    ):
        if inner == outer or inner.startswith(outer.rstrip("/") + "/"):
            raise UsageError(f"{store} cannot be mounted on {place}: {text}")


def user_allow_other(path: str = FUSE_CONFIG) -> bool:
    """Whether users may mount for others, read as fusermount3 does: the word alone on a line, but for a comment."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.partition("#")[0].strip() == "user_allow_other" for line in lines)
