"""The reserve of a store: there for a full disk, whoever of a group made it, and never in the way."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.store import reserve
from moonclipfs.store.config import create_store
from moonclipfs.store.forget import forget
from moonclipfs.store.gc import collect, open_to_reclaim
from moonclipfs.store.store import Store
from tests.nobody import Nobody
from tests.store.kit import noise, publish

Expect = Callable[[str], None]
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESERVE_BYTES", 8192)


def failing(error: OSError) -> Callable[..., None]:
    def fail(*arguments: int) -> None:
        raise error

    return fail


def test_taken_given_back_and_not_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reserve.take(tmp_path) and reserve.take(tmp_path)
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 8192
    assert reserve.release(tmp_path) and not reserve.release(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", failing(FULL))
    assert not reserve.take(tmp_path)
    assert os.listdir(tmp_path) == []


def test_it_is_taken_again_where_there_is_room_for_twice_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was released to work with on a full disk is not taken away from that work."""
    found, free = os.statvfs(tmp_path), 2 * 8192
    disk = os.statvfs_result((found.f_bsize, 1, found.f_blocks, free, free, *found[5:]))
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", lambda _: disk)
        assert not reserve.take_again(tmp_path)
    assert os.listdir(tmp_path) == []
    assert reserve.take_again(tmp_path) and reserve.take_again(tmp_path)
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 8192


def test_a_part_is_lent_and_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESERVE_LOAN_BYTES", 4096)
    assert not reserve.lend(tmp_path)
    assert reserve.take(tmp_path)
    assert reserve.lend(tmp_path) and (tmp_path / "reserve").stat().st_size == 4096
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", failing(FULL))
        assert not reserve.take(tmp_path)
    assert (tmp_path / "reserve").stat().st_size == 4096
    assert reserve.take(tmp_path) and (tmp_path / "reserve").stat().st_blocks * 512 >= 8192
    assert reserve.lend(tmp_path) and reserve.lend(tmp_path) and not reserve.lend(tmp_path)


@pytest.mark.parametrize("leftover", [b"", b"x" * 5000])
def test_one_that_is_too_small_is_completed(tmp_path: Path, leftover: bytes) -> None:
    (tmp_path / "reserve").write_bytes(leftover)
    assert reserve.take(tmp_path) and (tmp_path / "reserve").stat().st_blocks * 512 >= 8192


def test_one_that_is_there_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another user's."""
    assert reserve.take(tmp_path)
    monkeypatch.setattr(os, "open", failing(PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
    assert reserve.take(tmp_path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EIO, errno.EOPNOTSUPP, errno.EROFS])
def test_gc_and_forget_report_what_they_did_without_a_reserve(
    store: Store, code: int, monkeypatch: pytest.MonkeyPatch, expect_log: Expect
) -> None:
    versions = [publish(store, f"s{number}", {"f": noise(number)}) for number in range(2)]
    reserve.release(store.path)
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError(code, os.strerror(code))))
    expect_log(r"WARNING .*cannot reserve space in .*: without it, forget and gc may fail on a full disk")
    assert forget(store, versions[:1]).gc.deleted_packs == 1
    store.log.forget([("s1", 1)])
    assert collect(store).deleted_packs == 1
    with open_to_reclaim(store.path, "gc") as opened:
        assert opened.names().sequence == store.names().sequence


def files_of(root: Path) -> dict[str, int]:
    """Modes of everything in a store but its index, which is a cache of one user."""
    found = {str(path.relative_to(root)): path.lstat().st_mode for path in (root, *root.rglob("*"))}
    return {name: mode for name, mode in found.items() if not name.startswith("index")}


@pytest.mark.parametrize(("shared", "mode"), [(True, 0o660), (False, 0o600)])
def test_every_file_of_a_store_has_the_mode_of_the_store(tmp_path: Path, shared: bool, mode: int) -> None:
    path, mask = tmp_path / "store", os.umask(0o077)
    try:
        create_store(path, shared=shared)
        with Store.open(path, write=True, index_path=tmp_path / "index.sqlite") as store:
            publish(store, "a", {"f": noise(1)})
            publish(store, "b", {"f": noise(2)})
            reserve.release(path)
            forget(store, [store.resolve("a")])
            modes = files_of(path)
    finally:
        os.umask(mask)
    assert {"reserve", "README.txt", "config.json"} <= set(modes) and len([n for n in modes if "leases/" in n]) == 1
    wrong = {name: oct(found) for name, found in modes.items() if stat.S_ISREG(found) and found & 0o777 != mode}
    assert not wrong


@pytest.fixture
def shared_place() -> Iterator[Path]:
    """A directory that another user can reach."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("left", ["whole", "none", "unreadable"])
def test_another_member_of_the_group_reclaims(shared_place: Path, nobody: Nobody, left: str) -> None:
    """Whatever its creator left of the reserve, even one that only its maker may write."""
    path = shared_place / "store"
    create_store(path, shared=True)
    for found in (path, *path.rglob("*")):
        os.chown(found, -1, 65534)
    with Store.open(path, write=True, index_path=shared_place / "index.sqlite") as store:
        for number in range(2):
            publish(store, f"s{number}", {"f": noise(number)})
    if left == "none":
        reserve.release(path)
    elif left == "unreadable":
        (path / "reserve").chmod(0o600)

    def reclaim() -> None:
        with open_to_reclaim(path, "gc") as opened:
            assert forget(opened, [opened.resolve("s0")]).gc.deleted_packs == 1
            assert reserve.release(path)
            opened.log.forget([("s1", 1)])
            assert collect(opened).deleted_packs == 1

    nobody.run(reclaim)
    assert (path / "reserve").stat().st_mode & 0o777 == 0o660
    assert (path / "reserve").stat().st_uid == 65534
