"""What a layer over a fixed base changed: names, attributes, and by how much each tensor."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from moonclipfs.layers.basing import BaseOf
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlaydiff import LayerDiff, layer_diff
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, ObjectId, Version
from tests.cli.conftest import safetensors
from tests.layers.filekit import encode
from tests.layers.overlaykit import create
from tests.layers.publish import File, publish

Over = Callable[[ObjectId], LayerPath]


@pytest.fixture
def over(store: Store) -> Iterator[Over]:
    """The root of an overlay on a directory object."""
    made: list[Overlay] = []

    def call(base: ObjectId) -> LayerPath:
        made.append(create(store, f"over-{len(made)}", BaseOf(root=base)))
        return LayerPath(made[-1])

    yield call
    for overlay in made:
        overlay.close()


@pytest.fixture
def base(store: Store) -> Version:
    """A model of two tensors in a directory beside other files."""
    return publish(
        store,
        "model",
        {
            "model.safetensors": safetensors(tensors()),
            "config.json": b"{}\n",
            "link": "config.json",
            "notes": {"a.txt": b"a", "deep": {"b.txt": b"b"}},
            "script": File(b"#!/bin/sh\n", mode=0o755, xattrs={b"user.x": b"1"}),
        },
    )


def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"frozen": rng.normal(size=(300, 100)).astype("f4"), "head": rng.normal(size=(300, 100)).astype("f4")}


def difference(root: LayerPath, base: ObjectId) -> LayerDiff:
    return layer_diff(root._holder.layer, base)


def told(found: LayerDiff) -> dict[str, str]:
    return {os.fsdecode(one.path): " ".join([one.change, *one.attributes]) for one in found.paths}


def test_nothing_was_changed(over: Over, base: Version) -> None:
    found = difference(over(base.root), base.root)
    assert (told(found), found.different, found.report.tensors) == ({}, False, ())
    assert found.as_json() == {"different": False, "files": [], "tensors": []}


def test_names_that_came_and_went(over: Over, base: Version) -> None:
    root = over(base.root)
    (root / "config.json").unlink()
    (root / "new").write_bytes(b"new")
    (root / "made").mkdir()
    (root / "made" / "inside").write_bytes(b"i")
    (root / "notes" / "deep" / "b.txt").unlink()
    (root / "notes" / "deep").rmdir()
    (root / "link").unlink()
    (root / "link").symlink_to("elsewhere")
    (root / "script").unlink()
    (root / "script").mkdir()
    found = difference(root, base.root)
    assert [one.change for one in found.paths if one.path == b"script"] == ["removed", "added"]  # a file, a directory
    assert told(found) == {
        "config.json": "removed",
        "link": "changed mode",
        "made": "added",
        "made/inside": "added",
        "new": "added",
        "notes/deep": "removed",
        "notes/deep/b.txt": "removed",
        "script": "added",
    }


def test_a_directory_removed_and_made_again_is_compared_name_by_name(over: Over, base: Version) -> None:
    root = over(base.root)
    (root / "notes" / "deep" / "b.txt").unlink()
    (root / "notes" / "deep").rmdir()
    (root / "notes" / "a.txt").unlink()
    (root / "notes").rmdir()
    (root / "notes").mkdir()
    (root / "notes" / "a.txt").write_bytes(b"a")
    found = told(difference(root, base.root))
    assert {path: change for path, change in found.items() if change == "removed"} == {
        "notes/deep": "removed",
        "notes/deep/b.txt": "removed",
    }
    assert "changed" not in found.get("notes/a.txt", "")


def test_attributes_and_times(over: Over, base: Version) -> None:
    root = over(base.root)
    layer = root._holder.layer
    (root / "script").chmod(0o700)
    layer.set_attributes(layer.resolve(b"notes/a.txt"), now_ns=time.time_ns(), uid=7)
    layer.set_xattr(layer.resolve(b"script"), b"user.y", b"2", time.time_ns())
    (root / "config.json").touch()
    (root / "notes").chmod(0o700)
    assert told(difference(root, base.root)) == {
        "config.json": "attributes times",
        "notes": "attributes mode",
        "notes/a.txt": "attributes owner",
        "script": "attributes mode xattrs",
    }


def test_a_tensor_that_changed_is_measured(over: Over, base: Version) -> None:
    """Each tensor is told by how much it changed: count and share of elements, largest and mean change, and norm."""
    root = over(base.root)
    changed = tensors()
    changed["head"][7, :10] += np.float32(0.5)
    offset = safetensors(changed).index(changed["head"].tobytes())
    with (root / "model.safetensors").open("r+b") as file:
        file.seek(offset + 7 * 400)
        file.write(changed["head"][7, :10].tobytes())
    expected = np.abs(changed["head"].astype("f8") - tensors()["head"].astype("f8"))
    for is_staged in (True, False):
        found = difference(root, base.root).as_json()
        assert found["files"] == [{"path": "model.safetensors", "type": "file", "change": "changed", "attributes": []}]
        (tensor,) = found["tensors"]
        assert (tensor["name"], tensor["change"]) == ("head", "changed")
        values = tensor["values"]
        assert (values["elements"], values["changed"]) == (30_000, 10)
        assert values["share"] == pytest.approx(10 / 30_000)
        assert values["max_abs"] == pytest.approx(expected.max())
        assert values["mean_abs"] == pytest.approx(expected.mean())
        assert values["norm"] == pytest.approx(np.sqrt((expected**2).sum()))
        if is_staged:
            layer = root._holder.layer
            encode(layer, *layer.take_jobs(time.monotonic(), urgent=True))


def test_tensors_of_a_file_that_was_renamed_are_the_same(over: Over, base: Version) -> None:
    root = over(base.root)
    (root / "model.safetensors").rename(root / "renamed.safetensors")
    found = difference(root, base.root)
    assert told(found) == {"model.safetensors": "removed", "renamed.safetensors": "added"}
    assert {one.name: str(one.change) for one in found.report.tensors} == {"frozen": "unchanged", "head": "unchanged"}
    assert found.as_json()["tensors"] == []


def test_the_same_bytes_written_again_are_no_change(over: Over, base: Version) -> None:
    """Bytes that are the same as in the base are no change, however they came there."""
    root = over(base.root)
    with (root / "model.safetensors").open("r+b") as file:
        file.write(safetensors(tensors())[:5000])
    (root / "config.json").write_bytes(b"{}\n")
    assert told(difference(root, base.root)) == {
        "config.json": "attributes times",
        "model.safetensors": "attributes times",
    }


def test_what_was_cut_off_or_grew(over: Over, base: Version) -> None:
    root = over(base.root)
    with (root / "notes" / "a.txt").open("r+b") as file:
        file.truncate(0)
    with (root / "config.json").open("r+b") as file:
        file.truncate(10_000)
    assert told(difference(root, base.root)) == {"notes/a.txt": "changed", "config.json": "changed"}


def test_over_nothing_all_is_added(over: Over) -> None:
    root = over(NO_ID)
    (root / "model.safetensors").write_bytes(safetensors(tensors()))
    found = difference(root, NO_ID)
    assert told(found) == {"model.safetensors": "added"}
    assert {one.name: str(one.change) for one in found.report.tensors} == {"frozen": "added", "head": "added"}


def test_what_is_not_changed_is_not_looked_at(over: Over, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Telling what an overlay changed costs what was changed, not what the base has."""
    version = publish(store, "wide", {f"d{n:03}": {"f": b"%d" % n} for n in range(200)})
    root = over(version.root)
    (root / "d007" / "f").write_bytes(b"changed")
    loads: list[ObjectId] = []
    load = Store.directory
    monkeypatch.setattr(Store, "directory", lambda self, object_id: loads.append(object_id) or load(self, object_id))
    assert told(difference(root, version.root)) == {"d007/f": "changed"}
    assert len(loads) <= 4


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_after_random_changes_it_tells_what_differs(seed: int, over: Over, store: Store) -> None:
    """Beside a comparison of all that both show, path by path."""
    rng = random.Random(seed)
    root = over(publish(store, "random", some_files(rng, 2)).root)
    before = everything(root)
    for _ in range(25):
        change(rng, root)
    after = everything(root)
    expected = {(path.rstrip("/"), "removed") for path in before.keys() - after.keys()}
    expected |= {(path.rstrip("/"), "added") for path in after.keys() - before.keys()}
    expected |= {(path, "changed") for path in before.keys() & after.keys() if before[path] != after[path]}
    found = difference(root, root._holder.base_root).paths
    assert {(os.fsdecode(one.path), one.change) for one in found if one.change != "attributes"} == expected


