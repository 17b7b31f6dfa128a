"""Reading the log: little of it, damage that is named and hides nothing else, checkpoints and trimming."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError
from moonclipfs.store.backend import LocalBackend, LocalValue
from moonclipfs.store.log import Log
from tests.faults import CountingOps
from tests.store.logkit import bind, content, flip, record

Expect = Callable[[str], None]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []
    real = LocalValue.__init__

    def counting(self: LocalValue, path: str) -> None:
        opened.append(os.path.basename(path))
        real(self, path)

    monkeypatch.setattr(LocalValue, "__init__", counting)
    return opened


def test_opening_reads_the_last_checkpoint_and_the_tail(root: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        bind(log, f"a/{number}", number)
    assert log.names.sequence == 203
    opened = count_reads(monkeypatch)
    names = Log(LocalBackend(root)).refresh()
    assert content(names) == content(log.refresh())
    assert len(opened) <= limits.LOG_CHECKPOINT_EVERY + 3


def test_a_refresh_without_news_lists_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    bind(log, "a")
    opened = count_reads(monkeypatch)
    before = log.names
    assert log.refresh() is before
    assert opened == ["0000000000000002.json", "0000000000000001.json"]


def test_R077_a_pointer_to_the_newest_record_is_ignored(root: Path, log: Log) -> None:
    bind(log, "a")
    (root / "log" / "HEAD").write_text("0000000000000099.json")
    (root / "log" / "_last_checkpoint").write_text("{}")
    names = Log(LocalBackend(root)).refresh()
    assert list(names.bound()) == ["a"] and not names.damaged


def test_a_damaged_checkpoint_costs_nothing(root: Path, log: Log, expect_log: Expect) -> None:
    for number in range(140):
        bind(log, f"a/{number}", number)
    flip(record(root, 130))
    expect_log(r"WARNING .*0000000000000130.json.*an earlier checkpoint is used")
    names = Log(LocalBackend(root)).refresh()
    assert content(names) == content(log.refresh()) and not names.damaged
    flip(record(root, 65))
    expect_log(r"WARNING .*0000000000000065.json.*an earlier checkpoint is used")
    names = Log(LocalBackend(root)).refresh()
    assert list(names.all_versions()) == list(log.names.all_versions()) and not names.damaged
    bind(Log(LocalBackend(root)), "more")


def test_a_damaged_record_is_named_and_nothing_is_appended(root: Path, log: Log, expect_log: Expect) -> None:
    for number in range(5):
        bind(log, f"a/{number}", number)
    flip(record(root, 3))
    expect_log(r"ERROR .*0000000000000003.json.*what it says is left out")
    damaged = Log(LocalBackend(root))
    names = damaged.refresh()
    assert sorted(names.bound()) == ["a/0", "a/1", "a/3", "a/4"]
    assert len(names.damaged) == 1 and "0000000000000003.json" in names.damaged[0]
    with pytest.raises(CorruptError, match=r"0000000000000003\.json.*restore it"):
        bind(damaged, "b")
    assert not record(root, 6).exists()


def test_a_missing_record_is_named(root: Path, log: Log, expect_log: Expect) -> None:
    for number in range(5):
        bind(log, f"a/{number}", number)
    record(root, 3).unlink()
    expect_log(r"ERROR .*record 3 is missing")
    names = Log(LocalBackend(root)).refresh()
    assert sorted(names.bound()) == ["a/0", "a/1", "a/3", "a/4"] and "record 3" in names.damaged[0]


def test_a_missing_beginning_is_named(root: Path, log: Log, expect_log: Expect) -> None:
    for number in range(5):
        bind(log, f"a/{number}", number)
    record(root, 1).unlink()
    record(root, 2).unlink()
    expect_log(r"ERROR .*records 1 to 2 are missing")
    assert "1 to 2" in Log(LocalBackend(root)).refresh().damaged[0]


def test_records_that_contradict_each_other_are_damage(root: Path, log: Log, expect_log: Expect) -> None:
    bind(log, "a")
    bind(log, "b")
    log.unbind(["a"])
    record(root, 1).unlink()
    expect_log(r"record 3: it does not fit")
    expect_log(r"records 1 to 1 are missing")
    names = Log(LocalBackend(root)).refresh()
    assert list(names.bound()) == ["b"] and len(names.damaged) == 2


def test_damage_that_comes_while_open_is_seen(root: Path, log: Log, expect_log: Expect) -> None:
    bind(log, "a")
    reader = Log(LocalBackend(root))
    reader.refresh()
    bind(log, "b")
    bind(log, "c")
    flip(record(root, 2))
    expect_log(r"0000000000000002.json")
    assert sorted(reader.refresh().bound()) == ["a", "c"] and reader.names.damaged
    assert reader.refresh() is reader.names, "it is reported once"


def test_a_claim_without_bytes_is_no_record(root: Path, log: Log) -> None:
    bind(log, "a")
    record(root, 2).touch()
    assert Log(LocalBackend(root)).refresh().sequence == 1
    assert bind(log, "b").sequence == 2


def test_too_long_a_record_is_not_read(root: Path, log: Log, expect_log: Expect) -> None:
    bind(log, "a")
    with record(root, 2).open("wb") as file:
        file.truncate(limits.LOG_RECORD_BYTES + 1)
    expect_log("longer than")
    assert Log(LocalBackend(root)).refresh().damaged


# Checkpoints and trimming


def test_trimming_keeps_two_checkpoints_and_readers_go_on(root: Path, log: Log) -> None:
    sleeper = Log(LocalBackend(root))
    bind(log, "first")
    sleeper.refresh()
    for number in range(300):
        bind(log, f"a/{number}", number)
    assert log.trim() > 100
    assert log.trim() == 0
    fresh = Log(LocalBackend(root)).refresh()
    assert content(fresh) == content(log.refresh()) and not fresh.damaged
    assert content(sleeper.refresh()) == content(fresh), "it slept through records that are gone"
    bind(sleeper, "more")
    assert len(os.listdir(root / "log")) < 200


def test_after_trimming_the_last_checkpoint_may_still_be_damaged(root: Path, log: Log, expect_log: Expect) -> None:
    for number in range(200):
        bind(log, f"a/{number}", number)
    log.trim()
    flip(record(root, 195))
    expect_log("an earlier checkpoint")
    assert len(Log(LocalBackend(root)).refresh().bound()) == 200


def test_records_trimmed_between_listing_and_reading(root: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(70):
        bind(log, f"a/{number}", number)
    reader = Log(LocalBackend(root))
    real = reader._numbers
    listings: list[list[int]] = []

    def stale() -> list[int]:
        listings.append(real())
        if len(listings) == 1:
            for number in range(140):
                bind(log, f"b/{number}", number)
            log.trim()
            assert not record(root, listings[0][-1]).exists()
        return listings[-1]

    monkeypatch.setattr(reader, "_numbers", stale)
    assert content(reader.refresh()) == content(log.refresh())
    assert len(listings) == 2


def test_a_checkpoint_drops_condemned_packs_that_are_gone(
    root: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOG_CHECKPOINT_EVERY", 3)
    gone, there = "0" * 32, "1" * 32
    (root / "packs" / f"{there}.pack").write_bytes(b"x")
    log.condemn([gone, there])
    bind(log, "a")
    assert set(log.refresh().condemned()) == {gone, there}
    bind(log, "a")
    assert set(log.refresh().condemned()) == {there}
    assert set(Log(LocalBackend(root)).refresh().condemned()) == {there}


def test_a_checkpoint_that_cannot_be_written_fails_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, expect_log: Expect
) -> None:
    monkeypatch.setattr(limits, "LOG_CHECKPOINT_EVERY", 2)

    class Full(CountingOps):
        def write(self, fd: int, data: bytes | bytearray | memoryview) -> int:
            if b"checkpoint" in bytes(data[:60]):
                raise OSError(28, "No space left on device")
            return super().write(fd, data)

    log = Log(LocalBackend(root, Full()))
    bind(log, "a")
    bind(log, "b")
    expect_log("cannot write a checkpoint")
    assert Log(LocalBackend(root)).refresh().sequence == 2
