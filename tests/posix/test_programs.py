"""Ordinary programs on a mount: copies of trees, archives, searches, databases. Suites of such are in test_suites."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fuse.conftest import Mounted
from tests.fuse.sides import describe

KIB, MIB = 1 << 10, 1 << 20


def need(*programs: str) -> None:
    """Skip where a program is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a program, which has to succeed; returns what it printed."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, check=False)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return os.fsdecode(done.stdout)


def make_tree(root: Path) -> None:
    """Files of all kinds, modes and times."""
    root.mkdir()
    (root / "sub/deep/er").mkdir(parents=True)
    for number in range(40):
        path = root / ("sub" if number % 3 else "sub/deep") / f"file {number}\n"
        path.write_bytes(os.urandom(number * 1000))
        os.chmod(path, 0o600 + number % 64)
        os.chown(path, number, number * 2)
        os.utime(path, ns=(10**18 + number, 10**18 + number * 7 + 123456789))
    (root / "empty").touch()
    with (root / "sparse").open("wb") as file:
        file.truncate(8 * MIB)
        file.seek(3 * MIB + 5)
        file.write(b"in the middle")
    os.link(root / "sparse", root / "sub/sparse too")
    os.symlink("sub/deep", root / "to deep")
    os.symlink("/nowhere/at/all", root / "dangling")
    os.mkfifo(root / "fifo", 0o620)
    os.utime(root / "fifo", ns=(10**18, 10**18))
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(root, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}/sock")
        os.close(here)
    os.setxattr(root / "empty", "user.note", b"\0bytes\xff")
    os.setxattr(root / "sub", "user.dir", b"1")
    (root / "名前 \udcff").write_bytes(b"odd")
    os.chmod(root / "sub/deep/er", 0o1777)
    os.chmod(root / "sub", 0o2755)
    for directory, _, _ in os.walk(root, topdown=False):
        os.utime(directory, ns=(10**18, 10**18 + 1))


COPIES = {
    "cp": ("cp", "-a", "{source}", "{target}"),
    "cp-sparse": ("cp", "-a", "--sparse=always", "{source}", "{target}"),
    "cp-reflink": ("cp", "-a", "--reflink=auto", "{source}", "{target}"),
    "rsync": ("rsync", "-aHX", "--specials", "{source}/", "{target}/"),
    "rsync-inplace": ("rsync", "-aHX", "--specials", "--inplace", "--fsync", "{source}/", "{target}/"),
    "tar": ("sh", "-c", "mkdir '{target}' && tar -C '{source}' --xattrs -cf - . | tar -C '{target}' --xattrs -xpf -"),
}


@pytest.mark.parametrize("way", COPIES)
def test_trees_are_copied_in_and_out(writable: Mounted, tmp_path: Path, way: str) -> None:
    """Copies into a mount, within it and out of it have all that there was: bytes, links, owners, times, attributes."""
    need(COPIES[way][0])
    make_tree(tmp_path / "source")
    if way == "tar":
        (tmp_path / "source/sock").unlink()  # it archives none
    places = [tmp_path / "source", writable.path / "in", writable.path / "within", tmp_path / "out"]
    for source, target in pairwise(places):
        run(*(word.format(source=source, target=target) for word in COPIES[way]))
        if source == writable.path / "in":
            writable.flush()
    shown = [portrait(place) for place in places]
    assert shown[1] == shown[2] == shown[3] == shown[0]
    assert all(len(found) > 40 for found in shown)
    if way.startswith("rsync"):
        assert run("rsync", "-aHXni", "--specials", "--checksum", f"{places[0]}/", f"{places[1]}/") == ""
    assert "ERROR" not in writable.log_text()


def portrait(place: Path) -> dict[str, list[object]]:
    """What a copy has to keep."""
    found = describe(place, times=True)
    for path, value in found.items():
        if os.path.islink(place / path) or stat.S_ISSOCK(os.lstat(place / path).st_mode):
            value.pop()  # not every program sets the times of these
    return found


def test_find_and_du_agree_with_the_tree(writable: Mounted, tmp_path: Path) -> None:
    """find by type, links, size and time, du by apparent size, ls and grep say of a mount what they say of a disk."""
    for root in (tmp_path / "tree", writable.path / "tree"):
        make_tree(root)
        for path in (root / "sub").rglob("file*"):
            path.write_bytes(path.name.encode() * 100)
        os.utime(root / "empty", ns=(10**18, 10**18))
    questions = [
        ["find", ".", "-type", "f", "-size", "+2k"],
        ["find", ".", "-links", "2"],
        ["find", ".", "-type", "d", "-printf", "%p %n %m\\n"],
        ["find", ".", "-samefile", "sparse"],
        ["find", ".", "!", "-newer", "empty"],
        ["find", ".", "-empty"],
        ["find", "-L", ".", "-xtype", "l"],
        ["du", "-ab", "--exclude=."],
        ["grep", "-rlZ", "file 7"],
        ["find", ".", "!", "-type", "d", "-printf", "%p %M %U %G %s %l %n\\n"],
        ["cksum", "sparse", "empty"],
    ]
    for question in questions:
        said = [run(*question, cwd=root).split("\n") for root in (tmp_path / "tree", writable.path / "tree")]
        assert sorted(filter(_is_of_file, said[0])) == sorted(filter(_is_of_file, said[1])), question


