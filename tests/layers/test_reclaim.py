"""What a layer at work reclaims, and when: after a time, when the disk is needed, and never what anyone sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.reclaim import Reclaimer, reclaim
from moonclipfs.store import pins
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from tests.layers.filekit import encode, read_all, write_file
from tests.layers.sealkit import carried
from tests.store.kit import contents, noise, packs, publish

MIB = 1 << 20


class LocalEncoder:
    """Reclaims in this process, with a store of its own, while the layer follows the log as a mount makes it do."""

    def __init__(self, layer: Layer, index: Path) -> None:
        self.layer = layer
        self.calls: list[dict[str, Any]] = []
        self.encoded_bytes = self.failures = 0
        self._index = index

    def call(self, op: str, **arguments: Any) -> Any:
        assert op == "reclaim"
        self.calls.append(arguments)
        with self._following(), Store.open(self.layer.store.path, write=True, index_path=self._index) as store:
            return carried(reclaim(store, carried(arguments)))

    def forgotten(self) -> list[str]:
        """What was forgotten by calls, in order."""
        return [path.decode() for call in self.calls if not call.get("preview") for path, _ in call["forget"]]

    @contextmanager
    def _following(self) -> Iterator[None]:
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(0.02):
                self.layer.refresh(time.time_ns())

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Case:
    """A layer and its reclaimer, on a disk whose size is told."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.layer = Layer.open(store, "test")
        self.encoder = LocalEncoder(self.layer, store.path.parent / "worker.sqlite")
        self.disk = 1 << 40
        self._patch = monkeypatch

    def start(self, **options: Any) -> Reclaimer:
        reclaimer = Reclaimer(self.layer, self.encoder, **options)  # type: ignore[arg-type]
        self._patch.setattr(reclaimer, "_free", self.free)
        self._patch.setattr(reclaimer, "_low_mark", lambda: MIB // 2)
        return reclaimer

    def free(self) -> int:
        return self.disk - sum(path.stat().st_size for path in (self.store.path / "packs").iterdir())

    def fill(self, names: str, *, removed: str = "") -> None:
        """Snapshots of a MiB each, with the letters as names, some of them removed in the order given."""
        for name in names:
            publish(self.store, name, {"f": noise(ord(name), MIB)})
        for name in removed:
            self.store.log.unbind([name])
        self.layer.refresh(time.time_ns())

    def kept(self) -> str:
        return "".join(sorted(version.path for version in self.store.names().all_versions()))


@pytest.fixture
def case(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    found = Case(store, monkeypatch)
    yield found
    found.layer.close()
    assert verify(store).problems == []


def test_what_was_removed_is_forgotten_after_its_time(case: Case) -> None:
    case.fill("abc", removed="a")
    reclaimer = case.start(keep_deleted=2.0)
    reclaimer.tick(0.0)
    assert case.kept() == "abc"
    time.sleep(2.1)
    case.store.log.unbind(["b"])
    case.layer.refresh(time.time_ns())
    before = case.free()
    reclaimer.tick(10.0)
    assert case.kept() == "bc"
    assert case.free() > before + MIB
    assert contents(case.store, "b@1") == {"f": noise(ord("b"), MIB)}


def test_what_was_removed_by_an_older_program_counts_from_now(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.fill("ab")
    append = case.store.log.append
    monkeypatch.setattr(
        case.store.log, "append", lambda type_, body: append(type_, lambda names: {"paths": body(names)["paths"]})
    )
    case.store.log.unbind(["a"])
    assert case.store.log.names.versions("a")[0].removed_ns == 0
    reclaimer = case.start(keep_deleted=1.0)
    reclaimer.tick(0.0)
    assert case.kept() == "ab"
    time.sleep(1.1)
    reclaimer.tick(10.0)
    assert case.kept() == "b"


def test_room_is_made_of_what_was_removed_first_and_no_more_than_is_needed(case: Case) -> None:
    case.fill("abcdefgh", removed="hafbg")
    reclaimer = case.start()
    case.disk -= case.free()
    assert case.free() == 0
    assert reclaimer.make_room(2 * MIB) > 2 * MIB
    assert case.kept() == "bcdeg", "one, then two at a time"
    assert case.encoder.forgotten()[:2] == ["h", "a"]
    assert reclaimer.make_room(100 * MIB) > 0
    assert case.kept() == "cde"
    calls = len(case.encoder.calls)
    assert reclaimer.make_room(100 * MIB) == 0
    assert len(case.encoder.calls) == calls, "a full disk is no reason to look again and again"
    for name in "cde":
        assert contents(case.store, name) == {"f": noise(ord(name), MIB)}


def test_pinned_versions_stay_whatever_room_is_needed(case: Case) -> None:
    """A version that is pinned stays when it was removed, whatever room is needed, until it is unpinned."""
    case.fill("abc")
    pins.pin(case.store, [("a", 1)])
    case.store.log.unbind(["a", "b"])
    case.layer.refresh(time.time_ns())
    reclaimer = case.start(keep_deleted=0.0)
    case.disk -= case.free()
    reclaimer.make_room(100 * MIB)
    reclaimer.tick(10.0)
    assert case.kept() == "ac" and contents(case.store, "a@1") == {"f": noise(ord("a"), MIB)}
    pins.unpin(case.store, [("a", 1)])
    assert reclaimer.make_room(100 * MIB) > MIB
    assert case.kept() == "c"


def test_what_was_removed_just_now_makes_room_at_once(case: Case) -> None:
    """Before the log was told, and after all else was reclaimed in vain."""
    case.fill("ab")
    reclaimer = case.start()
    case.disk -= case.free()
    assert reclaimer.make_room(MIB) == 0
    case.layer.unlink(case.layer.resolve(b"a"), b"f", 5)
    case.layer.rmdir(case.layer.root, b"a", 6)
    assert reclaimer.make_room(MIB) > MIB
    assert case.kept() == "b"


def test_what_keeps_it_from_reclaiming_is_told_and_whoever_needs_room_has_none(
    case: Case, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    case.fill("ab", removed="a")
    reclaimer = case.start()
    case.disk -= case.free()
    calls: list[str] = []

    def fail(op: str, **arguments: Any) -> Any:
        calls.append(op)
        raise CorruptError("log record 5 is damaged, so nothing is deleted")

    monkeypatch.setattr(case.encoder, "call", fail)
    expect_log("cannot be reclaimed: log record 5 is damaged")
    for _ in range(3):
        assert reclaimer.make_room(MIB) == 0
    assert len(calls) == 1 and case.kept() == "ab"


def test_where_another_disk_is_full_nothing_is_forgotten(case: Case) -> None:
    case.fill("ab", removed="a")
    assert case.start().make_room(MIB) == 0
    assert case.kept() == "ab" and case.encoder.calls == []


def test_a_disk_that_is_nearly_full_gets_room_before_anybody_asks(case: Case) -> None:
    case.fill("abc", removed="ab")
    reclaimer = case.start()
    case.disk -= case.free() - 1000
    reclaimer.tick(0.0)
    assert case.kept() == "bc"
    case.disk -= case.free() - 1000
    reclaimer.tick(100.0)
    assert case.kept() == "c"
    case.disk -= case.free() - 1000
    reclaimer.tick(200.0)
    calls = len(case.encoder.calls)
    for second in range(300, 310):
        reclaimer.tick(second)
    assert len(case.encoder.calls) == calls, "nothing is left, and that is known"


def test_what_could_not_be_stored_gets_as_much_room_as_it_takes(case: Case) -> None:
    case.fill("abcdef", removed="abcd")
    reclaimer = case.start()
    write_file(case.layer, b"large", noise(1, 2 * MIB))
    case.disk -= case.free() - MIB
    reclaimer.tick(0.0)
    assert case.kept() == "abcdef", "there is room enough, for all that is known"
    case.encoder.failures = 1
    reclaimer.tick(100.0)
    assert case.free() > 2 * MIB and case.kept() == "bcdef"


def test_the_estimate_is_what_is_freed_and_made_only_when_something_changed(case: Case) -> None:
    case.fill("abcd", removed="ab")
    reclaimer = case.start()
    reclaimer.tick(0.0)
    assert 2 * MIB < reclaimer.reclaimable < 2.1 * MIB
    calls = len(case.encoder.calls)
    reclaimer.tick(1000.0)
    assert len(case.encoder.calls) == calls
    before, told = case.free(), reclaimer.reclaimable
    case.disk -= case.free()
    reclaimer.make_room(100 * MIB)
    assert reclaimer.reclaimable == 0
    assert abs(case.free() - told) < 0.1 * MIB and before > 0
    reclaimer.tick(2000.0)
    assert reclaimer.reclaimable < 0.1 * MIB


def test_estimates_take_little_of_the_time(case: Case) -> None:
    reclaimer = case.start()
    times = []
    for second in range(200):
        case.encoder.encoded_bytes += 1
        calls = len(case.encoder.calls)
        reclaimer.tick(float(second) / 1000)
        if len(case.encoder.calls) > calls:
            times.append(second)
    assert times[0] == 0 and len(times) < 50


def test_files_that_were_stored_and_removed_are_freed_though_the_journal_named_them(case: Case) -> None:
    case.fill("a")
    write_file(case.layer, b"kept", noise(1, MIB))
    write_file(case.layer, b"gone", noise(2, MIB))
    encode(case.layer, *case.layer.take_jobs(0.0, urgent=True))
    case.layer.unlink(case.layer.root, b"gone", 5)
    reclaimer = case.start()
    case.disk -= case.free()
    assert reclaimer.make_room(MIB // 2) > MIB // 2
    assert read_all(case.layer, case.layer.lookup(case.layer.root, b"kept")) == noise(1, MIB)
    assert contents(case.store, "a") == {"f": noise(ord("a"), MIB)}


def test_gc_finds_what_a_closed_layer_dropped(case: Case) -> None:
    write_file(case.layer, b"gone", noise(2, MIB))
    encode(case.layer, *case.layer.take_jobs(0.0, urgent=True))
    case.layer.unlink(case.layer.root, b"gone", 5)
    case.start().leave()
    case.layer.close()
    assert collect(case.store).freed_bytes > MIB


def test_dead_packs_go_without_anybody_asking(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECLAIM_BYTES", MIB)
    case.fill("abc")
    reclaimer = case.start()
    reclaimer.tick(0.0)
    before = packs(case.store)
    for name in (b"x", b"y"):
        write_file(case.layer, name, noise(name[0], MIB))
    encode(case.layer, *case.layer.take_jobs(0.0, urgent=True))
    assert len(packs(case.store)) > len(before)
    for name in (b"x", b"y"):
        case.layer.unlink(case.layer.root, name, 5)
    case.encoder.encoded_bytes += 2 * MIB
    reclaimer.tick(1000.0)
    assert packs(case.store) == before
    assert reclaimer.reclaimable < 0.1 * MIB, "it is free already, and must not count twice"


def test_what_somebody_reads_goes_when_it_is_closed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RETRY_SECONDS", 0.0)
    case.fill("ab", removed="a")
    lease = case.store.lease
    assert lease is not None
    reclaimer = case.start()
    with lease.hold(case.store.log.names.sequence):
        case.disk -= case.free()
        assert reclaimer.make_room(MIB) == 0
        assert case.kept() == "b" and case.free() == 0
    case.disk += 10 * MIB
    before = case.free()
    reclaimer.tick(time.monotonic() + 1)
    assert case.free() > before + MIB


def test_a_removed_snapshot_that_the_layer_still_shows_parts_of_stays_readable(case: Case) -> None:
    """Files that were moved out of it belong to the layer."""
    case.fill("ab")
    directory = case.layer.resolve(b"a")
    case.layer.rename(directory, b"f", case.layer.root, b"rescued", 5)
    case.layer.rmdir(case.layer.root, b"a", 6)
    case.layer.push_names()
    reclaimer = case.start()
    case.disk -= case.free()
    reclaimer.make_room(100 * MIB)
    assert case.kept() == "b"
    assert read_all(case.layer, case.layer.lookup(case.layer.root, b"rescued")) == noise(ord("a"), MIB)
