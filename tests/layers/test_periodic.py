"""Repeated work: it goes on after errors, says each once, and ends when told."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from moonclipfs.errors import NoSpaceError
from moonclipfs.layers.periodic import Periodic


def test_work_is_repeated_until_it_is_stopped() -> None:
    calls = threading.Semaphore(0)
    work = Periodic("work", calls.release, 0.001)
    work.start()
    assert all(calls.acquire(timeout=10) for _ in range(3))
    work.stop()
    while calls.acquire(blocking=False):
        pass
    assert not calls.acquire(timeout=0.05), "it was called after stop"


def test_a_woken_one_does_not_wait_for_its_time() -> None:
    called = threading.Event()
    work = Periodic("work", called.set, 3600)
    work.start()
    work.wake()
    assert called.wait(10)
    work.stop()


def test_an_error_is_said_once_and_the_work_goes_on(
    caplog: pytest.LogCaptureFixture, expect_log: Callable[[str], None]
) -> None:
    calls = threading.Semaphore(0)

    def fail() -> None:
        calls.release()
        raise NoSpaceError("the disk is full")

    expect_log("the disk is full")
    work = Periodic("work", fail, 0.001)
    work.start()
    assert all(calls.acquire(timeout=10) for _ in range(3))
    work.stop()
    assert work.trouble == "the disk is full"
    assert len([one for one in caplog.records if "the disk is full" in one.message]) == 1


def test_stop_before_start_is_harmless() -> None:
    Periodic("work", lambda: None, 1).stop()
