"""Several ranks save one snapshot. Here each is a thread with a manager of its own, which is all that a process has."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import moonclipfs
from moonclipfs import CheckpointManager
from moonclipfs.errors import CorruptError, NotFoundError, RanksError, UsageError
from moonclipfs.store import ranks as notes
from moonclipfs.store.gc import collect
from moonclipfs.store.leases import live_leases
from moonclipfs.store.optimize import optimize
from moonclipfs.store.retention import Rules
from moonclipfs.store.store import Store
from moonclipfs.store.target import is_store
from moonclipfs.torch import topology
from tests.torch.kit import adam, model, same, train
from tests.torch.rankprograms import start

Ranks = Callable[..., list[CheckpointManager]]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Makes the managers of all ranks of a launch."""
    monkeypatch.setenv(topology.WAIT, "60")
    made: list[CheckpointManager] = []

    def make(size: int = 2, *, only: Sequence[int] | None = None, **options: Any) -> list[CheckpointManager]:
        launch = []
        for rank in range(size) if only is None else only:
            topology._groups.clear()  # each is the first of its process
            launch.append(CheckpointManager(tmp_path / "store", "run", world_size=size, rank=rank, **options))
        made.extend(launch)
        return launch

    yield make
    for manager in made:
        try:
            manager.close()
        except RanksError:
            pass  # its test has seen that


def each(managers: Sequence[CheckpointManager], call: Callable[[CheckpointManager, int], Any]) -> list[Any]:
    """Call for all ranks side by side; returns what each returned or raised."""

    def caught(manager: CheckpointManager, rank: int) -> Any:
        try:
            return call(manager, rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(managers)) as pool:
        return list(pool.map(caught, managers, range(len(managers))))


def shard(rank: int, step: int = 0) -> dict[str, torch.Tensor]:
    """What only this rank has, under names that all use."""
    return {"weight": torch.full((64, 64), float(rank + 1)) + step, "bias": torch.arange(32) + 100 * rank}


def save(step: int) -> Callable[[CheckpointManager, int], Any]:
    """Each rank saves its shard, and waits for the snapshot."""

    def call(manager: CheckpointManager, rank: int) -> None:
        manager.save(step, shard(rank, step))
        manager.flush()

    return call


def contents(tmp_path: Path, name: str) -> list[str]:
    with moonclipfs.open(tmp_path / "store", name) as snapshot:
        return snapshot.files()


def pack_bytes(store: Path) -> int:
    return sum(pack.stat().st_size for pack in store.glob("packs/*.pack"))


def test_c11_every_rank_has_the_same_names_and_loads_its_own(ranks: Ranks, tmp_path: Path) -> None:
    """Cases 11 and 35: a rank loads what it just saved, and never another's shard."""
    managers = ranks(3)
    assert each(managers, save(5)) == [None] * 3
    assert contents(tmp_path, "run/step-000005") == [
        *(f"rank-0000{rank}/{name}" for rank in range(3) for name in ("model.safetensors", "state.json")),
        "state.json",
    ]
    for rank, manager in enumerate([*managers, *ranks(3)]):
        assert same(manager.load(5).state["model"], shard(rank % 3, 5))
        assert same(manager.load_tensors(5, ["bias"])["bias"], shard(rank % 3)["bias"])
        target = {"weight": torch.zeros(64, 64), "bias": torch.zeros(32, dtype=torch.int64)}
        assert manager.resume(target) == 6
        assert same(target, shard(rank % 3, 5))
        assert set(manager.describe(5)["parts"]["model"]) == {"weight", "bias"}


def test_c35_a_store_of_two_ranks_opened_as_one_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    """Case 35: not silently shard 0. Nor for another number of ranks."""
    each(ranks(2), save(1))
    for alone in (CheckpointManager(tmp_path / "store", "run"), *ranks(3, only=[2])):
        with pytest.raises(UsageError, match=r"run/step-000001@1 was saved by 2 ranks, each with model of its own"):
            alone.load(1)
        with pytest.raises(UsageError, match="was saved by 2 ranks"):
            alone.resume(model())
        with pytest.raises((UsageError, NotFoundError)):
            alone.load_tensors(1, ["bias"])
        alone.close()


