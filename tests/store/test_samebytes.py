"""What lies at the target of an export counts as done by its bytes alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import ExistsError
from moonclipfs.store import export as exporting
from moonclipfs.store.add import add
from moonclipfs.store.export import export
from moonclipfs.store.ingest import IngestStats
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, BytesSource, Entry, EntryType, Extent
from tests.nobody import Nobody
from tests.store.kit import noise, publish, series
from tests.store.test_add import lay
from tests.store.test_export import tree


def test_another_versions_bytes_do_not_count_as_done(store: Store, tmp_path: Path) -> None:
    """Whatever their length and time: pieces of any kind, at any place, are compared."""
    size, target = 3 * limits.MIB, tmp_path / "target"
    base = {
        "model": series(1)[0],
        "sparse": noise(2, 200_000) + bytes(size) + noise(3, 200_000),
        "zeros": bytes(size),
        "small": b"small",
    }
    variants = [base]
    for name, at in [("model", 70_000), ("sparse", 10), ("sparse", size), ("sparse", -1), ("zeros", -1), ("small", 2)]:
        changed = bytearray(variants[-1][name])
        changed[at] ^= 1
        variants.append({**variants[-1], name: bytes(changed)})
    for number, files in enumerate(variants):
        publish(store, "run", files)
        if number:
            with pytest.raises(ExistsError, match="exists and differs"):
                export(store, store.resolve("run"), target)
        report = export(store, store.resolve("run"), target, overwrite=True)
        assert (report.files, report.skipped) == ((1, 3) if number else (4, 0))
        assert {path.name: path.read_bytes() for path in target.iterdir()} == files


def test_bytes_of_a_part_of_an_object_are_compared(store: Store, tmp_path: Path) -> None:
    with store.ingest() as ingest:
        whole = ingest.put_contents(BytesSource(noise(1, 100_000)))[0].extents[0]
        recipe = Recipe([Extent(5_000, whole.object_id, 100), Extent(3), Extent(2, literal=b"ab")])
        part = ingest.put_recipe(recipe, IngestStats())
        entry = Entry(b"f", EntryType.FILE, Attributes(0o644), recipe.size, part)
        version = ingest.publish("a", ingest.put_directory([entry]), {})
    data = noise(1, 100_000)[100:5_100] + bytes(3) + b"ab"
    for at in (None, 0, 4_999, 5_000, 5_004):
        target = tmp_path / f"target-{at}"
        changed = bytearray(data)
        if at is not None:
            changed[at] ^= 1
        lay(target, {"f": bytes(changed)})
        os.utime(target / "f", ns=(0, 0))
        assert export(store, version, target, overwrite=True).skipped == (at is None)
        assert (target / "f").read_bytes() == data


def test_overwriting_brings_the_attributes_of_what_has_the_right_bytes(store: Store, tmp_path: Path) -> None:
    source = lay(tmp_path / "source", {"f": b"same", "link": b""})
    os.utime(source / "f", ns=(7, 7))
    add(store, [source])
    os.chmod(source / "f", 0o711)
    os.setxattr(source / "f", "user.note", b"new")
    add(store, [source])
    export(store, store.resolve("source@1"), tmp_path / "target")
    before = tree(tmp_path / "target")
    export(store, store.resolve("source@2"), tmp_path / "target")
    assert tree(tmp_path / "target")["f"] == before["f"]
    assert export(store, store.resolve("source@2"), tmp_path / "target", overwrite=True).skipped == 2
    assert tree(tmp_path / "target") == tree(source)


def test_what_cannot_be_read_does_not_count_as_done(store: Store, tmp_path: Path, nobody: Nobody) -> None:
    publish(store, "a", {"f": b"1"})
    export(store, store.resolve("a"), tmp_path / "target")
    with nobody.copy(tmp_path / "target") as target:
        os.chmod(target / "f", 0)
        entry = store.lookup(store.resolve("a"), b"f")

        def compare() -> None:
            work = exporting._Export(store, lambda _: None, False, 1)
            with pytest.raises(ExistsError, match="exists and differs"):
                work.todo([(os.fsencode(target / "f"), entry)])

        nobody.run(compare)
