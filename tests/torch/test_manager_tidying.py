"""Rules, pins, merging, thinning and crashes, as a training run sees them. C and a number: faults that moonclip had."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moonclipfs
from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError, NotFoundError, UsageError
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.packs import pack_key
from moonclipfs.store.retention import Rules
from moonclipfs.store.store import Store
from moonclipfs.torch.manager import CheckpointManager


class Net(torch.nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a = torch.nn.Linear(width, width)
        self.b = torch.nn.Linear(width, width)

    def forward(self, values: Any) -> Any:
        return self.b(torch.relu(self.a(values)))


def training(seed: int = 0, width: int = 64) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net(width)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def step(net: Net, optimizer: torch.optim.AdamW) -> None:
    optimizer.zero_grad()
    net(torch.randn(4, net.a.in_features)).square().mean().backward()
    optimizer.step()


def state(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def pack_bytes(path: Path) -> int:
    return sum(pack.stat().st_size for pack in (path / "packs").iterdir())


def links(store: Store, name: str) -> int:
    version = store.resolve(name)
    ids = [one for _, entry in store.walk(version) for one in store.recipe(entry).object_ids()]
    return max(len(store.objects.chain(one)) - 1 for one in ids)


def test_rules_apply_after_each_save_and_space_comes_back(tmp_path: Path) -> None:
    net, optimizer = training(width=200)
    with CheckpointManager(tmp_path / "s", retention=Rules(keep_last=2, keep_every=10, keep_every_last=1)) as manager:
        for number in range(1, 31):
            step(net, optimizer)
            manager.save(number, net, optimizer)
        manager.pin(29)
        manager.save(31, net, optimizer)
        manager.save(32, net, optimizer)
        assert [one.step for one in manager.list_snapshots()] == [29, 30, 31, 32]
    one_save = sum(tensor.numel() * 4 for tensor in net.state_dict().values()) * 3
    assert pack_bytes(tmp_path / "s") < 5 * one_save, "32 saves took their space for a while"
    with Store.open(tmp_path / "s") as store:
        assert verify(store).problems == []


def test_a_manager_and_forget_decide_the_same(tmp_path: Path) -> None:
    from moonclipfs.store.retention import plan

    net, _ = training()
    rules = Rules(keep_last=1, keep_every=2, keep_every_last=2)
    with CheckpointManager(tmp_path / "all") as free, CheckpointManager(tmp_path / "some", retention=rules) as ruled:
        for number in (2, 4, 5, 6, 3, 7):
            free.save(number, net)
            ruled.save(number, net)
        free.flush()
        with Store.open(tmp_path / "all") as store:
            kept = [version.path for version in plan(store.names(), rules).keep]
        assert kept == [f"run/step-{one.step:06}" for one in ruled.list_snapshots()] == [
            "run/step-000004", "run/step-000006", "run/step-000007"
        ]  # fmt: skip


def test_c03_what_was_cast_is_cast_back_after_merging(tmp_path: Path) -> None:
    net, optimizer = training()
    with CheckpointManager(tmp_path / "s", save_dtype={"model/*": "bf16"}) as manager:
        for number in range(5):
            step(net, optimizer)
            manager.save(number, net, optimizer)
        manager.flush()
        expected = manager.load(4).state["model"]
        report = moonclipfs.optimize(tmp_path / "s", "run")
        assert report.problems == []
        found = manager.load(4).state["model"]
    assert same(expected, found) and all(tensor.dtype is torch.float32 for tensor in found.values())
    assert torch.equal(found["a.weight"], net.a.weight.to(torch.bfloat16).float())


def test_c01_merging_beside_a_manager_that_saves(tmp_path: Path) -> None:
    """Tensors are gained and lost meanwhile; each snapshot has its own set, the newest one link."""
    net, optimizer = training(width=200)
    saved = {}
    merging = []
    with CheckpointManager(tmp_path / "s") as manager:
        for number in range(8):
            step(net, optimizer)
            if number == 3:
                net.register_buffer("gained", torch.randn(200, 200))
            if number == 6:
                del net.gained
            saved[number] = state(net)
            manager.save(number, net, optimizer)
            if number:
                merging.append(moonclipfs.optimize_aside(tmp_path / "s", "run"))
        manager.flush()
        assert [one.result(60).problems for one in merging] == [[]] * 7
        moonclipfs.optimize(f"{tmp_path / 's'}:run")
        for number, expected in saved.items():
            assert same(manager.load(number).state["model"], expected)
    with Store.open(tmp_path / "s") as store:
        assert links(store, "run/step-000007") <= 1 and verify(store).problems == []


def test_what_merging_aside_fails_with_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        moonclipfs.optimize_aside(tmp_path / "nowhere").result(60)


def test_what_is_merged_aside_is_finished_though_the_program_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools of threads take no work then; a gc beside a manager reads back what it copied in the same way."""
    monkeypatch.setattr(limits, "PLAIN_SNAPSHOTS", 0)  # encoded at once, so that there is something to merge
    net, optimizer = training(width=200)
    with CheckpointManager(tmp_path / "s") as manager:
        for number in range(4):
            step(net, optimizer)
            manager.save(number, net, optimizer)
    program = (
        "import sys, moonclipfs\n"
        "merging = moonclipfs.optimize_aside(sys.argv[1])\n"
        "merging.add_done_callback(lambda done: print(done.result().objects))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "") and int(ended.stdout) > 0
    with Store.open(tmp_path / "s") as store:
        assert links(store, "run/step-000003") <= 1 and verify(store).problems == []


def test_resuming_from_a_thinned_snapshot_is_an_error_and_its_weights_are_there(tmp_path: Path) -> None:
    net, optimizer = training()
    saved = {}
    with CheckpointManager(tmp_path / "s") as manager:
        for number in range(3):
            step(net, optimizer)
            saved[number] = state(net)
            manager.save(number, net, optimizer)
        manager.flush()
        report = moonclipfs.thin(f"{tmp_path / 's'}:run", keep_optimizer_last=1)
        assert [one.dropped for one in report.snapshots] == [("optimizer.safetensors",)] * 2 + [()]
        assert [one.step for one in manager.list_snapshots()] == [0, 1, 2]
        other, other_optimizer = training(1)
        with pytest.raises(UsageError, match="thinned"):
            manager.load(1, other, other_optimizer)
        manager.load(1, other)
        assert same(state(other), saved[1])
        assert manager.resume(other, other_optimizer) == 3 and same(state(other), saved[2])
    with pytest.raises(UsageError, match="one run"):
        moonclipfs.thin(tmp_path / "s", keep_optimizer_last=1)


def test_c23_the_latest_is_the_last_that_was_saved_also_after_thinning(tmp_path: Path) -> None:
    net, optimizer = training()
    step(net, optimizer)
    with CheckpointManager(tmp_path / "s") as manager:
        for number in (5, 9, 3):
            manager.save(number, net, optimizer)
        manager.flush()
        moonclipfs.thin(tmp_path / "s", "run", keep_optimizer_last=1)
        assert manager.load_latest().step == 3 and manager.resume(net, optimizer) == 4


_SAVER = """
import sys, torch
from pathlib import Path
from moonclipfs.store.retention import Rules
from moonclipfs.torch.manager import CheckpointManager
torch.set_num_threads(1)
path, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rules = Rules(keep_last=int(sys.argv[4])) if len(sys.argv) > 4 else None
with CheckpointManager(path, retention=rules) as manager:
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(first, first + count):
        torch.manual_seed(step)
        manager.save(step, {"w": torch.randn(100, 100), "step": torch.tensor(step)})
        if step % 4 == 0:
            manager.pin(step)
        print(step, flush=True)
"""


def saver(path: Path, first: int, count: int, *more: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SAVER, str(path), str(first), str(count), *map(str, more)]
    found = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None and found.stdout.readline() == "ready\n"
    return found


def begin(*savers: subprocess.Popen[str]) -> None:
    for one in savers:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()


def check_saved(path: Path) -> list[int]:
    """Every snapshot of the run of `_SAVER` is whole; returns their steps."""
    with CheckpointManager(path) as manager:
        steps = [one.step for one in manager.list_snapshots()]
        for number in steps:
            torch.manual_seed(number)
            found = manager.load(number).state["model"]
            assert torch.equal(found["w"], torch.randn(100, 100)) and int(found["step"]) == number
        return steps


def test_c31_two_processes_never_undo_each_others_saves_and_pins(tmp_path: Path) -> None:
    Store.create(tmp_path / "s").close()
    first, second = saver(tmp_path / "s", 100, 8, 3), saver(tmp_path / "s", 200, 8, 3)
    begin(first, second)
    for one in (first, second):
        assert one.communicate(timeout=60) and one.returncode == 0
    steps = check_saved(tmp_path / "s")
    with CheckpointManager(tmp_path / "s") as manager:
        assert manager.pinned_steps() == [100, 104, 200, 204]
    assert set(steps) >= {100, 104, 200, 204} and len(steps) <= 4 + 3
    with Store.open(tmp_path / "s") as store:
        assert verify(store).problems == []


def test_c04_c31_a_save_in_flight_survives_the_gc_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the packs and the name of a save, another process opens the store, applies its rules and runs gc."""
    from moonclipfs.store.publish import Ingest

    net, optimizer = training()
    real = Ingest.publish
    with CheckpointManager(tmp_path / "s", async_save=False) as manager:
        for number in range(3):
            step(net, optimizer)
            manager.save(number, net, optimizer)

        def slow(ingest: Ingest, *rest: Any) -> Any:
            monkeypatch.setattr(Ingest, "publish", real)
            with Store.open(tmp_path / "s", write=True, index_path=tmp_path / "other") as other:
                other.log.forget([(f"run/step-{number:06}", 1) for number in (0, 1)])
                began = time.monotonic()
                collect(other, wait_seconds=0)
                assert time.monotonic() - began < 5
            return real(ingest, *rest)

        step(net, optimizer)
        monkeypatch.setattr(Ingest, "publish", slow)
        manager.save(3, net, optimizer)
        collect(manager._place.for_saving(), wait_seconds=0)
        assert same(manager.load(3).state["model"], state(net))
    with Store.open(tmp_path / "s") as store:
        assert verify(store).problems == [] and sorted(store.names().bound()) == ["run/step-000002", "run/step-000003"]


@pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_c08_c33_killed_at_any_moment_nothing_that_was_told_is_lost_and_nothing_is_in_the_way(
    tmp_path: Path, rounds: int
) -> None:
    """kill -9 of a process that saves, applies rules, pins and runs gc: the next one opens, reads and goes on."""
    rng = random.Random(rounds)
    path = tmp_path / "s"
    first = 0
    for _ in range(rounds):
        process = saver(path, first, 1000, 4)
        begin(process)
        told: list[int] = []
        assert process.stdout is not None
        wanted = rng.randrange(2, 6)
        for line in process.stdout:
            told.append(int(line))
            if len(told) == wanted:
                break
        time.sleep(rng.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        told += [int(line) for line in process.stdout.read().split("\n")[:-1]]
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        process.stdout.close()
        steps = check_saved(path)
        # What `save` returned for before the last one was durable when that began; one may still have been in flight.
        assert max(steps) >= told[-1] - 1
        assert set(steps) >= {one for one in told if one % 4 == 0 and one < told[-1] - 1}, "pins are kept"
        first = max([*steps, *told]) + 1
    with Store.open(path, write=True) as store:
        report = collect(store)
        assert report.waiting_packs == 0 and verify(store).problems == []
        assert list((path / "tmp").iterdir()) == []


def test_c12_c32_a_lost_index_and_a_damaged_checkpoint_of_the_log_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    monkeypatch.setattr("moonclipfs.limits.LOG_CHECKPOINT_EVERY", 3)
    net, _ = training()
    path = tmp_path / "s"
    with CheckpointManager(path) as manager:
        for number in range(7):
            manager.save(number, net)
            if number == 2:
                manager.pin(2)
    for name in list(path.glob("index.sqlite*")):
        name.write_bytes(b"SQLite format 3\0" + bytes(50))
    records = sorted((path / "log").iterdir())
    newest = max(one for one in records if one.read_bytes().startswith(b"moonclipfs-log 1 checkpoint"))
    newest.write_bytes(newest.read_bytes()[:-20])
    expect_log("an earlier checkpoint is used")
    if (path / "index.sqlite").exists():
        expect_log("index")
    with CheckpointManager(path) as manager:
        assert [one.step for one in manager.list_snapshots()] == list(range(7)) and manager.pinned_steps() == [2]
        assert manager.resume(net) == 7


def test_c32_what_is_missing_makes_only_what_needs_it_unreadable_and_saving_goes_on(
    tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    net, optimizer = training()
    path = tmp_path / "s"
    saved = {}
    with CheckpointManager(path) as manager:
        for number in range(3):
            torch.nn.init.normal_(net.a.weight)
            torch.nn.init.normal_(net.b.weight)
            saved[number] = state(net)
            manager.save(number, net)
        manager.flush()
        store = manager._place.for_saving()
        version = store.resolve("run/step-000002")
        recipe = store.recipe(store.lookup(version, b"model.safetensors"))
        pack = max((store.index.locate(one) for one in recipe.object_ids()), key=lambda place: place.raw_length).pack
    os.unlink(path / pack_key(pack))
    with CheckpointManager(path) as manager:
        expect_log("run/step-000002@1 is damaged, so an earlier snapshot is resumed")
        assert manager.resume(net) == 2 and same(state(net), saved[1])
        with pytest.raises(CorruptError):
            manager.load(2)
        assert same(manager.load(0).state["model"], saved[0])
        manager.save(3, net, optimizer)
        manager.flush()
        assert manager.resume(net, optimizer) == 4


def test_gc_that_fails_is_told_and_no_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    def broken(*arguments: Any, **rest: Any) -> Any:
        raise CorruptError("something is damaged")

    monkeypatch.setattr("moonclipfs.torch.tidying.collect", broken)
    expect_log("the space of dropped snapshots cannot be given back: something is damaged")
    net, _ = training()
    with CheckpointManager(tmp_path / "s", retention=Rules(keep_last=1)) as manager:
        for number in range(3):
            manager.save(number, net)
        assert [one.step for one in manager.list_snapshots()] == [2]
    assert issubclass(CorruptError, MoonclipError)
