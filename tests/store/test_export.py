"""Snapshots written back: every byte and attribute, holes as holes, resumed, never over something else."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import BackendError, CorruptError, ExistsError, MoonclipError, NoSpaceError
from moonclipfs.store import export as exporting
from moonclipfs.store.add import add
from moonclipfs.store.export import export
from moonclipfs.store.packs import pack_key
from moonclipfs.store.progress import Progress
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, BytesSource, Entry, EntryType, Extent, Kind, Version
from tests.store.kit import noise, packs, publish, series
from tests.store.test_add import lay


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory as it can be seen from outside."""
    seen: dict[str, tuple[object, ...]] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        body: object = None
        if kind == stat.S_IFREG:
            body = path.read_bytes()
        elif kind == stat.S_IFLNK:
            body = os.readlink(path)
        xattrs = {} if kind == stat.S_IFLNK else {name: os.getxattr(path, name) for name in os.listxattr(path)}
        owner = status.st_uid, status.st_gid
        mode = None if kind == stat.S_IFLNK else stat.S_IMODE(status.st_mode)
        links = status.st_nlink if kind == stat.S_IFREG else None
        seen[os.fsdecode(path.relative_to(root))] = (kind, mode, owner, status.st_mtime_ns, links, body, xattrs)
    return seen


def rich(root: Path) -> Path:
    """A directory of everything that can be stored."""
    lay(
        root,
        {"model": series(1)[0], "sub/empty": b"", "sub/deep/er/file": noise(1), "script": b"#!", "\udcff\n": b"odd"},
    )
    os.link(root / "model", root / "sub" / "same")
    (root / "link").symlink_to("sub/\udcfe")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    os.chmod(root / "script", 0o4711)
    os.chmod(root / "sub", 0o1555)
    os.setxattr(root / "script", "user.note", b"\0kept")
    os.setxattr(root / "sub", "user.note", b"dir")
    for number, path in enumerate([*root.rglob("*"), root]):
        os.utime(path, ns=(number, 1_500_000_000_000_000_001 + number), follow_symlinks=False)
    return root


def test_everything_comes_back(store: Store, tmp_path: Path) -> None:
    source = rich(tmp_path / "source")
    add(store, [source])
    report = export(store, store.resolve("source"), tmp_path / "new" / "target")
    assert tree(tmp_path / "new" / "target") == tree(source)
    assert (report.files, report.skipped, report.notes) == (6, 0, [])


def test_again_it_writes_nothing(store: Store, tmp_path: Path) -> None:
    source = rich(tmp_path / "source")
    add(store, [source])
    export(store, store.resolve("source"), tmp_path / "target")
    inodes = {path: path.lstat().st_ino for path in (tmp_path / "target").rglob("*")}
    decoded = store.objects.counters.bytes_decoded
    report = export(store, store.resolve("source"), tmp_path / "target")
    assert (report.files, report.skipped, report.bytes) == (0, 6, 0)
    assert store.objects.counters.bytes_decoded == decoded
    assert {path: path.lstat().st_ino for path in (tmp_path / "target").rglob("*")} == inodes
    assert tree(tmp_path / "target") == tree(source)


def test_what_is_missing_or_torn_is_made_again(store: Store, tmp_path: Path) -> None:
    source = rich(tmp_path / "source")
    add(store, [source])
    target = tmp_path / "target"
    export(store, store.resolve("source"), target)
    os.chmod(target / "sub", 0o755)
    (target / "sub" / "same").unlink()
    (target / "script").unlink()
    (target / "link").unlink()
    (target / "sub" / f".{'0' * 16}.moonclipfs-part").write_bytes(b"left by a killed one")
    (target / "own notes").write_bytes(b"stay")
    report = export(store, store.resolve("source"), target)
    assert report.files == 2
    (target / "own notes").unlink()
    os.utime(target, ns=(1, (tmp_path / "source").stat().st_mtime_ns))
    assert tree(target) == tree(source)


