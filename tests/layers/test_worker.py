"""The encoder process and the messages to it, without an encoder."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import errors, limits
from moonclipfs.errors import LimitError, MoonclipError, NoSpaceError, UsageError
from moonclipfs.layers import priority
from moonclipfs.layers.records import PART_RECIPE, PART_STAGED
from moonclipfs.layers.wire import Channel, error_fields, error_of
from moonclipfs.layers.worker import OPERATIONS, Worker
from moonclipfs.layers.workerprocess import WorkerDiedError, WorkerProcess
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID
from tests.layers.encoding import read
from tests.store.kit import noise


@pytest.fixture
def process(store: Store) -> Iterator[WorkerProcess]:
    started = WorkerProcess(store.path, "encoder of a test")
    yield started
    started.stop()


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def job(staged: bytes, **fields: object) -> dict[str, object]:
    return {
        "number": 1,
        "path": b"f",
        "size": len(staged),
        "parts": [(0, len(staged), PART_STAGED, 7)],
        "data": [(7, 0, staged)],
        "files": {},
        "recipe": NO_ID,
        "hint": NO_ID,
        **fields,
    }


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=50) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(st.text(max_size=8), VALUES, max_size=5), max_size=5))
def test_messages_arrive_as_they_were_sent(messages: list[dict[str, Any]]) -> None:
    one, other = socket.socketpair()
    with one, other:
        for message in messages:
            Channel(one).send(message)
        Channel(one).shut()
        received = []
        while (message := Channel(other).receive()) is not None:
            received.append(message)
    assert received == messages


def test_a_connection_that_ends_in_the_middle_of_a_message_has_ended() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"\x10\0\0\0abc")
        one.shutdown(socket.SHUT_WR)
        assert Channel(other).receive() is None


def test_long_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WIRE_BYTES", 100)
    one, other = socket.socketpair()
    with one, other, pytest.raises(LimitError, match="at most 100"):
        Channel(one).send({"data": bytes(101)})


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MoonclipError)]
)
def test_every_error_comes_back_as_itself(kind: type[MoonclipError]) -> None:
    error = error_of(error_fields(kind("what, where")))
    assert type(error) is kind
    assert str(error) == "what, where"


def test_errors_that_are_not_ours_come_back_as_the_general_one() -> None:
    assert type(error_of(error_fields(KeyError("x")))) is MoonclipError
    assert type(error_of({"error": "Exception", "message": "x"})) is MoonclipError
    assert type(error_of({"error": "errno", "message": "x"})) is MoonclipError


def test_a_file_goes_through_the_process(store: Store, process: WorkerProcess) -> None:
    data = noise(1, 50_000)
    answer = process.ask("encode", jobs=[job(data)], urgent=False)
    ((number, recipe, size),) = answer["results"]
    assert (number, size) == (1, 50_000)
    process.ask("complete")
    assert read(store, recipe, size) == data
    process.ask("release")
    process.ask("complete")


def test_staged_bytes_that_are_missing_are_an_error_and_never_zeros(process: WorkerProcess, tmp_path: Path) -> None:
    path = tmp_path / "staged"
    path.write_bytes(noise(1, 1000))
    lost = job(b"", size=2000, parts=[(0, 2000, PART_STAGED, 7)], data=[], files={7: os.fspath(path)})
    orphan = job(b"", size=2000, parts=[(0, 2000, PART_RECIPE, 0)], data=[])
    for broken in (lost, orphan):
        (result,) = process.ask("encode", jobs=[broken], urgent=True)["results"]
        assert result[:2] == (1, "CorruptError")


def test_a_hint_that_cannot_be_read_is_passed_over(store: Store, process: WorkerProcess) -> None:
    (result,) = process.ask("encode", jobs=[job(noise(1), hint=b"\1" * 32)], urgent=True)["results"]
    assert result[2] == 20_000
    (result,) = process.ask("encode", jobs=[job(noise(1), recipe=b"\1" * 32)], urgent=True)["results"]
    assert result[1] == "MissingObjectError"


def test_the_process_sees_the_log_while_it_is_idle(store: Store, process: WorkerProcess) -> None:
    from moonclipfs.store.leases import live_leases

    with store.ingest() as ingest:
        version = ingest.publish("a", ingest.put_directory([]), {})
    wait_for(lambda: all(lease.seen >= version.sequence for lease in live_leases(store.path) if lease.purpose))


def test_a_killed_process_ends_who_waits_and_says_how(process: WorkerProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
    with pytest.raises(WorkerDiedError, match="killed by SIGKILL"):
        process.ask("complete")
    with pytest.raises(WorkerDiedError, match="killed by SIGKILL"):
        process.ask("complete")
    process.tell("urgent", urgent=True)


def test_a_process_that_hangs_is_killed_by_stop(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.layers.workerprocess._END_SECONDS", 0.5)
    process = WorkerProcess(store.path, "encoder of a test")
    os.kill(process.pid, signal.SIGSTOP)
    process.stop()
    assert not Path(f"/proc/{process.pid}").exists()


def test_what_the_process_says_when_it_fails_is_told(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = tmp_path / "broken.py"
    main.write_text("raise SystemExit('no such luck')")
    monkeypatch.setattr("moonclipfs.layers.workerprocess._MAIN", main)
    with pytest.raises(WorkerDiedError, match="ended with code 1: no such luck"):
        WorkerProcess(store.path, "encoder of a test")


def test_the_error_of_a_process_that_does_not_start_holds_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the callers hold, as staged files that were deleted since, is let go at once: on a full disk it matters."""

    class Held:
        pass

    def start() -> weakref.ref[Held]:
        held = Held()
        with suppress(WorkerDiedError):
            WorkerProcess(store.path, "encoder of a test")
        return weakref.ref(held)

    main = tmp_path / "broken.py"
    main.write_text("raise SystemExit(1)")
    monkeypatch.setattr("moonclipfs.layers.workerprocess._MAIN", main)
    gc.disable()
    try:
        held = start()
        wait_for(lambda: held() is None, 5)
    finally:
        gc.enable()