def test_what_all_ranks_bring_is_stored_once_and_loads_anywhere(
    ranks: Ranks, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    """Replicated state is a snapshot as of one process; what only some tensors are, each rank has in its directory."""
    module = model(width=256)
    optimizer = adam(module)
    train(module, optimizer)
    with CheckpointManager(tmp_path / "alone", "run") as alone:
        alone.save(0, module, optimizer)
    managers = ranks(4)

    def call(manager: CheckpointManager, rank: int) -> None:
        manager.save(0, module, optimizer, extra={"rng": rank}, extra_files={"config.json": "{}"})
        manager.flush()

    assert each(managers, call) == [None] * 4
    files = contents(tmp_path, "run/step-000000")
    assert [name for name in files if "/" not in name] == [
        "config.json", "model.safetensors", "optimizer.safetensors", "state.json",
    ]  # fmt: skip
    assert {name.partition("/")[2] for name in files if "/" in name} == {"state.json"}
    name, file = "run/step-000000", "model.safetensors"
    with moonclipfs.open(tmp_path / "store", name) as shared, moonclipfs.open(tmp_path / "alone", name) as one:
        assert shared.read(file) == one.read(file)
    added = pack_bytes(tmp_path / "store") / pack_bytes(tmp_path / "alone")
    assert added < 1.05, "something is stored twice"
    assert managers[2].load(0).extra == {"rng": 2}
    for other in (*ranks(2), CheckpointManager(tmp_path / "store", "run")):
        expect_log("saved by 4 ranks, and what each gave as extra is not loaded")
        fresh = model(1, width=256)
        schedule = adam(fresh)
        assert other.resume(fresh, schedule) == 1
        assert same(fresh.state_dict(), module.state_dict())
        assert same(schedule.state_dict(), optimizer.state_dict())
        with pytest.raises(UsageError, match="each with extra of its own"):
            other.load(0)
        other.close()


def test_a_missing_rank_is_named_and_there_is_no_snapshot(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(topology.WAIT, "1")
    managers = ranks(3)
    failed = each(managers[:2], save(1))
    assert all(isinstance(one, RanksError) for one in failed)
    assert "rank 2 of 3 has not brought its part within 1 seconds" in str(failed[0])
    assert "there is no snapshot run/step-000001: rank 2 of 3" in str(failed[1])
    with Store.open(tmp_path / "store") as store:
        assert not list(store.names().all_versions())
    assert isinstance(each(managers[2:], save(1))[0], RanksError)  # it comes too late
    for manager in managers:
        manager.close()
    monkeypatch.setenv(topology.WAIT, "60")
    managers = ranks(3)
    assert each(managers, save(1)) == [None] * 3


def test_c05_ranks_that_save_at_the_same_time_lose_nothing(ranks: Ranks) -> None:
    """Case 5."""
    managers = ranks(3)

    def call(manager: CheckpointManager, rank: int) -> None:
        for step in range(6):
            time.sleep(0.01 * ((rank + step) % 3))
            manager.save(step, shard(rank, step), extra={"step": step})
        manager.flush()

    assert each(managers, call) == [None] * 3
    for rank, manager in enumerate(managers):
        for step in range(6):
            loaded = manager.load(step)
            assert same(loaded.state["model"], shard(rank, step)) and loaded.extra == {"step": step}


def test_a_rank_that_cannot_save_is_told_to_the_others_at_once(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    managers = ranks(3)
    each(managers, save(0))

    def call(manager: CheckpointManager, rank: int) -> None:
        manager.save(1, shard(rank, 1), extra=object() if rank == 1 else None)
        manager.flush()

    began = time.monotonic()
    failed = each(managers, call)
    assert time.monotonic() - began < 20
    assert isinstance(failed[1], UsageError) and "extra is a builtins.object" in str(failed[1])
    for rank in (0, 2):
        assert isinstance(failed[rank], RanksError) and "rank 1 of 3 could not save its part: extra" in str(
            failed[rank]
        )
    assert each(managers, save(1)) == [None] * 3
    assert [one.step for one in managers[0].list_snapshots()] == [0, 1]


def test_ranks_that_disagree_are_told_how(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    managers = ranks(2)
    failed = each(managers, lambda manager, rank: save(7 + rank)(manager, rank))
    for manager in managers:
        manager.close()
    assert "rank 1 of 2 saves run/step-000008, and rank 0 run/step-000007" in str(failed[0])
    monkeypatch.setenv(topology.WAIT, "1")
    failed = each([*ranks(2, only=[0]), *ranks(3, only=[1])], save(0))
    assert any("says that there are" in str(one) for one in failed)


def test_the_topology_has_to_be_said_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match=r"rank 1 of 2, and .* rank 0 of 1"):
        CheckpointManager(tmp_path / "store")
    assert topology.topology("auto", None) == topology.topology("auto", "auto") == topology.topology(2, 1) == (2, 1)
    assert topology.topology(1, 0) == topology.topology(1, None) == (1, 0)
    assert topology.topology(2, None) == (2, 1)
    for size, rank in ((3, 0), (2, 2), (2, -1), ("two", 0), (2, "one"), (0, 0)):
        with pytest.raises(UsageError):
            topology.topology(size, rank)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert topology.topology(None, None) == topology.topology("auto", "auto") == (1, 0)
    assert topology.topology(3, 2) == (3, 2)
    with pytest.raises(UsageError, match="give the rank too"):
        topology.topology(3, None)
    monkeypatch.setenv(topology.WAIT, "soon")
    with pytest.raises(UsageError, match="MOONCLIPFS_RANKS_WAIT"):
        CheckpointManager(tmp_path / "store", world_size=2, rank=0)


def test_each_rank_may_have_a_store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with CheckpointManager(tmp_path / f"store-{rank}", "run", world_size=1, rank=0) as manager:
            manager.save(3, shard(rank))
    for rank in (0, 1):
        with CheckpointManager(tmp_path / f"store-{rank}", "run", world_size=1, rank=0) as manager:
            assert same(manager.load(3).state["model"], shard(rank))


DYING = """
import os, sys, torch
from moonclipfs import CheckpointManager
from moonclipfs.store import ranks
hand_in = ranks.Group.hand_in
def die(group, number, body):
    if sys.argv[2] == "after":
        hand_in(group, number, body)
    os._exit(9)
ranks.Group.hand_in = die
torch.set_num_threads(1)
manager = CheckpointManager(sys.argv[1], "run", world_size=2, rank=1)
manager.save(1, {"weight": torch.full((64, 64), -7.0)})
"""


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_c33_a_shard_left_by_a_dead_rank_is_never_combined_with_a_new_one(
    ranks: Ranks, tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 33: nor does it block anything. Rank 1 is killed in a save, all start again and save that step."""
    (first,) = ranks(2, only=[0])
    assert first._ranks is not None
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    dying = subprocess.Popen([sys.executable, "-c", DYING, str(tmp_path / "store"), when], env=environment)
    if when == "after":  # its part is there when rank 0 comes to save: that it is of the dead must be seen
        with first._ranks.preparing():
            pass
        first._ranks._number = 0
        assert dying.wait(60) == 9
    with pytest.raises(RanksError, match="rank 1 of 2 ended before the snapshot was whole"):
        save(1)(first, 0)
    assert dying.wait(60) == 9
    assert first.list_snapshots() == []
    first.close()
    managers = ranks(2)
    assert each(managers, save(1)) == [None, None]
    for rank, manager in enumerate(managers):
        assert same(manager.load(1).state["model"], shard(rank, 1))
    with Store.open(tmp_path / "store", write=True) as store:
        optimize(store)
        collect(store)
        left = {info.key.split(".")[0].removeprefix("tmp/") for info in store.backend.list("tmp/")}
        alive = {lease.name for lease in live_leases(store.path)}
        assert left <= alive, "the dead have left something"
    assert each(managers, save(2)) == [None, None]


def snapshots(path: Path) -> int:
    """How many there are."""
    if not is_store(path):
        return 0
    with Store.open(path) as store:
        return len(store.names().bound())


@pytest.mark.slow
def test_ranks_that_are_killed_at_any_moment_leave_whole_snapshots_only(tmp_path: Path) -> None:
    """In any order, again and again; what is left is of one attempt each, on all ranks."""
    generator = random.Random(5)
    for attempt in range(6):
        running = [start("endless", tmp_path, 2, rank, ATTEMPT=str(attempt)) for rank in (0, 1)]
        wanted = (attempt + 1) * 3
        while snapshots(tmp_path / "store") < wanted:
            assert all(one.poll() is None for one in running), [one.communicate() for one in running]
            time.sleep(0.05)
        time.sleep(generator.uniform(0, 0.5))
        victim = generator.randrange(2)
        running[victim].kill()
        try:  # the other one is told, or is killed as well
            _, told = running[1 - victim].communicate(timeout=generator.choice([0.01, 20]))
            assert f"rank {victim} of 2 ended before the snapshot was whole" in told
        except subprocess.TimeoutExpired:
            running[1 - victim].kill()
        for one in running:
            one.communicate()
    managers = [CheckpointManager(tmp_path / "store", "run", world_size=2, rank=rank) for rank in (0, 1)]
    steps = [one.step for one in managers[0].list_snapshots()]
    assert len(steps) > 10 and steps == list(range(len(steps)))
    for step in steps:
        one, other = (manager.load(step).state["model"] for manager in managers)
        assert torch.equal(one["bias"], other["bias"]) and float(one["bias"][0]) % 1000 == step
        assert torch.equal(other["weight"] - one["weight"], torch.arange(40_000.0))
    for manager in managers:
        manager.close()
    with Store.open(tmp_path / "store", write=True) as store:
        collect(store)
        assert not list(store.backend.list("tmp/"))


def test_parts_are_kept_from_gc_while_their_rank_lives(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    managers = ranks(2)
    each(managers, save(0))
    gather, collected = notes.Group.gather, []

    def late(group: notes.Group, number: int, path: str) -> list[dict[str, Any]]:
        parts = gather(group, number, path)
        with Store.open(tmp_path / "store", write=True) as store:
            collected.append(collect(store, pressed=True, wait_seconds=0))
        return parts

    monkeypatch.setattr(notes.Group, "gather", late)
    assert each(managers, save(1)) == [None, None]
    assert collected and not collected[0].deleted_packs
    for rank, manager in enumerate(managers):
        assert same(manager.load(1).state["model"], shard(rank, 1))


def test_parts_that_were_condemned_meanwhile_are_stored_again(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a gc does that does not spare what is young."""
    managers = ranks(2)
    each(managers, save(0))
    gather = notes.Group.gather

    def late(group: notes.Group, number: int, path: str) -> list[dict[str, Any]]:
        parts = gather(group, number, path)
        with Store.open(tmp_path / "store", write=True) as store:
            store.log.condemn([info.key[6:38] for info in store.backend.list("packs/")])
        return parts

    monkeypatch.setattr(notes.Group, "gather", late)
    assert each(managers, save(1)) == [None, None]
    for manager in managers:
        manager.close()
    with Store.open(tmp_path / "store", write=True) as store:
        assert collect(store).deleted_packs
    for rank, manager in enumerate(ranks(2)):
        assert same(manager.load(1).state["model"], shard(rank, 1))


def test_a_part_that_refers_to_nothing_is_not_published(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 says that it stored what it has not."""
    managers = ranks(2)
    hand_in = notes.Group.hand_in
    monkeypatch.setattr(
        notes.Group,
        "hand_in",
        lambda group, number, body: hand_in(
            group, number, {**body, "files": [[name, bytes(range(32)), size] for name, _, size in body["files"]]}
        ),
    )
    failed = each(managers, save(0))
    assert isinstance(failed[0], CorruptError) and isinstance(failed[1], RanksError)
    assert managers[0].list_snapshots() == []


def test_c29_pins_and_rules_hold_for_snapshots_of_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Case 29, sharded: neither merging nor `save_final` deletes what is pinned or a rollback point."""
    managers = ranks(2, retention=Rules(keep_last=1, keep_every=4))
    for step in range(1, 4):
        each(managers, save(step))
        if step == 1:
            managers[1].pin(1)
    for step in range(4, 7):
        each(managers, save(step))
    done = each(managers, lambda manager, rank: manager.save_final(7, shard(rank, 7)))
    assert done == ["run/step-000007"] * 2
    with Store.open(tmp_path / "store", write=True) as store:
        optimize(store)
        collect(store)
    for rank, manager in enumerate(managers):
        assert [one.step for one in manager.list_snapshots()] == [1, 4, 7]
        assert manager.pinned_steps() == [1]
        for step in (1, 4, 7):
            assert same(manager.load(step).state["model"], shard(rank, step))


def test_damage_that_one_rank_finds_is_no_reason_to_go_on_from_another_step(ranks: Ranks, tmp_path: Path) -> None:
    managers = ranks(2)
    for step in (0, 1):
        each(managers, save(step))
    for manager in managers:
        manager.close()
    with Store.open(tmp_path / "store") as store:
        entry = store.lookup(store.resolve("run/step-000001"), b"rank-00001/model.safetensors")
        place = store.index.locate(next(iter(store.recipe(entry).object_ids())))
        pack = Path(store.backend.path(f"packs/{place.pack}.pack"))
    with open(pack, "r+b") as file:
        file.seek(place.offset + 8)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    targets = [{name: torch.zeros_like(one) for name, one in shard(0).items()} for _ in range(2)]
    found = each(ranks(2), lambda manager, rank: manager.resume(targets[rank]))
    assert found[0] == 2 and isinstance(found[1], CorruptError)


def test_what_only_one_rank_gives_is_its_own(ranks: Ranks, tmp_path: Path) -> None:
    managers = ranks(3)

    def call(manager: CheckpointManager, rank: int) -> None:
        files = {"all.txt": "same", "rank.txt": f"of {rank}"} if rank != 1 else {}
        extra = {"only": "here"} if rank == 1 else None
        manager.save(0, {"weight": torch.ones(3000)}, extra=extra, extra_files=files, metadata={"of": rank})
        manager.flush()

    assert each(managers, call) == [None] * 3
    assert contents(tmp_path, "run/step-000000") == [
        "all.txt", "model.safetensors", "rank-00000/state.json", "rank-00001/state.json", "rank-00002/rank.txt",
        "rank-00002/state.json", "rank.txt", "state.json",
    ]  # fmt: skip
    for rank, manager in enumerate(managers):
        loaded = manager.load(0)
        assert loaded.extra == ({"only": "here"} if rank == 1 else None) and loaded.metadata == {"of": 0}
        assert same(loaded.state["model"], {"weight": torch.ones(3000)})


def test_the_best_is_decided_alike_by_all_ranks(ranks: Ranks) -> None:
    managers = ranks(2)
    for step, loss in enumerate((0.5, 0.7, 0.3)):
        best = partial(CheckpointManager.save_best, step=step, metric=loss)
        each(managers, lambda manager, rank, best=best: best(manager, model=shard(rank)))  # type: ignore[misc]
    each(managers, lambda manager, rank: manager.flush())
    assert [one.step for one in managers[1].list_snapshots()] == [0, 2]
