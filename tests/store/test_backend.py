"""The local backend: what is published is whole, durable and exclusive, with hard links and without."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from moonclipfs.errors import (
    BackendError,
    ExistsError,
    LimitError,
    MoonclipError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    QuotaError,
)
from moonclipfs.store.backend import FileOps, LocalBackend
from tests.faults import CountingOps, FaultyOps, NoLinkOps, PausingOps, RecordingOps


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("log", "packs", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("ops", [FileOps, NoLinkOps])
def test_create_read_list_delete(root: Path, ops: type[FileOps]) -> None:
    backend = LocalBackend(root, ops())
    backend.create("log/a", b"hello")
    assert backend.read("log/a") == b"hello"
    assert backend.read("log/a", 1, 3) == b"ell"
    assert backend.read("log/a", 3, 100) == b"lo"
    assert backend.read("log/a", 9, 1) == b""
    assert backend.size("log/a") == 5
    assert [(info.key, info.size) for info in backend.list("log/")] == [("log/a", 5)]
    assert names(root / "tmp") == []
    backend.delete("log/a")
    backend.delete("log/a")
    with pytest.raises(NotFoundError, match="log/a"):
        backend.read("log/a")


@pytest.mark.parametrize("ops", [FileOps, NoLinkOps])
def test_create_is_exclusive(root: Path, ops: type[FileOps]) -> None:
    backend = LocalBackend(root, ops())
    backend.create("log/a", b"first")
    with pytest.raises(ExistsError):
        backend.create("log/a", b"second")
    assert backend.read("log/a") == b"first"
    assert names(root / "tmp") == []


@pytest.mark.parametrize("ops", [FileOps, NoLinkOps])
def test_one_of_many_racers_wins(root: Path, ops: type[FileOps]) -> None:
    won: list[int] = []

    def race(number: int) -> None:
        backend = LocalBackend(root, ops())
        for key in range(20):
            try:
                backend.create(f"log/{key}", b"%d" % number)
                won.append(key)
            except ExistsError:
                pass

    threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(20))


def test_publish_syncs_the_bytes_then_links_then_syncs_the_name(root: Path) -> None:
    ops = RecordingOps(root)
    LocalBackend(root, ops).create("log/a", b"hello")
    steps = [(event.name, event.target or event.path) for event in ops.events]
    assert [name for name, _ in steps] == ["create", "write", "sync", "link", "sync_directory", "unlink"]
    assert steps[3:5] == [("link", "log/a"), ("sync_directory", "log")]


def test_an_upload_is_invisible_and_leaves_nothing_when_aborted(root: Path) -> None:
    backend = LocalBackend(root)
    upload = backend.upload()
    upload.write(b"abc")
    upload.write(bytearray(b"def"))
    assert upload.offset == 6 and upload.read(2, 3) == b"cde"
    assert list(backend.list("packs/")) == []
    assert names(root / "tmp")[0].startswith(backend.owner)
    upload.abort()
    upload.abort()
    assert names(root / "tmp") == []


def test_a_value_held_open_outlives_its_key(root: Path) -> None:
    backend = LocalBackend(root)
    backend.create("packs/a", b"hello")
    value = backend.open("packs/a")
    backend.delete("packs/a")
    assert (value.read(0, 10), value.size()) == (b"hello", 5)
    before = len(os.listdir("/proc/self/fd"))
    del value
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_an_empty_file_is_an_abandoned_claim_and_counts_as_absent(root: Path) -> None:
    (root / "log" / "a").touch()
    backend = LocalBackend(root, NoLinkOps())
    assert list(backend.list("log/")) == []
    with pytest.raises(NotFoundError):
        backend.read("log/a")
    backend.create("log/a", b"taken over")
    assert backend.read("log/a") == b"taken over"


def test_an_abandoned_claim_is_taken_over_with_links_too(root: Path) -> None:
    (root / "log" / "a").touch()
    backend = LocalBackend(root)
    backend.create("log/a", b"taken over")
    assert backend.read("log/a") == b"taken over"


def test_a_claim_whose_maker_lives_is_not_taken_over(root: Path) -> None:
    rival = LocalBackend(root, NoLinkOps())

    class Slow(PausingOps, NoLinkOps):
        pass

    def meanwhile() -> None:
        assert (root / "log" / "a").stat().st_size == 0
        with pytest.raises(ExistsError):
            rival.create("log/a", b"rival")

    LocalBackend(root, Slow("rename", "log/a", meanwhile)).create("log/a", b"mine")
    assert rival.read("log/a") == b"mine"


def test_an_answer_lost_by_nfs_is_no_lost_race(root: Path) -> None:
    class Repeating(FileOps):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            super().link(source, target)

    backend = LocalBackend(root, Repeating())
    backend.create("log/a", b"mine")
    assert backend.read("log/a") == b"mine"


@pytest.mark.parametrize("ops", [FileOps, NoLinkOps])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, QuotaError),
        (errno.EIO, BackendError),
        (errno.EFBIG, LimitError),
    ],
)
def test_any_failing_call_is_a_clean_error_and_leaves_whole_values(
    root: Path, ops: type[FileOps], code: int, kind: type[MoonclipError]
) -> None:
    class Faulty(FaultyOps, ops):  # type: ignore[misc, valid-type]
        pass

    succeeded = 0
    for at in range(40):
        key, faulty = f"log/{at}", Faulty(at, code)
        try:
            LocalBackend(root, faulty).create(key, b"value")
            succeeded += 1
        except kind as error:
            assert str(root) in str(error)
        plain = LocalBackend(root)
        assert [info.size for info in plain.list("log/") if info.key == key] in ([], [5])
        if not faulty.reached:
            break
    assert not faulty.reached and succeeded >= 1


def test_writes_that_take_a_part_at_a_time(root: Path) -> None:
    class Short(FileOps):
        def write(self, fd: int, data: bytes | bytearray | memoryview) -> int:
            return super().write(fd, memoryview(data)[:3])

    backend = LocalBackend(root, Short())
    backend.create("log/a", bytes(range(100)))
    assert backend.read("log/a") == bytes(range(100))


def test_a_shared_store_lets_the_group_in_whatever_the_umask(root: Path) -> None:
    before = os.umask(0o077)
    try:
        LocalBackend(root, shared=True).create("log/a", b"x")
        LocalBackend(root).create("log/b", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "log/a").stat().st_mode) == 0o660
    assert stat.S_IMODE((root / "log/b").stat().st_mode) == 0o600


def test_errors_by_kind(root: Path) -> None:
    with pytest.raises(PermissionDeniedError):
        LocalBackend(root, FaultyOps(0, errno.EACCES)).create("log/a", b"x")
    with pytest.raises(NotFoundError):
        list(LocalBackend(root / "missing").list("log/"))


def test_a_settled_directory_costs_one_fsync(root: Path) -> None:
    ops = CountingOps()
    LocalBackend(root, ops).settle("packs/")
    assert ops.calls == {"open": 1, "fsync": 1, "close": 1}


def test_stray_directories_are_not_values(root: Path) -> None:
    (root / "packs" / "lost+found").mkdir()
    assert list(LocalBackend(root).list("packs/")) == []
