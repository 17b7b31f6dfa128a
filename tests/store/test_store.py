"""One open store: what it costs to open, who may, and what its names, trees and files say."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import (
    CorruptError,
    ExistsError,
    FormatVersionError,
    MissingObjectError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UsageError,
)
from moonclipfs.store.add import add
from moonclipfs.store.check import verify
from moonclipfs.store.gc import collect
from moonclipfs.store.health import State, check_store
from moonclipfs.store.leases import Lease, live_leases
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, BytesSource, Entry, EntryType, Extent, Kind
from tests.store.kit import contents, noise, publish
from tests.store.test_add import lay
from tests.store.test_ingest import floats, safetensors


def test_creating_and_opening(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="moonclipfs init"):
        Store.open(tmp_path / "s")
    assert not (tmp_path / "s").exists(), "a typo makes no store"
    with Store.create(tmp_path / "s") as store:
        assert store.write
        publish(store, "a", {"f": b"1"})
    with pytest.raises(ExistsError):
        Store.create(tmp_path / "s")
    with pytest.raises(FormatVersionError, match="not a store"):
        Store.open(tmp_path)
    with Store.open(str(tmp_path / "s")) as store:
        assert contents(store, "a") == {"f": b"1"}


def test_reading_does_not_write(store: Store) -> None:
    with Store.open(store.path) as reader:
        with pytest.raises(UsageError, match="open for reading only"):
            reader.ingest()
        with pytest.raises(UsageError, match="open for reading only"):
            add(reader, [Path("/etc/hostname")], name="x")


def test_the_lease_lives_as_long_as_the_store_is_open(store: Store) -> None:
    def purposes() -> list[str]:
        return sorted(state.purpose for state in live_leases(store.path))

    assert purposes() == [""]
    reader = Store.open(store.path, purpose="a test")
    assert purposes() == ["", "a test"]
    assert reader.lease is not None
    assert reader.backend.owner == reader.lease.name
    reader.close()
    reader.close()
    assert purposes() == [""]


@pytest.mark.parametrize("error", [PermissionDeniedError, NoSpaceError])
def test_reading_goes_on_without_a_lease(store: Store, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    publish(store, "a", {"f": noise(1)})

    def refuse(*_: object) -> None:
        raise error("no")

    monkeypatch.setattr(Lease, "acquire", refuse)
    with Store.open(store.path) as reader:
        assert reader.lease is None
        assert contents(reader, "a") == {"f": noise(1)}
    with pytest.raises(error):
        Store.open(store.path, write=True)


def test_names_that_other_processes_bind_are_seen(store: Store) -> None:
    with Store.open(store.path) as reader:
        publish(store, "a", {"f": noise(1)})
        assert contents(reader, "a") == {"f": noise(1)}
        publish(store, "a", {"f": noise(2)})
        assert contents(reader, "a") == {"f": noise(2)}
        assert contents(reader, "a@1") == {"f": noise(1)}


def test_resolving_names(store: Store) -> None:
    first = publish(store, "run/ckpt-1", {"f": b"1"})
    second = publish(store, "run/ckpt-1", {"f": b"2"})
    assert store.resolve("run/ckpt-1") == second
    assert store.resolve("run/ckpt-1@1") == first
    with pytest.raises(NotFoundError, match=r"did you mean run/ckpt-1\?"):
        store.resolve("run/ckpt1")
    with pytest.raises(NotFoundError, match=r"no version 3 of run/ckpt-1.*kept: 1, 2"):
        store.resolve("run/ckpt-1@3")
    with pytest.raises(NotFoundError, match=r"no version 1 of zzz.*kept: none"):
        store.resolve("zzz@1")
    store.log.unbind(["run/ckpt-1"])
    with pytest.raises(NotFoundError, match="its version 2 is still kept: run/ckpt-1@2"):
        store.resolve("run/ckpt-1")
    assert store.resolve("run/ckpt-1@2").root == second.root


def test_walking_and_looking_up(store: Store, tmp_path: Path) -> None:
    files = {"b": b"1", "a/z": b"2", "a/b/c": b"3", "a.b": b"4"}
    add(store, [lay(tmp_path / "t", files)])
    version = store.resolve("t")
    paths = [path for path, _ in store.walk(version)]
    assert paths == [b"a", b"a/b", b"a/b/c", b"a/z", b"a.b", b"b"]
    assert store.lookup(version, b"") == store.root_entry(version)
    assert store.lookup(version, b"a/b/c").size == 1
    for path in (b"a/q", b"b/x", b"a//b", b"/", b".."):
        with pytest.raises(NotFoundError, match=r"in t@1"):
            store.lookup(version, path)
    with pytest.raises(UsageError, match="is no file"):
        store.open_file(store.lookup(version, b"a"))


def test_a_root_without_attributes_gets_plain_ones(store: Store) -> None:
    version = publish(store, "a", {}, attributes={"mode": "odd", "uid": 7})
    attributes = store.root_entry(version).attributes
    assert (attributes.mode, attributes.uid, attributes.mtime_ns) == (0o755, 7, version.time_ns)


def test_a_tree_that_is_too_deep_is_refused(store: Store) -> None:
    with store.ingest() as ingest:
        child = ingest.put_directory([])
        for _ in range(limits.PATH_DEPTH + 2):
            child = ingest.put_directory([Entry(b"d", EntryType.DIRECTORY, Attributes(0o755), child=child)])
        version = ingest.publish("deep", child, {})
    with pytest.raises(CorruptError, match="deeper than"):
        list(store.walk(version))


def test_a_recipe_of_another_length_than_its_entry_is_refused(store: Store) -> None:
    version = publish(store, "a", {"f": noise(1)})
    entry = store.lookup(version, b"f")
    with pytest.raises(CorruptError, match="19999 bytes, but a recipe of 20000"):
        store.recipe(Entry(entry.name, entry.type, entry.attributes, 19_999, entry.child))
    with pytest.raises(CorruptError, match="1 bytes, but a recipe of 0"):
        store.recipe(Entry(b"f", EntryType.FILE, Attributes(0o644), 1, NO_ID))
    assert store.recipe(Entry(b"f", EntryType.FILE, Attributes(0o644))).extents == Recipe([]).extents


def test_layouts_are_parsed_once_and_read_little(store: Store) -> None:
    data = safetensors({"w": ("F32", floats(1, 2_000_000)), "v": ("BF16", floats(2, 500_000))})
    version = publish(store, "a", {"m": data})
    entry = store.lookup(version, b"m")
    layout = store.layout(entry)
    assert [tensor.name for tensor in layout.tensors] == ["w", "v"]
    work = store.objects.counters.bytes_decoded
    assert work < 100_000
    assert store.layout(entry) is layout
    assert store.objects.counters.bytes_decoded == work


def test_a_damaged_directory_is_an_error_with_its_id(store: Store) -> None:
    with store.ingest() as ingest:
        version = ingest.publish("a", b"\x07" * 32, {})
    with pytest.raises(MissingObjectError, match="07" * 32):
        list(store.walk(version))


def test_caches_keep_their_bounds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIRECTORY_CACHE_ENTRIES", 10)
    monkeypatch.setattr(limits, "RECIPE_CACHE_EXTENTS", 10)
    monkeypatch.setattr(limits, "LAYOUT_CACHE_BYTES", 3000)
    monkeypatch.setattr(limits, "HEAD_CACHE_BYTES", 5000)
    with Store.open(store.path, write=True, cache_bytes=50_000) as small:
        for number in range(10):
            publish(small, f"s{number}", {f"f{file}": noise(10 * number + file) for file in range(4)})
        for number in range(10):
            version = small.resolve(f"s{number}")
            for file in range(4):
                entry = small.lookup(version, b"f%d" % file)
                assert small.open_file(entry).read(0, entry.size) == noise(10 * number + file)
                small.layout(entry)
        assert max(small._directories.weight, small._recipes.weight) <= 10
        assert 0 < small._layouts.weight <= 3000
        assert small.objects._links.weight <= 5000
        assert small.objects._blocks.weight <= 50_000


OPENS = """
import sys
from moonclipfs.store.store import Store
with Store.open(sys.argv[1]) as store:
    assert store.names().bound()
