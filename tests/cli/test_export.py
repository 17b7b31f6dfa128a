"""Exports of many snapshots, one of them damaged or in the way: all the rest is written, and each error told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonclipfs.store.packs import pack_key
from moonclipfs.store.store import Store
from tests.cli.conftest import Run


def flip(path: Path, offset: int) -> None:
    """Damage one byte of a file."""
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def noise(number: int) -> bytes:
    return np.random.default_rng(number).bytes(100_000)


def damage(store_path: Path, name: str, path: bytes) -> None:
    """Flip a byte of the first object of a file."""
    with Store.open(store_path) as store:
        recipe = store.recipe(store.lookup(store.resolve(name), path))
        wanted = recipe.extents[0].object_id
        (place,) = (one for one in store.index.iterate() if one.object_id == wanted)
    flip(store_path / pack_key(place.pack), place.offset + place.encoded_length // 2)


@pytest.fixture
def three(run: Run, tmp_path: Path) -> Path:
    """A store of the snapshots a, b and c, of the files 1, 2 and 3 each; 2 has another name, again."""
    run("init", tmp_path / "s")
    for number, name in enumerate("abc"):
        (tmp_path / name).mkdir()
        for file in "123":
            (tmp_path / name / file).write_bytes(noise(10 * number + int(file)))
        os.link(tmp_path / name / "2", tmp_path / name / "again")
        assert run("add", tmp_path / "s", tmp_path / name).code == 0
    return tmp_path / "s"


@pytest.mark.parametrize("whole", [["--all", "s"], ["s:*"], ["s:a", "b", "c"]])
def test_export_goes_on_after_a_damaged_file(
    run: Run, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(three, "a", b"2")
    done = run("export", *whole, "out")
    assert done.code == 5
    first, second, last = done.err.splitlines()
    assert first.startswith(f"moonclipfs: cannot write {tmp_path}/out/a/2: ")
    assert second.startswith(f"moonclipfs: cannot write {tmp_path}/out/a/again: ")
    assert last == "moonclipfs: not everything was exported: see the 2 errors above"
    assert done.out.startswith("a@1: 2 files, ")
    assert done.out.count("\n") == 3
    written = {str(path.relative_to("out")): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    wanted = {f"{name}/{file}" for name in "abc" for file in ("1", "2", "3", "again")} - {"a/2", "a/again"}
    assert written == {path: Path(path).read_bytes() for path in wanted}


def test_export_goes_on_after_a_damaged_directory(run: Run, three: Path, tmp_path: Path) -> None:
    with Store.open(three) as store:
        tree = store.lookup(store.resolve("a"), b"").child
        (place,) = (one for one in store.index.iterate() if one.object_id == tree)
    flip(three / pack_key(place.pack), place.offset + place.encoded_length // 2)
    done = run("export", "--all", three, tmp_path / "out")
    assert done.code == 5
    assert done.err.startswith("moonclipfs: a@1: ")
    assert [line[:3] for line in done.out.splitlines()] == ["b@1", "c@1"]


def test_export_of_one_snapshot_names_the_damaged_file(run: Run, three: Path, tmp_path: Path) -> None:
    damage(three, "a", b"2")
    done = run("export", f"{three}:a", tmp_path / "out")
    assert (done.code, done.out, done.err.count("\n")) == (5, "", 1)
    assert done.err.startswith(f"moonclipfs: cannot write {tmp_path}/out/2: ")


def test_export_goes_on_after_a_snapshot_whose_place_is_taken(run: Run, three: Path, tmp_path: Path) -> None:
    """One snapshot has the name of a file of another."""
    for source, name in (("a", "run/ck"), ("b/1", "run/ck/1"), ("c", "zlast")):
        assert run("add", three, tmp_path / source, "--as", name).code == 0
    done = run("export", "--all", three, tmp_path / "out")
    assert done.code == 4
    first, last = done.err.splitlines()
    assert first.startswith("moonclipfs: run/ck/1@1: cannot write below ")
    assert last == "moonclipfs: not everything was exported: see the error above"
    assert (tmp_path / "out" / "run" / "ck" / "1").read_bytes() == noise(1)
    assert (tmp_path / "out" / "zlast" / "3").read_bytes() == noise(23)


def test_export_ends_with_the_code_of_the_first_failure(run: Run, three: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "1").write_bytes(b"mine")
    damage(three, "b", b"3")
    assert run("export", "--all", three, tmp_path / "out").code == 4
    assert (tmp_path / "out" / "a" / "1").read_bytes() == b"mine"
    assert (tmp_path / "out" / "b" / "1").read_bytes() == noise(11)
    assert (tmp_path / "out" / "c" / "1").read_bytes() == noise(21)


@pytest.mark.parametrize("record", [1, 2])
def test_export_of_all_tells_that_the_log_is_damaged(
    run: Run, three: Path, tmp_path: Path, expect_log: Callable[[str], None], record: int
) -> None:
    expect_log(f"log record {record}: .* left out")
    flip(three / "log" / f"{record:016}.json", 30)
    done = run("export", "--all", three, tmp_path / "out")
    assert done.code == 5
    assert "snapshots may be missing" in done.err.splitlines()[-1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted({*"abc"} - {"abc"[record - 1]})


def test_export_of_all_when_nothing_is_known(
    run: Run, three: Path, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    expect_log("left out")
    for record in (three / "log").iterdir():
        flip(record, 30)
    done = run("export", "--all", three, tmp_path / "out")
    assert (done.code, done.out) == (5, "")
    assert "snapshots may be missing" in done.err.splitlines()[-1]
