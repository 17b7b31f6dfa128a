"""The log: names that follow from its records, and what may be recorded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs.errors import CorruptError, ExistsError, NotFoundError, UsageError
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.log import Log, parse_spec
from moonclipfs.store.paths import check_path
from moonclipfs.store.records import encode_record
from tests.store.logkit import bind, content, record, root_id

Expect = Callable[[str], None]


def test_an_empty_log(log: Log) -> None:
    assert log.names.sequence == 0
    names = log.refresh()
    assert (names.sequence, dict(names.bound()), list(names.all_versions())) == (0, {}, [])
    assert names.versions("x") == () and names.highest("x") == 0


def test_bind_makes_versions_and_others_see_them(root: Path, log: Log) -> None:
    other = Log(LocalBackend(root))
    other.refresh()
    first, second = bind(log, "run1/ckpt", 1), bind(log, "run1/ckpt", 2)
    assert (first.number, first.sequence, second.number, second.sequence) == (1, 1, 2, 2)
    names = other.refresh()
    assert names.bound() == {"run1/ckpt": second}
    assert names.versions("run1/ckpt") == (first, second)
    assert second.metadata == {"files": 2} and second.root == root_id(2) and second.removed == 0


def test_names_never_change(log: Log) -> None:
    bind(log, "a")
    names = log.names
    before = content(names)
    bind(log, "b")
    log.unbind(["a"])
    assert content(names) == before
    with pytest.raises(TypeError):
        names.bound()["x"] = next(names.all_versions())  # type: ignore[index]


def test_unbind_keeps_what_was_removed(log: Log) -> None:
    bind(log, "a", 1)
    bind(log, "a", 2)
    sequence = log.unbind(["a"])
    names = log.refresh()
    assert names.bound() == {}
    assert [(version.number, version.removed) for version in names.versions("a")] == [(1, sequence), (2, sequence)]
    assert all(version.time_ns < version.removed_ns <= time.time_ns() for version in names.versions("a"))
    third = bind(log, "a", 3)
    assert third.number == 3
    assert third.removed_ns == 0
    assert [version.removed for version in log.names.versions("a")] == [sequence, sequence, 0]
    with pytest.raises(NotFoundError, match="'b'"):
        log.unbind(["a", "b"])
    assert "a" in log.refresh().bound(), "a refused record changes nothing"


def test_move_takes_all_below_along(log: Log) -> None:
    bind(log, "run1/a", 1)
    bind(log, "run1/a", 2)
    bind(log, "run1/b", 3)
    bind(log, "run10", 4)
    bind(log, "run1/gone", 5)
    log.unbind(["run1/gone"])
    log.move("run1", "run2/deep")
    names = log.refresh()
    assert sorted(names.bound()) == ["run10", "run2/deep/a", "run2/deep/b"]
    assert [(version.number, version.root) for version in names.versions("run2/deep/a")] == [
        (1, root_id(1)),
        (2, root_id(2)),
    ]
    assert names.versions("run1/a") == () and len(names.versions("run1/gone")) == 1
    assert bind(log, "run1/a").number == 3, "a number is never used twice"


def test_move_onto_a_removed_name_gives_new_numbers(log: Log) -> None:
    bind(log, "a", 1)
    log.unbind(["a"])
    bind(log, "b", 2)
    bind(log, "b", 3)
    log.move("b", "a")
    assert [(version.number, version.root[-1]) for version in log.refresh().versions("a")] == [(1, 1), (2, 2), (3, 3)]
    assert log.names.bound()["a"].number == 3


def test_refused_moves(log: Log) -> None:
    bind(log, "a")
    bind(log, "b/c")
    for old, new, error in (
        ("a", "b", ExistsError), ("a", "b/c", ExistsError), ("x", "y", NotFoundError), ("a", "a", UsageError),
        ("a", "a/b", UsageError), ("a", "@x", UsageError),
    ):  # fmt: skip
        with pytest.raises(error):
            log.move(old, new)
    log.move("a", "b/d")
    assert sorted(log.refresh().bound()) == ["b/c", "b/d"]


def test_forget(log: Log) -> None:
    for number in (1, 2, 3):
        bind(log, "a", number)
    log.forget([("a", 1)])
    assert [version.number for version in log.refresh().versions("a")] == [2, 3]
    assert log.names.bound()["a"].number == 3
    sequence = log.forget([("a", 3)])
    assert log.refresh().bound() == {}, "an earlier version does not come back by itself"
    assert [(version.number, version.removed) for version in log.names.versions("a")] == [(2, sequence)]
    log.forget([("a", 2)])
    assert list(log.refresh().all_versions()) == []
    assert bind(log, "a").number == 4
    with pytest.raises(NotFoundError, match="no version 3"):
        log.forget([("a", 3)])


def test_condemned_packs_keep_their_first_record(log: Log) -> None:
    first = log.condemn(["p", "q"])
    log.condemn(["q", "r"])
    assert log.refresh().condemned() == {"p": first, "q": first, "r": first + 1}


def test_a_name_of_any_bytes(log: Log, root: Path) -> None:
    path = os.fsdecode(b"run\xff\xfe/\xc3\xa9\n\"'")
    bind(log, path)
    assert path in Log(LocalBackend(root)).refresh().bound()


IMPOSSIBLE = ["", "/a", "a/", "a//b", ".", "a/..", "./a", "../../a", "@latest", "@x/y", "a\0b", "x" * 256]
IMPOSSIBLE += ["a/" * 128 + "a", "\ud800"]


@pytest.mark.parametrize("path", IMPOSSIBLE)
def test_paths_that_no_snapshot_can_have(path: str, log: Log) -> None:
    with pytest.raises(UsageError):
        check_path(path)
    with pytest.raises(UsageError):
        bind(log, path)


@pytest.mark.parametrize("path", [*IMPOSSIBLE, None, 1, ["a"]])
@pytest.mark.parametrize("type_", ["bind", "move", "checkpoint"])
def test_records_with_paths_that_no_snapshot_can_have_are_damage(
    type_: str, path: object, root: Path, log: Log, expect_log: Expect
) -> None:
    """Whoever made the store: no path of it leads out of the directory that it is exported to or mounted at."""
    kept = bind(log, "kept")
    row = {"path": path, "number": 1, "root": root_id(1).hex(), "time_ns": 1, "metadata": {}}
    versions: list[object] = [{**row, "sequence": 1, "removed": 0}] if type_ == "checkpoint" else [["kept", 1, path, 1]]
    body = row if type_ == "bind" else {"versions": versions, "highest": {}, "condemned": {}}
    record(root, 2).write_bytes(encode_record(2, type_, body))
    expect_log("log record 2: (it does not fit|.* cannot be a snapshot's name)")
    for names in (log.refresh(), *([] if type_ == "checkpoint" else [Log(LocalBackend(root)).refresh()])):
        assert list(names.all_versions()) == [kept] and len(names.damaged) == 1
    with pytest.raises(CorruptError, match="record 2"):
        bind(log, "more")


def test_too_long_a_path() -> None:
    with pytest.raises(UsageError, match="longer than 4096 bytes"):
        check_path("/".join(["x" * 255] * 17))


@pytest.mark.parametrize("path", ["a", "run1/checkpoint-500", "a@b", "x/@y", "..a", "x" * 255, "\udcff", " "])
def test_paths_that_a_snapshot_can_have(path: str) -> None:
    assert check_path(path) == path


def test_specs() -> None:
    assert parse_spec("run1/ckpt") == ("run1/ckpt", None)
    assert parse_spec("run1/ckpt@3") == ("run1/ckpt", 3)
    assert parse_spec("a@b") == ("a@b", None)
    assert parse_spec("a@2@3") == ("a@2", 3)
    assert parse_spec("@3") == ("@3", None)
    assert parse_spec("a@" + "9" * 100)[1] is None


@given(st.text(max_size=30))
def test_any_text_is_a_path_or_a_usage_error(text: str) -> None:
    try:
        assert check_path(text) == text
    except UsageError as error:
        assert str(error)
