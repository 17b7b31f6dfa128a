"""Staged bytes that are lost: what needs them is told once and given up; all else goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError, StagingLostError
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.live import Live, LiveOptions
from moonclipfs.layers.seal import Sealer
from moonclipfs.store.store import Store
from tests.layers.filekit import overwrite, read_all
from tests.layers.sealkit import LocalEncoder, directory, model, put, stored

DATA = os.urandom(2 * limits.INLINE_BYTES)
LATER = 1000.0


@pytest.fixture
def layer(store: Store) -> Iterator[Layer]:
    opened = Layer.open(store, "host")
    yield opened
    opened.close()


def sealer_of(layer: Layer) -> Sealer:
    return Sealer(layer, LocalEncoder(layer), seal_after=None)


def staged_file(inode: Inode) -> str:
    assert inode.content is not None
    (generation,) = inode.content.generations()
    assert generation.path is not None
    return generation.path


def lose(layer: Layer, path: str) -> None:
    """Take a staging file away, from those who have it open too."""
    os.unlink(path)
    layer.staging.opened.drop(int(os.path.basename(path), 16))


def test_a_capture_whose_bytes_are_lost_is_given_up(
    store: Store, layer: Layer, expect_log: Callable[[str], None]
) -> None:
    """A capture whose staged bytes are lost is given up, and told: the next seal takes the directory as it is then."""
    sealer = sealer_of(layer)
    inode = put(layer, "run/a/big", DATA)
    put(layer, "run/a/small", b"small")
    sealer.seal(b"run/a", wait=False)
    lost = staged_file(inode)
    lose(layer, lost)
    expect_log(f"ERROR .*/run/a was not sealed as it was: run/a/big: staged bytes are lost: {lost} is gone")
    sealer.tick(LATER)
    assert len(layer.captures) == 0 and store.names().bound() == {}
    assert len(sealer.given_up()) == 1 and "run/a/big" in sealer.given_up()[0]
    assert read_all(layer, layer.resolve(b"run/a/small")) == b"small"
    with pytest.raises(CorruptError):
        read_all(layer, inode)
    for _ in range(2):
        with pytest.raises(StagingLostError, match=f"/run/a cannot be sealed: run/a/big: .*{lost}.*remove the file"):
            sealer.seal(b"run/a")
        assert len(layer.captures) == 0
    layer.unlink(directory(layer, "run/a"), b"big", 9)
    version = sealer.seal(b"run/a")
    assert version is not None and stored(store, version) == {"small": b"small"}
    assert sealer.given_up() == []
    layer.files.log.commit()
    assert not os.listdir(layer.staging.directory)


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_file_written_anew_is_sealed_after_a_restart(
    store: Store, damage: str, expect_log: Callable[[str], None]
) -> None:
    """A capture that only an earlier content of a file kept is given up at a clean end, which then seals the rest."""
    layer = Layer.open(store, "host")
    inode = put(layer, "run/a/big", DATA)
    put(layer, "run/a/model.safetensors", model())
    sealer_of(layer).seal(b"run/a", wait=False)
    lost = Path(staged_file(inode))
    overwrite(layer, inode, DATA[::-1])
    layer.close()
    if damage == "gone":
        lost.unlink()
    else:
        os.truncate(lost, len(DATA) - 1)
    expect_log("/run/a was not sealed as it was: run/a/big: staged bytes are lost: .*(is gone|ends at byte)")
    layer = Layer.open(store, "host")
    Sealer(layer, LocalEncoder(layer), seal_after=0.0).close()
    assert stored(store, store.resolve("run/a")) == {"big": DATA[::-1], "model.safetensors": model()}
    layer.close()
    layer = Layer.open(store, "host")
    assert len(layer.captures) == 0, "giving up is journalled"
    layer.close()


def test_one_directory_given_up_keeps_no_other_back(
    store: Store, layer: Layer, expect_log: Callable[[str], None]
) -> None:
    """Of several captures, the ones with all their bytes become versions, of the same directory too."""
    sealer = sealer_of(layer)
    inode = put(layer, "run/a/big", DATA)
    sealer.seal(b"run/a", wait=False)
    lost = staged_file(inode)
    overwrite(layer, inode, b"anew")
    sealer.seal(b"run/a", wait=False)
    put(layer, "run/b/x", b"b")
    sealer.seal(b"run/b", wait=False)
    lose(layer, lost)
    expect_log("/run/a was not sealed as it was")
    sealer.tick(LATER)
    bound = store.names().bound()
    assert stored(store, bound["run/a"]) == {"big": b"anew"} and stored(store, bound["run/b"]) == {"x": b"b"}
    assert len(layer.captures) == 0 and sealer.given_up() == []


def test_whoever_waits_for_a_seal_is_told(store: Store, layer: Layer, expect_log: Callable[[str], None]) -> None:
    """A seal whose bytes are lost while it is under way raises, and leaves no capture."""
    sealer = sealer_of(layer)
    inode = put(layer, "run/a/big", DATA)
    lost = staged_file(inode)

    def meanwhile(_: object) -> None:
        layer.unlink(directory(layer, "run/a"), b"big", 9)
        lose(layer, lost)

    sealer.before_publish = meanwhile
    sealer._drain = lambda capture: None  # type: ignore[method-assign]
    expect_log("/run/a was not sealed as it was")
    with pytest.raises(StagingLostError, match="run/a/big"):
        sealer.seal(b"run/a")
    assert len(layer.captures) == 0


def test_a_staging_directory_that_is_away_gives_nothing_up(store: Store, layer: Layer, tmp_path: Path) -> None:
    """Its disk may come back: the capture stays, and is published then."""
    sealer = sealer_of(layer)
    put(layer, "run/a/big", DATA)
    sealer.seal(b"run/a", wait=False)
    place, away = layer.staging.directory, tmp_path / "away"
    layer.staging.opened.drop(1)
    shutil.move(place, away)
    with pytest.raises(MoonclipError):
        sealer.tick(LATER)
    assert len(layer.captures) == 1
    shutil.move(away, place)
    sealer.tick(2 * LATER)
    assert stored(store, store.resolve("run/a")) == {"big": DATA}


def test_lost_bytes_of_a_capture_keep_no_commit_from_others(
    store: Store, layer: Layer, expect_log: Callable[[str], None]
) -> None:
    """An fsync of any file makes the journal durable, which asks for the bytes of captures first."""
    inode = put(layer, "run/a/big", DATA)
    sealer = sealer_of(layer)
    sealer.seal(b"run/a", wait=False)
    lose(layer, staged_file(inode))
    overwrite(layer, put(layer, "run/b/x", b""), b"other", sync=True)
    expect_log("/run/a was not sealed as it was")
    sealer.tick(LATER)


def test_lost_bytes_of_a_renamed_file_keep_no_commit_from_others(layer: Layer) -> None:
    """The same where they replaced another file: who syncs all is told, until the file is removed."""
    top = directory(layer, "run")
    put(layer, "run/old", b"old")
    inode = put(layer, "run/new", DATA)
    lose(layer, staged_file(inode))
    layer.rename(top, b"new", top, b"old", 5)
    overwrite(layer, put(layer, "run/x", b""), b"other", sync=True)
    with pytest.raises(CorruptError, match="is gone"):
        layer.sync_all()
    layer.unlink(top, b"old", 9)
    layer.sync_all()


def test_a_clean_end_names_a_lost_file_once(store: Store, expect_log: Callable[[str], None]) -> None:
    """While the file is there, each end says which it is; without it, all is well."""
    live = Live(store, LiveOptions(layer="host", seal_after=LATER))
    inode = put(live.layer, "run/a/big", DATA)
    put(live.layer, "run/a/model.safetensors", model())
    live.sealer.seal(b"run/a", wait=False)
    live.layer.sync_all()
    lose(live.layer, staged_file(inode))
    expect_log("/run/a was not sealed as it was")
    expect_log("ERROR .*cannot be encoded: run/a/big: staged bytes are lost.*remove the file")
    live.encoder.start()
    problems = live.close()
    assert len(problems) == 1 and "run/a/big" in problems[0] and "remove the file" in problems[0]
    live = Live(store, LiveOptions(layer="host", seal_after=LATER))
    assert len(live.layer.captures) == 0
    live.layer.unlink(directory(live.layer, "run/a"), b"big", 9)
    live.encoder.start()
    assert live.close() == []
    assert stored(store, store.resolve("run/a")) == {"model.safetensors": model()}
