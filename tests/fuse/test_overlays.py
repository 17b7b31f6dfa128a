"""Overlays through real mounts: how they come, change and go, what the kernel sees of it, and that the base stays."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonclipfs.errors import BusyError, ExistsError, MoonclipError, NotFoundError, UsageError
from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.layers.overlay import Overlay
from moonclipfs.store.overlaydirs import find_overlay, overlay_names
from moonclipfs.store.store import Store
from tests.fuse.conftest import (
    SMALL_FILES,
    Mounted,
    Mounter,
    Overlaid,
    eventually,
    is_running,
    patched_server,
)
from tests.layers.publish import File, publish
from tests.layers.sealkit import put

MIB = 1 << 20


def errno_of(call: Callable[..., object], *args: object) -> int:
    """The errno that a call ends with."""
    with pytest.raises(OSError) as caught:
        call(*args)
    return caught.value.errno or 0


def create(mounted: Mounted, name: str, base: str = "", **options: Any) -> Path:
    """Make an overlay at the control socket."""
    ask(str(mounted.path), "overlay_create", None, name=name, base=base, **options)
    return mounted.path / "@overlays" / name


def discard(mounted: Mounted, name: str, **options: Any) -> None:
    ask(str(mounted.path), "overlay_discard", None, name=name, **options)


def log_of(overlays: Mounted) -> Callable[[], str]:
    """What a mount that tests share logs from here on."""
    begins = len(overlays.log_text())
    return lambda: overlays.log_text()[begins:]


def everything(root: Path) -> dict[str, tuple[object, ...]]:
    """All of a tree that nobody may change: bytes, sizes, modes, owners, link counts, mtime, ctime, numbers."""
    found = {}
    for path, names, files in os.walk(root):
        for name in ["", *names, *files]:
            at = Path(path, name)
            status = os.lstat(at)
            data = hashlib.sha256(at.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
            found[str(at.relative_to(root))] = (
                data, status.st_size, status.st_mode, status.st_uid, status.st_gid, status.st_nlink,
                status.st_mtime_ns, status.st_ctime_ns, status.st_ino,
            )  # fmt: skip
    return found


ExpectLog = Callable[[str], None]


def kill(mounted: Mounted, expect_log: ExpectLog) -> None:
    """Kill the server of a mount; the next mount at its place clears that."""
    os.kill(mounted.pid, signal.SIGKILL)
    eventually(lambda: not is_running(mounted.pid))
    expect_log("cleared a dead mount")


def restarted(mounted: Mounted, mounter: Mounter) -> Mounted:
    """The same store, mounted again."""
    unmount(mounted.path)
    return mounter(mounted.store, read_only=False)


# Names


def test_mkdir_makes_an_empty_overlay_and_rmdir_discards_it(overlays: Mounted) -> None:
    """mkdir in @overlays makes an empty overlay, rmdir discards one that shows nothing, mv gives it another name."""
    directory = overlays.path / "@overlays"
    os.mkdir(directory / "one", 0o750)
    assert "one" in os.listdir(directory)
    assert stat.S_IMODE(os.stat(directory / "one").st_mode) == 0o750
    (directory / "one/f").write_bytes(b"x")
    number = os.stat(directory / "one").st_ino
    os.rename(directory / "one", directory / "two")
    assert (directory / "two/f").read_bytes() == b"x"
    assert os.stat(directory / "two").st_ino == number
    assert not (directory / "one").exists()
    assert errno_of(os.rmdir, directory / "two") == errno.ENOTEMPTY
    shutil.rmtree(directory / "two")
    assert "two" not in os.listdir(directory)
    assert "two" not in overlay_names(overlays.store)


def test_nothing_but_overlays_stands_in_the_directory_of_overlays(overlays: Mounted, tmp_path: Path) -> None:
    """@overlays takes overlays only: all else is EPERM, a bad name EINVAL, a taken one EEXIST."""
    directory = overlays.path / "@overlays"
    for name in ("taken", "other"):
        os.mkdir(directory / name)
    for call, *arguments in (
        (Path.touch, directory / "file"),
        (os.symlink, "x", directory / "link"),
        (os.mkfifo, directory / "fifo"),
        (os.chmod, directory, 0o777),
        (os.utime, directory),
        (os.setxattr, directory, "user.x", b"1"),
        (os.rmdir, directory),
    ):
        assert errno_of(call, *arguments) == errno.EPERM, call
    assert errno_of(os.mkdir, directory / "bad name") == errno.EINVAL
    assert errno_of(os.mkdir, directory / ".hidden") == errno.EINVAL
    assert errno_of(os.mkdir, directory / "taken") == errno.EEXIST
    assert errno_of(os.rename, directory / "taken", directory / "other") == errno.EEXIST
    assert errno_of(os.rename, directory / "none", directory / "new") == errno.ENOENT
    assert errno_of(os.rmdir, directory / "none") == errno.ENOENT
    assert errno_of(os.rename, directory, overlays.path / "elsewhere") == errno.EPERM
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o755
    assert os.stat(directory).st_nlink == 2 + len(os.listdir(directory))
    assert "@overlays" not in os.listdir(overlays.path)
    for name in ("taken", "other"):
        os.rmdir(directory / name)


def test_nothing_moves_between_layers_but_by_copying(overlay: Overlaid) -> None:
    """A rename or a link from one layer to another is EXDEV, and mv copies."""
    other, main = create_beside(overlay), overlay.root
    try:
        for target in (other / "f", main / "f", main / "@overlays/f"):
            for call in (os.rename, os.link):
                source = overlay.path / "run1/a/config.json"
                assert errno_of(call, source, target) in (errno.EXDEV, errno.EPERM), (call, target)
        subprocess.run(["mv", overlay.path / "run1", other / "moved"], check=True)
        assert sorted(os.listdir(other / "moved/a")) == sorted(SMALL_FILES)
        assert os.listdir(overlay.path) == []
        devices = {os.stat(path).st_dev for path in (main, other, overlay.path, other / "moved/a")}
        assert len(devices) == 1
    finally:
        discard_beside(overlay, other)


def create_beside(overlay: Overlaid, base: str = "base") -> Path:
    name = overlay.path.name + ".beside"
    ask(str(overlay.root), "overlay_create", None, name=name, base=base)
    return overlay.root / "@overlays" / name


def discard_beside(overlay: Overlaid, other: Path) -> None:
    ask(str(overlay.root), "overlay_discard", None, name=other.name, force=True)


def test_overlays_of_other_processes_come_and_go_at_once(live: Mounted, store: Store) -> None:
    """An overlay that another process has is listed and EBUSY, until that lets it go."""
    directory = live.path / "@overlays"
    assert not (directory / "theirs").exists()
    theirs = Overlay.create(store, "theirs", _nothing())
    assert os.listdir(directory) == ["theirs"]
    assert [entry.is_dir() for entry in os.scandir(directory)] == [True]
    assert errno_of(os.stat, directory / "theirs") == errno.EBUSY
    assert errno_of(os.rmdir, directory / "theirs") == errno.EBUSY
    with pytest.raises(BusyError, match=f"process {os.getpid()}"):
        discard(live, "theirs")
    theirs.discard()
    assert errno_of(os.stat, directory / "theirs") == errno.ENOENT
    Overlay.create(store, "theirs", _nothing()).close()
    (directory / "theirs/f").write_bytes(b"here")
    with pytest.raises(BusyError, match=str(live.path)):
        Overlay.open(store, "theirs")
    assert "ERROR" not in live.log_text()


def _nothing() -> Any:
    from moonclipfs.layers.basing import BaseOf

    return BaseOf()


def test_a_read_only_mount_has_no_overlays(store: Store, mounter: Mounter) -> None:
    Overlay.create(store, "one", _nothing()).close()
    mounted = mounter(store.path, show_virtual=True)
    assert "@overlays" not in os.listdir(mounted.path)
    assert not (mounted.path / "@overlays").exists()


# What the kernel remembers


def test_the_kernel_is_told_what_commands_do_with_overlays(overlays: Mounted) -> None:
    """What commands do with overlays shows at once, also where the kernel remembered something else."""
    directory = overlays.path / "@overlays"
    assert not (directory / "new").exists()
    create(overlays, "new", "base")
    assert (directory / "new/run1/a/config.json").read_bytes() == SMALL_FILES["config.json"]
    assert not (directory / "renamed").exists()
    ask(str(overlays.path), "overlay_rename", None, name="new", new="renamed")
    assert not (directory / "new").exists()
    assert (directory / "renamed/run1/a/config.json").exists()
    discard(overlays, "renamed")
    assert not (directory / "renamed/run1/a/config.json").exists()
    create(overlays, "renamed")
    assert os.listdir(directory / "renamed") == []
    discard(overlays, "renamed")


def test_what_lies_in_an_overlay_is_remembered_by_the_kernel(overlay: Overlaid) -> None:
    """stat in an overlay that is open is answered by the kernel after the first time, absence too."""
    for path in (overlay.path / "run1/a/config.json", overlay.path / "run1/none"):
        path.exists()
        before = overlay.stats()["requests"]
        for _ in range(50):
            path.exists()
        after = overlay.stats()["requests"]
        assert after.get("lookup", 0) - before.get("lookup", 0) < 5
        assert after.get("getattr", 0) - before.get("getattr", 0) < 5


def test_a_rebase_shows_at_once(live: Mounted, store: Store) -> None:
    """After a rebase every name shows the new base or what the overlay changed, at once.

    A directory in it that is in use meanwhile is as one that was removed then, an open file has its bytes.
    """
    publish(store, "ck", {"same": b"1", "theirs": b"old", "gone": b"1", "both": b"0", "d": {"x": b"1"}})
    path = create(live, "exp", "ck@1")
    assert (path / "theirs").read_bytes() == b"old"
    assert not (path / "new").exists()
    (path / "both").write_bytes(b"mine")
    os.chmod(path / "theirs", 0o600)
    inside, top = os.open(path / "d", os.O_RDONLY), os.open(path, os.O_RDONLY)
    reader = (path / "theirs").open("rb", buffering=0)
    publish(
        store, "ck", {"same": b"1", "theirs": b"longer than before", "new": b"n", "both": b"yours", "d": {"y": b"2"}}
    )
    answer = ask(str(live.path), "overlay_rebase", None, name="exp")
    assert [conflict["path"] for conflict in answer["conflicts"]] == ["both"]
    eventually((live.path / answer["conflicts"][0]["base"]).exists, 3)
    assert (live.path / answer["conflicts"][0]["base"]).read_bytes() == b"yours"
    assert (path / "theirs").read_bytes() == b"longer than before"
    assert stat.S_IMODE(os.stat(path / "theirs").st_mode) == 0o600
    assert (path / "new").read_bytes() == b"n"
    assert not (path / "gone").exists()
    assert (path / "both").read_bytes() == b"mine"
    assert os.listdir(path / "d") == ["y"]
    with pytest.raises(FileNotFoundError):
        os.mkdir("lost", dir_fd=inside)
    os.mkdir("kept", dir_fd=top)
    assert sorted(os.listdir(top)) == sorted(os.listdir(path)) == ["both", "d", "kept", "new", "same", "theirs"]
    assert reader.read() == b"old"
    reader.close()
    os.close(inside)
    os.close(top)
    assert "ERROR" not in live.log_text()


def test_what_the_kernel_forgets_of_overlays_the_server_forgets(overlay: Overlaid) -> None:
    """A rename by a command lets the kernel forget all that it knows below; then the server has forgotten it, too."""
    many, name = overlay.path / "many", overlay.path.name
    many.mkdir()
    for number in range(300):
        (many / f"{number}").touch()
    known = overlay.stats()["known"]
    assert known > 300
    for old, new in ((name, f"{name}.new"), (f"{name}.new", name)):
        ask(str(overlay.root), "overlay_rename", None, name=old, new=new)
    eventually(lambda: overlay.stats()["known"] < known - 250)
    assert len(os.listdir(many)) == 300
    assert (many / "7").stat().st_size == 0


def test_a_damaged_overlay_is_eio_and_can_be_discarded(live: Mounted, store: Store, mounter: Mounter) -> None:
    """A damaged overlay is listed, and EIO for who goes there; it can be discarded, and is in the way of no other."""
    directory = live.path / "@overlays"
    for name in ("good", "name", "journal", "gone"):
        (directory / name).mkdir()
        (directory / name / "f").write_bytes(b"x")
    unmount(live.path)
    layers = {name: store.path / "layers" / find_overlay(store.path, name).layer for name in overlay_names(store.path)}
    (store.path / "overlays/name").write_bytes(b"garbage")
    for segment in (layers["journal"] / "journal").iterdir():
        segment.write_bytes(b"garbage" * 100)
    shutil.rmtree(layers["gone"])
    again = mounter(store.path, read_only=False)
    assert os.listdir(directory) == ["gone", "good", "journal", "name"]
    assert (directory / "good/f").read_bytes() == b"x"
    for name in ("name", "journal", "gone"):
        assert errno_of(os.listdir, directory / name) == errno.EIO
        discard(again, name)
    (directory / "name").mkdir()
    again = restarted(again, mounter)
    assert os.listdir(directory) == ["good", "name"]
    assert len([name for name in os.listdir(store.path / "layers") if name.startswith("overlay.")]) == 2


# The base


def test_the_base_of_an_overlay_stays_as_it_is(
    live: Mounted, store: Store, mounter: Mounter, expect_log: ExpectLog
) -> None:
    """Nothing that is done in an overlay changes its base: no byte, size, mode, owner, link count, time or number."""
    publish(
        store, "ck",
        {"d": {"e": {"f": b"f" * 5000}, "g": b"g"}, "one": File(b"linked", link_group=1),
         "two": File(b"linked", link_group=1), "to": "d/g", "big": os.urandom(2 * MIB)},
    )  # fmt: skip
    version, path = live.path / "@versions/ck/1", create(live, "exp", "ck")
    eventually((live.path / "ck").exists)
    before = everything(live.path / "ck"), everything(version)
    assert [value[:8] for value in everything(path).values()] == [value[:8] for value in before[0].values()]
    assert {value[8] for value in everything(path).values()}.isdisjoint(value[8] for value in before[0].values())
    with (path / "big").open("r+b") as file:
        file.seek(MIB)
        file.write(b"!")
    os.chmod(path / "one", 0o600)
    os.truncate(path / "d/g", 0)
    os.utime(path / "d/e/f", ns=(1, 1))
    os.rename(path / "d/e", path / "e")
    os.remove(path / "two")
    os.link(path / "one", path / "three")
    os.setxattr(path / "to", "trusted.x", b"1", follow_symlinks=False) if os.geteuid() == 0 else None
    (path / "new").write_bytes(b"new")
    os.chown(path / "e/f", 5, 6)
    shutil.rmtree(path / "d")
    assert (everything(live.path / "ck"), everything(version)) == before
    kill(live, expect_log)
    again = mounter(live.store, read_only=False)
    assert (everything(again.path / "ck"), everything(version)) == before
    assert sorted(os.listdir(path)) == ["big", "e", "new", "one", "three", "to"]
    discard(again, "exp")
    assert (everything(again.path / "ck"), everything(version)) == before


def test_two_overlays_of_one_base_never_see_each_other(overlay: Overlaid) -> None:
    other = create_beside(overlay)
    try:
        for path, word in ((overlay.path, b"first"), (other, b"second")):
            (path / "run1/a/config.json").write_bytes(word)
            (path / "run1/a/model.bin").unlink()
            (path / "run1" / word.decode()).touch()
        assert (overlay.path / "run1/a/config.json").read_bytes() == b"first"
        assert (other / "run1/a/config.json").read_bytes() == b"second"
        assert sorted(os.listdir(overlay.path / "run1")) == ["a", "first"]
        assert sorted(os.listdir(other / "run1")) == ["a", "second"]
        assert (overlay.root / "base/run1/a/config.json").read_bytes() == SMALL_FILES["config.json"]
    finally:
        discard_beside(overlay, other)


def test_an_overlay_of_an_overlay_sees_its_parent_as_of_creation(overlay: Overlaid) -> None:
    (overlay.path / "run1/a/config.json").write_bytes(b"parent")
    os.remove(overlay.path / "run1/a/empty")
    child = create_beside(overlay, overlay.path.name)
    try:
        (overlay.path / "run1/a/config.json").write_bytes(b"later")
        assert (child / "run1/a/config.json").read_bytes() == b"parent"
        assert not (child / "run1/a/empty").exists()
        (child / "run1/a/config.json").write_bytes(b"child")
        assert (overlay.path / "run1/a/config.json").read_bytes() == b"later"
    finally:
        discard_beside(overlay, child)


def test_a_live_directory_is_a_base_as_of_that_moment(live: Mounted) -> None:
    (live.path / "work/d").mkdir(parents=True)
    (live.path / "work/d/f").write_bytes(b"then" * 10_000)
    path = create(live, "exp", "/work")
    (live.path / "work/d/f").write_bytes(b"now")
    shutil.rmtree(live.path / "work")
    assert (path / "d/f").read_bytes() == b"then" * 10_000
    assert (live.path / "@versions/work").exists() is False, "it is bound nowhere"


def test_r105_what_was_removed_stays_so_over_renames_and_remounts(
    live: Mounted, store: Store, mounter: Mounter
) -> None:
    """R105: rm -rf a; mkdir -p a/b; mv a/b b; remount: every listed name can be looked at, a is empty, the base as it
    was.
    """
    publish(store, "ck", {"a": {"b": {"x": b"1"}, "c": b"2"}, ".wh.a": b"odd", ".wh..wh..opq": b"odd"})
    path = create(live, "exp", "ck")
    eventually((live.path / "ck").exists)
    before = everything(live.path / "ck")
    shutil.rmtree(path / "a")
    (path / "a/b").mkdir(parents=True)
    os.rename(path / "a/b", path / "b")
    (path / ".wh.b").write_bytes(b"ordinary")
    for mounted in (live, restarted(live, mounter)):
        assert sorted(os.listdir(path)) == [".wh..wh..opq", ".wh.a", ".wh.b", "a", "b"]
        for directory, names, files in os.walk(path):
            for name in names + files:
                os.lstat(os.path.join(directory, name))
        assert os.listdir(path / "a") == os.listdir(path / "b") == []
        assert (path / ".wh.b").read_bytes() == b"ordinary"
        assert everything(mounted.path / "ck") == before


def test_markers_of_what_was_removed(live: Mounted, store: Store, mounter: Mounter) -> None:
    """What was removed from a base stays away, over renames, remounts and directories of the same name.

    A rename over what was removed keeps the lower entry hidden, one of what exists here only leaves no marker, and a
    directory removed and made again is empty.
    """
    publish(store, "ck", {"lower": b"lower", "d": {"x": b"1"}, "moved": {"y": b"2"}, "gone": b"g"})
    path = create(live, "exp", "ck")
    os.remove(path / "lower")
    (path / "upper").write_bytes(b"upper")
    os.rename(path / "upper", path / "lower")
    (path / "mine").touch()
    os.rename(path / "mine", path / "mine too")
    shutil.rmtree(path / "d")
    (path / "d").mkdir()
    os.rename(path / "moved", path / "there")
    (path / "moved").mkdir()
    os.remove(path / "gone")
    for _ in (live, restarted(live, mounter)):
        assert sorted(os.listdir(path)) == ["d", "lower", "mine too", "moved", "there"]
        assert (path / "lower").read_bytes() == b"upper"
        assert os.listdir(path / "d") == os.listdir(path / "moved") == []
        assert (path / "there/y").read_bytes() == b"2"
    assert not {"mine", "upper"} & {entry["path"] for entry in _differences(live, "exp")}
    os.remove(path / "lower")
    assert not (path / "lower").exists()


def _differences(mounted: Mounted, name: str) -> list[dict[str, Any]]:
    answer = ask(str(mounted.path), "overlay_diff", None, name=name)
    return [entry for entries in answer.values() if isinstance(entries, list) for entry in entries]


def test_r107_a_change_costs_what_was_changed(store: Store, mounter: Mounter) -> None:
    """R107: chmod, utime and rename of a 64 MiB file of the base grow the store by less than 16 KiB, a byte in its
    middle by one chunk and 16 KiB at most; discarded, it has its size back, and the base its bytes.
    """
    data = os.urandom(64 * MIB)
    publish(store, "ck", {"model.bin": data})
    mounted = mounter(store.path, read_only=False, seal_after=None)
    digest = hashlib.sha256(data).hexdigest()
    path = create(mounted, "exp", "ck")
    empty = _disk_usage(store)
    os.chmod(path / "model.bin", 0o600)
    os.utime(path / "model.bin", ns=(1, 2))
    os.rename(path / "model.bin", path / "renamed")
    os.sync()
    assert _disk_usage(store) - empty < 16 * 1024
    with (path / "renamed").open("r+b") as file:
        file.seek(32 * MIB)
        file.write(bytes([data[32 * MIB] ^ 1]))
    for step in (lambda: os.sync(), lambda: ask(str(mounted.path), "overlay_flush", None, name="exp")):
        step()
        assert _disk_usage(store) - empty <= MIB + 16 * 1024
    assert hashlib.sha256((path / "renamed").read_bytes()).hexdigest() != digest
    discard(mounted, "exp")
    ask(str(mounted.path), "flush", None)
    assert hashlib.sha256((mounted.path / "ck/model.bin").read_bytes()).hexdigest() == digest


def _disk_usage(store: Store) -> int:
    """Bytes of the store on the disk, without what is kept in reserve for full disks."""
    return sum(
        min(os.lstat(path).st_blocks * 512, -(-os.lstat(path).st_size // 4096) * 4096)
        for path in store.path.rglob("*")
        if path.is_file() and "reserve" not in path.name and "index" not in path.name and path.parent.name != "leases"
    )


# Open files


def test_an_overlay_in_use_is_discarded_by_force_only(overlay: Overlaid) -> None:
    """An overlay with open files is discarded by force only: then their users get ESTALE at once, and all goes on."""
    other = create_beside(overlay)
    file = (other / "run1/a/model.bin").open("r+b", buffering=0)
    reader = (other / "run1/a/sub/y").open("rb", buffering=0)
    working = os.open(other / "run1", os.O_RDONLY)
    with pytest.raises(BusyError, match=r"run1/a/model\.bin"):
        ask(str(overlay.root), "overlay_discard", None, name=other.name)
    file.write(b"still")
    began = time.monotonic()
    discard_beside(overlay, other)
    assert time.monotonic() - began < 2
    for call, *arguments in (
        (file.write, b"x"),
        (os.pread, file.fileno(), 10, 0),
        (os.pread, reader.fileno(), 10, 0),
        (os.fsync, file.fileno()),
        (os.ftruncate, file.fileno(), 1),
        (os.listdir, working),
        (os.close, os.dup(file.fileno())),
    ):
        assert errno_of(call, *arguments) == errno.ESTALE, call
    for descriptor in (file, reader):
        with pytest.raises(OSError, match="Stale"):
            descriptor.close()
    os.close(working)
    assert not other.exists()
    assert "ERROR" not in overlay.log_text()
    assert overlay.stats()["open_files"] == 0


def test_an_overlay_is_discarded_while_it_is_written_to(overlay: Overlaid) -> None:
    """Who is at work in an overlay that is discarded by force gets an error, and waits for nothing."""
    other, errors = create_beside(overlay), []

    def work(number: int) -> None:
        try:
            for step in range(100_000):
                path = other / f"{number}.{step % 7}"
                path.write_bytes(b"x" * 200_000)
                assert len(path.read_bytes()) == 200_000
                os.rename(path, other / f"r{number}")
        except OSError as error:
            errors.append(error.errno)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    discard_beside(overlay, other)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert set(errors) <= {errno.ESTALE, errno.ENOENT, errno.EIO}
    assert not other.exists()
    (overlay.path / "after").write_bytes(b"it serves still")


def test_an_unlinked_file_keeps_an_overlay_from_rmdir(overlays: Mounted) -> None:
    path = overlays.path / "@overlays/held"
    path.mkdir()
    with (path / "f").open("w+b", buffering=0) as file:
        file.write(b"bytes")
        os.remove(path / "f")
        assert errno_of(os.rmdir, path) == errno.EBUSY
        assert os.pread(file.fileno(), 5, 0) == b"bytes"
    path.rmdir()
    assert not path.exists()


# Bounds and attributes


def test_a_quota_is_edquot_and_freeing_works(overlays: Mounted) -> None:
    """A write past the quota of an overlay is EDQUOT, and what is removed makes room for others."""
    log, path = log_of(overlays), create(overlays, "small", "base", quota=MIB)
    try:
        (path / "half").write_bytes(os.urandom(600_000))
        assert errno_of((path / "more").write_bytes, os.urandom(600_000)) == errno.EDQUOT
        (path / "half").unlink()
        (path / "more").unlink(missing_ok=True)
        (path / "more").write_bytes(os.urandom(600_000))
        os.chmod(path / "run1/a/model.bin", 0o600)
    finally:
        discard(overlays, "small", force=True)
    assert "ERROR" not in log()


def test_attributes_sync_and_size_of_an_overlay(overlay: Overlaid) -> None:
    path = overlay.path / "run1/a/config.json"
    assert os.getxattr(path, "user.moonclip.store") == os.fsencode(overlay.store)
    for name in ("user.moonclip.none", "user.none"):
        assert errno_of(os.getxattr, path, name) == errno.ENODATA
    assert errno_of(os.setxattr, path, "user.moonclip.store", b"x") == errno.EPERM
    os.setxattr(path, "user.note", b"kept")
    assert os.listxattr(path) == ["user.note"]
    assert os.getxattr(overlay.path.parent, "user.moonclip.store") == os.fsencode(overlay.store)
    assert os.listxattr(overlay.path.parent) == []
    with path.open("r+b", buffering=0) as file:
        file.write(b"synced")
        os.fsync(file.fileno())
    for directory in (overlay.path, overlay.path.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    assert os.statvfs(overlay.path).f_blocks == os.statvfs(overlay.root).f_blocks
    assert os.statvfs(overlay.path.parent).f_namemax == 255


def test_a_hundred_overlays_work_at_once(overlays: Mounted) -> None:
    """A hundred overlays of one base, made, written to, listed and discarded."""
    paths = [create(overlays, f"arm{number}", "base") for number in range(100)]
    for number, path in enumerate(paths):
        (path / "run1/a/config.json").write_text(f"{number}")
        (path / f"only{number}").touch()
    assert [int((path / "run1/a/config.json").read_text()) for path in paths] == list(range(100))
    assert {len(os.listdir(path)) for path in paths} == {2}
    assert sum(name.startswith("arm") for name in os.listdir(paths[0].parent)) == 100
    status = ask(str(overlays.path), "status")
    assert sum(one["name"].startswith("arm") for one in status["overlays"]) == 100
    for path in paths:
        discard(overlays, path.name)
    assert not any(path.exists() for path in paths)


def test_of_more_overlays_than_may_be_open_those_that_nobody_uses_are_closed(
    store: Store, tmp_path: Path, fuse: None
) -> None:
    """However many overlays there are, each is there for who goes there, while few enough are used at a time."""
    patch = "from moonclipfs import limits\nlimits.OVERLAYS_OPEN = 16"
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        paths = [mounted.path / "@overlays" / f"o{number:02}" for number in range(24)]
        used = None
        for number, path in enumerate(paths):
            eventually(lambda path=path: _made(path))  # type: ignore[misc]
            (path / "f").write_bytes(b"%d" % number)
            used = used or (path / "f").open("r+b", buffering=0)
        assert used is not None
        used.write(b"used")
        assert [entry.name for entry in os.scandir(paths[0].parent)] == [path.name for path in paths]
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o755}
        for number, path in enumerate(paths[1:], 1):
            assert (path / "f").read_bytes() == b"%d" % number
        subprocess.run(["ls", "-lR", paths[0].parent], stdout=subprocess.DEVNULL, check=True)
        used.write(b" still")
        used.close()
        assert (paths[0] / "f").read_bytes() == b"used still"
        assert len(ask(str(mounted.path), "status")["overlays"]) <= 16


def test_more_overlays_than_may_be_open_are_used_at_once(store: Store, tmp_path: Path, fuse: None) -> None:
    """Closing some for others makes nobody wait for ever, and shows nobody an overlay that is empty."""
    for number in range(24):
        with Overlay.create(store, f"o{number}", _nothing()) as overlay:
            put(overlay.layer, "f", b"%d" % number)
    patch = "from moonclipfs import limits\nlimits.OVERLAYS_OPEN = 16"
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        top, until, odd = mounted.path / "@overlays", time.monotonic() + 3, []

        def use(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < until:
                path = top / f"o{rng.randrange(24)}"
                try:
                    if rng.randrange(3):
                        assert (path / "f").read_bytes() == os.fsencode(path.name[1:])
                    else:
                        assert os.listdir(path) == ["f"] and len(list(os.scandir(top))) == 24
                except (OSError, AssertionError) as error:
                    if getattr(error, "errno", 0) != errno.ESTALE:  # more are wanted at once than may be open
                        odd.append(error)

        threads = [threading.Thread(target=use, args=(seed,), daemon=True) for seed in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until + 20 - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads) and odd == []


def test_an_overlay_that_takes_long_to_open_is_waited_for_by_nobody_else(
    store: Store, tmp_path: Path, fuse: None
) -> None:
    publish(store, "ck", {f"d{number}": {"f": b"x"} for number in range(10)})
    for number in range(5):
        Overlay.create(store, f"slow{number}", _nothing()).close()
    patch = """
