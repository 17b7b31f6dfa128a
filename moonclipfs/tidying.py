"""`moonclipfs.optimize` and `moonclipfs.thin`: what the commands of these names do, from Python."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from moonclipfs.errors import UsageError
from moonclipfs.store.optimize import OptimizeReport
from moonclipfs.store.optimize import optimize as optimize_store
from moonclipfs.store.store import Store
from moonclipfs.store.target import parse_target
from moonclipfs.store.thin import ThinReport
from moonclipfs.store.thin import thin as thin_store

Place = str | os.PathLike[str] | Store


def optimize(store: Place, *names: str, dry_run: bool = False, core_share: float = 1.0) -> OptimizeReport:
    """Make the newest snapshot of each line quick to read, one link from a full encoding; free what that leaves.

    `store` is its directory, STORE:NAME, or an open `Store`; `names` are snapshots, or what lies above them.
    `core_share` of the cores are used. Nothing that can be read changes, and whoever reads or saves meanwhile, in any
    process, is not disturbed. What is damaged stays as it is: see `problems` of the result. Raises NotFoundError,
    CorruptError, NoSpaceError, PermissionDeniedError.
    """
    with _opened(store, write=not dry_run) as (opened, spec):
        wanted = [*([spec] if spec else []), *names]
        return optimize_store(opened, wanted, dry_run=dry_run, core_share=core_share)


def optimize_aside(store: Place, *names: str, core_share: float = 0.25) -> Future[OptimizeReport]:
    """`optimize` in the background, on a thread that the end of the program waits for; the result tells, or raises.

    For a training loop that wants its newest snapshot quick to read while it goes on: saves and loads need not wait.
    """
    future: Future[OptimizeReport] = Future()

    def work() -> None:
        try:
            future.set_result(optimize(store, *names, core_share=core_share))
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=work, name="moonclipfs optimize", daemon=False).start()
    return future


def thin(
    store: Place, run: str = "", *, keep_optimizer_last: int, also: Sequence[str] = (), dry_run: bool = False
) -> ThinReport:
    """Drop optimizer, random number and ZeRO state from all but the last snapshots of each line at or below `run`.

    `store` is its directory, STORE:RUN, or an open `Store`; `also` are further names of files to drop, with `*`. The
    weights stay, as a new version of each snapshot in its old place; resuming from one of them is an error that says
    so. `gc` of the result tells what was freed. Raises NotFoundError, UsageError, CorruptError, NoSpaceError,
    PermissionDeniedError.
    """
    with _opened(store, write=not dry_run) as (opened, spec):
        if bool(spec) == bool(run):
            raise UsageError("name one run to thin: a whole store is not thinned at once")
        return thin_store(opened, spec or run, keep_optimizer_last=keep_optimizer_last, also=also, dry_run=dry_run)


@contextmanager
def _opened(store: Place, *, write: bool) -> Iterator[tuple[Store, str]]:
    """An open store, and the name in it that was given with it."""
    if isinstance(store, Store):
        yield store, ""
        return
    target = parse_target(os.fspath(store))
    with Store.open(target.store, write=write, purpose="python") as opened:
        yield opened, target.spec or ""