def _is_of_file(line: str) -> bool:
    """Directories have sizes that are each file system's own."""
    return not line.startswith("d") and not line.endswith(("\t./sub", "/deep", "/er", "\t."))


def test_archives_are_made_and_taken_apart(writable: Mounted, tmp_path: Path) -> None:
    """zip, gzip, dd, patch, sed -i, split, sort and install work in a mount."""
    place = writable.path / "work"
    place.mkdir()
    (place / "text").write_text("\n".join(str(number * 7919 % 10007) for number in range(20_000)) + "\n")
    run("sh", "-ec", """
        sort -n -T . text > sorted; sort -n -c sorted
        gzip -k text; gunzip -c text.gz | cmp - text
        split -b 10k text part.; cat part.* | cmp - text
        dd if=text of=copy bs=777 conv=fsync,sparse status=none; cmp text copy
        dd if=/dev/zero of=copy bs=1 seek=5 count=3 conv=notrunc status=none
        test "$(stat -c %s copy)" = "$(stat -c %s text)"
        sed -i s/^7/x/ copy; ! grep -q ^7 copy
        diff -au text copy > change || true
        cp text other; patch -s other change; cmp other copy
        install -D -m 750 -o 12 -g 34 text a/b/c; test "$(stat -c %a:%u:%g a/b/c)" = 750:12:34
        ln -sf a/b/c link; ln -sfn a link; test "$(readlink link)" = a
        mv -T a/b moved; mv -n text moved/; test ! -e text
        truncate -s 100M copy; fallocate -l 2M filled || true; mktemp -p . -d
        touch -d 2001-02-03 moved/c; test "$(stat -c %Y moved/c)" = "$(date -d 2001-02-03 +%s)"
        cat copy >> copy2; tee -a copy2 < moved/text > /dev/null
        rm -r moved part.*; test "$(find . -type d | wc -l)" = 3
        exec 9> lock; flock -n 9 true; flock -n 9; ! flock -n lock true
    """, cwd=place)  # fmt: skip
    assert "ERROR" not in writable.log_text()


def _count_up(path: str, me: int, count: int) -> None:
    base = sqlite3.connect(path, timeout=60)
    base.execute("pragma synchronous=normal")
    for number in range(count):
        with base:
            base.execute("begin immediate")
            base.execute("update counter set n = n + 1")
            base.execute("insert into t values (?, ?, ?)", (me, number, os.urandom(3000)))
    base.close()


def _read_on(path: str, count: int) -> None:
    base = sqlite3.connect(path, timeout=60)
    for _ in range(count):
        base.execute("begin")
        (total,) = base.execute("select n from counter").fetchone()
        (rows,) = base.execute("select count(*) from t").fetchone()
        assert total == rows
        base.rollback()
    base.close()


@pytest.mark.parametrize("mode", ["delete", "truncate", "persist", "wal"])
def test_a_database_with_many_writers_and_readers(writable: Mounted, mode: str) -> None:
    """SQLite with writers and readers in several processes, in each mode of its journal, loses and tears nothing."""
    path = str(writable.path / "base")
    base = sqlite3.connect(path)
    assert base.execute(f"pragma journal_mode={mode}").fetchone() == (mode,)
    base.executescript("create table t (who, n, x); create table counter (n); insert into counter values (0)")
    base.close()
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_count_up, args=(path, me, 25)) for me in range(3)]
    jobs += [context.Process(target=_read_on, args=(path, 60)) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
        assert job.exitcode == 0
        job.close()
    base = sqlite3.connect(path)
    assert base.execute("pragma integrity_check").fetchall() == [("ok",)]
    assert base.execute("select n from counter").fetchone() == (75,)
    assert base.execute("select count(*), count(distinct who * 1000 + n) from t").fetchone() == (75, 75)
    base.execute("vacuum")
    base.close()
    assert "ERROR" not in writable.log_text()


def test_inotifywait_tells_of_files(writable: Mounted) -> None:
    need("inotifywait")
    waiter = subprocess.Popen(
        ["inotifywait", "-m", "-q", "--format", "%e %f", writable.path], stdout=subprocess.PIPE, text=True
    )
    time.sleep(0.5)
    (writable.path / "f").write_bytes(b"1")
    os.rename(writable.path / "f", writable.path / "g")
    assert waiter.stdout is not None
    said = [waiter.stdout.readline().split() for _ in range(6)]
    waiter.terminate()
    waiter.communicate()
    assert ["CLOSE_WRITE,CLOSE", "f"] in said
    assert said[-1] == ["MOVED_TO", "g"]
