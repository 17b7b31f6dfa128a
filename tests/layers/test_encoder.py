"""Encoding in the background: what is stored, in how many packs, and what a failure, a crash or a kill leaves."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from moonclipfs import limits
from moonclipfs.errors import (
    BackendError,
    BusyError,
    CorruptError,
    MoonclipError,
    NoSpaceError,
    NotFoundError,
    UsageError,
)
from moonclipfs.layers import encoder as encoder_module
from moonclipfs.layers import priority
from moonclipfs.layers.encoder import Encoder
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.tasks import Task
from moonclipfs.layers.workerprocess import WorkerProcess
from moonclipfs.store.gc import collect
from moonclipfs.store.leases import live_leases
from moonclipfs.store.store import Store
from moonclipfs.types import BytesSource, Kind
from tests.layers.encoding import Job, StubLayer, generations, read
from tests.store.kit import noise, packs, series
from tests.store.test_ingest import floats, safetensors


@pytest.fixture
def layer(store: Store, tmp_path: Path) -> StubLayer:
    return StubLayer(store, tmp_path / "staging")


@pytest.fixture
def encoder(store: Store, layer: StubLayer) -> Iterator[Encoder]:
    made = Encoder(cast(Layer, layer), store.path)
    made.start()
    yield made
    pid = made.status()["pid"]
    made.stop()
    made.stop()
    assert pid is None or not Path(f"/proc/{pid}").exists()


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_staged_files_of_all_kinds_are_stored_as_they_are(store: Store, layer: StubLayer, encoder: Encoder) -> None:
    contents = [b"", b"tiny", noise(1, 5000), noise(2, 200_000), bytes(300_000), safetensors({"w": ("F32", floats(1))})]
    assert encoder.status()["pid"] is None, "no process before there is work"
    jobs = [layer.add(data) for data in contents]
    encoder.drain()
    assert layer.commits >= 1
    assert layer.staging.used == 0
    for job, data in zip(jobs, contents, strict=True):
        recipe, size = layer.results[job.number]
        assert read(store, recipe, size) == data
    assert len(packs(store)) == 1
    assert encoder.status()["failures"] == encoder.status()["waiting"] == 0


def test_what_nobody_waits_for_is_stored_when_it_is_idle(
    store: Store, layer: StubLayer, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENCODE_IDLE_SECONDS", 0.2)
    job = layer.add(noise(1))
    wait_for(lambda: job.number in layer.results)
    assert not any(urgent for urgent, _ in layer.taken)


def test_a_change_in_place_takes_over_what_was_there(store: Store, layer: StubLayer, encoder: Encoder) -> None:
    data = safetensors({f"t{n}": ("F32", floats(n)) for n in range(4)})
    with store.ingest() as ingest:
        recipe, size, _ = ingest.put_file(BytesSource(data))
        ingest.complete([(Kind.RECIPE, recipe)])
        at = len(data) - 1000
        changed = data[:at] + b"\x55" * 10 + data[at + 10 :]
        job = layer.add_edit(size, recipe, [(at, b"\x55" * 10)])
        encoder.drain()
    assert read(store, *layer.results[job.number]) == changed
    with store.ingest() as ingest:
        assert ingest.put_file(BytesSource(changed))[0] == layer.results[job.number][0]


def test_a_hint_offers_bases(store: Store, layer: StubLayer, encoder: Encoder) -> None:
    first, second = series(2, 200_000)
    with store.ingest() as ingest:
        hint, _, _ = ingest.put_file(BytesSource(first))
        ingest.complete([(Kind.RECIPE, hint)])
        before = sum(os.stat(path).st_size for path in (Path(store.path) / "packs").iterdir())
        job = layer.add(second, hint=hint)
        encoder.drain()
    assert read(store, *layer.results[job.number]) == second
    after = sum(os.stat(path).st_size for path in (Path(store.path) / "packs").iterdir())
    assert after - before < len(second) // 2


def test_many_small_files_cost_few_packs(store: Store, layer: StubLayer, encoder: Encoder) -> None:
    jobs = [layer.add(noise(number, 4096)) for number in range(2000)]
    encoder.drain()
    assert len(layer.results) == 2000
    assert len(packs(store)) <= 2
    for job in jobs[::400]:
        assert read(store, *layer.results[job.number]) == noise(jobs.index(job), 4096)


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_is_reclaimed_between_durable_and_journalled(
    store: Store,
    layer: StubLayer,
    encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
    killed: bool,
    expect_log: Callable[[str], None],
) -> None:
    if killed:
        expect_log("encoder process was killed by SIGKILL; 0 files are encoded again")
    kept: list[bool] = []
    stored = layer.stored

    def collecting(job: Job, recipe: bytes, size: int) -> None:
        process = encoder._process
        assert process is not None
        if killed:
            os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda: process.death is not None)
        with Store.open(store.path, write=True) as other:
            for _ in range(2):
                store.names()
                collect(other, wait_seconds=0)
            kept.append(read(other, recipe, size) == noise(1))
        stored(job, recipe, size)

    monkeypatch.setattr(layer, "stored", collecting)
    layer.add(noise(1))
    encoder.drain()
    assert kept == [True]


def test_a_killed_process_is_replaced_and_nothing_is_lost(
    store: Store, layer: StubLayer, encoder: Encoder, expect_log: Callable[[str], None]
) -> None:
    expect_log("encoder process was killed by SIGKILL; 2 files are encoded again")
    first = layer.add(noise(1))
    wait_for(lambda: encoder.status()["finishing"] == 1)
    pid = encoder.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    second = layer.add(noise(2, 300_000))
    wait_for(lambda: encoder.status()["encoding"] == 1)
    os.kill(pid, signal.SIGKILL)
    encoder.drain()
    assert read(store, *layer.results[first.number]) == noise(1)
    assert read(store, *layer.results[second.number]) == noise(2, 300_000)


def test_a_process_that_dies_with_a_batch_does_not_make_it_durable(
    store: Store, layer: StubLayer, encoder: Encoder, expect_log: Callable[[str], None]
) -> None:
    expect_log("encoder process was killed by SIGKILL; 1 files are encoded again")
    job = layer.add(noise(1))
    wait_for(lambda: encoder.status()["finishing"] == 1)
    os.kill(encoder.status()["pid"], signal.SIGKILL)
    wait_for(lambda: encoder.status()["pid"] is None or encoder.status()["waiting"] == 1)
    encoder.drain()
    assert read(store, *layer.results[job.number]) == noise(1)


def test_a_file_that_is_deleted_while_it_waits_is_not_encoded(
    store: Store, layer: StubLayer, encoder: Encoder, expect_log: Callable[[str], None]
) -> None:
    expect_log("cannot be encoded: bad: ")
    bad = layer.add(noise(2, 100_000), path=b"bad")
    (generation,) = generations(bad)
    assert generation.path is not None
    os.rename(generation.path, generation.path + ".away")
    wait_for(lambda: encoder.status()["failures"] == 1)
    layer.gone.add(bad.number)
    waits = layer.add(noise(1))
    layer.gone.add(waits.number)
    encoder.drain()
    wait_for(lambda: encoder.status()["failures"] == 0)
    assert not layer.results
    os.rename(generation.path + ".away", generation.path)


def test_the_count_of_failures_waits_for_nobody(layer: StubLayer, encoder: Encoder) -> None:
    """A mount asks for it on the loop, also while hints for what is encoded next are read from the store."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with encoder._changed:
            held.set()
            go.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    began = time.monotonic()
    assert (encoder.failures, encoder.encoded_bytes) == (0, 0)
    assert time.monotonic() - began < 5
    go.set()
    holder.join()


