"""A plain output directory that is watched: what is absorbed when, and what is deleted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonclipfs.errors import CorruptError, NoSpaceError, NotFoundError, PermissionDeniedError, UsageError
from moonclipfs.layers import watching
from moonclipfs.layers.watching import Absorbed, Watcher, watch, watch_once
from moonclipfs.store import move
from moonclipfs.store.add import AddReport, add
from moonclipfs.store.store import Store
from tests.formats.samples import entry, safetensors

QUIET = 10.0


def model(seed: int) -> bytes:
    data = bytes((seed * 7 + i) % 251 for i in range(4000))
    return safetensors({"w": entry("U8", [4000], 0, 4000)}, data)


def save(directory: Path, step: int, *, state: bool = True) -> Path:
    """A checkpoint as Trainer lays it out; each is a second newer than the one before."""
    place = directory / f"checkpoint-{step}"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(model(step))
    (place / "config.json").write_text("{}")
    if state:
        (place / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    for file in place.iterdir():
        os.utime(file, ns=(step * 10**9, step * 10**9))
    return place


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def settle(watcher: Watcher, start: float = 0.0) -> list[Absorbed]:
    """Look, and again when all was quiet for long enough."""
    return [*watcher.tick(start), *watcher.tick(start + QUIET)]


def names(store: Store) -> list[str]:
    return sorted(store.names().bound())


def test_a_finished_checkpoint_is_absorbed_when_it_was_quiet(store: Store, output: Path) -> None:
    """A watched directory's checkpoints become snapshots below its name when they are complete and were quiet."""
    watcher = Watcher(output, store, quiet=QUIET)
    place = save(output, 500)
    assert watcher.tick(0.0) == []
    assert watcher.tick(QUIET - 1) == []
    (place / "late.txt").write_text("still writing")
    assert watcher.tick(QUIET) == []
    (done,) = watcher.tick(2 * QUIET)
    assert (done.path, done.version.path, done.new) == (place, "out/checkpoint-500", True)
    assert watcher.tick(3 * QUIET) == [] and not watcher.pending
    version = store.names().bound()["out/checkpoint-500"]
    reader = store.open_file(store.lookup(version, b"model.safetensors"))
    assert reader.read(0, reader.size) == model(500)
    assert place.is_dir()


def test_what_is_incomplete_stays(store: Store, output: Path) -> None:
    """A watched checkpoint that is truncated, or lacks what its siblings have, is left as it is, and told of."""
    save(output, 1)
    watcher = Watcher(output, store, keep_plain=0, quiet=QUIET)
    settle(watcher)
    short = save(output, 2, state=False)
    cut = save(output, 3)
    (cut / "model.safetensors").write_bytes(model(3)[:-1])
    assert settle(watcher, 100.0) == []
    assert watcher.missing()[str(short)] == ["trainer_state.json: missing, and its siblings have it"]
    assert "truncated" in watcher.missing()[str(cut)][0]
    assert names(store) == ["out/checkpoint-1"] and short.is_dir() and cut.is_dir()
    (cut / "model.safetensors").write_bytes(model(3))
    assert [done.version.path for done in settle(watcher, 200.0)] == ["out/checkpoint-3"]


@pytest.mark.parametrize("name", ["tmp-checkpoint-5", "checkpoint-5.tmp", ".tmp5"])
def test_temporary_directories_are_passed_over(store: Store, output: Path, name: str) -> None:
    save(output, 5).rename(output / name)
    assert settle(Watcher(output, store, quiet=QUIET)) == []


def test_an_open_writer_is_waited_for(store: Store, output: Path) -> None:
    """A watched checkpoint that a process has open for writing is not absorbed."""
    place = save(output, 5)
    watcher = Watcher(output, store, quiet=QUIET)
    with (place / "config.json").open("r+b"):
        assert settle(watcher) == []
        assert "open for writing" in watcher.missing()[str(place)][0]
    assert len(watcher.tick(1000.0)) == 1


