"""Saves are stored plain and encoded later: beside saves, readers, gc and crashes, and as small in the end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from moonclipfs import CheckpointManager, limits
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.retention import Rules
from moonclipfs.store.store import Store
from moonclipfs.store.tighten import plain_objects
from tests.torch.kit import same

PROGRAM = """
import os, sys, torch
from moonclipfs import CheckpointManager
from moonclipfs.store.backend import FileOps

class Deadly(FileOps):
    left = 1 << 60

    def _count(self):
        Deadly.left -= 1
        if Deadly.left < 0:
            os._exit(9)

for name in ("open", "write", "fsync", "link", "rename", "unlink"):
    def call(self, *arguments, _name=name):
        self._count()
        return getattr(FileOps, _name)(self, *arguments)
    setattr(Deadly, name, call)

def state(step):
    torch.manual_seed(0)
    return {"w": torch.randn(300_000) + step * 1e-3, "frozen": torch.arange(100_000.0)}

manager = CheckpointManager(sys.argv[1], "r")
with manager._tightening.paused():
    for step in range(2):
        manager.save_raw(step, state(step))
    manager.flush()
    manager._place.store().backend.ops = Deadly()
    if len(sys.argv) > 2:
        Deadly.left = int(sys.argv[2])
"""


def state(step: int) -> dict[str, torch.Tensor]:
    own = torch.Generator().manual_seed(0)
    return {"w": torch.randn(300_000, generator=own) + step * 1e-3, "frozen": torch.arange(100_000.0)}


def plain_steps(path: Path, run: str = "r") -> list[int]:
    with Store.open(path) as store:
        bound = store.names().bound()
        return [
            int(name.rpartition("-")[2])
            for name in sorted(bound)
            if name.startswith(f"{run}/") and plain_objects(store, [bound[name]])
        ]


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "packs").rglob("*.pack"))


def check(path: Path, steps: list[int]) -> None:
    with CheckpointManager(path, "r") as manager:
        assert [info.step for info in manager.list_snapshots()] == steps
        for step in steps:
            assert same(dict(manager.load(step).state["model"]), state(step))
    with Store.open(path, write=True) as store:
        assert verify(store).problems == []


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_the_newest_is_plain_until_the_next_or_the_end_and_all_is_as_small_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "s", "r") as manager:
        for step in range(5):
            manager.save_raw(step, state(step))
            manager.flush()
            manager._tightening.wait()
            manager._tidying.wait()
            assert plain_steps(tmp_path / "s") == [step]
    assert plain_steps(tmp_path / "s") == []
    with Store.open(tmp_path / "s") as store:
        newest = store.names().bound()["r/step-000004"]
        recipe = store.lookup(newest, b"model.safetensors").child
        ids = store.recipe_object(recipe).object_ids()
        assert {len(store.objects.chain(one)) - 1 for one in ids} <= {0, 1}
    check(tmp_path / "s", list(range(5)))
    monkeypatch.setattr(limits, "PLAIN_SNAPSHOTS", 0)
    with CheckpointManager(tmp_path / "at-once", "r") as manager:
        for step in range(5):
            manager.save_raw(step, state(step))
    assert size(tmp_path / "s") < 1.05 * size(tmp_path / "at-once")


def test_while_saves_go_on_nothing_is_encoded_and_what_is_plain_is_bounded(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "s", "r") as manager:
        with manager._tightening.paused():
            for step in range(5):
                manager.save_raw(step, {"w": state(step)["w"]})
            manager.flush()
            assert plain_steps(tmp_path / "s") == [0, 1]
        manager._tightening.wait()
        assert plain_steps(tmp_path / "s") == []


def test_a_save_interrupts_the_encoding_which_holds_nothing_meanwhile_and_goes_on(tmp_path: Path) -> None:
    tensors = {str(number): state(number)["w"] for number in range(8)}
    with CheckpointManager(tmp_path / "s", "r") as manager:
        seen: list[bool] = []
        undisturbed = manager._tightening._undisturbed

        def interrupted() -> bool:
            seen.append(undisturbed())
            return seen[-1] and len(seen) % 3 != 0  # as a save that begins and ends just then

        manager._tightening._undisturbed = interrupted  # type: ignore[method-assign]
        for step in range(2):
            manager.save_raw(step, {name: tensor + step for name, tensor in tensors.items()})
            manager.flush()
        manager._tightening.wait()
        manager._tidying.wait()
        assert len(seen) > 8 and plain_steps(tmp_path / "s") == [1]
        lease = manager._place.store().lease
        assert lease is not None and not lease._holds
    assert plain_steps(tmp_path / "s") == []


def test_where_room_is_short_saves_are_encoded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PLAIN_DISK_SHARE", 1 << 60)
    with CheckpointManager(tmp_path / "s", "r") as manager:
        manager.save_raw(0, state(0))
        manager.flush()
        assert plain_steps(tmp_path / "s") == []


def test_the_end_takes_no_longer_than_is_allowed_and_the_next_manager_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(limits, "PLAIN_CLOSE_SECONDS", 0.0)
        with CheckpointManager(tmp_path / "s", "r") as manager, manager._tightening.paused():
            manager.save_raw(0, state(0))
            manager.save_raw(1, state(1))
            began = time.monotonic()
            manager.close()
            assert time.monotonic() - began < 10
    assert plain_steps(tmp_path / "s") == [0, 1]
    check(tmp_path / "s", [0, 1])
    assert plain_steps(tmp_path / "s") == [0, 1], "who only loads changes nothing"
    with CheckpointManager(tmp_path / "s", "r") as manager:
        manager.save_raw(2, state(2))
    assert plain_steps(tmp_path / "s") == []
    check(tmp_path / "s", [0, 1, 2])


def test_a_program_that_ends_without_close_encodes_what_it_has_saved(tmp_path: Path) -> None:
    done = run(PROGRAM, tmp_path / "s")
    assert (done.returncode, done.stderr) == (0, "")
    assert plain_steps(tmp_path / "s") == []
    check(tmp_path / "s", [0, 1])


@pytest.mark.parametrize(
    "left", [3, *(pytest.param(left, marks=pytest.mark.slow) for left in (0, 1, 2, 4, 5, 6, 8, 10, 12, 15, 20, 30))]
)
def test_killed_while_it_encodes_nothing_is_lost_and_the_next_goes_on(tmp_path: Path, left: int) -> None:
    """At each change that it makes to the disk: whatever is there then is a whole store."""
    run(PROGRAM + "manager.close()\n", tmp_path / "s", left)
    check(tmp_path / "s", [0, 1])
    with CheckpointManager(tmp_path / "s", "r") as manager:
        manager.save_raw(2, state(2))
    assert plain_steps(tmp_path / "s") == []
    with Store.open(tmp_path / "s", write=True) as store:
        collect(store)
    check(tmp_path / "s", [0, 1, 2])


def test_what_is_forgotten_meanwhile_is_not_encoded(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "s", "r", retention=Rules(keep_last=1)) as manager:
        with manager._tightening.paused():
            for step in range(3):
                manager.save_raw(step, state(step))
            manager.flush()
        manager._tightening.wait()
    check(tmp_path / "s", [2])
    assert plain_steps(tmp_path / "s") == []


def test_two_managers_and_a_reader_are_not_in_each_others_way(tmp_path: Path) -> None:
    path = tmp_path / "s"
    failures: list[BaseException] = []
    over = threading.Event()
    Store.create(path).close()

    def save(name: str) -> None:
        try:
            with CheckpointManager(path, name) as manager:
                for step in range(6):
                    manager.save_raw(step, state(step))
                    manager.flush()
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        try:
            with CheckpointManager(path, "r") as manager:
                while not over.is_set():
                    for info in manager.list_snapshots()[-3:]:
                        assert same(dict(manager.load(info.id).state["model"]), state(info.step))
        except BaseException as error:
            failures.append(error)

    savers = [threading.Thread(target=save, args=(name,)) for name in ("r", "other")]
    reader = threading.Thread(target=read)
    for thread in (*savers, reader):
        thread.start()
    for thread in savers:
        thread.join()
    over.set()
    reader.join()
    assert failures == []
    check(path, list(range(6)))
    assert plain_steps(path) == [] and plain_steps(path, "other") == []
    with Store.open(path, write=True) as store:
        collect(store)
        whole = size(path)
    assert whole < 6 * 1_600_000 / 2, "both runs are the same bytes, stored once, mostly as deltas"


def test_a_final_save_is_encoded_before_it_returns(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "s", "r") as manager:
        manager.save_raw(0, state(0))
        manager.save_final(1, model=state(1))
        assert plain_steps(tmp_path / "s") == []