SAYING = """
import logging, sys
sys.path.insert(0, {package!r})
from moonclipfs.layers import worker, worker_main
def look(self):
    logging.getLogger("moonclipfs.layers.worker").warning("all is %s", "well")
    logging.getLogger("moonclipfs.layers.worker").debug("this is not")
worker.Worker._look = look
worker_main._find_package = lambda: None
worker_main.main()
"""


def test_warnings_of_the_process_are_logged_here(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    expect_log("^WARNING moonclipfs.layers.worker: all is well$")
    main = tmp_path / "saying.py"
    main.write_text(SAYING.format(package=os.fspath(Path(limits.__file__).parents[1])))
    monkeypatch.setattr("moonclipfs.layers.workerprocess._MAIN", main)
    process = WorkerProcess(store.path, "encoder of a test")
    time.sleep(1.5)
    process.stop()


def echo(store: Store, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An operation for tests."""
    if "fail" in arguments:
        raise NoSpaceError(arguments["fail"])
    return {"store": os.fspath(store.path), "long": bytes(arguments.get("grow", 0)), **arguments}


@pytest.fixture
def inner(store: Store) -> Iterator[Channel]:
    """The other end of a worker that runs on a thread of this process."""
    ours, theirs = socket.socketpair()
    worker = Worker(store, Channel(theirs), {"echo": f"{__name__}:echo"})
    thread = threading.Thread(target=worker.run)
    thread.start()
    channel = Channel(ours)
    yield channel
    channel.shut()
    thread.join()
    ours.close()
    theirs.close()


def ask(channel: Channel, **message: Any) -> dict[str, Any]:
    channel.send({"id": 1, **message})
    answer = channel.receive()
    assert answer is not None
    return answer


def test_operations_are_called_by_name(store: Store, inner: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[echo.__module__])
    answer = ask(inner, op="call", polite=False, name="echo", arguments={"path": b"\xff", "n": (1, 2)})
    assert answer["value"] == {"store": os.fspath(store.path), "long": b"", "path": b"\xff", "n": (1, 2)}
    failed = error_of(ask(inner, op="call", polite=False, name="echo", arguments={"fail": "full"}))
    assert (type(failed), str(failed)) == (NoSpaceError, "full")
    assert type(error_of(ask(inner, op="call", polite=False, name="no", arguments={}))) is UsageError


def test_an_answer_that_is_too_long_is_an_error(inner: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WIRE_BYTES", 1000)
    failed = error_of(ask(inner, op="call", polite=False, name="echo", arguments={"grow": 2000}))
    assert type(failed) is LimitError


def test_every_operation_exists() -> None:
    import importlib

    for target in OPERATIONS.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_a_pool_has_all_its_threads_from_the_start() -> None:
    before = threading.active_count()
    for polite in (False, True):
        pool = priority.thread_pool(3, "test", polite=polite)
        try:
            assert threading.active_count() == before + 3
            nice = os.getpriority(os.PRIO_PROCESS, 0) if not polite else priority.NICE
            assert set(pool.map(lambda _: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), range(9))) == {
                nice
            }
        finally:
            pool.shutdown()


def test_the_process_imports_no_torch_and_no_fuse(process: WorkerProcess) -> None:
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "fuse" not in maps


def test_the_session_of_the_process_is_polite_too(process: WorkerProcess) -> None:
    group = Path(f"/proc/{process.pid}/autogroup")
    try:
        text = group.read_text()
    except OSError:
        pytest.skip("this kernel shares the processor between threads alone")
    assert text.split()[-1] == str(priority.NICE)
