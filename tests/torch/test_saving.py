"""Saves in the background: nothing leaks in, failures are told once, and a program that ends or dies loses nothing."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moonclipfs
from moonclipfs import CheckpointManager
from moonclipfs.errors import NoSpaceError, UsageError
from moonclipfs.store.store import Store
from moonclipfs.torch import parts, saving
from moonclipfs.torch.workers import Workers, thread_count
from tests.torch.kit import adam, bits, model, same, train

PROGRAM = """
import sys, torch
from moonclipfs import CheckpointManager
path, count = sys.argv[1], int(sys.argv[2])
manager = CheckpointManager(path, "r")
start = manager.resume()
weights = torch.arange(300_000, dtype=torch.float32).reshape(3, -1)
for step in range(start, start + count):
    state = {"weights": weights * (1 + step), "frozen": weights, "step": torch.tensor(step)}
    manager.save(step, state, extra={"step": step})
    print(step, flush=True)
"""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "store", "r") as made:
        yield made


def run(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(
        words, capture_output=True, text=True, errors="replace", timeout=120, env={**os.environ, **environment}
    )


class Slow:
    """Holds saves up until it is told to let them go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self._store_job = saving.store_job
        patch.setattr(saving, "store_job", self._run)

    def _run(self, *arguments: object) -> object:
        assert self.go.wait(30)
        return self._store_job(*arguments)  # type: ignore[arg-type]