def deadly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, act: str = "os.kill(os.getpid(), 9)") -> None:
    """Let the process die, or do something else, at any file that holds the word."""
    main = tmp_path / "deadly_main.py"
    package = Path(encoder_module.__file__).parents[2]
    main.write_text(
        f"""
import os, sys
sys.path.insert(0, {os.fspath(package)!r})
from moonclipfs.layers import stagedsource, worker, worker_main
plain = stagedsource.StagedSource.read
def read(self, offset, length):
    data = plain(self, offset, length)
    if b"deadly" in data:
        {act}
    return data
stagedsource.StagedSource.read = read
worker_main._find_package = lambda: None
worker_main.main()
"""
    )
    monkeypatch.setattr("moonclipfs.layers.workerprocess._MAIN", main)


def test_a_file_that_kills_the_process_is_given_up_and_all_others_are_stored(
    store: Store,
    layer: StubLayer,
    encoder: Encoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: Callable[[str], None],
) -> None:
    deadly(monkeypatch, tmp_path)
    expect_log("encoder process was killed by SIGKILL; . files are encoded again")
    expect_log("safe in staging: b: b: .* killed by SIGKILL, each time it was encoded")
    good = [layer.add(noise(number, 5000), path=b"a") for number in range(3)]
    bad = layer.add(b"deadly" * 1000, path=b"b")
    good += [layer.add(noise(number, 5000), path=b"c") for number in range(3, 6)]
    with pytest.raises(BackendError, match="each time it was encoded"):
        encoder.drain()
    wait_for(lambda: len(layer.results) == 6)
    assert {job.number for job in good} == layer.results.keys()
    assert list(layer.messages) == [bad.number]
    (generation,) = generations(bad)
    kept = bytearray(bad.size)
    generation.read_into(0, memoryview(kept))
    assert kept == b"deadly" * 1000
    assert encoder.status()["failed"][0]["path"] == "b"