@pytest.mark.parametrize("there", ["file", "symlink", "directory", "file for a directory"])
def test_something_else_in_the_way_is_named_before_a_byte_is_written(store: Store, tmp_path: Path, there: str) -> None:
    publish(store, "a", {"aa": noise(1), "f": noise(2)})
    target = tmp_path / "target"
    target.mkdir()
    outside = lay(tmp_path / "outside", {"f": b"precious"})
    name = "f"
    if there == "file":
        (target / "f").write_bytes(b"other")
    elif there == "symlink":
        (target / "f").symlink_to(outside / "f")
    elif there == "directory":
        (target / "f").mkdir()
    else:
        add(store, [lay(tmp_path / "b", {"aa": b"1", "sub/f": b"2"})])
        (target / "sub").symlink_to(outside)
        name = "sub"
    version = store.resolve("b" if name == "sub" else "a")
    with pytest.raises(ExistsError, match=rf"target/{name} "):
        export(store, version, target)
    assert [path.name for path in target.iterdir()] == [name]
    if there in ("file", "symlink"):
        export(store, version, target, overwrite=True)
        assert (target / "f").read_bytes() == noise(2)
        assert not (target / "f").is_symlink()
    else:
        with pytest.raises(ExistsError):
            export(store, version, target, overwrite=True)
    assert (outside / "f").read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["../../outside", "/{outside}", "a/../../outside", "link/inner", "run/link/inner"])
def test_a_name_from_the_store_does_not_lead_out(name: str, store: Store, tmp_path: Path) -> None:
    """Also by a symbolic link that an earlier snapshot left on the way."""
    version = publish(store, "fine", {"f": b"1"})
    outside, directory = tmp_path / "outside", tmp_path / "x" / "out"
    outside.mkdir()
    (directory / "run").mkdir(parents=True)
    for link in (directory / "link", directory / "run" / "link"):
        link.symlink_to(outside)
    target = directory / name.format(outside=outside)
    with pytest.raises((CorruptError, ExistsError), match=r"is outside|link is in the way"):
        export(store, version, target, inside=directory, overwrite=True)
    assert not list(outside.iterdir())
    export(store, version, directory / "run" / "fine", inside=directory)
    assert (directory / "run" / "fine" / "f").read_bytes() == b"1"


def bind_entry(store: Store, entry: Entry, data: bytes | None = b"") -> Version:
    """A snapshot of one file with the attributes of `entry`; without `data`, of one other thing."""
    with store.ingest() as ingest:
        if data is not None:
            child, size, _ = ingest.put_file(BytesSource(data))
            entry = replace(entry, child=child, size=size)
        return ingest.publish("odd", ingest.put_directory([entry]), {})


def test_holes_stay_holes(store: Store, tmp_path: Path) -> None:
    size = 64 * limits.MIB
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(size)
        for at in (0, 20 * limits.MIB + 5):
            file.seek(at)
            file.write(noise(at, 300_000))
    add(store, [path])
    export(store, store.resolve("sparse"), tmp_path / "target")
    written = tmp_path / "target" / "sparse"
    assert written.stat().st_size == size
    assert written.stat().st_blocks * 512 < 5 * limits.MIB
    with open(path, "rb") as one, open(written, "rb") as other:
        while part := one.read(limits.MIB):
            assert other.read(limits.MIB) == part


