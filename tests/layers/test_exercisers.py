"""The exercisers agree with themselves on plain directories, and notice what a wrong file system does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.layers.exerciser import Difference, Exerciser, Side
from tests.layers.fsx import FileExerciser, Mismatch


def exerciser(tmp_path: Path, seed: int, *, skip: tuple[str, ...] = ()) -> Exerciser:
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    return Exerciser(tmp_path / "left", tmp_path / "right", seed, skip=skip)


@pytest.mark.parametrize("seed", range(5))
def test_two_plain_directories_do_the_same(tmp_path: Path, seed: int) -> None:
    found = exerciser(tmp_path, seed)
    found.run(1500)
    assert found.left.tree() and found.left.tree() == found.right.tree()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_two_plain_directories_do_the_same_for_long(tmp_path: Path, seed: int) -> None:
    exerciser(tmp_path, seed).run(10_000)


def test_calls_can_be_left_out(tmp_path: Path) -> None:
    found = exerciser(tmp_path, 1, skip=("mknod", "rename", "rename_directory"))
    found.run(200)
    assert not [line for line in found._history if "mknod" in line or "rename" in line]
    with pytest.raises(AssertionError, match="no such calls"):
        Exerciser(tmp_path, tmp_path, 1, skip=("renam",))


def lose_the_last_byte(side: Side, slot: int, offset: int, data: bytes) -> object:
    os.pwrite(side.fds[slot], data[:-1], offset)
    return len(data)


def rename_over(side: Side, path: bytes, target: bytes, flags: int) -> object:
    return os.rename(side.at(path), side.at(target))


def forget_the_time(side: Side, path: bytes, atime_ns: int, mtime_ns: int) -> object:
    os.utime(side.at(path), ns=(atime_ns, mtime_ns + 1000), follow_symlinks=False)
    return atime_ns, mtime_ns


def copy_instead_of_link(side: Side, path: bytes, target: bytes) -> object:
    os.link(side.at(path), side.at(target), follow_symlinks=False)
    if os.path.isfile(side.at(target)) and not os.path.islink(side.at(target)):
        os.unlink(side.at(target))
        side_fd = os.open(side.at(target), os.O_CREAT | os.O_WRONLY)
        os.close(side_fd)
    return None


def keep_the_value(side: Side, path: bytes, name: bytes) -> object:
    return os.getxattr(side.at(path), name) and None


def keep_the_tail(side: Side, slot: int, size: int) -> object:
    return os.ftruncate(side.fds[slot], max(size, os.fstat(side.fds[slot]).st_size))


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ("pwrite", lose_the_last_byte),
        ("rename", rename_over),
        ("utime", forget_the_time),
        ("link", copy_instead_of_link),
        ("remove_xattr", keep_the_value),
        ("ftruncate", keep_the_tail),
    ],
)
def test_a_wrong_file_system_is_noticed(tmp_path: Path, call: str, wrong: Callable[..., object]) -> None:
    found = exerciser(tmp_path, 7)
    setattr(found.right, call, lambda *arguments: wrong(found.right, *arguments))
    with pytest.raises(Difference, match=r"seed 7, step \d+"):
        found.run(3000)


@pytest.mark.parametrize("seed", range(3))
def test_a_plain_file_holds_what_was_written(tmp_path: Path, seed: int) -> None:
    FileExerciser(tmp_path / "file", seed).run(500)


def test_a_file_of_at_most_what_is_staged_in_memory(tmp_path: Path) -> None:
    FileExerciser(tmp_path / "file", 1, size=3 * 4096, skip=("append",)).run(500)


def zeros_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:-1] + b"\0", offset))


def truncates_to_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.truncate
    monkeypatch.setattr(os, "truncate", lambda path, size: real(path, -(-size // 4096) * 4096))


def stale_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, buffers, max(0, offset - 4096)))


@pytest.mark.parametrize("break_it", [zeros_at_the_end, truncates_to_pages, stale_reads])
def test_a_wrong_file_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    found = FileExerciser(tmp_path / "file", 3)
    break_it(monkeypatch)
    with pytest.raises(Mismatch, match=r"seed 3, step \d+"):
        found.run(500)
