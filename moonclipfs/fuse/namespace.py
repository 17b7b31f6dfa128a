"""Mount namespaces: a server makes one for its mount, and commands are started in it.

Run as a program, it is the small step between a process outside and a command inside: it needs nothing but Python.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import json
import os
import signal
import sys
from collections.abc import Collection

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_REC = 0x4000
_MS_SLAVE = 0x80000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REFUSED = frozenset({errno.EPERM, errno.ENOSPC, errno.EINVAL, errno.ENOSYS, errno.EUSERS})
"""What unshare answers where namespaces are forbidden, used up or unknown."""
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
"""As shells have it."""


class Isolation(enum.Enum):
    """Who sees a mount: the processes of a mount namespace, for root or as a user, or everybody."""

    MOUNT = "mount"
    USER = "user"
    NONE = "none"


def isolate(wanted: Isolation | None = None) -> Isolation:
    """Move this process, which must have one thread, into a mount namespace of its own; return the kind it got.

    None tries all in order; NONE does nothing. Later mounts of the host still show up. Raises OSError when what is
    `wanted` is refused.
    """
    for kind in Isolation if wanted is None else (wanted,):
        try:
            _enter_new(kind)
        except OSError as error:
            if wanted is not None or error.errno not in _REFUSED:
                raise
        else:
            return kind
    return Isolation.NONE


def _enter_new(kind: Isolation) -> None:
    if kind is Isolation.NONE:
        return
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWNS | (_CLONE_NEWUSER if kind is Isolation.USER else 0))
    if kind is Isolation.USER:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    # What is mounted here must not show outside; what is mounted outside may show here.
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None)


def adopt_orphans(wanted: bool) -> None:
    """Whether descendants of this process whose parent ends become its children."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def enter_arguments(pid: int, isolation: Isolation, mask: Collection[int], command: list[str]) -> list[str]:
    """The command line that runs `command` in the namespace of process `pid`, with these signals blocked."""
    request = {
        "pid": pid,
        "isolation": isolation.value,
        "mask": sorted(int(number) for number in mask),
        "parent": os.getpid(),
        "cwd": os.getcwd(),
        "command": command,
    }
    return [sys.executable, "-P", os.path.abspath(__file__), json.dumps(request)]


def _main() -> int:
    """Enter the namespace that the JSON in the first argument names, and become its command."""
    request = json.loads(sys.argv[1])
    try:
        _join(request["pid"], Isolation(request["isolation"]), request["cwd"])
        # The command is told when whoever started it is killed, since the mount ends then.
        _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
        if os.getppid() != request["parent"]:
            return 128 + signal.SIGTERM
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    except OSError as error:
        print(f"moonclipfs: cannot enter the mount's namespace: {error}", file=sys.stderr)
        return 14
    command = request["command"]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"moonclipfs: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_FOUND if error.errno == errno.ENOENT else EXIT_NOT_EXECUTABLE


def _join(pid: int, isolation: Isolation, cwd: str) -> None:
    kinds = {Isolation.MOUNT: ("mnt",), Isolation.USER: ("user", "mnt"), Isolation.NONE: ()}[isolation]
    descriptors = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    for descriptor in descriptors:
        _call("setns", descriptor, 0)
        os.close(descriptor)
    if kinds:
        os.chdir(cwd)  # a new mount namespace begins at its root


def _call(name: str, *arguments: object) -> None:
    """Call a function of libc that answers -1 for an error. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(_main())