def test_a_file_at_which_a_parser_fails_by_an_unexpected_error_fails_alone(
    layer: StubLayer,
    encoder: Encoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expect_log: Callable[[str], None],
) -> None:
    deadly(monkeypatch, tmp_path, "raise ZeroDivisionError('odd')")
    expect_log("b: not encoded by an unexpected error")
    expect_log("safe in staging: b: an unexpected error")
    good = [layer.add(noise(1, 5000), path=b"a")]
    bad = layer.add(b"deadly" * 1000, path=b"b")
    good += [layer.add(noise(2, 5000), path=b"c")]
    with pytest.raises(MoonclipError, match="ZeroDivisionError"):
        encoder.drain()
    wait_for(lambda: len(layer.results) == 2)
    assert {job.number for job in good} == layer.results.keys() and list(layer.messages) == [bad.number]


def test_a_file_that_cannot_be_read_fails_alone_and_is_tried_again(
    store: Store, layer: StubLayer, encoder: Encoder, expect_log: Callable[[str], None]
) -> None:
    expect_log("cannot be encoded: bad: ")
    good, bad = layer.add(noise(1)), layer.add(noise(2, 100_000), path=b"bad")
    (generation,) = generations(bad)
    assert generation.path is not None
    os.rename(generation.path, generation.path + ".away")
    with pytest.raises((NotFoundError, CorruptError), match="staging"):
        encoder.drain()
    wait_for(lambda: good.number in layer.results)
    assert "staging" in layer.messages[bad.number]
    assert encoder.status()["failures"] == 1
    os.rename(generation.path + ".away", generation.path)
    encoder.drain()
    assert read(store, *layer.results[bad.number]) == noise(2, 100_000)
    assert encoder.status()["failures"] == 0