import time
from moonclipfs.layers.overlay import Overlay
take = Overlay.open
def slowly(store, name, **options):
    time.sleep(0.7)
    return take(store, name, **options)
Overlay.open = slowly
"""
    with patched_server(store.path, tmp_path / "mnt", patch, read_only=False) as mounted:
        slow = [mounted.path / f"@overlays/slow{number}" for number in range(5)]
        threads = [threading.Thread(target=os.stat, args=(path,)) for path in slow]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        began = time.monotonic()
        for number in range(10):
            assert (mounted.path / f"ck/d{number}/f").read_bytes() == b"x"
        (mounted.path / "new").write_bytes(b"x")
        assert time.monotonic() - began < 1.5
        assert any(thread.is_alive() for thread in threads)
        for thread in threads:
            thread.join()


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except OSError as error:
        assert error.errno == errno.ENFILE
        return False
    return True


# The end of a mount, and of owners


def test_overlays_are_there_again_after_a_remount(live: Mounted, mounter: Mounter, store: Store) -> None:
    """An unmount lets go of overlays as they are, and discards ephemeral ones."""
    path = create(live, "kept", "run1/a")
    (path / "config.json").write_bytes(b"changed")
    (path / "big").write_bytes(os.urandom(3 * MIB))
    (create(live, "short", ephemeral=True) / "f").write_bytes(b"x")
    before = everything(path)
    again = restarted(live, mounter)
    assert os.listdir(again.path / "@overlays") == ["kept"]
    assert everything(path) == before
    assert "ERROR" not in again.log_text()


def test_after_a_kill_persistent_overlays_are_there_and_ephemeral_ones_gone(
    live: Mounted, mounter: Mounter, expect_log: ExpectLog
) -> None:
    """After kill -9 of the server a persistent overlay has what was closed in it, an ephemeral one is gone."""
    path, short = create(live, "kept", "run1/a"), create(live, "short", ephemeral=True)
    data = os.urandom(MIB)
    for directory in (path, short):
        (directory / "new").write_bytes(data)
        os.rename(directory / "new", directory / "renamed")
    os.remove(path / "config.json")
    eventually((live.path / "run1/a").exists)
    before = everything(live.path / "run1/a")
    kill(live, expect_log)
    again = mounter(live.store, read_only=False)
    assert os.listdir(again.path / "@overlays") == ["kept"]
    assert (path / "renamed").read_bytes() == data
    assert sorted(os.listdir(path)) == ["empty", "latest", "model.bin", "renamed", "sub"]
    assert everything(again.path / "run1/a") == before


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_an_overlay_of_a_process_ends_with_it(overlays: Mounted, how: str) -> None:
    """An overlay that belongs to a process is discarded when that ends, whatever is open in it."""
    log, owner = log_of(overlays), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = create(overlays, "theirs", "base", ephemeral=True, owner={"pid": owner.pid})
    ask(str(overlays.path), "overlay_rename", None, name="theirs", new="renamed")
    path = path.with_name("renamed")
    with (path / "f").open("wb", buffering=0) as file:
        file.write(b"x")
        if how == "kill":
            owner.kill()
        owner.communicate(b"\n")
        eventually(lambda: "renamed" not in os.listdir(path.parent), 5)
        assert not path.exists()
        assert errno_of(file.write, b"x") == errno.ESTALE
        with pytest.raises(OSError, match="Stale"):
            file.close()
    assert "ERROR" not in log()


def test_an_overlay_of_a_process_that_is_not_there_is_not_made(overlays: Mounted) -> None:
    owner = subprocess.Popen(["true"])
    owner.wait()
    with pytest.raises(NotFoundError, match="no process"):
        create(overlays, "orphan", ephemeral=True, owner={"pid": owner.pid})
    with pytest.raises(UsageError):
        create(overlays, "orphan", ephemeral=True, owner={"pid": "me"})
    assert not (overlays.path / "@overlays/orphan").exists()


def test_commands_tell_what_is_wrong(overlays: Mounted) -> None:
    create(overlays, "there")
    wrong: list[tuple[type[MoonclipError], str, dict[str, Any]]] = [
        (ExistsError, "overlay_create", {"name": "there"}),
        (NotFoundError, "overlay_create", {"name": "x", "base": "nowhere"}),
        (UsageError, "overlay_create", {"name": "a/b"}),
        (NotFoundError, "overlay_discard", {"name": "nothing"}),
        (UsageError, "overlay_discard", {}),
        (NotFoundError, "overlay_rename", {"name": "nothing", "new": "x"}),
        (UsageError, "overlay_rebase", {"name": "there"}),
    ]
    for kind, verb, arguments in wrong:
        with pytest.raises(kind):
            ask(str(overlays.path), verb, None, **arguments)
    assert os.listdir(overlays.path / "@overlays/there") == []
    discard(overlays, "there")


def test_a_commit_leaves_the_overlay_usable(live: Mounted) -> None:
    """A commit makes a snapshot, which the mount shows, and disturbs no number and no open file of the overlay."""
    path = create(live, "exp", "run1/a")
    (path / "config.json").write_bytes(b"trained")
    os.remove(path / "empty")
    with (path / "model.bin").open("r+b", buffering=0) as file:
        file.write(b"w" * 1000)
        numbers = {name: os.stat(path / name).st_ino for name in os.listdir(path)}
        version = ask(str(live.path), "overlay_commit", None, **{"name": "exp", "as": "run1/b"})
        assert (version["path"], version["number"]) == ("run1/b", 1)
        eventually((live.path / "run1/b").exists)
        assert (live.path / "run1/b/config.json").read_bytes() == b"trained"
        assert sorted(os.listdir(live.path / "run1/b")) == sorted(os.listdir(path))
        file.write(b"v" * 1000)
        assert {name: os.stat(path / name).st_ino for name in os.listdir(path)} == numbers
    assert (path / "model.bin").read_bytes()[:2000] == b"w" * 1000 + b"v" * 1000
    assert (live.path / "run1/b/model.bin").read_bytes()[1000:2000] != b"v" * 1000
    assert (live.path / "run1/a/config.json").read_bytes() == SMALL_FILES["config.json"]


# A mount that keeps nothing


def test_a_dry_run_can_be_written_to_and_keeps_nothing(store: Store, mounter: Mounter, tmp_path: Path) -> None:
    """mount --dry-run: everything can be written, nobody else sees it, nothing can be sealed, and nothing is kept."""
    publish(store, "run1/a", SMALL_FILES)
    Overlay.create(store, "before", _nothing()).close()
    log = store.names().sequence
    mounted = mounter(store.path, read_only=False, dry_run=True, seal_after=0.1)
    beside = mounter(store.path, tmp_path / "beside", read_only=False)
    (mounted.path / "run1/a/config.json").write_bytes(b"changed")
    shutil.rmtree(mounted.path / "run1/a/sub")
    os.rename(mounted.path / "run1", mounted.path / "run2")
    (mounted.path / "run2/a/model.bin").write_bytes(os.urandom(MIB))
    assert os.getxattr(mounted.path / "run2/a/model.bin", "user.moonclip.dry_run") == b"1"
    for verb, arguments in (("seal", {"path": "run2/a"}), ("clone", {"source": "run1/a", "target": "x"})):
        with pytest.raises(UsageError, match="dry run"):
            ask(str(mounted.path), verb, None, **arguments)
    assert ask(str(mounted.path), "status")["dry_run"] is True
    assert os.listdir(mounted.path / "@overlays") == []
    assert not (mounted.path / "@overlays/before").exists()
    with pytest.raises(NotFoundError, match="dry run"):
        discard(mounted, "before")
    (mounted.path / "@overlays/own").mkdir()
    (mounted.path / "@overlays/own/f").write_bytes(b"x")
    with pytest.raises(UsageError, match="dry run"):
        ask(str(mounted.path), "overlay_commit", None, name="own")
    assert (beside.path / "run1/a/config.json").read_bytes() == SMALL_FILES["config.json"]
    unmount(mounted.path)
    assert store.names().sequence == log
    assert sorted(os.listdir(store.path / "overlays")) in ([".lock", "before"], ["before"])
    assert len([name for name in os.listdir(store.path / "layers") if name.startswith("overlay.")]) == 1


def test_after_a_kill_nothing_is_left_of_a_dry_run(store: Store, mounter: Mounter, expect_log: ExpectLog) -> None:
    publish(store, "run1/a", SMALL_FILES)
    mounted = mounter(store.path, read_only=False, dry_run=True)
    (mounted.path / "run1/a/config.json").write_bytes(b"changed")
    (mounted.path / "big").write_bytes(os.urandom(MIB))
    kill(mounted, expect_log)
    again = mounter(store.path, read_only=False, dry_run=True)
    assert (again.path / "run1/a/config.json").read_bytes() == SMALL_FILES["config.json"]
    assert len([name for name in os.listdir(store.path / "layers") if name.startswith("overlay.")]) == 1


def test_an_overlay_is_made_and_discarded_without_a_look_into_its_base(live: Mounted, store: Store) -> None:
    """create and discard take as long for a base of many files as for one of few: they read none of it."""
    publish(store, "large", {"d": {f"{number}": b"%d" % number for number in range(5000)}})
    reads = []
    for base in ("run1/a", "large"):
        create(live, "first", base)
        discard(live, "first")
        before, began = live.stats()["encoded_bytes_read"], time.monotonic()
        path = create(live, "exp", base)
        os.stat(path)
        discard(live, "exp")
        assert time.monotonic() - began < 1
        reads.append(live.stats()["encoded_bytes_read"] - before)
    assert reads[1] <= reads[0]
