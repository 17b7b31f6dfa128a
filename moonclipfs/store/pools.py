"""Threads that share work, also when the program ends meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


def submit(pool: Executor, work: Callable[..., T], *arguments: Any) -> Future[T]:
    """As `pool.submit`. While the program ends, pools take no work any more, and threads that it waits for, as a gc
    beside a training loop, are not done: what they ask for is done here then.
    """
    try:
        return pool.submit(work, *arguments)
    except RuntimeError:
        done: Future[T] = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done
