"""What this machine can do for a mount, and what to do where it cannot: the answers of `moonclipfs doctor`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
from pathlib import Path

from moonclipfs.errors import FuseUnavailableError
from moonclipfs.fuse import prepare
from moonclipfs.fuse.control import server_pid
from moonclipfs.fuse.mounts import Mount, find_mounts
from moonclipfs.store.health import Finding, State

_FEATURES = (((6, 6), "shared mmap of direct handles"), ((6, 9), "passthrough"), ((6, 14), "requests by io_uring"))
"""The first kernel that has each; a mount asks the kernel itself and never relies on the number."""


def check_machine() -> list[Finding]:
    """Look at what a mount needs, and at the mounts that there are. Touches no mounted file system, which may hang."""
    return [
        check_device(), check_helper(), check_binding(), check_allow_other(prepare.FUSE_CONFIG),
        check_kernel(os.uname().release), check_extension(), check_read_ahead(), *map(check_mount, find_mounts()),
    ]  # fmt: skip


def check_device() -> Finding:
    """Can the FUSE device be opened?"""
    try:
        prepare.check_device()
    except FuseUnavailableError as error:
        return Finding("fuse device", State.PROBLEM, *str(error).split(": ", 1))
    return Finding("fuse device", State.OK, "opens")


def check_helper() -> Finding:
    """Is fusermount3 there, and may it mount for this user?"""
    path = shutil.which("fusermount3")
    if path is None:
        return Finding("fusermount3", State.PROBLEM, "not installed", "install the package fuse3")
    if os.geteuid() != 0 and not os.stat(path).st_mode & stat.S_ISUID:
        return Finding("fusermount3", State.PROBLEM, f"{path} is not setuid root", f"`chmod u+s {path}` as root")
    return Finding("fusermount3", State.OK, path)


def check_binding() -> Finding:
    """Is pyfuse3 installed?"""
    if importlib.util.find_spec("pyfuse3") is None:
        return Finding(
            "pyfuse3", State.PROBLEM, "not installed", "`pip install pyfuse3` (needs libfuse3-dev, pkg-config)"
        )
    return Finding("pyfuse3", State.OK, "installed")


def check_allow_other(path: str) -> Finding:
    """May this user mount for others?"""
    if os.geteuid() == 0:
        return Finding("allow-other", State.OK, "root may mount for other users")
    if prepare.user_allow_other(path):
        return Finding("allow-other", State.OK, f"user_allow_other is set in {path}")
    return Finding(
        "allow-other", State.NOTE, "mounts are for this user only", f"for others: user_allow_other in {path}"
    )


def check_kernel(release: str) -> Finding:
    """Which FUSE features does a kernel of this number have?"""
    found = re.match(r"(\d+)\.(\d+)", release)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    have = [name for since, name in _FEATURES if number >= since]
    lack = [f"{name} (from {major}.{minor})" for (major, minor), name in _FEATURES if number < (major, minor)]
    text = f"{release}: has {', '.join(have) or 'the basics'}" + (f"; lacks {', '.join(lack)}" if lack else "")
    return Finding("kernel", State.OK, text)


def check_extension() -> Finding:
    """Was the extension built that asks the kernel for more than libfuse does?"""
    if importlib.util.find_spec("moonclipfs._fuseinit") is not None:
        return Finding("fuse extension", State.OK, "built: mounts use what the kernel offers beyond libfuse")
    advice = "install again where a C compiler is; with libfuse older than 3.14 it makes no difference"
    return Finding("fuse extension", State.NOTE, "not built: writing to a mount is slower, all else works", advice)


def check_read_ahead() -> Finding:
    """May this user raise the read-ahead of a mount?"""
    if os.geteuid() == 0 and os.access("/sys/class/bdi", os.W_OK):
        return Finding("read-ahead", State.OK, "mounts raise it to 1 MiB")
    advice = "as root: `echo 1024 > /sys/class/bdi/$(mountpoint -d DIR)/read_ahead_kb` after each mount"
    return Finding("read-ahead", State.NOTE, "stays at the kernel's 128 KiB for this user's mounts", advice)


def check_mount(mount: Mount) -> Finding:
    """Does the server of a mount answer?"""
    pid = server_pid(mount.mountpoint)
    if pid is None and mount.owner not in (None, os.geteuid()):
        return Finding("mount", State.NOTE, f"{mount.mountpoint}: of user {mount.owner}, who alone may ask its server")
    if pid is None:
        advice = f"mount again; if that hangs: `moonclipfs umount --lazy {mount.mountpoint}` first"
        what = f"{mount.mountpoint}: its server has ended, or hangs"
        return Finding("mount", State.PROBLEM, what, advice)
    read_ahead = Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb")
    try:
        shown = f", read-ahead {read_ahead.read_text().strip()} KiB"
    except OSError:
        shown = ""
    return Finding("mount", State.OK, f"{mount.mountpoint}: {mount.store}, pid {pid}{shown}")