def test_who_waits_while_a_file_fails_gets_it_tried_again(
    store: Store, layer: StubLayer, encoder: Encoder, expect_log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of its chunk are being encoded meanwhile: it is with them, and among what has failed."""
    expect_log("safe in staging: bad: ")
    message, ask, go, failures = Task.message, WorkerProcess.ask, threading.Event(), [NoSpaceError("full")]

    def messages(task: Task) -> dict[str, Any]:
        if task.name == "bad" and failures:
            raise failures.pop()
        return message(task)

    def asks(process: WorkerProcess, op: str, **fields: Any) -> dict[str, Any]:
        go.wait()
        return ask(process, op, **fields)

    monkeypatch.setattr(Task, "message", messages)
    monkeypatch.setattr(WorkerProcess, "ask", asks)
    good, bad = layer.add(noise(1)), layer.add(noise(2), path=b"bad")
    wait_for(lambda: encoder.status()["failures"] == 1)
    threading.Timer(0.3, go.set).start()
    encoder.drain()
    assert layer.results.keys() == {good.number, bad.number}
    assert encoder.status()["failures"] == encoder.status()["waiting"] == 0


def test_failures_are_tried_again_without_anybody_asking(
    store: Store, layer: StubLayer, encoder: Encoder, expect_log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENCODE_RETRY_SECONDS", 0.5)
    monkeypatch.setattr(limits, "ENCODE_IDLE_SECONDS", 0.2)
    expect_log("cannot be encoded: bad: ")
    bad = layer.add(noise(2, 100_000), path=b"bad")
    (generation,) = generations(bad)
    assert generation.path is not None
    os.rename(generation.path, generation.path + ".away")
    wait_for(lambda: encoder.status()["failures"] == 1)
    os.rename(generation.path + ".away", generation.path)
    wait_for(lambda: bad.number in layer.results)


def test_pressure_takes_open_files_and_finishes_at_once(tmp_path: Path, store: Store) -> None:
    layer = StubLayer(store, tmp_path / "staging", limit=1_000_000)
    encoder = Encoder(cast(Layer, layer), store.path)
    encoder.start()
    try:
        job = layer.add(noise(1, 900_000))
        wait_for(lambda: job.number in layer.results)
        assert (True, True) in layer.taken
    finally:
        encoder.stop()


def test_drain_gives_up_after_its_timeout_and_stop_ends_those_who_wait(
    store: Store, layer: StubLayer, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer.add(noise(1, 1_000_000))
    monkeypatch.setattr(encoder, "_encode", lambda chunk: time.sleep(1.0))
    with pytest.raises(BusyError, match="1 files were not stored after 0 s"):
        encoder.drain(timeout=0.2)


def test_operations_come_back_and_so_do_their_errors(
    store: Store, layer: StubLayer, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="knows no operation 'nothing'"):
        encoder.call("nothing")


def test_an_error_that_was_handled_holds_nothing(encoder: Encoder) -> None:
    class Held:
        pass

    def ask() -> weakref.ref[Held]:
        held = Held()
        with suppress(UsageError):
            encoder.call("nonsense")
        return weakref.ref(held)

    gc.disable()
    try:
        held = ask()
        wait_for(lambda: held() is None)  # the thread that brought the error may not have let go yet
    finally:
        gc.enable()


def test_waking_waits_for_nothing(store: Store, layer: StubLayer, encoder: Encoder) -> None:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with encoder._changed:
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    encoder.wake()
    go.set()
    thread.join()
    encoder.wake()


def test_after_stop_nothing_starts_a_process(store: Store, layer: StubLayer) -> None:
    encoder = Encoder(cast(Layer, layer), store.path)
    encoder.start()
    encoder.stop()
    with pytest.raises(BusyError):
        encoder.call("publish")
    with pytest.raises(BusyError):
        encoder.drain()


def test_a_stop_in_the_midst_of_a_file_leaves_it_staged(store: Store, layer: StubLayer) -> None:
    encoder = Encoder(cast(Layer, layer), store.path)
    encoder.start()
    job = layer.add(noise(1, 60_000_000))
    wait_for(lambda: encoder.status()["encoding"] == 1 and encoder.status()["pid"] is not None)
    pid = encoder.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    os.kill(pid, signal.SIGCONT)
    started = time.monotonic()
    encoder.stop()
    assert time.monotonic() - started < 12
    assert not Path(f"/proc/{pid}").exists()
    assert job.number not in layer.results
    assert not layer.messages
    assert layer.staging.used == 60_000_000


def test_a_store_that_cannot_be_opened_is_an_error_of_each_file(
    tmp_path: Path, layer: StubLayer, expect_log: Callable[[str], None]
) -> None:
    expect_log("safe in staging: f: .*nowhere")
    encoder = Encoder(cast(Layer, layer), tmp_path / "nowhere")
    encoder.start()
    try:
        layer.add(noise(1))
        with pytest.raises(MoonclipError, match="nowhere"):
            encoder.drain()
    finally:
        encoder.stop()


PARENT = """
import sys, threading, time
from pathlib import Path
from moonclipfs.layers.records import PART_STAGED
from moonclipfs.layers.workerprocess import WorkerProcess
from moonclipfs.types import NO_ID

path, size = sys.argv[2], int(sys.argv[3])
process = WorkerProcess(Path(sys.argv[1]), "encoder of a test")
job = {"number": 1, "path": b"f", "size": size, "parts": [(0, size, PART_STAGED, 1)], "data": [], "files": {1: path},
       "recipe": NO_ID, "hint": NO_ID}
if size:
    threading.Thread(target=process.ask, args=("encode",), kwargs={"jobs": [job], "urgent": False}, daemon=True).start()
    time.sleep(0.2)
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("size", [0, 1 << 30])
def test_the_process_ends_with_its_parent_and_gives_its_lease_back(store: Store, tmp_path: Path, size: int) -> None:
    path = tmp_path / "staged"
    with path.open("wb") as file:
        file.truncate(size)
    arguments = [os.fspath(store.path), os.fspath(path), str(size)]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.communicate()
    wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())
    assert len(live_leases(store.path)) == 1, "ours"


