"""Golden stores, one for each release (see `make_golden.py`): every later version reads and continues all of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moonclipfs import limits, rescue
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.live import Live, LiveOptions
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.check import verify
from moonclipfs.store.export import export
from moonclipfs.store.gc import collect
from moonclipfs.store.packs import Location, pack_key
from moonclipfs.store.records import record_type
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, DType, EntryType, Kind
from tests.nobody import Nobody
from tests.store.kit import noise, packs, publish
from tests.store.make_golden import LAYER, OVERLAY, STORES, make

RELEASES = sorted(path.name for path in STORES.iterdir() if path.is_dir())
Rows = dict[str, dict[str, Any]]


def expected_of(release: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((STORES / release / "expected.json").read_text())
    return found


def copied(release: str, target: Path) -> Path:
    """A copy of a golden store; Git keeps no empty directories."""
    shutil.copytree(STORES / release / "store", target)
    for name in ("tmp", "leases"):
        (target / name).mkdir(exist_ok=True)
    return target


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def golden(release: str, tmp_path: Path) -> Path:
    return copied(release, tmp_path / "golden")


def read(store: Store, spec: str) -> Rows:
    """A version's tree, read whole, as `expected.json` describes it."""
    rows: Rows = {}
    for path, entry in store.walk(store.resolve(spec)):
        attributes = entry.attributes
        row: dict[str, Any] = {"type": entry.type.name, "mode": attributes.mode, "mtime_ns": attributes.mtime_ns}
        row["xattrs"] = {key.decode(): value.hex() for key, value in attributes.xattrs.items()}
        if entry.type is EntryType.FILE:
            data = store.open_file(entry).read(0, entry.size)
            row |= {"size": entry.size, "sha256": hashlib.sha256(data).hexdigest(), "links": entry.link_group}
        elif entry.type is EntryType.SYMLINK:
            row["target"] = entry.target.decode()
        rows[os.fsdecode(path)] = row
    return rows


def on_disk(root: Path) -> Rows:
    """What was written out below `root`, likewise; files with a common inode are links of one number."""
    rows: Rows = {}
    inodes: dict[int, int] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        row: dict[str, Any] = {"mode": stat.S_IMODE(status.st_mode), "mtime_ns": status.st_mtime_ns}
        if path.is_symlink():
            row |= {"type": "SYMLINK", "target": os.readlink(path)}
        elif path.is_dir():
            row |= {"type": "DIRECTORY"}
        else:
            links = inodes.setdefault(status.st_ino, len(inodes) + 1) if status.st_nlink > 1 else 0
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            row |= {"type": "FILE", "size": status.st_size, "sha256": digest, "links": links}
        rows[str(path.relative_to(root))] = row
    return rows


def comparable(rows: Rows) -> Rows:
    """Without what not every file system keeps: xattrs, and modes of symbolic links."""
    dropped = {("FILE", "xattrs"), ("DIRECTORY", "xattrs"), ("SYMLINK", "xattrs"), ("SYMLINK", "mode")}
    return {
        path: {key: value for key, value in row.items() if (row["type"], key) not in dropped}
        for path, row in rows.items()
    }


def check(store: Store, expected: dict[str, Any]) -> None:
    """All versions, and nothing but these, are as they were stored."""
    names = store.names()
    assert {version.path: version.number for version in names.bound().values()} == expected["bound"]
    assert {f"{version.path}@{version.number}" for version in names.all_versions()} == set(expected["versions"])
    pins = {f"{name}@{number}": list(why) for (name, number), why in names.pins().items()}
    assert pins == expected.get("pins", {})
    for spec, rows in expected["versions"].items():
        assert read(store, spec) == rows, spec


def test_all_files_of_the_store_are_here(release: str) -> None:
    """Else something of it was not put under version control, or changed in its care."""
    root = STORES / release / "store"
    found = {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}
    assert found == expected_of(release)["files"]
    assert sum(found.values()) < 300_000


def test_it_is_read(golden: Path, release: str) -> None:
    expected = expected_of(release)
    with Store.open(golden) as store:
        check(store, expected)
        assert set(store.names().condemned()) == set(expected["condemned"]) <= packs(store)


def test_it_is_read_where_nothing_can_be_written(release: str, tmp_path: Path, nobody: Nobody) -> None:
    with nobody.copy(copied(release, tmp_path / "golden")) as path:
        for found in (*path.rglob("*"), path):
            found.chmod(0o555 if found.is_dir() else 0o444)
        before = sorted(path.rglob("*"))

        def look() -> None:
            with Store.open(path) as store:
                assert store.lease is None
                check(store, expected_of(release))
                assert not verify(store).problems

        nobody.run(look)
        assert sorted(path.rglob("*")) == before


