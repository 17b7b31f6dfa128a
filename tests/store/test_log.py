"""The log: one order for all writers, names that follow from it, damage that is named and hides nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from moonclipfs import limits
from moonclipfs.errors import BusyError, CorruptError, ExistsError, NotFoundError, UsageError
from moonclipfs.store.backend import LocalBackend, LocalValue
from moonclipfs.store.log import Log, Names, parse_spec
from moonclipfs.store.paths import check_path
from moonclipfs.store.records import encode_record, record_name
from moonclipfs.types import Version
from tests.faults import CountingOps, NoLinkOps, PausingOps, UnsyncedOps

Expect = Callable[[str], None]


def make_root(root: Path) -> Path:
    for name in ("log", "packs", "tmp"):
        (root / name).mkdir(parents=True)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "store")


@pytest.fixture
def log(root: Path) -> Log:
    return Log(LocalBackend(root, UnsyncedOps()))


def root_id(number: int) -> bytes:
    return number.to_bytes(32, "big")


def bind(log: Log, path: str, number: int = 1) -> Version:
    return log.bind(path, root_id(number), {"files": number})


def content(names: Names) -> tuple[object, ...]:
    return (names.sequence, list(names.all_versions()), dict(names.bound()), dict(names.condemned()))


def record(root: Path, sequence: int) -> Path:
    return root / record_name(sequence)


def flip(path: Path, at: int = -10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


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
    third = bind(log, "a", 3)
    assert third.number == 3
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


# Writers


@pytest.mark.parametrize("links", [True, False])
def test_writers_race_for_numbers_and_none_is_lost(root: Path, links: bool) -> None:
    def work(name: str) -> None:
        log = Log(LocalBackend(root, None if links else NoLinkOps()))
        for number in range(10):
            bind(log, f"{name}/{number}")
            bind(log, "shared", number)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = Log(LocalBackend(root)).refresh()
    assert not names.damaged and len(names.bound()) == 31
    assert [version.number for version in names.versions("shared")] == list(range(1, 31))


def test_a_loser_sees_the_newest_names(root: Path) -> None:
    rival = Log(LocalBackend(root))

    def meanwhile() -> None:
        bind(rival, "a", 9)

    log = Log(LocalBackend(root, PausingOps("link", "log/", meanwhile)))
    seen: list[int] = []
    version = log.bind("a", root_id(1), {}, check=lambda names: seen.append(names.sequence))
    assert seen == [0, 1] and (version.number, version.sequence) == (2, 2)


def test_a_check_that_raises_gives_up(log: Log, root: Path) -> None:
    def refuse(names: Names) -> None:
        raise ExistsError("not today")

    with pytest.raises(ExistsError, match="not today"):
        log.bind("a", root_id(1), {}, check=refuse)
    assert os.listdir(root / "log") == []


def test_always_losing_ends_in_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMMIT_ATTEMPTS", 5)
    rival = Log(LocalBackend(root))

    class Slow(CountingOps):
        def link(self, source: str, target: str) -> None:
            bind(rival, "rival")
            super().link(source, target)

    with pytest.raises(BusyError, match="5 attempts"):
        bind(Log(LocalBackend(root, Slow())), "a")


def test_a_record_waits_for_those_before_it_to_be_durable(root: Path) -> None:
    """Else a crash might keep the later one alone: a gap."""
    first, second = CountingOps(), CountingOps()
    a, b = Log(LocalBackend(root, first)), Log(LocalBackend(root, second))
    bind(a, "a")
    assert first.calls["fsync"] == 3, "packs/, the record, log/"
    bind(a, "a")
    assert first.calls["fsync"] == 6
    bind(b, "b")
    assert second.calls["fsync"] == 4, "and log/ once more, for the records of the other"


# Reading


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


# Any sequence of changes


PATHS = st.sampled_from(["a", "a/b", "a/b/c", "b", "b/c", "c"])


class LogMachine(RuleBasedStateMachine):
    """Two processes change names; a third that opens the log anew sees what a simple model says."""

    versions = Bundle("versions")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        root = make_root(Path(self.directory.name) / "store")
        self.root = root
        self.logs = [Log(LocalBackend(root, UnsyncedOps())), Log(LocalBackend(root, UnsyncedOps()))]
        self.kept: dict[bytes, str] = {}
        self.bound: dict[str, bytes] = {}
        self.count = 0

    def teardown(self) -> None:
        self.directory.cleanup()

    @rule(target=versions, who=st.integers(0, 1), path=PATHS)
    def bind(self, who: int, path: str) -> bytes:
        self.count += 1
        version = self.logs[who].bind(path, root_id(self.count), {})
        self.kept[version.root], self.bound[path] = path, version.root
        return version.root

    @rule(who=st.integers(0, 1), path=PATHS)
    def unbind(self, who: int, path: str) -> None:
        if path not in self.bound:
            with pytest.raises(NotFoundError):
                self.logs[who].unbind([path])
            return
        self.logs[who].unbind([path])
        del self.bound[path]

    @rule(who=st.integers(0, 1), old=PATHS, new=PATHS)
    def move(self, who: int, old: str, new: str) -> None:
        before = self.logs[who].refresh()
        try:
            self.logs[who].move(old, new)
        except (UsageError, ExistsError, NotFoundError):
            return
        for path in [path for path in self.bound if path == old or path.startswith(old + "/")]:
            target = new + path[len(old) :]
            self.bound[target] = self.bound.pop(path)
            for version in before.versions(path):
                if not version.removed:
                    self.kept[version.root] = target

    @rule(who=st.integers(0, 1), root=consumes(versions))
    def forget(self, who: int, root: bytes) -> None:
        path = self.kept.pop(root)
        (number,) = [v.number for v in self.logs[who].refresh().versions(path) if v.root == root]
        self.logs[who].forget([(path, number)])
        if self.bound.get(path) == root:
            del self.bound[path]

    @rule(who=st.integers(0, 1))
    def trim(self, who: int) -> None:
        self.logs[who].trim()

    @invariant()
    def all_readers_agree(self) -> None:
        fresh = Log(LocalBackend(self.root)).refresh()
        assert not fresh.damaged
        assert {path: version.root for path, version in fresh.bound().items()} == self.bound
        assert {version.root: version.path for version in fresh.all_versions()} == self.kept
        numbers = [(version.path, version.number) for version in fresh.all_versions()]
        assert len(numbers) == len(set(numbers))
        for log in self.logs:
            assert content(log.refresh())[:3] == content(fresh)[:3]


class TestLogMachine(LogMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=15, stateful_step_count=30, deadline=None)

    @pytest.fixture(autouse=True)
    def frequent_checkpoints(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "LOG_CHECKPOINT_EVERY", 5)


@given(st.text(max_size=30))
def test_any_text_is_a_path_or_a_usage_error(text: str) -> None:
    try:
        assert check_path(text) == text
    except UsageError as error:
        assert str(error)


_WRITER = """
import sys
from pathlib import Path
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.log import Log
log = Log(LocalBackend(Path(sys.argv[1])))
sys.stdin.readline()
for number in range(20):
    log.bind(f"{sys.argv[2]}/{number}", bytes(32), {})
    log.bind("shared", bytes(32), {"by": sys.argv[2]})
"""


def test_processes_and_containers_race_for_numbers(root: Path) -> None:
    """One of them in a pid namespace of its own, one stopped and continued in between: no record is lost."""
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        container = []  # this user cannot make a pid namespace: a plain process races instead
    writers = [
        subprocess.Popen([*prefix, sys.executable, "-c", _WRITER, str(root), name], stdin=subprocess.PIPE)
        for name, prefix in (("a", []), ("b", container), ("c", []))
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.close()
    reader = Log(LocalBackend(root))
    while reader.refresh().sequence < 10 and writers[0].poll() is None:
        time.sleep(0.01)
    writers[0].send_signal(signal.SIGSTOP)
    before = reader.refresh().sequence
    while reader.refresh().sequence < before + 10 and writers[1].poll() is None:
        time.sleep(0.01)
    writers[0].send_signal(signal.SIGCONT)
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    names = Log(LocalBackend(root)).refresh()
    assert not names.damaged and len(names.bound()) == 61
    assert [version.number for version in names.versions("shared")] == list(range(1, 61))