assert not {"torch", "trio", "pyfuse3", "click", "tqdm"} & set(sys.modules), sorted(sys.modules)
"""


def test_opening_imports_nothing_heavy(store: Store) -> None:
    publish(store, "a", {"f": b"1"})
    subprocess.run([sys.executable, "-c", OPENS, store.path], check=True, timeout=60)


AS_NOBODY = """
import os, sys
from moonclipfs.store.store import Store
os.setgid(65534)
os.setuid(65534)
os.environ["XDG_CACHE_HOME"] = "/nonexistent"
from moonclipfs.errors import PermissionDeniedError
with Store.open(sys.argv[1]) as store:
    assert store.lease is None
    version = store.resolve("a")
    entry = store.lookup(version, b"f")
    assert store.open_file(entry).read(0, 3) == b"one", entry
try:
    Store.open(sys.argv[1], write=True)
except PermissionDeniedError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without rights")
def test_a_directory_that_cannot_be_written_to_can_be_read(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with Store.create(place) as store:
        publish(store, "a", {"f": b"one"})
    for path in [place, *place.rglob("*")]:
        os.chmod(path, 0o755 if path.is_dir() else 0o644)
    for parent in place.parents:
        if parent.stat().st_uid == os.getuid() and parent.is_relative_to(tempfile.gettempdir()):
            os.chmod(parent, 0o755)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, place], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Permission denied" in done.stdout


def test_data_objects_are_checked_block_by_block(store: Store) -> None:
    with store.ingest() as ingest:
        child, _, _ = ingest.put_file(BytesSource(noise(1)))
        ingest.publish("a", ingest.put_directory([Entry(b"f", EntryType.FILE, Attributes(0o644), 20_000, child)]), {})
    (data,) = store.recipe(store.lookup(store.resolve("a"), b"f")).object_ids()
    assert store.objects.load(data, Kind.DATA) == noise(1)
    assert Extent(20_000, data) in store.recipe(store.lookup(store.resolve("a"), b"f")).extents


@pytest.mark.parametrize("shared", [False, True])
def test_a_copy_without_its_empty_directories(tmp_path: Path, shared: bool) -> None:
    """git and some tools that copy leave these out. Reading does without them, writing makes them again."""
    root = tmp_path / "store"
    with Store.create(root, shared=shared) as store:
        publish(store, "a", {"f": b"text"})
    modes = {name: (root / name).stat().st_mode for name in ("tmp", "leases")}
    for name in modes:
        (root / name).rmdir()
    with Store.open(root) as store:
        assert contents(store, "a") == {"f": b"text"}
        assert verify(store).ok
        assert not (root / "leases").exists()
    assert {finding.state for finding in check_store(root)} <= {State.OK, State.NOTE}
    with Store.open(root, write=True) as store:
        publish(store, "b", {"g": b"more"})
        collect(store)
        assert contents(store, "b") == {"g": b"more"}
    assert {name: (root / name).stat().st_mode for name in modes} == modes