def some_files(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        name: some_files(rng, depth - 1) if depth and rng.random() < 0.4 else rng.randbytes(rng.choice([0, 3, 5000]))
        for name in "abcd"
        if rng.random() < 0.7
    }


def everything(root: LayerPath, prefix: str = "") -> dict[str, bytes | None]:
    """All below a directory: bytes of files, None for directories, whose paths end with a slash."""
    found: dict[str, bytes | None] = {}
    for path in root.iterdir():
        if path.is_dir():
            found[f"{prefix}{path.name}/"] = None
            found |= everything(path, f"{prefix}{path.name}/")
        else:
            found[prefix + path.name] = path.read_bytes()
    return found


def change(rng: random.Random, root: LayerPath) -> None:
    """Try to change something somewhere."""

    def somewhere() -> LayerPath:
        directories = [root, *(root / path[:-1] for path in everything(root) if path.endswith("/"))]
        return rng.choice(directories) / rng.choice("abcdef")

    path = somewhere()
    with suppress(OSError):  # it is of another type, not there, or not empty
        match rng.choice(["write", "same", "unlink", "mkdir", "rename", "remove"]):
            case "write":
                path.write_bytes(rng.randbytes(10))
            case "same":
                path.write_bytes(path.read_bytes())
            case "unlink":
                path.unlink()
            case "mkdir":
                path.mkdir()
            case "rename":
                path.rename(somewhere())
            case "remove":
                remove(path)


def remove(path: LayerPath) -> None:
    """A directory with all in it."""
    for below in path.iterdir():
        (remove if below.is_dir() else LayerPath.unlink)(below)
    path.rmdir()
