"""Many processes at once in one directory and on one file of a mount."""

from __future__ import annotations

import errno
import hashlib
import mmap
import multiprocessing
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonclipfs.errors import MoonclipError
from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.store.store import Store
from tests.fuse.conftest import Mounted, Mounter

FORK = multiprocessing.get_context("fork")
PROCESSES = 8
PAGE = 4096


def run_all(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], seconds: float = 120) -> list[Any]:
    """What `work` returns, or the error it ends with, in a process for each of the arguments, all at the same time."""
    start = FORK.Barrier(len(arguments))
    pipes = []

    def body(pipe: Any, given: tuple[Any, ...]) -> None:
        start.wait()
        try:
            pipe.send((True, work(*given)))
        except BaseException as error:
            pipe.send((False, "".join(traceback.format_exception(error))))

    for given in arguments:
        ours, theirs = FORK.Pipe()
        process = FORK.Process(target=body, args=(theirs, given))
        process.start()
        theirs.close()
        pipes.append((process, ours))
    results = []
    for process, ours in pipes:
        assert ours.poll(seconds), "a process does not end"
        results.append(ours.recv())
        ours.close()
        process.join()
        process.close()
    assert [told for fine, told in results if not fine] == []
    return [value for _, value in results]


def won(call: Callable[..., object], arguments: tuple[object, ...], lost: int) -> bool:
    """Whether a call succeeded; otherwise it fails as that of a loser does."""
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno == lost, error
        return False
    return True


def race(directory: str, me: int, count: int) -> list[tuple[str, int]]:
    """Try to be the one who makes, takes, links and removes each of many names; returns what was won."""
    mine = []
    order = list(range(count))
    random.Random(me).shuffle(order)
    for number in order:
        contests: dict[str, tuple[Callable[..., object], tuple[object, ...], int]] = {
            "create": (os.open, (f"{directory}/c{number}", os.O_CREAT | os.O_EXCL), errno.EEXIST),
            "mkdir": (os.mkdir, (f"{directory}/d{number}",), errno.EEXIST),
            "symlink": (os.symlink, (f"{me}", f"{directory}/s{number}"), errno.EEXIST),
            "link": (os.link, (f"{directory}/one", f"{directory}/l{number}"), errno.EEXIST),
            "take": (os.rename, (f"{directory}/t{number}", f"{directory}/t{number}.{me}"), errno.ENOENT),
            "unlink": (os.unlink, (f"{directory}/u{number}",), errno.ENOENT),
            "rmdir": (os.rmdir, (f"{directory}/r{number}",), errno.ENOENT),
        }
        mine += [(name, number) for name, (call, given, lost) in contests.items() if won(call, given, lost)]
    return mine


def test_each_name_has_one_winner(writable: Mounted) -> None:
    """Of eight processes that make, take, link or remove one name at the same time, exactly one succeeds."""
    count = 40
    place = writable.path / "race"
    place.mkdir()
    (place / "one").touch()
    for number in range(count):
        (place / f"t{number}").touch()
        (place / f"u{number}").touch()
        (place / f"r{number}").mkdir()
    wins = Counter(win for mine in run_all(race, [(str(place), me, count) for me in range(PROCESSES)]) for win in mine)
    assert set(wins.values()) == {1}
    assert len(wins) == 7 * count
    names = os.listdir(place)
    assert len(names) == len(set(names)) == 1 + 5 * count
    assert (place / "one").stat().st_nlink == 1 + count
    assert place.stat().st_nlink == 2 + count
    assert {name[0] for name in names} == set("octdsl")
    assert "ERROR" not in writable.log_text()


def shuffle(directory: str, me: int, seconds: float) -> None:
    """Do anything with a few names that others do anything with, too; only what names are there may go wrong."""
    rng, until = random.Random(me), time.monotonic() + seconds
    allowed = {
        errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EINVAL, errno.EPERM,
    }  # fmt: skip

    def path() -> str:
        return "/".join([directory, *rng.choices("abcd", k=rng.choice((1, 1, 2, 3)))])

    calls: list[Callable[[], object]] = [
        lambda: os.mkdir(path()),
        lambda: os.rmdir(path()),
        lambda: os.rename(path(), path()),
        lambda: os.rename(path(), path()),
        lambda: os.link(path(), path()),
        lambda: os.unlink(path()),
        lambda: os.listdir(path()),
        lambda: os.stat(path()),
        lambda: os.close(os.open(path(), os.O_RDWR | os.O_CREAT)),
        lambda: os.truncate(path(), 10),
        lambda: os.chmod(path(), 0o755),
    ]
    while time.monotonic() < until:
        try:
            rng.choice(calls)()
        except OSError as error:
            assert error.errno in allowed, error


