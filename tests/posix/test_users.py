"""Several users on one mount: who may do what is in the matrix; here is what takes more than one call."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter
from tests.posix.conftest import Shared
from tests.posix.users import MEMBER, OTHER, OWNER, ROOT, STAFF, Worker, outcome, run_as

MASKS = (0o000, 0o022, 0o077, 0o137, 0o777)


def modes(place: str) -> list[str]:
    """The modes of what is made under several masks."""
    found = []
    for mask in MASKS:
        os.umask(mask)
        path = f"{place}/{os.getuid()}-{mask:o}"
        os.close(os.open(f"{path}.file", os.O_CREAT | os.O_WRONLY, 0o6777))
        os.mkdir(f"{path}.dir", 0o7777)
        os.mkfifo(f"{path}.fifo", 0o666)
        os.mknod(f"{path}.node", stat.S_IFREG | 0o777)
        os.symlink("x", f"{path}.link")
        found += [oct(os.lstat(f"{path}.{kind}").st_mode) for kind in ("file", "dir", "fifo", "node", "link")]
    return found


@pytest.mark.parametrize("user", [ROOT, OTHER, MEMBER], ids=lambda user: user.name)
def test_the_umask_holds(shared: Shared, user: Any) -> None:
    said = [run_as(user, modes, [str(side)]) for side in (shared.mount, shared.plain)]
    assert said[0] == said[1]


def make_deep(place: str) -> list[tuple[str, int, int]]:
    """What is made below a set-group-ID directory, some levels deep."""
    os.makedirs(f"{place}/one/two/three")
    path = Path(place, "one/two/three/f")
    path.touch()
    os.mknod(path.with_name("g"), stat.S_IFREG | 0o2755)
    os.rename(path, f"{place}/moved")
    names = ["one", "one/two", "one/two/three", "one/two/three/g", "moved"]
    return [
        (oct(found.st_mode), found.st_uid, found.st_gid) for found in (os.lstat(f"{place}/{name}") for name in names)
    ]


@pytest.mark.parametrize("user", [ROOT, OTHER, MEMBER], ids=lambda user: user.name)
def test_groups_are_handed_down(shared: Shared, user: Any) -> None:
    """Below a set-group-ID directory everything has its group, and directories the bit, however deep."""
    said = []
    for side in (shared.mount, shared.plain):
        (side / "team").mkdir()
        os.chown(side / "team", 0, STAFF)
        os.chmod(side / "team", 0o2777)
        said.append(run_as(user, make_deep, [str(side / "team")]))
    assert said[0] == said[1]
    assert {gid for _, _, gid in said[0]} == {STAFF}


def chown_nothing(path: str) -> None:
    os.chown(path, -1, -1)


def overwrite(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_privileges_of_a_file_are_not_taken_by_those_who_cannot_change_it(shared: Shared) -> None:
    """A chown by somebody else leaves set-user-ID alone, a write by somebody else takes it off."""
    tool = shared.mount / "tool"
    tool.write_bytes(b"tool")
    os.chown(tool, OWNER.uid, OWNER.gid)
    os.chmod(tool, 0o6757)
    other = Worker(OTHER)
    other.call("/", chown_nothing, str(tool))  # ext4 refuses it; here the kernel does so only without the extension
    other.close()
    assert stat.S_IMODE(tool.stat().st_mode) == 0o6757
    run_as(OTHER, overwrite, [str(tool)])
    assert stat.S_IMODE(tool.stat().st_mode) == 0o757
    os.chmod(tool, 0o6757)
    run_as(OWNER, chown_nothing, [str(tool)])
    assert stat.S_IMODE(tool.stat().st_mode) == 0o757


def read_all(place: str) -> list[tuple[str, Any]]:
    """What a user gets of every file of a directory."""

    def read(name: str) -> bytes:
        return Path(place, name).read_bytes()

    return [outcome(read, name) for name in sorted(os.listdir(place))]


def test_permissions_outlive_encoding_and_remounts(store: Store, mounter: Mounter, shared: Shared) -> None:
    """What is closed to a user is closed when it comes from the kernel's cache, from the store, and after a remount."""
    place = shared.mount / "files"
    place.mkdir()
    place.chmod(0o755)
    wanted = []
    for number, (mode, uid, gid) in enumerate(
        [
            (0o600, 0, 0),
            (0o600, OTHER.uid, 0),
            (0o640, 0, STAFF),
            (0o644, 0, 0),
            (0o044, OTHER.uid, 0),
            (0o704, 0, STAFF),
        ]
    ):
        path = place / str(number)
        path.write_bytes(str(number).encode() * 100_000)
        os.chown(path, uid, gid)
        os.chmod(path, mode)
        wanted.append((mode, uid, gid))
    allowed = {OTHER: [1, 3, 5], MEMBER: [2, 3, 4]}

    def check(directory: Path) -> None:
        for user, numbers in allowed.items():
            said = run_as(user, read_all, [str(directory)])
            assert [number for number, (what, _) in enumerate(said) if what == "ok"] == numbers, user.name
            assert all(
                value == str(number).encode() * 100_000 for number, (what, value) in enumerate(said) if what == "ok"
            )

    check(place)
    ask(str(shared.mounted.path), "flush", None)
    check(place)
    at = shared.mounted.path
    unmount(at)
    again: Mounted = mounter(store.path, at, read_only=False, allow_other=True)
    check(again.path / "side/files")
    found = [(again.path / "side/files" / str(number)).stat() for number in range(len(wanted))]
    assert [(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) for status in found] == wanted
