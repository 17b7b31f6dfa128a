"""Pins: in the log, so that every process sees them, and nothing forgets what they keep."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moonclipfs import limits
from moonclipfs.errors import FormatVersionError, NotFoundError, UsageError
from moonclipfs.store import pins
from moonclipfs.store.config import Config, load_config
from moonclipfs.store.forget import forget, retain
from moonclipfs.store.log import Log
from moonclipfs.store.replay import State
from moonclipfs.store.retention import Rules
from moonclipfs.store.store import Store
from tests.store.kit import contents, noise, publish


def test_a_pin_survives_a_restart_a_checkpoint_and_a_move(store: Store) -> None:
    publish(store, "run/a", {"f": noise(1)})
    publish(store, "run/b", {"f": noise(2)})
    assert pins.pin(store, [("run/a", 1)]) == [("run/a", 1)]
    assert pins.pin(store, [("run/a", 1)]) == [], "once is enough"
    pins.pin(store, [("run/a", 1)], "fork")
    store.log.move("run", "ran")
    state = State()
    body = {"sequence": 1, "type": "checkpoint", **store.log.names._state.to_checkpoint([])}
    state.apply(json.loads(json.dumps(body)))
    assert state.pins == {("ran/a", 1): ("pinned", "fork")}
    with Store.open(store.path, index_path=store.path.parent / "other") as other:
        assert other.names().pins() == {("ran/a", 1): ("pinned", "fork")}
    assert pins.unpin(store, [("ran/a", 1)]) == [("ran/a", 1)]
    assert pins.unpin(store, [("ran/a", 1)]) == []
    assert pins.pinned(store.names()) == [] and pins.pinned(store.names(), "fork") == [("ran/a", 1)]


def test_nothing_forgets_what_is_pinned(store: Store) -> None:
    for number in range(4):
        publish(store, f"run/step-{number}", {"f": noise(number)})
    pins.pin(store, [("run/step-1", 1)])
    with pytest.raises(UsageError, match="pinned: unpin it"):
        forget(store, [store.resolve("run/step-1")])
    decided = retain(store, Rules(keep_last=1))
    assert [one.path for one in decided.drop] == ["run/step-0", "run/step-2"]
    assert retain(store, Rules(keep_last=1)).drop == ()
    store.log.unbind(["run/step-1"])
    assert contents(store, "run/step-1@1") == {"f": noise(1)}
    with pytest.raises(UsageError):
        store.log.forget([("run/step-1", 1)])
    pins.unpin(store, [("run/step-1", 1)])
    store.log.forget([("run/step-1", 1)])
    assert not store.names().versions("run/step-1")


def test_a_pin_needs_a_version_and_a_writer(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    with pytest.raises(NotFoundError, match="no version 2"):
        pins.pin(store, [("a", 2)])
    with Store.open(store.path, index_path=store.path.parent / "other") as other, pytest.raises(UsageError):
        pins.pin(other, [("a", 1)])
    assert not store.names().pins() and "pins" not in store.config.read_only_compatible


def test_who_does_not_know_pins_may_read_but_not_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, "a", {"f": noise(1)})
    pins.pin(store, [("a", 1)])
    config: Config = load_config(store.backend)
    assert config.read_only_compatible == ("pins",)
    monkeypatch.setattr("moonclipfs.store.config._WRITER_FEATURES", frozenset({"layers"}))
    with pytest.raises(FormatVersionError, match="pins"):
        Store.open(store.path, write=True)
    with Store.open(store.path, index_path=store.path.parent / "other") as other:
        assert contents(other, "a") == {"f": noise(1)}


def test_a_pin_outlives_the_records_before_a_checkpoint(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOG_CHECKPOINT_EVERY", 3)
    publish(store, "kept", {"f": noise(0)})
    pins.pin(store, [("kept", 1)])
    for number in range(12):
        publish(store, f"a/{number}", {"f": noise(number)})
    store.log.trim()
    assert Log(store.backend).refresh().pins() == {("kept", 1): ("pinned",)}


_PIN_MANY = """
import sys
from pathlib import Path
from moonclipfs.store import pins
from moonclipfs.store.store import Store
path, first = Path(sys.argv[1]), int(sys.argv[2])
with Store.open(path, write=True, index_path=path.parent / f"index-{first}") as store:
    for number in range(first, 20, 2):
        pins.pin(store, [(f"run/{number}", 1)])
        if number % 4 == first:
            pins.unpin(store, [(f"run/{number}", 1)])
"""


def test_c31_two_processes_never_overwrite_each_others_pins(store: Store) -> None:
    for number in range(20):
        publish(store, f"run/{number}", {"f": b"%d" % number})
    workers = [subprocess.Popen([sys.executable, "-c", _PIN_MANY, str(store.path), first]) for first in "01"]
    assert [worker.wait() for worker in workers] == [0, 0]
    expected = [(f"run/{number}", 1) for number in range(20) if number % 4 not in (0, 1)]
    assert pins.pinned(store.names()) == expected
    assert retain(store, Rules(keep_last=1)).drop and pins.pinned(store.names()) == expected


def test_rules_are_applied_to_the_names_that_the_record_follows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process pins and saves between the decision and the record."""
    for number in range(4):
        publish(store, f"run/{number}", {"f": noise(number)})
    create = Log._create
    with Store.open(store.path, write=True, index_path=store.path.parent / "other") as other:

        def late(log: Log, *arguments: object) -> object:
            if log is store.log and not other.names().pins():
                pins.pin(other, [("run/0", 1)])
                publish(other, "run/4", {"f": noise(4)})
            return create(log, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Log, "_create", late)
        decided = retain(store, Rules(keep_last=2))
    assert [one.path for one in decided.drop] == ["run/1", "run/2"]
    assert sorted(store.names().bound()) == ["run/0", "run/3", "run/4"]
