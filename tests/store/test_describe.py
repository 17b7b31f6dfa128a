"""How files and tensors are stored, in the words of `show`."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from moonclipfs.store.add import add
from moonclipfs.store.describe import FileReport, How, describe
from moonclipfs.store.store import Store
from moonclipfs.types import Version
from tests.cli.conftest import safetensors

RNG = np.random.default_rng(1)
BIG = RNG.normal(size=(256, 256)).astype("f4")
OTHER = RNG.normal(size=(256, 256)).astype("f4")


def put(store: Store, where: Path, name: str, files: dict[str, bytes]) -> Version:
    directory = where / "put" / name
    directory.mkdir(parents=True)
    for path, data in files.items():
        (directory / path).write_bytes(data)
    version = add(store, [directory], name=name).snapshots[0].version
    assert version is not None
    return version


def reports(store: Store, version: Version) -> dict[bytes, FileReport]:
    return {report.path: report for report in describe(store, version)}


def test_first_use_is_full_and_later_use_is_shared(store: Store, tmp_path: Path) -> None:
    put(store, tmp_path, "run/1", {"m.safetensors": safetensors({"w": BIG, "v": OTHER})})
    second = put(store, tmp_path, "run/2", {"n.safetensors": safetensors({"w": BIG, "x": OTHER, "y": BIG})})
    (report,) = reports(store, second).values()
    storages = {one.tensor.name: one.storage for one in report.tensors}
    assert {name: one.raw for name, one in storages.items()} == {name: {How.SHARED: BIG.nbytes} for name in "wxy"}
    assert storages["w"].sharers == ["run/1@1/m.safetensors"]
    assert storages["x"].sharers == ["run/1@1/m.safetensors:v"]
    assert storages["y"].sharers == ["run/1@1/m.safetensors:w"]
    assert report.storage.new == 0
    assert report.storage.stored > 0


def test_sharing_inside_one_file_and_one_snapshot(store: Store, tmp_path: Path) -> None:
    files = {"a.safetensors": safetensors({"w": BIG, "tied": BIG}), "b.safetensors": safetensors({"w": BIG})}
    found = reports(store, put(store, tmp_path, "one", files))
    first, tied = found[b"a.safetensors"].tensors
    assert first.storage.raw == {How.FULL: BIG.nbytes}
    assert tied.storage.sharers == ["this file:w"]
    assert found[b"b.safetensors"].tensors[0].storage.sharers == ["one@1/a.safetensors"]
    assert found[b"a.safetensors"].storage.raw[How.FULL] == BIG.nbytes


def test_deltas_name_their_base(store: Store, tmp_path: Path) -> None:
    drift = BIG + np.float32(1e-5) * OTHER
    put(store, tmp_path, "run/1", {"m.safetensors": safetensors({"w": BIG})})
    second = put(store, tmp_path, "run/2", {"m.safetensors": safetensors({"w": drift})})
    (report,) = reports(store, second).values()
    storage = report.tensors[0].storage
    assert storage.raw == {How.DELTA: BIG.nbytes}
    assert (storage.bases, storage.depth) == (["run/1@1"], 1)
    assert storage.new == storage.stored
    store.log.forget([("run/1", 1)])
    (report,) = reports(store, second).values()
    assert report.tensors[0].storage.bases == ["a base kept only for deltas"]


def test_what_is_not_in_tensors(store: Store, tmp_path: Path) -> None:
    (tmp_path / "put").mkdir()
    with open(tmp_path / "put" / "sparse", "wb") as file:
        file.truncate(1 << 20)
    files = {"text": b"abc", "empty": b"", "cut.safetensors": safetensors({"w": BIG})[:-8]}
    version = put(store, tmp_path, "odd", files)
    found = reports(store, version)
    assert found[b"text"].storage.raw == {How.LITERAL: 3}
    assert found[b"empty"].storage.raw == {}
    assert found[b"empty"].size == 0
    assert "8 bytes" in found[b"cut.safetensors"].reason
    sparse = add(store, [tmp_path / "put" / "sparse"], name="sparse").snapshots[0].version
    assert sparse is not None
    assert reports(store, sparse)[b"sparse"].storage.raw == {How.HOLE: 1 << 20}


def test_one_file_or_one_directory(store: Store, tmp_path: Path) -> None:
    (tmp_path / "t" / "sub" / "er").mkdir(parents=True)
    (tmp_path / "t" / "sub" / "er" / "x").write_text("1")
    (tmp_path / "t" / "subx").write_text("2")
    version = add(store, [tmp_path / "t"], name="t").snapshots[0].version
    assert version is not None
    assert [one.path for one in describe(store, version, b"sub")] == [b"sub/er/x"]
    assert [one.path for one in describe(store, version, b"subx")] == [b"subx"]


@pytest.mark.parametrize("count", [1, 5])
def test_every_recipe_is_read_once(store: Store, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(count):
        last = put(store, tmp_path, f"run/{number}", {"m.safetensors": safetensors({"w": BIG}), "n": b"%d" % number})
    read: list[bytes] = []
    plain = store.recipe
    monkeypatch.setattr(store, "recipe", lambda entry: (read.append(entry.child), plain(entry))[1])
    list(describe(store, last))
    # The files shown: for their objects, for their layout. The files of all versions: for what came before.
    assert len(read) <= 2 * 2 + 2 * count


def test_the_cost_grows_with_the_snapshots_and_not_with_their_tensors(store: Store, tmp_path: Path) -> None:
    """Two directories or recipes are read for each snapshot before, and no tensor."""
    read = []
    for number in range(12):
        tensors = {"w": BIG + np.float32(number), "v": OTHER}
        version = put(store, tmp_path, f"run/{number}", {"m.safetensors": safetensors(tensors)})
        with Store.open(store.path) as again:
            list(describe(again, version))
            counters = again.objects.counters
            read.append(counters.blocks_decoded)
            assert counters.bytes_decoded < BIG.nbytes
    assert {after - before for before, after in itertools.pairwise(read)} == {2}