def test_only_the_newest_stay_as_plain_files(store: Store, output: Path) -> None:
    """With --keep-plain K only the newest K checkpoints beside each other stay; the rest is in the store, verified."""
    places = [save(output, step) for step in (500, 1000, 1500, 2000)]
    other = save(output / "other", 1)
    (output / "model.safetensors").write_bytes(model(0))
    watcher = Watcher(output, store, as_name="runs/a", keep_plain=2, quiet=QUIET)
    assert [done.version.path for done in settle(watcher)] == [
        "runs/a/checkpoint-500", "runs/a/checkpoint-1000", "runs/a/checkpoint-1500", "runs/a/checkpoint-2000",
        "runs/a/other/checkpoint-1",
    ]  # fmt: skip
    assert [place.is_dir() for place in places] == [False, False, True, True]
    assert other.is_dir() and (output / "model.safetensors").is_file()
    assert sorted(os.listdir(output)) == ["checkpoint-1500", "checkpoint-2000", "model.safetensors", "other"]
    for step in (500, 1000):
        version = store.names().bound()[f"runs/a/checkpoint-{step}"]
        reader = store.open_file(store.lookup(version, b"model.safetensors"))
        assert reader.read(0, reader.size) == model(step)


def test_a_watcher_that_starts_again_publishes_nothing_twice(store: Store, output: Path) -> None:
    """A watcher that was stopped goes on where it was: what is stored is verified again, and makes no new version."""
    for step in (1, 2, 3):
        save(output, step)
    settle(Watcher(output, store, quiet=QUIET))
    sequence = store.names().sequence
    again = settle(Watcher(output, store, keep_plain=1, quiet=QUIET))
    assert [(done.version.path, done.new) for done in again] == [
        ("out/checkpoint-1", False), ("out/checkpoint-2", False), ("out/checkpoint-3", False),
    ]  # fmt: skip
    assert store.names().sequence == sequence
    assert os.listdir(output) == ["checkpoint-3"]


def test_a_changed_checkpoint_becomes_another_version(store: Store, output: Path) -> None:
    place = save(output, 1)
    watcher = Watcher(output, store, quiet=QUIET)
    settle(watcher)
    (place / "config.json").write_text('{"changed": true}')
    (done,) = settle(watcher, 100.0)
    assert (done.version.number, done.new) == (2, True)


