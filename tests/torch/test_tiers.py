"""Experts in RAM over files: nothing that was changed is lost, nothing that was not is written."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonclipfs import limits
from moonclipfs.errors import NoSpaceError, NotFoundError, ReadOnlyError, UsageError
from moonclipfs.torch import ExpertStore, ExpertTiers
from tests.torch.expertkit import Place, bits, expert, with_moments


def filled(place: Place, count: int = 4, file_format: str = "safetensors") -> ExpertStore:
    """A store of `count` experts with moments."""
    store = ExpertStore(place, file_format=file_format)
    for number in range(count):
        store.write(number, with_moments(number))
    return store


def changed(seed: int) -> dict[str, torch.Tensor]:
    """What an expert is after training."""
    return {name: tensor + 1 for name, tensor in with_moments(seed).items()}


@pytest.mark.parametrize("file_format", ["safetensors", "npz"])
def test_a_changed_expert_comes_back_through_a_tier_of_one(place: Place, file_format: str) -> None:
    tiers = ExpertTiers(filled(place, file_format=file_format), 1)
    tiers.put(0, changed(0))
    assert bits(tiers.fetch(1)) == bits(with_moments(1))
    assert bits(tiers.fetch(0)) == bits(changed(0)) == bits(tiers.store.read(0))
    expected = {"held": 1, "reads": 2, "hits": 0, "evictions": 2, "writebacks": 1}
    report = tiers.report()
    assert {name: report[name] for name in expected} == expected
    size = sum(tensor.nbytes for tensor in changed(0).values())
    assert report["bytes_read"] == 2 * size and report["bytes_written"] == size == report["held_bytes"]
    assert tiers.stall_s > 0


def test_an_expert_whose_bytes_did_not_change_is_not_written(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = {path.name: path.stat() for path in tmp_path.iterdir()}
    with ExpertTiers(store, 2) as tiers:
        for number in (0, 1, 2, 3, 0):
            tiers.put(number, {name: tensor.clone() for name, tensor in tiers.fetch(number).items()})
        tiers.put(1, dict(reversed(with_moments(1).items())))  # the same tensors, whatever their order
    assert tiers.writebacks == tiers.bytes_written == 0
    assert {path.name: path.stat() for path in tmp_path.iterdir()} == before


def test_the_least_recently_used_leave(tmp_path: Path) -> None:
    tiers = ExpertTiers(filled(tmp_path), 2)
    for number in (0, 1, 0, 2, 0, 1):
        tiers.fetch(number)
    assert (tiers.hits, tiers.reads, tiers.evictions) == (2, 4, 2)


def test_ram_is_bounded_in_bytes_too_but_holds_one(tmp_path: Path) -> None:
    store = filled(tmp_path)
    size = sum(tensor.nbytes for tensor in with_moments(0).values())
    tiers = ExpertTiers(store, 100, ram_bytes=2 * size)
    for number in range(4):
        tiers.fetch(number)
    assert tiers.report()["held"] == 2 and tiers.report()["held_bytes"] == 2 * size
    small = ExpertTiers(store, 100, ram_bytes=1)
    small.put(0, changed(0))
    assert bits(small.fetch(0)) == bits(changed(0)) and small.hits == 1
    small.fetch(1)
    assert bits(small.fetch(0)) == bits(changed(0)) and small.report()["held"] == 1


def test_a_change_in_place_is_noticed(tmp_path: Path) -> None:
    tiers = ExpertTiers(filled(tmp_path), 1)
    tiers.fetch(0)["w1"].add_(1)
    tiers.fetch(1)
    assert torch.equal(tiers.fetch(0)["w1"], with_moments(0)["w1"] + 1)


def test_reading_only_never_loses_an_update(tmp_path: Path) -> None:
    filled(tmp_path)
    tiers = ExpertTiers(ExpertStore(tmp_path, read_only=True), 1)
    tiers.put(0, with_moments(0))  # nothing changed, nothing lost
    with pytest.raises(ReadOnlyError, match=r"expert 0 was changed, and .* the change would be lost"):
        tiers.put(0, changed(0))
    assert bits(tiers.fetch(0)) == bits(with_moments(0))
    tiers.fetch(0)["w1"].add_(1)
    for use in (lambda: tiers.fetch(1), tiers.flush, lambda: tiers.put(2, with_moments(2))):
        with pytest.raises(ReadOnlyError, match="expert 0 was changed"):
            use()
    assert torch.equal(tiers.fetch(0)["w1"], with_moments(0)["w1"] + 1), "it is still held"
    with pytest.raises(ReadOnlyError):
        tiers.delete(0)
    with pytest.raises(ReadOnlyError):
        tiers.create(expert(9))


def test_what_cannot_be_written_stays_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = ExpertTiers(filled(tmp_path), 1)
    tiers.put(0, changed(0))
    write = tiers.store.write

    def full(*_: Any) -> int:
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(tiers.store, "write", full)
    for use in (lambda: tiers.fetch(1), lambda: tiers.put(2, changed(2)), tiers.flush, tiers.close):
        with pytest.raises(NoSpaceError):
            use()
    assert bits(tiers.fetch(0)) == bits(changed(0)) and tiers.report()["held"] == 1
    monkeypatch.setattr(tiers.store, "write", write)
    tiers.flush()
    assert bits(ExpertStore(tmp_path).read(0)) == bits(changed(0))
    assert bits(tiers.fetch(2)) == bits(with_moments(2)), "the put that failed has changed nothing"


def test_a_deleted_expert_stays_deleted(place: Place) -> None:
    tiers = ExpertTiers(filled(place), 2)
    tiers.put(3, changed(3))
    tiers.delete(3)
    tiers.flush()
    with pytest.raises(NotFoundError, match="expert 3"):
        tiers.fetch(3)
    with pytest.raises(UsageError, match="numbers are never used again"):
        tiers.put(3, changed(3))
    assert tiers.store.ids() == [0, 1, 2]
    assert tiers.create(with_moments(7)) == 4 and bits(tiers.fetch(4)) == bits(with_moments(7)) and tiers.hits == 1
    with pytest.raises(NotFoundError):
        tiers.delete(3)


def test_bounds_are_checked(tmp_path: Path) -> None:
    store = filled(tmp_path, 0)
    for wrong in ({"ram_capacity": 0}, {"ram_bytes": 0}, {"prefetch": -1}, {"prefetch": limits.EXPERT_THREADS + 1}):
        with pytest.raises(UsageError):
            ExpertTiers(store, **wrong)


def test_reading_ahead_makes_hits(place: Place) -> None:
    with ExpertTiers(filled(place, 6), 6, prefetch=3) as tiers:
        assert tiers.prefetch([0, 1, 2, 3, 0]) == 4
        while tiers.report()["held"] < 4:
            time.sleep(0.001)
        for number in range(4):
            assert bits(tiers.fetch(number)) == bits(with_moments(number))
        assert tiers.reads == 4 and tiers.hits == 4
        assert tiers.prefetch([0, 1]) == 0, "they are in RAM"
    assert ExpertTiers(tiers.store, 6).prefetch([0]) == 0, "no threads, no reading ahead"


def test_reads_ahead_go_on_at_the_same_time_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, 12)
    read, together, most, go = store.read, [0], [0], threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        together[0] += 1
        most[0] = max(most[0], together[0])
        assert go.wait(30)
        try:
            return read(*arguments, **options)
        finally:
            together[0] -= 1

    monkeypatch.setattr(store, "read", slow)
    with ExpertTiers(store, 8, prefetch=4) as tiers:
        assert tiers.prefetch(range(12)) == 8, "no more than RAM holds"
        fetched: list[Any] = []
        waiter = threading.Thread(target=lambda: fetched.append(tiers.fetch(0)))
        waiter.start()
        while together[0] < 4:
            time.sleep(0.001)
        go.set()
        waiter.join()
        assert bits(fetched[0]) == bits(with_moments(0))
        assert most[0] == 4 and tiers.hits == 1 and tiers.stall_s > 0


def test_what_cannot_be_read_ahead_is_told_to_whoever_fetches_it(tmp_path: Path) -> None:
    store = filled(tmp_path, 2)
    (tmp_path / "e00001.safetensors").unlink()
    with ExpertTiers(store, 2, prefetch=1) as tiers:
        assert tiers.prefetch([1, 0]) == 2
        with pytest.raises(NotFoundError, match="expert 1"):
            tiers.fetch(1)
        assert bits(tiers.fetch(0)) == bits(with_moments(0))


def test_threads_that_share_a_tier_see_each_update(tmp_path: Path) -> None:
    store = filled(tmp_path, 8)
    troubles: list[BaseException] = []
    with ExpertTiers(store, 2, prefetch=2) as tiers:

        def work(own: list[int]) -> None:
            try:
                seeds, randomly = {number: number for number in own}, random.Random(own[0])
                for turn in range(60):
                    number = randomly.choice(own)
                    assert bits(tiers.fetch(number)) == bits(with_moments(seeds[number]))
                    tiers.prefetch([randomly.randrange(8)])
                    if turn % 2:
                        seeds[number] = 100 * turn + number
                        tiers.put(number, with_moments(seeds[number]))
                    if turn % 17 == 0:
                        tiers.flush()
                final.update(seeds)
            except BaseException as error:
                troubles.append(error)

        final: dict[int, int] = {}
        threads = [threading.Thread(target=work, args=([2 * one, 2 * one + 1],)) for one in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not troubles and len(final) == 8
    assert {number: bits(store.read(number)) for number in final} == {
        number: bits(with_moments(seed)) for number, seed in final.items()
    }


class Tiers(RuleBasedStateMachine):
    """Tiers of any size over files, beside a dict."""

    @initialize(
        capacity=st.integers(1, 3), file_format=st.sampled_from(["safetensors", "npz"]), threads=st.integers(0, 2)
    )
    def begin(self, capacity: int, file_format: str, threads: int) -> None:
        from tempfile import TemporaryDirectory

        self.place = TemporaryDirectory()
        self.capacity, self.threads = capacity, threads
        self.model: dict[int, int] = {}
        self.highest = -1
        self.tiers = ExpertTiers(ExpertStore(self.place.name, file_format=file_format), capacity, prefetch=threads)

    @rule(seed=st.integers(0, 3))
    def create(self, seed: int) -> None:
        number = self.tiers.create(with_moments(seed))
        assert number == self.highest + 1
        self.model[number], self.highest = seed, number

    @rule(gap=st.integers(1, 3), seed=st.integers(0, 3))
    def put_a_new_one(self, gap: int, seed: int) -> None:
        self.highest += gap
        self.tiers.put(self.highest, with_moments(seed))
        self.model[self.highest] = seed

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seed=st.integers(0, 3))
    def put(self, data: st.DataObject, seed: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        self.tiers.put(number, with_moments(seed))
        self.model[number] = seed

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        assert bits(self.tiers.fetch(number)) == bits(with_moments(self.model[number]))

    @precondition(lambda self: self.model and not self.threads)  # what is read ahead may evict it before the change
    @rule(data=st.data(), seed=st.integers(0, 3))
    def change_in_place(self, data: st.DataObject, seed: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        for name, tensor in self.tiers.fetch(number).items():
            tensor.copy_(with_moments(seed)[name])
        self.model[number] = seed

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        self.tiers.delete(number)
        del self.model[number]
        with pytest.raises(NotFoundError):
            self.tiers.fetch(number)

    @rule(numbers=st.lists(st.integers(0, 8), max_size=4))
    def read_ahead(self, numbers: list[int]) -> None:
        self.tiers.prefetch(numbers)

    @rule()
    def flush(self) -> None:
        self.tiers.flush()
        files = ExpertStore(self.place.name, read_only=True)
        assert {number: bits(files.read(number)) for number in files.ids()} == {
            number: bits(with_moments(seed)) for number, seed in self.model.items()
        }

    @rule()
    def reopen(self) -> None:
        self.tiers.close()
        store = ExpertStore(self.place.name, file_format=self.tiers.store._format)
        self.tiers = ExpertTiers(store, self.capacity, prefetch=self.threads)

    @invariant()
    def experts_are_listed(self) -> None:
        if hasattr(self, "tiers"):
            assert self.tiers.store.ids() == sorted(self.model)

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.flush()
            self.tiers.close()
            self.place.cleanup()


TestTiers = Tiers.TestCase
TestTiers.settings = settings(stateful_step_count=25)