def test_it_is_clean(golden: Path, release: str) -> None:
    with Store.open(golden) as store:
        report = verify(store, contents=True)
    assert not report.problems
    assert report.versions == len(expected_of(release)["versions"])


def test_it_is_exported(golden: Path, release: str, tmp_path: Path) -> None:
    with Store.open(golden) as store:
        for number, (spec, rows) in enumerate(expected_of(release)["versions"].items()):
            export(store, store.resolve(spec), tmp_path / str(number))
            assert comparable(on_disk(tmp_path / str(number))) == comparable(rows), spec


def test_the_rescue_reader_reads_it(golden: Path, release: str, tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="the rescue reader needs zstandard")
    command = [sys.executable, rescue.__file__, str(golden), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    expected = expected_of(release)
    for path, number in expected["bound"].items():
        rows = {name: dict(row) for name, row in comparable(expected["versions"][f"{path}@{number}"]).items()}
        found = comparable(on_disk(tmp_path / "out" / path))
        for row in (*rows.values(), *found.values()):
            if row["type"] == "DIRECTORY":
                del row["mtime_ns"]
        assert found == rows, path


def test_it_is_written_on(golden: Path, release: str) -> None:
    """What is stored already is found, gc takes what was condemned, and nothing else is lost."""
    expected = expected_of(release)
    with Store.open(golden, write=True) as store:
        step = store.resolve("run/step-1")
        known = store.open_file(store.lookup(step, b"model.safetensors"))
        before = packs(store)
        publish(store, "again", {"f": bytes(known.read(0, known.size))})
        (new,) = packs(store) - before
        kinds = {place.kind for place in store.index.iterate() if place.pack == new}
        assert kinds == {Kind.DIRECTORY}, "cut, hashed and found as in the release that stored it"
        publish(store, "new", {"f": noise(5)})
        assert collect(store, repack=False).deleted_packs == len(expected["condemned"])
        store.log.forget([("again", 1), ("new", 1)])
        collect(store)
        check(store, expected)
        assert not verify(store).problems


def places_of(path: Path) -> list[Location]:
    with Store.open(path) as store:
        return list(store.index.iterate())


def test_it_has_every_kind_of_object(golden: Path) -> None:
    """Else the tests above prove less than they say."""
    places = places_of(golden)
    by_id = {place.object_id: place for place in places}
    data = [place for place in places if place.kind is Kind.DATA]
    deltas = [place for place in data if place.base != NO_ID]
    typed = {DType.F32, DType.BF16, DType.F16, DType.F64, DType.I64, DType.F8_E4M3}
    assert {place.kind for place in places} == set(Kind)
    assert {place.dtype for place in data if place.base == NO_ID} == {*typed, DType.BYTES}
    assert {place.dtype for place in deltas if by_id[place.base].dtype is place.dtype} >= typed
    assert {(by_id[place.base].dtype, place.dtype) for place in deltas} >= {
        (DType.F32, DType.BF16),
        (DType.F32, DType.F16),
    }
    assert {place.depth for place in data} == {0, 1, 2, 3}
    assert {place.dtype for place in deltas if place.raw_length > 1 << 19} >= {DType.I64}, "deltas of several blocks"
    with Store.open(golden) as store:
        step = store.resolve("run/step-1")
        extents = [
            extent
            for _, entry in store.walk(step)
            if entry.type is EntryType.FILE
            for extent in store.recipe(entry).extents
        ]
        chunks = store.recipe(store.lookup(step, b"train.log")).extents
    assert any(extent.is_hole for extent in extents) and any(extent.literal for extent in extents)
    assert sum(extent.object_id is not None for extent in chunks) > 2


def test_it_has_every_kind_of_record(golden: Path, release: str) -> None:
    """Behind the checkpoint, so that a reader has to apply them."""
    types = [record_type(record.read_bytes()) for record in sorted(golden.glob("log/*"))]
    last = len(types) - 1 - types[::-1].index("checkpoint")
    expected = expected_of(release)
    pins = {"pin"} if "pins" in expected else set()
    assert set(types[last + 1 :]) == {"bind", "unbind", "move", "forget", "condemn", *pins}
    numbers = Counter(spec.rpartition("@")[0] for spec in expected["versions"])
    assert max(numbers.values()) > 1 and set(numbers) - set(expected["bound"])
    assert len(packs_on_disk(golden)) > 2 and set(expected["condemned"]) < packs_on_disk(golden)


def packs_on_disk(path: Path) -> set[str]:
    return {found.stem for found in path.glob(pack_key("*"))}


def shown_by(layer: Layer, directory: Inode, prefix: bytes = b"") -> Rows:
    """What a layer shows, as far as it was not said by names alone or changed with the names in it."""
    rows: Rows = {}
    names = layer.names_in(directory)
    for name, child in zip(names, layer.children(directory, names), strict=True):
        assert child is not None
        inode, status = child
        row: dict[str, Any] = {"type": inode.type.name}
        if inode.type is EntryType.FILE:
            file = layer.open_file(inode, write=False)
            digest = hashlib.sha256(file.read(0, file.size)).hexdigest()
            file.close()
            row |= {"mode": stat.S_IMODE(status.mode), "size": status.size, "sha256": digest}
        elif inode.type is EntryType.SYMLINK:
            row["target"] = os.fsdecode(layer.readlink(inode))
        rows[os.fsdecode(prefix + name)] = row
        if inode.type is EntryType.DIRECTORY:
            rows |= shown_by(layer, inode, prefix + name + b"/")
    return rows


def of_layer(rows: Rows) -> Rows:
    """What `shown_by` tells of these."""
    keys = {"FILE": {"mode", "size", "sha256"}, "SYMLINK": {"target"}, "DIRECTORY": set()}
    return {
        path: {key: value for key, value in row.items() if key in {"type", *keys[row["type"]]}}
        for path, row in rows.items()
    }


@pytest.mark.parametrize("release", [release for release in RELEASES if "layer" in expected_of(release)])
def test_its_layer_goes_on(golden: Path, release: str) -> None:
    """It shows what it did when it was left; that is stored, and sealed."""
    expected = expected_of(release)
    rows = of_layer(expected["layer"])
    with Store.open(golden, write=True) as store:
        with Live(store, LiveOptions(layer=LAYER, seal_after=None)) as live:
            assert shown_by(live.layer, live.layer.root) == rows
            assert live.status()["staged_files"] == 1, "and others are encoded"
            live.flush()
            assert live.status()["staged_files"] == 0
            assert shown_by(live.layer, live.layer.root) == rows
            version = live.seal(b"work")
        assert version is not None
        sealed = {os.fsdecode(path): entry.size for path, entry in store.walk(version)}
        assert sealed == {path[5:]: row["size"] for path, row in rows.items() if path.startswith("work/")}
        assert not verify(store).problems


@pytest.mark.parametrize("release", [release for release in RELEASES if "overlay" in expected_of(release)])
def test_its_overlay_goes_on(golden: Path, release: str) -> None:
    """Likewise; that is stored, and committed, and its base is as it was."""
    expected = expected_of(release)
    rows = of_layer(expected["overlay"])
    with Store.open(golden, write=True) as store:
        with Overlays(store) as overlays:
            overlay = overlays.get(OVERLAY)
            layer = overlay.layer
            assert shown_by(layer, layer.root) == rows
            assert layer.staged()["staged_files"] == 1, "and others are encoded"
            version = overlay.commit("committed")
            assert layer.staged()["staged_files"] == 0
            assert shown_by(layer, layer.root) == rows
            overlays.discard(OVERLAY)
        committed = {os.fsdecode(path): entry.size for path, entry in store.walk(version)}
        assert committed == {path: row.get("size", committed[path]) for path, row in rows.items()}
        store.log.forget([(version.path, version.number)])
        check(store, expected)
        assert not verify(store).problems


def test_the_next_golden_store_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.limits.LOG_CHECKPOINT_EVERY", 64)
    for name in ("JOURNAL_RESERVE_BYTES", "JOURNAL_STEP_BYTES"):
        monkeypatch.setattr(limits, name, getattr(limits, name))
    monkeypatch.setattr("tests.store.test_golden.STORES", tmp_path)
    make(tmp_path / "next")
    test_all_files_of_the_store_are_here("next")
    path = copied("next", tmp_path / "copy")
    test_it_is_read(path, "next")
    test_it_has_every_kind_of_object(path)
    test_it_has_every_kind_of_record(path, "next")
    test_its_layer_goes_on(copied("next", tmp_path / "layer"), "next")
    test_its_overlay_goes_on(path, "next")
