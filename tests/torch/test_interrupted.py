"""Ctrl-C at any moment of a save: what is stored is what was saved, and the next save works."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moonclipfs.torch import copying
from moonclipfs.torch.background import Background


def test_a_job_whose_start_was_interrupted_is_still_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    background = Background()
    go, begun, done = threading.Event(), threading.Event(), []

    def job() -> None:
        begun.set()
        go.wait(10)
        done.append(1)

    with monkeypatch.context() as patched:
        start = threading.Thread.start

        def interrupt(thread: threading.Thread) -> None:
            start(thread)
            assert begun.wait(10)
            raise KeyboardInterrupt

        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            background.start(job, "save")
    threading.Timer(0.05, go.set).start()
    background.wait()
    assert done == [1], "its memory is not free before it has ended"


def test_a_job_that_was_given_up_before_it_began_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    background = Background()
    late: list[threading.Thread] = []
    done: list[int] = []
    with monkeypatch.context() as patched:
        start = threading.Thread.start

        def interrupt(thread: threading.Thread) -> None:
            late.append(thread)
            raise KeyboardInterrupt

        patched.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            background.start(lambda: done.append(1), "save")
    background.wait()
    background.start(lambda: done.append(2), "save")
    background.wait()
    start(late[0])
    late[0].join()
    background.wait()
    assert done == [2]


def test_no_thread_copies_on_after_an_interrupted_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 8 * copying._CHUNK_BYTES
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    main, helping, move = threading.get_ident(), threading.Event(), copying._memmove

    def slowly(to: int, at: int, length: int) -> int:
        if threading.get_ident() == main:
            assert helping.wait(10)
            raise KeyboardInterrupt
        helping.set()
        threading.Event().wait(0.05)
        return int(move(to, at, length))

    monkeypatch.setattr(copying, "_memmove", slowly)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt):
            copying.copy_all({"a": (target.data_ptr(), source.data_ptr(), size, False)}, pool, 2)
        copied = int(target.sum())
        threading.Event().wait(0.15)
        assert int(target.sum()) == copied < size
