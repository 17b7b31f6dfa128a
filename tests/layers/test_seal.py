"""Seals: captures become versions, the live tree stays as it is, and quiet, complete checkpoints seal themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from moonclipfs.errors import BusyError, NoSpaceError, NotFoundError, UsageError
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.seal import Sealer, note_writer
from moonclipfs.store.store import Store
from tests.layers import publish as plain
from tests.layers.filekit import overwrite
from tests.layers.sealkit import LocalEncoder, directory, identities, model, put, stored, tree

NOW = 1_000.0
QUIET = 60.0


@pytest.fixture
def layer(store: Store) -> Iterator[Layer]:
    opened = Layer.open(store, "host")
    yield opened
    opened.close()


@pytest.fixture
def sealer(layer: Layer) -> Sealer:
    return Sealer(layer, LocalEncoder(layer), seal_after=QUIET)


def settle(sealer: Sealer, start: float = NOW) -> None:
    """Two ticks with quiet between them."""
    sealer.tick(start)
    sealer.tick(start + QUIET)


def names(store: Store) -> dict[str, int]:
    return {path: version.number for path, version in store.names().bound().items()}


# Told to


def test_a_sealed_directory_is_a_version(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A seal makes what a directory holds at that moment the next version of the snapshot at its path."""
    put(layer, "run/a/model.safetensors", model())
    put(layer, "run/a/deep/x", b"x" * 100_000)
    version = sealer.seal(b"run/a")
    assert version is not None and (version.path, version.number) == ("run/a", 1)
    assert stored(store, version) == {"model.safetensors": model(), "deep/x": b"x" * 100_000}
    assert (version.metadata["automatic"], version.metadata["layer"]) == (False, "host")
    put(layer, "run/a/model.safetensors", model(1))
    second = sealer.seal(b"run/a")
    assert second is not None and second.number == 2
    assert stored(store, second)["model.safetensors"] == model(1)
    assert stored(store, version)["model.safetensors"] == model()