def test_what_changes_after_save_is_not_in_it(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    module = model()
    optimizer = adam(module)
    train(module, optimizer)
    extra = {"list": [1, 2], "array": torch.arange(3).numpy()}
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    manager.save(1, module, optimizer, extra=extra)
    train(module, optimizer, 2)
    extra["list"].append(3)
    extra["array"][0] = 9
    slow.go.set()
    loaded = manager.load(1)
    assert same(dict(loaded.state["model"]), before)
    assert loaded.extra["list"] == [1, 2] and loaded.extra["array"].tolist() == [0, 1, 2]


def test_one_save_is_in_flight_and_the_next_waits_for_it(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    manager.save_raw(1, {"a": torch.ones(5)})
    assert manager.last_queue_wait() < 1
    threading.Timer(0.3, slow.go.set).start()
    manager.save_raw(2, {"a": torch.ones(5) * 2})
    manager.flush()
    assert 0.2 < manager.last_queue_wait() < 20, "that of the save, not of the flush"
    assert [info.step for info in manager.list_snapshots()] == [1, 2]


def test_a_copy_that_was_interrupted_is_taken_for_nothing(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left in the buffers is in no snapshot, so the next save may not take it for what the last one stored."""
    before, tensors = torch.randn(50_000), {"a": torch.randn(50_000)}
    manager.save_raw(1, {"a": before})
    manager.flush()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(saving, "groups", interrupted)
        manager.save_raw(2, tensors)
    manager.save_raw(3, tensors)
    assert same(manager.load(3).state["model"], tensors)
    with pytest.raises(UsageError, match="metadata"):
        manager.save_raw(4, {"a": before}, metadata={"x": print})
    manager.save_raw(5, {"a": before})
    assert same(manager.load(5).state["model"], {"a": before})


def test_a_failure_is_told_once_and_the_save_that_hears_of_it_is_saved(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 21."""
    manager.save_raw(1, {"a": torch.ones(5)})
    manager.flush()
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise NoSpaceError("the disk is full")

        patch.setattr(saving, "store_job", full)
        manager.save_raw(2, {"a": torch.ones(5) * 2})
        manager._background.wait()
    with pytest.raises(NoSpaceError, match="the disk is full"):
        manager.save_raw(3, {"a": torch.ones(5) * 3})
    manager.flush()
    manager.save_raw(4, {"a": torch.ones(5) * 4})
    manager.flush()
    assert [info.step for info in manager.list_snapshots()] == [1, 3, 4]
    assert [float(manager.load(step).state["model"]["a"][0]) for step in (1, 3, 4)] == [1, 3, 4]


def test_what_cannot_be_kept_leaves_the_manager_as_it_was(manager: CheckpointManager) -> None:
    with pytest.raises(UsageError):
        manager.save(1, extra={"f": print})
    with pytest.raises(UsageError, match="a step is 0 or more"):
        manager.save_raw(-1, {})
    with pytest.raises(UsageError, match="metadata has to be text"):
        manager.save_raw(1, {}, metadata={"loss": torch.ones(1)})
    manager.save_raw(1, {"a": torch.ones(1)}, metadata={"loss": float("nan"), "rates": (1, 2.5)})
    manager.flush()
    assert [info.step for info in manager.list_snapshots()] == [1]
    assert manager.list_snapshots()[0].metadata == {"loss": "nan", "rates": [1, 2.5]} == manager.load(1).metadata


def test_a_program_that_ends_without_flush_loses_nothing(tmp_path: Path) -> None:
    done = run(PROGRAM, tmp_path / "store", 3)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    with CheckpointManager(tmp_path / "store", "r") as manager:
        assert manager.load_latest().extra == {"step": 2}


def test_a_failure_that_nobody_asked_for_is_told_at_the_end(tmp_path: Path) -> None:
    program = """
    import sys, torch
    from moonclipfs import CheckpointManager
    from moonclipfs.errors import NoSpaceError
    from moonclipfs.torch import parts, saving
    def full(*_):
        raise NoSpaceError("the disk is full")
    saving.store_job = full
    CheckpointManager(sys.argv[1], "r").save_raw(1, {"a": torch.ones(1)})
    """
    done = run(program, tmp_path / "store")
    assert done.returncode == 0
    assert done.stderr == "the last save failed, and nothing asked for it since: the disk is full\n"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_kill_9_at_any_moment_leaves_whole_snapshots_only(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    told = -1
    for _ in range(2):
        words = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), "1000"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            program.stdout.readline()
            time.sleep(rng.uniform(0, 0.25))
            program.send_signal(signal.SIGKILL)
            told = int((program.stdout.read().split() or [told])[-1])
        with CheckpointManager(tmp_path / "store", "r") as manager:
            steps = [info.step for info in manager.list_snapshots()]
            assert steps == list(range(len(steps))) and len(steps) >= told - 1
            for step in steps[-3:]:
                loaded = manager.load(step)
                weights = torch.arange(300_000, dtype=torch.float32).reshape(3, -1)
                assert bits(loaded.state["model"]["weights"]) == bits(weights * (1 + step))
                assert loaded.extra == {"step": step}


def test_unchanged_tensors_are_not_read_again(manager: CheckpointManager, tmp_path: Path) -> None:
    """Cases 8 and 37: a save in which nothing changed is a whole snapshot, and costs tens of bytes a tensor."""
    tensors = {f"layer.{number}.weight": torch.full((2000,), 1.0 + number) for number in range(300)}
    for step in (1, 2):
        manager.save_raw(step, tensors)
        manager.flush()
    size = sum(path.stat().st_size for path in (tmp_path / "store" / "packs").iterdir())
    manager.save_raw(3, tensors)
    manager.flush()
    more = sum(path.stat().st_size for path in (tmp_path / "store" / "packs").iterdir()) - size
    assert more < 300 * 60
    taken = parts.take({"model": tensors}, allow_pickle=False)
    staged, _ = saving.capture(taken, manager._buffers, manager._workers, 2)
    assert all(one.unchanged for one in staged["model"].values())
    assert same(manager.load(3).state["model"], tensors)


def test_what_is_unchanged_is_told_by_its_bytes(manager: CheckpointManager) -> None:
    """Not by version counters, which `.data` and other programs do not count, nor as numbers: 0.0 is not -0.0."""
    tensor, nan = torch.zeros(5000), torch.full((5000,), float("nan"))
    for step in range(4):
        tensor.data[step] = -0.0
        tensor.numpy()[step + 10] = step
        nan.view(torch.int32)[step] += step
        manager.save_raw(step, {"a": tensor, "b": nan, "c": torch.ones(5000)})
        found = manager.load(step).state["model"]
        assert bits(found["a"]) == bits(tensor) and bits(found["b"]) == bits(nan)


def test_new_buffers_know_nothing(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that leaves its device has its copies in other memory, which is full of zeros."""
    manager.save_raw(1, {"a": torch.ones(5000)})
    manager.flush()
    monkeypatch.setattr(manager._buffers, "_pinned", True)
    manager.save_raw(2, {"a": torch.zeros(5000)})
    assert same(manager.load(2).state["model"], {"a": torch.zeros(5000)})


def test_what_was_forgotten_meanwhile_is_stored_again(manager: CheckpointManager, tmp_path: Path) -> None:
    """An unchanged tensor refers to what the save before stored, if that is still there."""
    from moonclipfs.store.forget import forget

    tensors = {"a": torch.randn(50_000), "b": torch.randn(50_000)}
    manager.save_raw(1, tensors)
    manager.flush()
    with Store.open(tmp_path / "store", write=True) as store:
        forget(store, [store.resolve("r/step-000001")])
    tensors["b"] += 1
    manager.save_raw(2, tensors)
    assert same(manager.load(2).state["model"], tensors)
    with moonclipfs.open(tmp_path / "store", "r/step-000002") as snapshot:
        assert bits(snapshot.torch("a")) == bits(tensors["a"])


def test_two_programs_save_the_same_run_at_the_same_time(tmp_path: Path) -> None:
    """Case 31: none overwrites or deletes what the other saved."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), "4"]
    Store.create(tmp_path / "store").close()
    programs = [subprocess.Popen(words, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [program.wait(60) for program in programs] == [0, 0]
    with moonclipfs.open(tmp_path / "store") as reader:
        assert sum(len(reader.versions(name)) for name in reader.snapshots()) == 8
    with CheckpointManager(tmp_path / "store", "r") as manager:
        for info in manager.list_snapshots():
            assert manager.load(info.id).extra == {"step": info.step}


def test_a_forked_child_is_told_to_make_its_own(manager: CheckpointManager, tmp_path: Path) -> None:
    """Case 35."""
    manager.save_raw(1, {"a": torch.ones(3)})
    manager.flush()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            try:
                manager.save_raw(2, {"a": torch.ones(3)})
            except UsageError as error:
                with CheckpointManager(tmp_path / "store", "r") as own:
                    own.save_raw(3, {"a": own.load(1).state["model"]["a"] + 1})
                code = 0 if "make one here" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    manager.save_raw(4, {"a": torch.ones(3)})
    assert [info.step for info in manager.list_snapshots()] == [1, 3, 4]


def test_modes_of_files_follow_the_umask(manager: CheckpointManager, tmp_path: Path) -> None:
    """Case 35."""
    for step, umask, mode in ((1, 0o022, 0o644), (2, 0o077, 0o600)):
        before = os.umask(umask)
        try:
            manager.save_raw(step, {"a": torch.ones(3)})
            manager.flush()
        finally:
            os.umask(before)
        with moonclipfs.open(tmp_path / "store", f"r/step-{step:06}") as snapshot:
            assert snapshot.entry("model.safetensors").attributes.mode == mode


def test_a_save_without_background_raises_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(tmp_path / "store", "r", async_save=False) as manager:
        manager.save_raw(1, {"a": torch.ones(3)})
        with moonclipfs.open(tmp_path / "store", "r/step-000001") as snapshot:
            assert snapshot.files()

        def full(*_: object) -> None:
            raise NoSpaceError("the disk is full")

        with monkeypatch.context() as patch, pytest.raises(NoSpaceError):
            patch.setattr(saving, "store_job", full)
            manager.save_raw(2, {"a": torch.ones(3)})
        manager.flush()


def test_threads_are_the_cores_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 27: private threads, whose number can be set."""
    monkeypatch.setattr("moonclipfs.torch.workers.usable_cores", lambda: 8)
    monkeypatch.delenv("MOONCLIPFS_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert thread_count() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert thread_count() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert thread_count() == 1
    monkeypatch.setenv("MOONCLIPFS_THREADS", "5")
    assert thread_count() == 5
    monkeypatch.setenv("MOONCLIPFS_THREADS", "many")
    with pytest.raises(UsageError, match=r"\$MOONCLIPFS_THREADS is 'many'"):
        thread_count()


def test_workers_pass_on_results_and_errors() -> None:
    workers = Workers(2)
    assert [one.result(10) for one in [workers.submit(abs, -number) for number in range(9)]] == list(range(9))
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result(10)
    workers.shutdown()
    with pytest.raises(RuntimeError):
        workers.submit(abs, 1)


def test_the_profile_tells_every_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOONCLIPFS_PROFILE", "1")
    with CheckpointManager(tmp_path / "store", "r") as manager:
        for step in range(2):
            manager.save_raw(step, {"a": torch.randn(100_000)})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["r/step-000000", "r/step-000001"]
    for phase in ("wait", "copy", "hash", "encode", "write", "sync"):
        assert f" {phase} 0." in lines[1]
    assert "durable after" in lines[1] and lines[1].endswith("MB")


@pytest.mark.parametrize(("value", "synced"), [("0", False), ("1", True)])
def test_stores_that_need_not_survive_a_power_cut_are_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, synced: bool
) -> None:
    """Case 9: otherwise the bytes are synced before they are published, and the directory after."""
    monkeypatch.setenv("MOONCLIPFS_FSYNC", value)
    calls: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tmp_path / "store").parts[0])
        real(fd)

    with CheckpointManager(tmp_path / "store", "r") as manager:
        manager.save_raw(1, {"a": torch.randn(3000)})
        manager.flush()
        monkeypatch.setattr(os, "fsync", fsync)
        manager.save_raw(2, {"a": torch.randn(3000)})
        manager.flush()
        monkeypatch.undo()
    assert bool(calls) is synced
    if synced:
        assert calls.index("tmp") < calls.index("packs") < calls.index("log")


def test_reports_are_printed_on_any_console(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 22."""
    manager.name = "läuft-\u2603"
    console = io.TextIOWrapper(io.BytesIO(), "cp1252")
    for stream in (console, None):
        monkeypatch.setattr(sys, "stdout", stream)
        manager.print_stats()
    console.seek(0)
    assert console.read().startswith("läuft-? in ")
    console.close()
    monkeypatch.setattr(sys, "stdout", console)
    manager.print_stats()
    reading, writing = os.pipe()
    os.close(reading)
    pipe = os.fdopen(writing, "w")
    monkeypatch.setattr(sys, "stdout", pipe)
    manager.print_stats()
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