def test_many_segments_of_one_file(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_SEGMENT_BYTES", 300_000)
    data = noise(1, 2_000_000) + bytes(700_000) + noise(2, 500_000)
    (tmp_path / "f").write_bytes(data)
    add(store, [tmp_path / "f"])
    seen: list[tuple[int, int]] = []

    def tell(progress: Progress) -> None:
        seen.append((progress.done, progress.total))

    export(store, store.resolve("f"), tmp_path / "target", jobs=4, progress=tell)
    assert (tmp_path / "target" / "f").read_bytes() == data
    assert len(seen) > 5
    assert {total for _, total in seen} == {len(data)}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_files_in_work_are_bounded(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_FILES_IN_WORK", 3)
    files = {f"f{number}": noise(number, 5000) for number in range(40)}
    publish(store, "a", files)
    plain, most = exporting._Part.finish, 0

    def watched(self: exporting._Part) -> list[str]:
        nonlocal most
        most = max(most, sum(name.endswith("-part") for name in os.listdir(tmp_path / "target")))
        return plain(self)

    monkeypatch.setattr(exporting._Part, "finish", watched)
    export(store, store.resolve("a"), tmp_path / "target")
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == files
    assert most == 3


def test_R079_a_corrupt_file_never_gets_its_name(store: Store, tmp_path: Path) -> None:
    publish(store, "a", {"good": noise(1)})
    before = packs(store)
    publish(store, "b", {"bad": noise(2, 200_000), "good": noise(1)})
    (bad,) = packs(store) - before
    place = next(one for one in store.index.iterate() if one.pack == bad and one.raw_length > 60_000)
    with open(store.backend.path(pack_key(bad)), "r+b") as file:
        file.seek(place.offset + place.encoded_length // 2)
        file.write(b"flip")
    with pytest.raises(CorruptError, match=place.object_id.hex()):
        export(store, store.resolve("b"), tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] in ([], ["good"])


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.RECIPE])
def test_an_export_that_goes_on_names_each_file_and_leaves_no_part(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Of a file in many segments only the first of which can be read, and of one whose extents are unknown."""
    monkeypatch.setattr(exporting, "_SEGMENT_BYTES", 100_000)
    good = {name: noise(number, 300_000) for number, name in enumerate(("a", "c", "e"))}
    publish(store, "s", good | {"b": noise(8, 5_000_000), "d": noise(9, 5_000_000)})
    version = store.resolve("s")
    bad = {name: store.lookup(version, name) for name in (b"b", b"d")}
    hidden = {
        entry.child if kind is Kind.RECIPE else store.recipe(entry).extents[-1].object_id for entry in bad.values()
    }
    store.close()
    with Store.open(store.path) as damaged:
        for place in [one for one in damaged.index.iterate() if one.object_id in hidden]:
            path = damaged.backend.path(pack_key(place.pack))
            os.chmod(path, 0o600)
            with open(path, "r+b") as file:
                file.seek(place.offset)
                file.write(bytes(place.encoded_length))
        errors: list[MoonclipError] = []
        report = export(damaged, version, tmp_path / "target", failed=errors.append)
    assert [type(error) for error in errors] == [CorruptError] * 2
    for name, error in zip("bd", errors, strict=True):
        assert str(error).startswith(f"cannot write {tmp_path}/target/{name}: ")
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == good
    assert (report.files, report.bytes) == (3, 900_000)


def test_an_export_that_goes_on_stops_when_the_disk_is_full(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "a", {"f": noise(1), "g": noise(2)})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exporting, "_pwrite", full)
    errors: list[MoonclipError] = []
    with pytest.raises(NoSpaceError, match=r"target/[fg]: No space left"):
        export(store, store.resolve("a"), tmp_path / "target", failed=errors.append)
    assert errors == []
    assert list((tmp_path / "target").iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_whole_files_only(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: Mapping[str, bytes] = {f"f{number}": noise(number, 50_000) for number in range(6)}
    publish(store, "a", files)
    plain, left = os.pwrite, 3

    def failing(fd: int, data: memoryview, offset: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(fd, data[:10_000], offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(NoSpaceError, match="target/f0: No space left"):
        export(store, store.resolve("a"), tmp_path / "target", jobs=1)
    assert list((tmp_path / "target").iterdir()) == []
    monkeypatch.undo()
    export(store, store.resolve("a"), tmp_path / "target")
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == files


def test_attributes_from_a_hostile_store_give_no_rights(store: Store, tmp_path: Path) -> None:
    attributes = Attributes(0o6755, os.getuid() + 1, os.getgid() + 1, xattrs={b"security.x": b"1", b"user.x": b"2"})
    version = bind_entry(store, Entry(b"f", EntryType.FILE, attributes), b"#!/bin/sh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        export(store, version, tmp_path / "target")
    status = os.stat(tmp_path / "target" / "f")
    assert stat.S_IMODE(status.st_mode) == 0o755
    assert os.listxattr(tmp_path / "target" / "f") == ["user.x"]


def test_attributes_that_the_host_refuses_are_told(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    version = bind_entry(store, Entry(b"f", EntryType.FILE, Attributes(0o644, xattrs={b"user.x": b"1"})))
    report = export(store, version, tmp_path / "target")
    assert report.notes == [f"{tmp_path}/target/f: extended attribute user.x: Operation not supported"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM])
@pytest.mark.parametrize("kind", [EntryType.FILE, EntryType.SYMLINK, EntryType.FIFO])
def test_an_owner_that_the_host_refuses_is_told(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: EntryType
) -> None:
    """As in a container whose root is nobody outside. No bit lets a file run as an owner that it was not meant for."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "chown", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    attributes = Attributes(0o6755, 12345, 12345, mtime_ns=5)
    entry = Entry(b"f", kind, attributes, target=b"t" if kind is EntryType.SYMLINK else b"")
    for _ in range(2):
        report = export(store, bind_entry(store, entry, b"x" if kind is EntryType.FILE else None), tmp_path / "target")
        status = os.lstat(tmp_path / "target" / "f")
        assert (status.st_mtime_ns, status.st_mode & 0o6000) == (5, 0)
        if kind is not EntryType.SYMLINK:
            assert stat.S_IMODE(status.st_mode) == 0o755
        assert f"{tmp_path}/target/f: owner 12345:12345: {os.strerror(code)}" in report.notes
        os.unlink(tmp_path / "target" / "f")


IN_A_CONTAINER = """
import sys
from pathlib import Path
from moonclipfs.store.export import export
from moonclipfs.store.store import Store

with Store.open(sys.argv[1], index_path=Path(sys.argv[3])) as store:
    print(*export(store, store.resolve("odd"), Path(sys.argv[2])).notes, sep="\\n")
"""


def test_an_export_in_a_container_without_rights(store: Store, tmp_path: Path) -> None:
    inside = ["unshare", "-U", "-r"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this host lets nobody make a user namespace")
    bind_entry(store, Entry(b"f", EntryType.FILE, Attributes(0o4755, 1234, 1234)), b"data")
    target = tmp_path / "target"
    command = [*inside, sys.executable, "-c", IN_A_CONTAINER, str(store.path), str(target), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"{target}/f: owner 1234:1234: Invalid argument" in done.stdout.splitlines(), done.stderr
    assert (target / "f").read_bytes() == b"data"
    assert stat.S_IMODE((target / "f").stat().st_mode) == 0o755


@pytest.mark.parametrize("what", [b"", b"sub", b"model"])
def test_every_byte_and_name_is_durable(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: bytes
) -> None:
    """A file's bytes before its name; a name, and what a directory was given, by a later fsync of that directory."""
    source = rich(tmp_path / "source")
    add(store, [source])
    named: dict[str, int] = {}
    synced: dict[str, int] = {}
    files: list[str] = []
    step = 0

    def watch(call: str, place: Callable[..., list[str]], into: dict[str, int]) -> None:
        plain = getattr(os, call)

        def watched(*arguments: object, **more: object) -> object:
            nonlocal step
            step += 1
            seen = place(*arguments)
            into.update(dict.fromkeys(seen, step))
            return plain(*arguments, **more)

        monkeypatch.setattr(os, call, watched)

    def parent(path: bytes) -> str:
        return os.path.dirname(os.fsdecode(path))

    def renamed(old: bytes, new: bytes) -> list[str]:
        if stat.S_ISREG(os.lstat(old).st_mode) and os.lstat(old).st_nlink == 1:
            files.append(os.fsdecode(old))
            assert os.fsdecode(old) in synced
        return [parent(new)]

    watch("fsync", lambda fd: [os.readlink(f"/proc/self/fd/{fd}")], synced)
    watch("rename", renamed, named)
    watch("mkdir", lambda path, *_: [parent(path)], named)
    watch("utime", lambda path: [os.fsdecode(path)] if os.path.isdir(path) else [], named)
    target = tmp_path / "new" / "er" / "target"
    export(store, store.resolve("source"), target, path=what)
    assert len(files) == (1 if what == b"model" else 3 if what == b"sub" else 5)
    wanted = {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "er"), str(target)}
    wanted |= {str(path) for path in target.rglob("*") if path.is_dir()}
    assert set(named) == wanted
    assert {place: step for place, step in named.items() if synced.get(place, 0) < step} == {}
    synced.clear()
    named.clear()
    export(store, store.resolve("source"), target, path=what)
    regular = {str(path) for path in target.rglob("*") if path.is_file() and not path.is_symlink()}
    assert regular <= set(synced), "what is left as it is was perhaps not durable"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_directory_that_cannot_be_made_durable(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    publish(store, "a", {"f": b"1"})
    plain = os.fsync

    def failing(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        plain(fd)

    monkeypatch.setattr(os, "fsync", failing)
    if code == errno.EIO:
        with pytest.raises(BackendError, match="error"):
            export(store, store.resolve("a"), tmp_path / "target")
    else:
        (first, _) = export(store, store.resolve("a"), tmp_path / "target").notes
        assert first == f"{tmp_path}/target: the names in it may not outlive a crash of this host: Invalid argument"


KILLED = """
import os, sys
from pathlib import Path
from moonclipfs.store.export import export
from moonclipfs.store.store import Store

left = int(sys.argv[3])
plain = os.rename

def counted(*arguments):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    plain(*arguments)

os.rename = counted
with Store.open(sys.argv[1]) as store:
    export(store, store.resolve("a"), Path(sys.argv[2]))
"""


def test_a_killed_export_goes_on_where_it_was(store: Store, tmp_path: Path) -> None:
    files = {f"f{number}": noise(number, 30_000) for number in range(5)}
    publish(store, "a", files)
    target = tmp_path / "target"
    killed = [sys.executable, "-c", KILLED, str(store.path), str(target), "3"]
    assert subprocess.run(killed, timeout=60, check=False).returncode == -signal.SIGKILL
    whole = [path for path in target.iterdir() if not path.name.startswith(".")]
    assert len(whole) == 3
    assert all(path.read_bytes() == files[path.name] for path in whole)
    report = export(store, store.resolve("a"), target)
    assert (report.files, report.skipped) == (2, 3)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files


def test_a_target_without_a_place(store: Store, tmp_path: Path) -> None:
    publish(store, "a", {"f": b"1"})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ExistsError, match="file"):
        export(store, store.resolve("a"), tmp_path / "file")


def test_segments_cover_what_is_no_hole() -> None:
    class Reader:
        size = 100

        class recipe:
            extents = (Extent(10), Extent(30, NO_ID), Extent(30, NO_ID), Extent(10), Extent(20, literal=bytes(20)))

    part = exporting._Part.__new__(exporting._Part)
    part._reader = Reader()  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_SEGMENT_BYTES", 40)
        assert list(part.segments()) == [(10, 30), (40, 30), (80, 20)]
        patch.setattr(exporting, "_SEGMENT_BYTES", 1000)
        assert list(part.segments()) == [(10, 60), (80, 20)]