def test_a_seal_changes_nothing_of_the_live_tree(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A seal changes no inode number, mode, time, size or link count of the live tree, also over a remount."""
    plain.publish(
        store, "run/a", {"base": b"b" * 9000, "d": {"in": b"1"}, **{n: plain.File(b"2", link_group=1) for n in "pq"}}
    )
    layer.refresh(1)
    put(layer, "run/a/new", model())
    linked = put(layer, "run/a/d/linked", b"3")
    layer.link(linked, directory(layer, "run/a"), b"other", 5)
    layer.set_attributes(layer.resolve(b"run/a/p"), mode=0o600, now_ns=6)
    before = identities(layer, "run/a")
    assert sealer.seal(b"run/a") is not None
    assert identities(layer, "run/a") == before
    layer.refresh(9)
    assert identities(layer, "run/a") == before
    sealer.seal(b"run/a", metadata={"note": "again"})
    assert identities(layer, "run/a") == before
    layer.close()
    layer = Layer.open(store, "host")
    assert identities(layer, "run/a") == before
    layer.close()


def test_hard_links_stay_hard_links(store: Store, layer: Layer, sealer: Sealer) -> None:
    """Files that are hard links of each other are so in the version, and stay so in the live tree across a seal."""
    file = put(layer, "run/a/x", b"1")
    layer.link(file, directory(layer, "run/a/d"), b"y", 5)
    layer.link(file, layer.root, b"outside", 5)
    version = sealer.seal(b"run/a")
    assert version is not None
    groups = {path: entry.link_group for path, entry in store.walk(version)}
    assert groups[b"x"] == groups[b"d/y"] != 0
    assert layer.stat(file).nlink == 3
    overwrite(layer, file, b"changed")
    assert tree(layer) == {"outside": b"changed", "run/a/x": b"changed", "run/a/d/y": b"changed"}
    second = sealer.seal(b"run/a")
    assert second is not None and stored(store, second) == {"x": b"changed", "d/y": b"changed"}


def test_what_is_removed_after_a_seal_stays_removed(store: Store, layer: Layer, sealer: Sealer) -> None:
    """What was removed, made or changed after the capture is so in the live tree after the seal."""
    for name in ("a", "b", "c"):
        put(layer, f"run/x/{name}", name.encode())
    sealer.before_publish = lambda capture: meddle()

    def meddle() -> None:
        place = layer.resolve(b"run/x")
        layer.unlink(place, b"a", 5)
        put(layer, "run/x/b", b"later")
        overwrite(layer, layer.resolve(b"run/x/c"), b"over")
        put(layer, "run/x/d", b"new")

    version = sealer.seal(b"run/x")
    assert version is not None and stored(store, version) == {"a": b"a", "b": b"b", "c": b"c"}
    later = {"b": b"later", "c": b"over", "d": b"new"}
    assert tree(layer, "run/x") == later
    layer.refresh(9)
    sealer.before_publish = lambda capture: None
    second = sealer.seal(b"run/x")
    assert second is not None and stored(store, second) == later == tree(layer, "run/x")


def test_nothing_new_makes_no_version(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A seal of a directory without changes returns the version that is there."""
    put(layer, "run/a/x", b"1")
    first = sealer.seal(b"run/a")
    assert sealer.seal(b"run/a") == first and names(store) == {"run/a": 1}
    overwrite(layer, layer.resolve(b"run/a/x"), b"2")
    layer.unlink(layer.resolve(b"run/a"), b"x", 3)
    assert sealer.seal(b"run/a") is not None


def test_what_cannot_be_sealed(layer: Layer, sealer: Sealer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root, files and what is open for writing cannot be sealed: the error says which."""
    put(layer, "run/a/x", b"1")
    with pytest.raises(UsageError, match="below the root"):
        sealer.seal(b"")
    with pytest.raises(UsageError):
        sealer.seal(b"run/a/x")
    with pytest.raises(NotFoundError):
        sealer.seal(b"run/none")
    monkeypatch.setattr("moonclipfs.limits.SEAL_WRITERS_SECONDS", 0.05)
    file = layer.open_file(layer.resolve(b"run/a/x"), write=True)
    with pytest.raises(BusyError, match="run/a/x is open for writing"):
        sealer.seal(b"run/a")
    file.close()
    assert sealer.seal(b"run/a") is not None


def test_no_wait_captures_now_and_publishes_later(store: Store, layer: Layer, sealer: Sealer) -> None:
    """Without waiting, a seal captures the directory at once, and the next tick publishes it."""
    put(layer, "run/a/x", b"1")
    assert sealer.seal(b"run/a", wait=False) is None
    put(layer, "run/a/x", b"2")
    assert names(store) == {} and len(layer.captures) == 1
    sealer.tick(NOW)
    assert len(layer.captures) == 0
    assert stored(store, store.names().bound()["run/a"]) == {"x": b"1"}
    assert tree(layer, "run/a") == {"x": b"2"}


def test_pending_captures_survive_and_publish_in_order(store: Store, layer: Layer, sealer: Sealer) -> None:
    """Captures that are not published survive kill -9 and remounts, with the bytes they had, and publish in order."""
    big, small = os.urandom(200_000), b"small"
    put(layer, "run/a/big", big)
    put(layer, "run/a/small", small)
    sealer.seal(b"run/a", wait=False)
    overwrite(layer, layer.resolve(b"run/a/big"), b"2")
    layer.unlink(layer.resolve(b"run/a"), b"small", 3)
    sealer.seal(b"run/a", wait=False)
    layer.sync_all()
    layer.files.checkpoint()
    layer.close()
    layer = Layer.open(store, "host")
    assert len(layer.captures) == 2
    LocalEncoder(layer).drain()
    layer.sync_all()
    Sealer(layer, LocalEncoder(layer)).tick(NOW)
    first, second = store.names().versions("run/a")
    assert stored(store, first) == {"big": big, "small": small}
    assert stored(store, second) == {"big": b"2"} == tree(layer, "run/a")
    layer.sync_all()
    assert layer.staged()["staged_bytes"] == 0 or layer.staged()["staged_files"] > 0
    layer.close()


def test_a_failed_publish_is_tried_again(
    store: Store, layer: Layer, sealer: Sealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that cannot be published stays, and is tried again."""
    put(layer, "run/a/x", b"1")
    call = LocalEncoder.call

    def fail(*_: Any, **__: Any) -> Any:
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(LocalEncoder, "call", fail)
    with pytest.raises(NoSpaceError):
        sealer.seal(b"run/a")
    with pytest.raises(NoSpaceError):
        sealer.tick(NOW)
    sealer.tick(NOW + 1)
    assert len(layer.captures) == 1
    monkeypatch.setattr(LocalEncoder, "call", call)
    sealer.tick(NOW + 100)
    assert names(store) == {"run/a": 1} and len(layer.captures) == 0


def test_a_directory_renamed_before_publishing_is_published_where_it_is(
    store: Store, layer: Layer, sealer: Sealer
) -> None:
    """A directory that is renamed between its capture and its publishing becomes a version at its new path."""
    put(layer, "run/a/x", b"1")
    sealer.seal(b"run/a", wait=False)
    layer.rename(layer.resolve(b"run"), b"a", layer.root, b"b", 5)
    sealer.tick(NOW)
    assert names(store) == {"b": 1}
    assert tree(layer) == {"b/x": b"1"}


def test_a_directory_renamed_while_it_is_published_takes_its_name_along(
    store: Store, layer: Layer, sealer: Sealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(layer, "run/a/x", b"1")
    call = LocalEncoder.call

    def slow(encoder: LocalEncoder, op: str, **arguments: Any) -> Any:
        answer = call(encoder, op, **arguments)
        layer.rename(layer.resolve(b"run"), b"a", layer.root, b"b", 5)
        return answer

    monkeypatch.setattr(LocalEncoder, "call", slow)
    version = sealer.seal(b"run/a")
    assert version is not None and version.path == "b"
    assert names(store) == {"b": 1}
    assert tree(layer) == {"b/x": b"1"}


def test_a_directory_removed_before_publishing_is_kept_as_a_version(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A directory that is removed between its capture and its publishing is in @versions, and bound nowhere."""
    put(layer, "run/a/x", os.urandom(100_000))
    before = tree(layer, "run/a")
    sealer.seal(b"run/a", wait=False)
    layer.unlink(layer.resolve(b"run/a"), b"x", 3)
    layer.rmdir(layer.resolve(b"run"), b"a", 4)
    layer.sync_all()
    sealer.tick(NOW)
    assert names(store) == {}
    (version,) = store.names().versions("run/a")
    assert version.removed and stored(store, version) == before
    layer.sync_all()
    assert layer.staging.used == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_directory_removed_while_it_is_published_does_not_come_back(
    store: Store, layer: Layer, sealer: Sealer, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    put(layer, "run/a/x", b"0")
    if again:
        sealer.seal(b"run/a")
        put(layer, "run/a/x", b"1")
    call = LocalEncoder.call

    def slow(encoder: LocalEncoder, op: str, **arguments: Any) -> Any:
        answer = call(encoder, op, **arguments)
        layer.unlink(layer.resolve(b"run/a"), b"x", 5)
        layer.rmdir(layer.resolve(b"run"), b"a", 6)
        return answer

    monkeypatch.setattr(LocalEncoder, "call", slow)
    version = sealer.seal(b"run/a")
    assert version is not None and version.removed
    layer.push_names()
    layer.refresh(9)
    assert names(store) == {} and tree(layer) == {}
    assert len(store.names().versions("run/a")) == 1 + again


def test_a_removed_snapshot_made_again_starts_afresh(store: Store, layer: Layer, sealer: Sealer) -> None:
    put(layer, "run/a/x", b"1")
    put(layer, "run/a/y", b"1")
    sealer.seal(b"run/a")
    place = layer.resolve(b"run/a")
    for name in (b"x", b"y"):
        layer.unlink(place, name, 3)
    layer.rmdir(layer.resolve(b"run"), b"a", 4)
    put(layer, "run/a/x", b"2")
    version = sealer.seal(b"run/a")
    assert version is not None and version.number == 2 and stored(store, version) == {"x": b"2"}
    assert [bool(one.removed) for one in store.names().versions("run/a")] == [True, False]


def test_two_layers_that_write_different_files_end_in_one_snapshot(store: Store, layer: Layer, sealer: Sealer) -> None:
    """Two layers that seal one directory with different files end in one snapshot, which both show."""
    other = Layer.open(store, "other")
    second = Sealer(other, LocalEncoder(other))
    put(layer, "run/a/rank0", b"0")
    put(layer, "run/a/d/x", b"0")
    put(other, "run/a/rank1", b"1")
    put(other, "run/a/d/y", b"1")
    sealer.seal(b"run/a")
    second.seal(b"run/a")
    both = {"rank0": b"0", "rank1": b"1", "d/x": b"0", "d/y": b"1"}
    assert stored(store, store.names().bound()["run/a"]) == both
    for one in (layer, other):
        one.refresh(9)
        assert tree(one, "run/a") == both
    other.close()


def test_two_layers_that_write_one_file(store: Store, layer: Layer, sealer: Sealer) -> None:
    """Where two layers seal one file, the last seal wins, and both versions are kept."""
    put(layer, "run/a/x", b"0")
    sealer.seal(b"run/a")
    other = Layer.open(store, "other")
    second = Sealer(other, LocalEncoder(other))
    put(other, "run/a/x", b"theirs")
    put(layer, "run/a/x", b"ours")
    sealer.seal(b"run/a")
    second.seal(b"run/a")
    assert [stored(store, one)["x"] for one in store.names().versions("run/a")] == [b"0", b"ours", b"theirs"]
    layer.refresh(9)
    assert tree(layer, "run/a") == {"x": b"theirs"}
    other.close()


def test_what_others_move_leaves_no_empty_directories(store: Store, layer: Layer, sealer: Sealer) -> None:
    """Directories that names had made go with the last name below them, also where something was sealed in them."""
    other = Layer.open(store, "other")
    put(layer, "run/deep/a/x", b"0")
    sealer.seal(b"run/deep/a")
    other.refresh(1)
    put(other, "run/deep/a/y", b"1")
    Sealer(other, LocalEncoder(other)).seal(b"run/deep/a")
    layer.refresh(2)
    layer.rename(layer.root, b"run", layer.root, b"moved", 5)
    other.refresh(3)
    assert tree(other) == {"moved/deep/a/x": b"0", "moved/deep/a/y": b"1"}
    assert other.names_in(other.root) == [b"moved"]
    put(other, "moved/mine", b"2")
    layer.rename(layer.root, b"moved", layer.root, b"again", 5)
    other.refresh(4)
    assert set(tree(other)) == {"again/deep/a/x", "again/deep/a/y", "moved/mine"}
    other.close()


def test_what_others_changed_shows_after_a_seal(store: Store, layer: Layer, sealer: Sealer) -> None:
    """What others published into a directory with unsealed changes shows there when these are sealed."""
    put(layer, "run/a/x", b"0")
    put(layer, "run/a/z", b"0")
    put(layer, "run/a/d/w", b"0")
    sealer.seal(b"run/a")
    number = layer.resolve(b"run/a/z").number
    put(layer, "run/a/x", b"1")
    theirs: plain.Files = {"x": b"0", "z": b"theirs", "y": b"theirs", "d": {"w": b"0", "v": b"theirs"}}
    plain.publish(store, "run/a", theirs)
    layer.refresh(9)
    assert tree(layer, "run/a") == {"x": b"1", "z": b"0", "d/w": b"0"}
    sealer.seal(b"run/a")
    assert tree(layer, "run/a") == {"x": b"1", "z": b"theirs", "y": b"theirs", "d/w": b"0", "d/v": b"theirs"}
    assert layer.resolve(b"run/a/z").number != number


def test_snapshots_below_a_sealed_directory_keep_their_own_names(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A seal leaves out the snapshots that are bound below the directory: they have names of their own."""
    put(layer, "run/a/x", b"1")
    put(layer, "run/notes", b"n")
    sealer.seal(b"run/a")
    version = sealer.seal(b"run")
    assert version is not None and stored(store, version) == {"notes": b"n"}
    assert names(store) == {"run": 1, "run/a": 1}
    assert tree(layer) == {"run/a/x": b"1", "run/notes": b"n"}
    layer.refresh(9)
    assert tree(layer) == {"run/a/x": b"1", "run/notes": b"n"}


# By themselves


def test_a_quiet_complete_unit_seals_itself(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A unit that was quiet for --seal-after seconds and is complete is sealed by the mount, marked automatic."""
    put(layer, "run/checkpoint-5/model.safetensors", model())
    put(layer, "run/log.txt", b"text")
    sealer.tick(NOW)
    sealer.tick(NOW + QUIET - 1)
    assert names(store) == {}
    put(layer, "run/checkpoint-5/config.json", b"{}")
    sealer.tick(NOW + QUIET)
    assert names(store) == {}
    sealer.tick(NOW + 2 * QUIET)
    assert names(store) == {"run/checkpoint-5": 1}
    assert store.names().bound()["run/checkpoint-5"].metadata["automatic"] is True
    for late in range(3, 9):
        sealer.tick(NOW + late * QUIET)
    assert names(store) == {"run/checkpoint-5": 1}


def test_a_file_overwritten_at_every_save_gets_a_version_each(store: Store, layer: Layer, sealer: Sealer) -> None:
    for step in range(5):
        put(layer, "run/ckpt/last.ckpt", b"PK%d" % step)
        settle(sealer, NOW + step * 1000)
    versions = store.names().versions("run/ckpt")
    assert [one.number for one in versions] == [3, 4, 5]


def test_explicit_versions_are_kept(store: Store, layer: Layer, sealer: Sealer) -> None:
    """Of automatic versions the last --keep-versions of a name are kept; explicit ones until they are forgotten."""
    put(layer, "run/ckpt/last.ckpt", b"PKfirst")
    sealer.seal(b"run/ckpt")
    for step in range(5):
        put(layer, "run/ckpt/last.ckpt", b"PK%d" % step)
        settle(sealer, NOW + step * 1000)
    versions = store.names().versions("run/ckpt")
    assert [(one.number, one.metadata["automatic"]) for one in versions] == [
        (1, False),
        (4, True),
        (5, True),
        (6, True),
    ]


def test_an_open_writer_keeps_a_unit_open(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A unit with a file that is open for writing is not sealed by itself."""
    inode = put(layer, "run/a/model.safetensors", model())
    file = layer.open_file(inode, write=True)
    settle(sealer)
    assert names(store) == {} and "open for writing" in sealer.missing()["run/a"][0]
    file.close()
    sealer.tick(NOW + 5 * QUIET)
    sealer.tick(NOW + 6 * QUIET)
    assert names(store) == {"run/a": 1} and sealer.missing() == {}


def test_only_deletions_make_no_version(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A unit of which something was only deleted is not sealed anew by itself."""
    put(layer, "run/a/model.safetensors", model())
    put(layer, "run/a/optimizer.pt", b"PK")
    settle(sealer)
    layer.unlink(layer.resolve(b"run/a"), b"optimizer.pt", 3)
    settle(sealer, NOW + 1000)
    assert names(store) == {"run/a": 1}
    put(layer, "run/a/model.safetensors", model(1))
    settle(sealer, NOW + 2000)
    assert names(store) == {"run/a": 2}
    assert list(stored(store, store.names().bound()["run/a"])) == ["model.safetensors"]


def test_an_incomplete_unit_stays_open_and_is_marked_at_the_end(store: Store, layer: Layer, sealer: Sealer) -> None:
    """An incomplete unit stays open, status says what is missing, and a clean unmount seals it marked incomplete."""
    put(layer, "run/checkpoint-1/model.safetensors", model())
    put(layer, "run/checkpoint-1/optimizer.pt", b"PK")
    settle(sealer)
    put(layer, "run/checkpoint-2/model.safetensors", model(1))
    put(layer, "run/checkpoint-3/model.safetensors", model(1)[:-5])
    settle(sealer, NOW + 1000)
    assert names(store) == {"run/checkpoint-1": 1}
    missing = sealer.missing()
    assert missing["run/checkpoint-2"] == ["optimizer.pt: missing, and its siblings have it"]
    assert missing["run/checkpoint-3"][0].startswith("model.safetensors: truncated")
    put(layer, "run/checkpoint-4/model.safetensors", model(4))
    put(layer, "run/checkpoint-4/optimizer.pt", b"PK")
    sealer.close()
    bound = store.names().bound()
    marked = {path: version.metadata.get("incomplete", False) for path, version in bound.items()}
    assert marked == {f"run/checkpoint-{n}": n in (2, 3) for n in (1, 2, 3, 4)}
    put(layer, "run/checkpoint-2/optimizer.pt", b"PK")
    settle(sealer, NOW + 2000)
    version = store.names().bound()["run/checkpoint-2"]
    assert (version.number, version.metadata.get("incomplete")) == (2, None)


def test_off_means_that_nothing_seals_itself(store: Store, layer: Layer) -> None:
    """With --seal-after off nothing is sealed by itself, at the end neither."""
    sealer = Sealer(layer, LocalEncoder(layer), seal_after=None)
    put(layer, "run/a/model.safetensors", model())
    settle(sealer)
    sealer.seal(b"run/a", wait=False)
    put(layer, "run/b/model.safetensors", model())
    sealer.close()
    assert names(store) == {"run/a": 1}


def test_a_final_model_beside_checkpoints_is_sealed_explicitly(store: Store, layer: Layer, sealer: Sealer) -> None:
    """Files beside checkpoint-N directories belong to no unit: they wait for a seal of their directory."""
    put(layer, "out/checkpoint-5/model.safetensors", model())
    put(layer, "out/model.safetensors", model(1))
    put(layer, "out/trainer_state.json", b"{}")
    settle(sealer)
    sealer.close()
    assert names(store) == {"out/checkpoint-5": 1}
    version = sealer.seal(b"out")
    assert version is not None and set(stored(store, version)) == {"model.safetensors", "trainer_state.json"}


def test_a_tick_without_changes_looks_at_nothing(layer: Layer, sealer: Sealer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing changes, waiting for seals costs nothing."""
    put(layer, "run/a/x.txt", b"1")
    settle(sealer)
    monkeypatch.setattr("moonclipfs.layers.seal.open_units", lambda _: pytest.fail("looked"))
    for step in range(10):
        sealer.tick(NOW + 1000 + step)


def test_metadata_may_hold_any_bytes(store: Store, layer: Layer, sealer: Sealer) -> None:
    put(layer, "run/a/x", b"1")
    odd = os.fsdecode(b"caf\xe9")
    version = sealer.seal(b"run/a", metadata={"note": odd, "deep": {"list": [1, None, odd]}})
    assert version is not None and version.metadata["note"] == odd
    assert version.metadata["deep"] == {"list": [1, None, odd]}


def test_the_writing_process_is_told_in_the_log(store: Store, layer: Layer, sealer: Sealer) -> None:
    """A version says which command wrote it, and from where."""
    inode = put(layer, "run/a/model.safetensors", model())
    note_writer(layer, inode, os.getpid())
    note_writer(layer, inode, 2**22 + 1)
    note_writer(layer, layer.root, os.getpid())
    version = sealer.seal(b"run/a")
    assert version is not None
    assert version.metadata.get("provenance") is None  # the last writer is gone, and cannot be told
    note_writer(layer, inode, os.getpid())
    put(layer, "run/a/y", b"2")
    version = sealer.seal(b"run/a")
    assert version is not None
    provenance = version.metadata["provenance"]
    assert isinstance(provenance, dict) and sys.executable in provenance["command"] and provenance["cwd"] == os.getcwd()