def check_tree(top: Path) -> dict[str, int]:
    """Inode number of everything below, by path; listings, stat, link counts and parents agree."""
    found, links = {}, Counter()
    for directory, names, files in os.walk(top):
        with os.scandir(directory) as entries:
            for entry in entries:
                status = os.lstat(entry.path)
                assert entry.inode() == status.st_ino
                found[os.path.relpath(entry.path, top)] = status.st_ino
                links[status.st_ino] += 1
        assert os.lstat(directory).st_nlink == 2 + len(names)
        assert os.path.samefile(os.path.join(directory, ".."), os.path.dirname(directory))
        assert all(os.path.isfile(os.path.join(directory, name)) for name in files)
    for path, number in found.items():
        if os.path.isfile(top / path):
            assert os.lstat(top / path).st_nlink == links[number]
    return found


def test_a_tree_stays_a_tree(store: Store, mounter: Mounter, mounted: Mounted) -> None:
    """After eight processes did anything with the same names, the tree is whole, and the same when mounted again."""
    place = mounted.path / "tree"
    place.mkdir()
    run_all(shuffle, [(str(place), me, 5) for me in range(PROCESSES)])
    found = check_tree(place)
    unmount(mounted.path)
    again = mounter(store.path, read_only=False)
    assert check_tree(again.path / "tree") == found
    assert "ERROR" not in mounted.log_text() + again.log_text()


def rename_to_and_fro(directory: str, count: int) -> None:
    for _ in range(count):
        os.rename(f"{directory}/a", f"{directory}/b")
        os.rename(f"{directory}/b", f"{directory}/a")


def bustle(directory: str, me: int, count: int) -> None:
    for number in range(count):
        path = f"{directory}/{me}-{number % 7}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.unlink(path)


def list_names(directory: str, count: int) -> set[int]:
    return {len({"a", "b"} & set(os.listdir(directory))) for _ in range(count)}


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_r031_a_lister_sees_one_name_whatever_else_goes_on(writable: Mounted, kind: str) -> None:
    """While a name is renamed to and fro, every listing has one of the two, also in a busy directory."""
    place = writable.path / "busy"
    place.mkdir()
    for number in range(50):
        (place / f"other{number}").touch()
    (place / "a").touch() if kind == "file" else (place / "a").mkdir()
    jobs: list[tuple[Any, ...]] = [(rename_to_and_fro, str(place), 500)]
    jobs += [(bustle, str(place), me, 150) for me in range(3)]
    jobs += [(list_names, str(place), 200)] * 2
    results = run_all(lambda call, *arguments: call(*arguments), jobs)
    assert results[-2:] == [{1}, {1}]
    assert len(os.listdir(place)) == 51


def append_lines(path: str, me: int, count: int, flags: int) -> None:
    fd = os.open(path, os.O_APPEND | flags)
    rng = random.Random(me)
    for number in range(count):
        line = f"{me} {number} ".encode() + b"x" * rng.choice((1, 100, 5000, 200_000)) + b"\n"
        assert os.write(fd, line) == len(line)
    os.close(fd)


def test_lines_appended_by_many_processes_are_whole(writable: Mounted) -> None:
    """Writes of several processes to one file with O_APPEND, of any length, are all there and whole."""
    path = writable.path / "log"
    path.touch()
    flags = (os.O_WRONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_SYNC)
    run_all(append_lines, [(str(path), me, 60, how) for me, how in enumerate(flags)])
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    seen: dict[bytes, list[int]] = {}
    for line in lines:
        who, number, rest = line.split(b" ")
        assert rest.strip(b"x") == b""
        seen.setdefault(who, []).append(int(number))
    assert all(numbers == list(range(60)) for numbers in seen.values())
    assert len(seen) == len(flags)


