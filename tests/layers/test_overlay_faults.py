"""What goes wrong with one overlay while it is in use: it goes on, or is let go, and no other is harmed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from moonclipfs.errors import BusyError, CorruptError, NoSpaceError
from moonclipfs.layers import overlayencoder
from moonclipfs.layers.live import Live, LiveOptions
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.gc import collect
from moonclipfs.store.layerdirs import layer_names
from moonclipfs.store.overlaydirs import find_overlay, naming, overlay_infos, pinned_versions, sweep
from moonclipfs.store.store import Store
from tests.layers.filekit import read_all
from tests.layers.publish import publish
from tests.layers.sealkit import model, put, tree

ExpectLog = Callable[[str], None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index.sqlite") as opened:
        publish(opened, "base", {"f": b"hello" * 30, "d": {"x": b"1"}})
        yield opened


@pytest.fixture
def overlays(store: Store) -> Iterator[Overlays]:
    with Overlays(store) as made:
        yield made


def test_a_discard_that_fails_leaves_it_at_work(
    store: Store, overlays: Overlays, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = overlays.create("one", "base")
    put(overlay.layer, "f", b"before")
    with monkeypatch.context() as patch:
        patch.setattr("moonclipfs.layers.overlay.remove_overlay", _raise(NoSpaceError("the disk is full")))
        with pytest.raises(NoSpaceError):
            overlays.discard("one")
    assert overlays.get("one") is overlay and not overlay.is_ending
    put(overlay.layer, "f", b"after")
    assert overlay.commit("result").number == 1
    put(overlay.layer, "g", b"staged")
    overlays.release(overlay)
    with Overlay.open(store, "one") as again:  # its lock is free, and what was staged is there
        assert tree(again.layer) == {"f": b"after", "d/x": b"1", "g": b"staged"}


def test_a_discard_of_which_the_name_went_lets_go_of_it(
    store: Store, overlays: Overlays, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay = overlays.create("one", "base")

    def fail(backend: LocalBackend, name: str) -> None:
        monkeypatch.undo()
        os.unlink(backend.path(f"overlays/{name}"))
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr("moonclipfs.layers.overlay.remove_overlay", fail)
    with pytest.raises(NoSpaceError):
        overlays.discard("one")
    assert overlay.closed and overlays.opened() == [] and layer_names(store.path)
    assert sweep(store.backend) == [] and layer_names(store.path) == []


def test_an_overlay_has_one_name_however_renames_and_rebases_meet(
    store: Store, overlays: Overlays, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "base", {"f": b"newer"})
    overlay = overlays.create("one", "base@1")
    renaming = threading.Thread(target=overlays.rename, args=("one", "two"))

    def meet(backend: LocalBackend) -> AbstractContextManager[None]:
        if not renaming.ident:
            renaming.start()
            time.sleep(0.2)
        return naming(backend)

    monkeypatch.setattr("moonclipfs.layers.overlay.naming", meet)
    overlays.rebase("one")
    renaming.join()
    assert overlays.names() == ["two"] and overlay.name == "two"
    assert find_overlay(store.path, "two") == overlay.info and overlay.info.base == "base@2"


def test_what_was_there_before_a_rebase_counts_for_no_quota(store: Store, overlays: Overlays) -> None:
    """Also where the kernel knows it, or has it open."""
    overlay = overlays.create("one", "base", quota=100_000)
    inode = put(overlay.layer, "f", b"x" * 60_000)
    overlay.layer.remember(inode)
    file = overlay.layer.open_file(put(overlay.layer, "d/x", b"x" * 30_000), write=False)
    publish(store, "base", {"f": b"newer"})
    overlays.rebase("one")
    assert overlay.used == 0 and file.read(0, 2) == b"xx"
    put(overlay.layer, "g", b"y" * 80_000)
    file.close()
    overlay.layer.forget(inode, 1)
    assert overlay.used == 80_000


def test_an_overlay_that_cannot_be_opened_is_free_for_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with Overlays(store) as overlays:
        overlays.create("one", "base")
    _describe(store, "one", base="something else")  # so that the name has to be put right
    with monkeypatch.context() as patch:
        patch.setattr("moonclipfs.layers.overlay.naming", _raise(BusyError("the names are locked")))
        with pytest.raises(BusyError):
            Overlay.open(store, "one")
    with Overlay.open(store, "one") as overlay:
        assert overlay.info.base == find_overlay(store.path, "one").base == "base@1"


@pytest.mark.parametrize(
    "fields",
    [
        {"quota": "1"},
        {"base": ["x"]},
        {"base_path": 1},
        {"base_sequence": "1"},
        {"created_ns": None},
        {"ephemeral": "no"},
        {"owner": [1]},
        {"layer": "../other"},
        {"base_root": "00"},
    ],
    ids=str,
)
def test_a_description_with_odd_fields_is_damaged(store: Store, overlays: Overlays, fields: dict[str, object]) -> None:
    overlays.create("one", "base")
    _describe(store, "one", **fields)
    with pytest.raises(CorruptError, match=r"overlays/one is damaged .*discard it"):
        find_overlay(store.path, "one")


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_a_damaged_description_is_in_the_way_of_nothing_but_what_it_pins(
    store: Store, kind: str, expect_log: ExpectLog
) -> None:
    """What is no regular file is not waited for; other overlays work, and gc does; it can be discarded."""
    with Overlays(store) as overlays:
        put(overlays.create("good", "base").layer, "g", b"1")
        overlays.create("one", "base")
    path = store.path / "overlays" / "one"
    path.unlink()
    {"pipe": os.mkfifo, "directory": os.mkdir, "link": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    for look in (overlay_infos, lambda root: pinned_versions(root, store.names())):
        with pytest.raises(CorruptError, match="overlays/one is damaged"):
            look(store.path)
    problems = collect(store, wait_seconds=0).problems
    assert len(problems) == 1 and "overlays/one is damaged" in problems[0]
    with Overlays(store) as overlays:
        assert tree(overlays.get("good").layer)["g"] == b"1"
        if kind != "directory":
            overlays.discard("one")
            assert overlays.names() == ["good"]
            expect_log("overlay one is discarded as it is")
    expect_log("nothing of overlays is cleared away: overlays/one is damaged")


def test_seals_go_on_beside_a_damaged_overlay(store: Store, expect_log: ExpectLog) -> None:
    """What it stands on is not known, so that no older version is dropped meanwhile."""
    with Overlays(store) as overlays:
        overlays.create("one", "base")
    (store.path / "overlays" / "one").write_bytes(b"garbage")
    for number in range(3):
        live = Live(store, LiveOptions(seal_after=60, keep_versions=1))
        live.start()
        put(live.layer, "run/model.safetensors", model(number))
        assert live.close() == []
    assert [version.number for version in store.names().versions("run")] == [1, 2, 3]
    expect_log("run: its older versions are kept: overlays/one is damaged")


def test_gc_goes_on_where_nothing_of_overlays_can_be_cleared_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonclipfs.store.gc.sweep", _raise(NoSpaceError("the disk is full")))
    assert collect(store, wait_seconds=0).problems == ["nothing of overlays is cleared away: the disk is full"]


def test_an_encoder_that_waits_for_its_turn_does_not_start_once_the_overlay_ended(overlays: Overlays) -> None:
    """Else it would work in a layer that others may have by then."""
    overlay = overlays.create("one", "base")
    inode = put(overlay.layer, "f", b"staged" * 100)
    slots = overlayencoder._SLOTS
    for _ in range(slots._initial_value):  # type: ignore[attr-defined]
        slots.acquire()
    failures: list[BaseException] = []

    def flush() -> None:
        try:
            overlay.encoder.drain()
        except BusyError as error:
            failures.append(error)

    waiting = threading.Thread(target=flush)
    try:
        waiting.start()
        time.sleep(0.1)
        overlay.encoder.end()
        waiting.join(5)
        assert not waiting.is_alive() and len(failures) == 1
    finally:
        for _ in range(slots._initial_value):  # type: ignore[attr-defined]
            slots.release()
    overlay.encoder.resume()
    overlay.encoder.drain()
    assert read_all(overlay.layer, inode) == b"staged" * 100 and overlay.layer.staging.used == 0


def test_closing_does_not_wait_for_what_is_encoded_in_the_background(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unmount lets go of overlays as they are."""
    overlays = Overlays(store)
    overlay = overlays.create("one", "base")
    put(overlay.layer, "f", b"staged")
    begun = threading.Event()

    def encode(*arguments: object) -> None:
        begun.set()
        assert overlay.encoder._encoder is not None
        overlay.encoder._encoder._stopping.wait(20)

    monkeypatch.setattr("moonclipfs.layers.encoder.Encoder._encode", encode)
    overlay.encoder.wake()
    assert begun.wait(10)
    started = time.monotonic()
    assert overlays.close() == [] and time.monotonic() - started < 5
    with Overlay.open(store, "one") as again:
        assert tree(again.layer)["f"] == b"staged"


def _raise(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def _describe(store: Store, name: str, **fields: object) -> None:
    path = store.path / "overlays" / name
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}))