def test_background_threads_are_polite_and_urgent_ones_are_not(
    store: Store, layer: StubLayer, encoder: Encoder
) -> None:
    layer.add(noise(1))
    wait_for(lambda: encoder.status()["finishing"] == 1)
    tasks = Path(f"/proc/{encoder.status()['pid']}/task")
    assert priority.NICE in nices(tasks)
    layer.add(noise(2))
    encoder.drain()
    assert nices(tasks).count(0) > len(os.sched_getaffinity(0)), "the main thread, and one for each core"


def test_who_waits_without_hurry_gets_it_politely(store: Store, layer: StubLayer, encoder: Encoder) -> None:
    job = layer.add(noise(1))
    encoder.drain(urgent=False)
    assert job.number in layer.results
    tasks = Path(f"/proc/{encoder.status()['pid']}/task")
    assert priority.NICE in nices(tasks)
    wait_for(lambda: nices(tasks).count(0) == 1)  # the main thread alone; others are polite once they began


def test_what_goes_wrong_in_the_layer_is_told_once_and_tried_again(
    store: Store, layer: StubLayer, encoder: Encoder, expect_log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_log("cannot tell what is to be encoded: 'oops'")
    take, calls = layer.take_jobs, [0]

    def taking(*arguments: object, **options: object) -> list[Job]:
        calls[0] += 1
        if calls[0] < 4:
            raise KeyError("oops")
        return take(0.0)

    monkeypatch.setattr(layer, "take_jobs", taking)
    job = layer.add(noise(1))
    encoder.wake()
    wait_for(lambda: calls[0] > 3)
    encoder.drain()
    assert job.number in layer.results


def nices(tasks: Path) -> list[int]:
    found = []
    for task in tasks.iterdir():
        try:
            text = (task / "stat").read_text()
        except OSError:
            continue  # it has ended
        fields = text.rpartition(")")[2].split()
        found.append(int(fields[16]))
    return found