def test_what_changed_after_it_was_verified_is_not_deleted(
    store: Store, output: Path, expect_log: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that changed after it was verified is not deleted."""
    place = save(output, 1)
    save(output, 2)
    delete = move.delete

    def late(*arguments: object) -> None:
        (place / "config.json").write_text("late")
        delete(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(move, "delete", late)
    expect_log("checkpoint-1 stays: .* changed since it was stored")
    settle(Watcher(output, store, keep_plain=1, quiet=QUIET))
    assert (place / "config.json").read_text() == "late" and (place / "model.safetensors").is_file()


def test_what_was_forgotten_meanwhile_is_not_deleted(store: Store, output: Path) -> None:
    save(output, 1)
    watcher = Watcher(output, store, keep_plain=1, quiet=QUIET)
    settle(watcher)
    store.log.forget([("out/checkpoint-1", 1)])
    save(output, 2)
    settle(watcher, 100.0)
    assert sorted(os.listdir(output)) == ["checkpoint-1", "checkpoint-2"]


def test_bytes_that_do_not_come_back_are_an_error(store: Store, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store does not give back byte for byte is not deleted, and stops the watcher."""
    place = save(output, 1)

    def broken(*_: object) -> int:
        raise CorruptError("the store gives back other bytes")

    monkeypatch.setattr(move, "verify", broken)
    watcher = Watcher(output, store, keep_plain=0, quiet=QUIET)
    with pytest.raises(CorruptError):
        settle(watcher)
    assert place.is_dir()


def test_an_interrupted_deletion_is_ended(store: Store, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that was interrupted is ended by the next watcher; what is left of it is never a checkpoint."""
    save(output, 1)
    save(output, 2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(move, "_clear", killed)
    with pytest.raises(KeyboardInterrupt):
        settle(Watcher(output, store, keep_plain=1, quiet=QUIET))
    assert len(os.listdir(output)) == 2
    monkeypatch.undo()
    settle(Watcher(output, store, keep_plain=1, quiet=QUIET))
    assert os.listdir(output) == ["checkpoint-2"]
    assert names(store) == ["out/checkpoint-1", "out/checkpoint-2"]


def test_links_that_lead_out_keep_a_checkpoint(
    store: Store, output: Path, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    (save(output, 1) / "data").symlink_to(tmp_path)
    expect_log("1 symbolic link leads out")
    expect_log("checkpoint-1 stays: its symbolic link")
    settle(Watcher(output, store, keep_plain=0, quiet=QUIET))
    assert names(store) == ["out/checkpoint-1"] and (output / "checkpoint-1" / "data").is_symlink()


def test_a_directory_that_is_itself_a_checkpoint_is_absorbed_and_stays(store: Store, output: Path) -> None:
    (output / "epoch=1.ckpt").write_bytes(b"PK1")
    watcher = Watcher(output, store, keep_plain=0, quiet=QUIET)
    assert [done.version.path for done in settle(watcher)] == ["out"]
    (output / "epoch=2.ckpt").write_bytes(b"PK2")
    assert [done.version.number for done in settle(watcher, 100.0)] == [2]
    assert len(os.listdir(output)) == 2


def test_watching_what_cannot_be_watched(store: Store, output: Path) -> None:
    with pytest.raises(NotFoundError):
        Watcher(output / "none", store)
    with pytest.raises(UsageError):
        Watcher(output, store, keep_plain=-1)
    with pytest.raises(UsageError):
        Watcher(output, store, as_name="@latest")
    inside = Watcher(store.path.parent, store, quiet=QUIET)
    with pytest.raises(UsageError, match="store itself"):
        inside.tick(0.0)


def test_a_checkpoint_that_may_not_be_read_keeps_no_other_from_being_absorbed(
    store: Store, output: Path, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    def refusing(store: Store, paths: list[Path], **options: Any) -> AddReport:
        if paths[0].name == "checkpoint-1":
            raise PermissionDeniedError(f"cannot read {paths[0]}: Permission denied")
        return add(store, paths, **options)

    expect_log("checkpoint-1 is not absorbed yet: .*Permission denied")
    monkeypatch.setattr(watching, "add", refusing)
    save(output, 1)
    save(output, 2)
    watcher = Watcher(output, store, quiet=0.1)
    done = list(watch_once(watcher, threading.Event(), 0.05))
    assert [one.version.path for one in done] == ["out/checkpoint-2"]
    assert "Permission denied" in str(watcher.missing())


def test_looking_once_ends_when_the_rest_is_incomplete(store: Store, output: Path) -> None:
    save(output, 1)
    (save(output, 2) / "model.safetensors").write_bytes(b"")
    done = list(watch_once(Watcher(output, store, quiet=0.1), threading.Event(), 0.05))
    assert [one.version.path for one in done] == ["out/checkpoint-1"]


def test_a_full_disk_is_waited_for(
    store: Store, output: Path, monkeypatch: pytest.MonkeyPatch, expect_log: Callable[[str], None]
) -> None:
    """While the disk is full a watcher absorbs nothing, says so once, and goes on when there is room."""
    save(output, 1)
    stop, failures = threading.Event(), [0]
    tick = Watcher.tick

    def full(watcher: Watcher, now: float | None = None) -> list[Absorbed]:
        if failures[0] < 3:
            failures[0] += 1
            raise NoSpaceError("the disk is full")
        return tick(watcher, now)

    monkeypatch.setattr(Watcher, "tick", full)
    expect_log("nothing is absorbed at the moment: the disk is full")
    for done in watch(Watcher(output, store, quiet=0.0), stop, 0.01):
        assert done.new
        stop.set()
    assert names(store) == ["out/checkpoint-1"]