def swap(directory: str, seconds: float) -> int:
    """Replace a file by rename again and again, each time by one that is of one number throughout."""
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        number += 1
        with open(f"{directory}/tmp", "wb") as file:
            file.write(number.to_bytes(8, "little") * (PAGE * 32 // 8))
        os.replace(f"{directory}/tmp", f"{directory}/last.ckpt")
    return number


def read_whole(directory: str, seconds: float) -> int:
    """What is read is of one number throughout, by reads and by maps, and numbers only grow."""
    until, last, checked = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        with open(f"{directory}/last.ckpt", "rb") as file:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                by_map = np.frombuffer(bytes(mapped), np.uint64)
            by_read = np.frombuffer(file.read(), np.uint64)
        assert len(by_read) == len(by_map) == PAGE * 32 // 8
        assert by_read.min() == by_read.max() == by_map.min() == by_map.max()
        assert by_read[0] >= last
        last, checked = int(by_read[0]), checked + 1
    return checked


def tensors(seed: int) -> bytes:
    """A checkpoint file in which each seed changes a part of the numbers."""
    values = np.random.default_rng(7).standard_normal(60_000).astype(np.float32)
    values[seed * 1000 : seed * 1000 + 5000] += seed
    header = b'{"w":{"dtype":"F32","shape":[60000],"data_offsets":[0,240000]}}'
    return len(header).to_bytes(8, "little") + header + values.tobytes()


def save(directory: str, seconds: float) -> int:
    """Save checkpoints as a trainer does, the older ones removed."""
    until, step = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        step += 1
        place = f"{directory}/checkpoint-{step}"
        os.mkdir(f"{directory}/tmp-{step}")
        with open(f"{directory}/tmp-{step}/model.safetensors", "wb") as file:
            file.write(tensors(step % 20))
        os.rename(f"{directory}/tmp-{step}", place)
        if step > 6:
            os.unlink(f"{directory}/checkpoint-{step - 6}/model.safetensors")
            os.rmdir(f"{directory}/checkpoint-{step - 6}")
        time.sleep(0.3)
    return step


def load(directory: str, seconds: float, me: int) -> int:
    """Load checkpoints, keep some open and mapped, and read those again and again while they are encoded."""
    until, checked, rng = time.monotonic() + seconds, 0, random.Random(me)
    right = {seed: hashlib.sha256(tensors(seed)).digest() for seed in range(20)}
    kept: list[tuple[int, int, mmap.mmap]] = []
    while time.monotonic() < until:
        names = [name for name in os.listdir(directory) if name.startswith("checkpoint-")]
        if not names:
            continue
        name = rng.choice(names)
        seed = int(name.split("-")[1]) % 20
        try:
            fd = os.open(f"{directory}/{name}/model.safetensors", os.O_RDONLY)
        except FileNotFoundError:
            continue  # removed meanwhile
        kept.append((seed, fd, mmap.mmap(fd, 0, prot=mmap.PROT_READ)))
        if len(kept) > 8:
            _, fd, mapped = kept.pop(rng.randrange(8))
            mapped.close()
            os.close(fd)
        for seed, fd, mapped in kept:
            assert hashlib.sha256(mapped).digest() == right[seed]
            assert hashlib.sha256(os.pread(fd, 1 << 20, 0)).digest() == right[seed]
            checked += 1
    return checked


def command(path: str, seconds: float) -> None:
    """Ask for flushes and seals all the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ask(path, "flush", None)
        names = [name for name in os.listdir(f"{path}/run") if name.startswith("checkpoint-")]
        if names:
            try:
                ask(path, "seal", None, path=f"run/{max(names)}")
            except MoonclipError as error:
                assert "checkpoint-" in str(error), error  # it was removed meanwhile
        time.sleep(0.2)


def check_reading(store: Store, mounter: Mounter, seconds: float) -> None:
    mounted = mounter(store.path, read_only=False, seal_after=1.0)
    run = mounted.path / "run"
    run.mkdir()
    (run / "last.ckpt").write_bytes(bytes(PAGE * 32))
    jobs: list[tuple[Any, ...]] = [
        (swap, str(run), seconds),
        (read_whole, str(run), seconds),
        (save, str(run), seconds),
        (load, str(run), seconds, 1),
        (load, str(run), seconds, 2),
        (command, str(mounted.path), seconds),
    ]
    results = run_all(lambda call, *arguments: call(*arguments), jobs, seconds + 120)
    assert all(results[:5])
    assert "ERROR" not in mounted.log_text()
    ask(str(mounted.path), "flush", None)
    for name in os.listdir(run):
        if name.startswith("checkpoint-"):
            data = (run / name / "model.safetensors").read_bytes()
            assert data == tensors(int(name.split("-")[1]) % 20)
    versions = mounted.path / "@versions/run"
    sealed = [version for name in os.listdir(versions) for version in sorted((versions / name).iterdir())]
    assert sealed
    for version in sealed:
        seed = int(version.parent.name.split("-")[1]) % 20
        assert (version / "model.safetensors").read_bytes() == tensors(seed)


def test_bytes_are_right_while_they_are_encoded_and_sealed(store: Store, mounter: Mounter) -> None:
    """Reads, maps and open handles give the right bytes while files are replaced, encoded, sealed and removed."""
    check_reading(store, mounter, 6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bytes_are_right_for_long(store: Store, mounter: Mounter) -> None:
    check_reading(store, mounter, 120)
