"""The state of a store as `moonclipfs doctor` tells it: what is wrong or unusual, and what to do. Changes nothing."""

from __future__ import annotations

import enum
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import MoonclipError
from moonclipfs.store.leases import live_leases
from moonclipfs.store.store import Store

_LOW_BYTES = 2 * limits.GIB
"""Less free space than this is worth a word."""


class State(enum.StrEnum):
    """How good or bad a finding is; only a PROBLEM keeps something from working."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `advice` says what to do, empty when nothing is."""

    what: str
    state: State
    text: str
    advice: str = ""


def check_store(path: Path) -> list[Finding]:
    """Look at access, config, log, leases, index and free space of the store at `path`; never raises MoonclipError."""
    return list(_findings(path))


def _findings(path: Path) -> Iterator[Finding]:
    yield _guarded("access", "ask its owner, or `chown` it", lambda: _access(path))
    try:
        with Store.open(path, purpose="doctor") as store:
            yield Finding("config", State.OK, f"store {store.config.store_id}, format version {store.config.version}")
            if store.base is not None:
                where = f"private, over the store {store.base.config.store_id} at {store.base.path}"
                yield Finding("base store", State.OK, f"{where}, which nothing here keeps from being changed")
            verify = "`moonclipfs verify` names what is affected"
            yield _guarded("log", verify, lambda: _log(store))
            yield _guarded("index", "delete the index file: it is made again", lambda: _index(store))
    except MoonclipError as error:
        yield Finding(
            "store", State.PROBLEM, str(error), "restore what is damaged from a copy, or export what is readable"
        )
    yield _guarded("leases", "check the permissions of its directory leases/", lambda: _leases(path))
    yield _guarded("space", "check the disk", lambda: _space(path))


def _guarded(what: str, advice: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except MoonclipError as error:
        return Finding(what, State.PROBLEM, str(error), advice)
    except OSError as error:
        return Finding(what, State.PROBLEM, f"{error.filename}: {error.strerror}", advice)


def _access(path: Path) -> Finding:
    status = os.stat(path)
    open_to = [who for who, bit in (("group", stat.S_IRGRP), ("others", stat.S_IROTH)) if status.st_mode & bit]
    shown = f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}"
    if not os.access(path, os.R_OK | os.X_OK):
        return Finding("access", State.PROBLEM, f"not readable ({shown})", "ask its owner, or `chown` it")
    if "others" in open_to:
        return Finding("access", State.PROBLEM, f"everybody can read it all ({shown})", f"`chmod 700 {path}`")
    if not os.access(path, os.W_OK):
        return Finding("access", State.NOTE, f"read-only for this user ({shown})")
    return Finding("access", State.OK, shown + (", shared with its group" if open_to else ""))


def _log(store: Store) -> Finding:
    names = store.names()
    if names.damaged:
        return Finding("log", State.PROBLEM, "; ".join(names.damaged), "`moonclipfs verify` says what is affected")
    kept = sum(1 for _ in names.all_versions())
    return Finding("log", State.OK, f"{len(names.bound())} snapshots, {kept} kept versions, {names.sequence} records")


def _index(store: Store) -> Finding:
    store.index.sync()
    packs = store.index.packs()
    objects = sum(info.entries for info in packs.values())
    return Finding("index", State.OK, f"{objects} objects in {len(packs)} packs")


def _leases(path: Path) -> Finding:
    held = live_leases(path) if (path / "leases").exists() else []
    if not held:
        return Finding("leases", State.OK, "no other process uses the store")
    return Finding(
        "leases", State.OK, "; ".join(f"pid {one.pid} on {one.host}: {one.purpose or 'unnamed'}" for one in held)
    )


def _space(path: Path) -> Finding:
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    text = f"{free / limits.GIB:.1f} GiB free"
    if not os.path.exists(path / "reserve"):
        text += ", no reserve"
    if free < _LOW_BYTES:
        return Finding("space", State.NOTE, text, "`moonclipfs forget` old snapshots; it works on a full disk too")
    return Finding("space", State.OK, text)
