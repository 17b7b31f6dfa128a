"""Packs: written by several threads, read by location, checked wherever bytes come back."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MissingObjectError, NoSpaceError
from moonclipfs.store import packfile
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.gc import collect
from moonclipfs.store.objects import object_id
from moonclipfs.store.packs import Location, PackReader, PackWriter, pack_key, pack_of_key, require_packs
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, BytesSource, DType, Entry, EntryType, Kind
from tests.faults import FaultyOps
from tests.store.kit import contents, noise, publish, series

Published = list[tuple[str, NDArray[np.void]]]


def make_root(root: Path) -> Path:
    for name in ("packs", "tmp"):
        (root / name).mkdir(parents=True)
    return root


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(make_root(tmp_path / "store"))


def writer_of(backend: LocalBackend, published: Published | None = None) -> PackWriter:
    return PackWriter(
        backend, lambda pack, entries: (published if published is not None else []).append((pack, entries))
    )


def add(writer: PackWriter, data: bytes) -> Location:
    return writer.add(data, object_id=object_id(Kind.DATA, data), kind=Kind.DATA, raw_length=len(data))


def pack_bytes(backend: LocalBackend, datas: list[bytes]) -> tuple[str, bytes, list[Location]]:
    writer = writer_of(backend)
    locations = [add(writer, data) for data in datas]
    (pack,) = writer.flush()
    return pack, backend.read(pack_key(pack)), locations


def test_what_is_added_is_read_back(backend: LocalBackend) -> None:
    published: Published = []
    writer, reader = writer_of(backend, published), PackReader(backend)
    datas = [b"", b"x", os.urandom(1000), os.urandom(200_000)]
    locations = [add(writer, data) for data in datas]
    for location, data in zip(locations, datas, strict=True):
        assert writer.read(location, 0, len(data)) == data
        with pytest.raises(MissingObjectError, match=location.pack):
            reader.read(location, 0, len(data))
    packs = writer.flush()
    assert [pack for pack, _ in published] == packs == [locations[0].pack]
    for location, data in zip(locations, datas, strict=True):
        assert writer.read(location, 0, len(data)) is None
        assert reader.read(location, 0, len(data)) == data
        assert reader.read(location, len(data) // 2, len(data) // 4) == data[len(data) // 2 :][: len(data) // 4]
        with pytest.raises(ValueError):
            reader.read(location, 1, len(data))
    entries = reader.entries(packs[0])
    assert entries.tobytes() == published[0][1].tobytes() == reader.scan(packs[0]).tobytes()
    assert [Location.from_entry(packs[0], entry.tobytes()) for entry in entries] == locations


def test_every_field_comes_back(backend: LocalBackend) -> None:
    writer = writer_of(backend)
    location = writer.add(
        b"encoded", object_id=bytes([1]) * 32, kind=Kind.DATA, raw_length=4096, dtype=DType.BF16, depth=2,
        base=bytes([2]) * 32, base_start=65536, label=2**64 - 1, sketch=bytes([3]) * 32, generation=7,
    )  # fmt: skip
    (pack,) = writer.flush()
    entry = PackReader(backend).entries(pack)[0]
    assert Location.from_entry(pack, entry.tobytes()) == location
    assert (location.label, location.generation, location.base_start, location.depth) == (2**64 - 1, 7, 65536, 2)


def test_an_empty_writer_publishes_nothing(backend: LocalBackend) -> None:
    writer = writer_of(backend)
    assert writer.flush() == []
    writer.abort()
    assert os.listdir(backend.root / "packs") == os.listdir(backend.root / "tmp") == []


def test_packs_close_at_their_size_and_threads_share_a_writer(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PACK_BYTES", 50_000)
    published: Published = []
    writer, reader = writer_of(backend, published), PackReader(backend)
    found: list[tuple[Location, bytes]] = []

    def work(seed: int) -> None:
        for number in range(60):
            data = b"%d %d" % (seed, number) * 200
            found.append((add(writer, data), data))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    packs = writer.flush()
    assert sorted(packs) == sorted(pack for pack, _ in published) and len(packs) > 5
    assert all(backend.size(pack_key(pack)) < 60_000 for pack in packs)
    assert len(found) == 240 and all(reader.read(location, 0, len(data)) == data for location, data in found)
    assert os.listdir(backend.root / "tmp") == []


def test_open_packs_are_bounded(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OPEN_PACKS", 3)
    locations = [pack_bytes(backend, [b"%d" % number])[2][0] for number in range(10)]
    reader = PackReader(backend)
    before = len(os.listdir("/proc/self/fd"))
    for location in locations:
        reader.read(location, 0, location.encoded_length)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_deleted_pack_that_is_forgotten_is_missing(backend: LocalBackend) -> None:
    pack, _, (location,) = pack_bytes(backend, [b"hello"])
    reader = PackReader(backend)
    assert reader.read(location, 0, 5) == b"hello"
    backend.delete(pack_key(pack))
    assert reader.read(location, 0, 5) == b"hello", "an open pack stays readable"
    reader.forget([pack])
    with pytest.raises(MissingObjectError, match=location.object_id.hex()):
        reader.read(location, 0, 5)


def open_files(root: Path) -> set[str]:
    """Names of the files below `root` that this process holds open, deleted ones too."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.islink(link)]
    return {os.path.relpath(target, root) for target in targets if target.startswith(f"{root}/")}


def test_packs_that_others_deleted_are_let_go_of_and_no_others(backend: LocalBackend) -> None:
    (gone, _, (first,)), (kept, _, (second,)) = (pack_bytes(backend, [data]) for data in (b"hello", b"world"))
    reader = PackReader(backend)
    assert reader.read(first, 0, 5) + reader.read(second, 0, 5) == b"helloworld"
    value = reader._open[gone]
    backend.delete(pack_key(gone))
    assert len(open_files(backend.root)) == 2
    reader.forget_deleted()
    assert value.read(first.offset, 5) == b"hello", "a read that is under way ends well"
    del value
    assert open_files(backend.root) == {pack_key(kept)}


def test_a_reader_that_follows_the_names_keeps_no_deleted_pack(store: Store) -> None:
    """Else gc frees nothing on the disk for as long as a mount lives."""
    for number in range(3):
        publish(store, f"s{number}", {"f": noise(number)})
    with Store.open(store.path) as reader:
        kept = contents(reader, "s0"), contents(reader, "s1"), contents(reader, "s2")
        assert len(kept) == len([name for name in open_files(store.path) if name.startswith("packs/")])
        store.packs.close()
        store.log.forget([("s0", 1), ("s1", 1)])
        reader.names()
        assert collect(store, wait_seconds=0).waiting_packs == 2
        reader.names()
        assert collect(store, wait_seconds=0).deleted_packs == 2
        reader.names()
        assert not [name for name in open_files(store.path) if "deleted" in name]
        assert contents(reader, "s2") == kept[2]


def test_required_packs(backend: LocalBackend) -> None:
    packs = [pack_bytes(backend, [b"%d" % number])[0] for number in range(3)]
    require_packs(backend, packs)
    require_packs(backend, [])
    Path(backend.path(pack_key(packs[1]))).write_bytes(b"")
    for _ in range(2):
        with pytest.raises(MissingObjectError, match=packs[1]):
            require_packs(backend, packs)
        backend.delete(pack_key(packs[1]))


@pytest.mark.parametrize("role", ["object", "base of an object", "base of a base", "base of what is new"])
def test_what_was_found_must_be_there_when_it_is_published(store: Store, role: str) -> None:
    """The index only knows the packs that were listed: those that anybody took away since are missed in time."""
    files = series(4)
    found: list[Location] = []
    for number, data in enumerate(files[:3]):
        publish(store, f"run/{number}", {"w": data})
        found += [one for one in store.index.iterate() if one.kind is Kind.DATA and one not in found]
    assert [one.depth for one in found] == [0, 1, 2], "else this proves less than it says"
    known, gone = {
        "object": (files[2], found[2]),
        "base of an object": (files[2], found[1]),
        "base of a base": (files[2], found[0]),
        "base of what is new": (files[3], found[2]),
    }[role]
    with store.ingest() as ingest:
        child, size, stats = ingest.put_file(BytesSource(known))
        assert stats.full_bytes == 0
        root = ingest.put_directory([Entry(b"other", EntryType.FILE, Attributes(0o644), size, child)])
        os.unlink(store.backend.path(pack_key(gone.pack)))
        with pytest.raises(MissingObjectError, match=f"({gone.pack}|{gone.object_id.hex()}).*try again"):
            ingest.publish("again", root, {})
    assert "again" not in store.names().bound()
    publish(store, "again", {"w": known})
    assert contents(store, "again") == {"w": known}


def test_a_pack_that_nfs_took_away_is_missing_and_sought_again(backend: LocalBackend) -> None:
    _, _, (location,) = pack_bytes(backend, [b"hello"])
    reader = PackReader(backend)
    reader.read(location, 0, 5)

    def stale(*arguments: int) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", stale)
        with pytest.raises(MissingObjectError, match=location.pack):
            reader.read(location, 0, 5)
    assert reader.read(location, 0, 5) == b"hello"


def test_a_wrong_location_is_told(backend: LocalBackend) -> None:
    _, _, (first, second) = pack_bytes(backend, [b"hello" * 10, b"world" * 10])
    reader = PackReader(backend)
    for wrong in (
        Location(first.object_id, second.pack, second.offset, 50, 50, Kind.DATA, DType.BYTES),
        Location(first.object_id, first.pack, first.offset + 1, 50, 50, Kind.DATA, DType.BYTES),
        Location(first.object_id, first.pack, first.offset, 50, 49, Kind.DATA, DType.BYTES),
        Location(first.object_id, first.pack, first.offset, 50, 50, Kind.DATA, DType.BYTES, base=bytes([1]) * 32),
        Location(first.object_id, first.pack, 1 << 40, 50, 50, Kind.DATA, DType.BYTES),
    ):
        with pytest.raises(CorruptError, match=wrong.pack):
            reader.read(wrong, 0, 10)


def test_every_flipped_byte_of_a_pack_is_found(backend: LocalBackend) -> None:
    """Reading all objects whole, the footer, and the header: together they see every byte of a pack."""
    pack, data, locations = pack_bytes(backend, [b"hello", b"", b"world!"])
    path = Path(backend.path(pack_key(pack)))
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        reader = PackReader(backend)
        found = path.read_bytes()[: packfile.HEADER.size] != packfile.pack_header()
        try:
            reader.entries(pack)
        except CorruptError as error:
            assert pack in str(error)
            found = True
        for location in locations:
            try:
                reader.read(location, 0, location.encoded_length)
            except CorruptError as error:
                assert pack in str(error)
                found = True
        assert found, f"byte {at} was changed and nobody saw it"


def test_every_truncation_is_found_and_scanning_keeps_what_is_whole(backend: LocalBackend) -> None:
    pack, data, locations = pack_bytes(backend, [b"hello", b"world!"])
    path = Path(backend.path(pack_key(pack)))
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        reader = PackReader(backend)
        with pytest.raises(CorruptError):
            reader.entries(pack)
        whole = [entry.tobytes() for entry in reader.scan(pack)]
        expected = [one for one in locations if one.offset + one.encoded_length <= length]
        assert [Location.from_entry(pack, entry) for entry in whole] == expected


def test_scanning_finds_records_past_a_damaged_one(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.store.packs._SCAN_BYTES", 7)
    pack, data, locations = pack_bytes(backend, [b"hello", b"world!" * 9, b"third"])
    path = Path(backend.path(pack_key(pack)))
    at = locations[1].offset - 10
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    found = PackReader(backend).scan(pack)
    assert [Location.from_entry(pack, entry.tobytes()) for entry in found] == [locations[0], locations[2]]


def test_scanning_is_not_fooled_by_a_pack_inside_an_object(backend: LocalBackend) -> None:
    _, inner, _ = pack_bytes(backend, [b"inner"])
    pack, data, locations = pack_bytes(backend, [b"first", inner, b"last"])
    path = Path(backend.path(pack_key(pack)))
    at = locations[1].offset - 10
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    found = PackReader(backend).scan(pack)
    assert [Location.from_entry(pack, entry.tobytes()) for entry in found] == [locations[0], locations[2]]


def test_a_long_footer_is_read_whole(backend: LocalBackend) -> None:
    _, _, locations = pack_bytes(backend, [b"%d" % number for number in range(1000)])
    entries = PackReader(backend).entries(locations[0].pack)
    assert len(entries) == 1000 and entries.tobytes() == b"".join(
        location.to_entry(packfile.check_of(b"%d" % number)) for number, location in enumerate(locations)
    )


@pytest.mark.parametrize("lasting", [False, True])
def test_a_full_disk_at_any_call_is_clean(tmp_path: Path, lasting: bool) -> None:
    for at in range(40):
        root = make_root(tmp_path / str(at))
        ops = FaultyOps(at, errno.ENOSPC, lasting=lasting)
        writer = writer_of(LocalBackend(root, ops))
        try:
            for number in range(3):
                add(writer, b"%d" % number)
            writer.flush()
        except NoSpaceError:
            with pytest.raises(NoSpaceError):
                writer.flush()
        writer.abort()
        assert os.listdir(root / "tmp") == []
        plain = LocalBackend(root)
        for info in plain.list("packs/"):
            pack = pack_of_key(info.key)
            assert pack is not None and len(PackReader(plain).entries(pack)) == 3
        if not ops.reached:
            return
    pytest.fail("the calls never end")


def test_one_threads_failure_stops_them_all(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(backend)
    add(writer, b"before")
    backend.ops = FaultyOps(0)
    with pytest.raises(NoSpaceError):
        add(writer, b"fails")
    backend.ops = FaultyOps(1 << 30)
    for attempt in (lambda: add(writer, b"after"), writer.flush):
        with pytest.raises(NoSpaceError):
            attempt()
    writer.abort()
    assert os.listdir(backend.root / "packs") == os.listdir(backend.root / "tmp") == []


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_entries_outside_the_records_are_refused(offset: int, length: int, end: int) -> None:
    entries = np.zeros(1, packfile.ENTRY)
    entries["kind"], entries["offset"], entries["encoded_length"] = 1, offset, length
    fits = offset >= packfile.HEADER.size + packfile.RECORD_BYTES and offset + length <= end
    if fits:
        packfile.check_entries(entries, end)
    else:
        with pytest.raises(CorruptError):
            packfile.check_entries(entries, end)


@given(st.binary(max_size=400))
def test_no_bytes_make_a_reader_do_anything_but_refuse(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    root = make_root(tmp_path_factory.mktemp("hostile") / "store")
    pack = "0" * 32
    (root / pack_key(pack)).write_bytes(b"MCPK" + data + packfile.TRAILER_MAGIC)
    reader = PackReader(LocalBackend(root))
    with pytest.raises(CorruptError):
        reader.entries(pack)
    assert len(reader.scan(pack)) == 0


def test_keys() -> None:
    assert pack_of_key(pack_key("0123456789abcdef" * 2)) == "0123456789abcdef" * 2
    for stray in ("packs/x.pack", "packs/.nfs0001", "log/" + "0" * 32 + ".pack", "packs/" + "G" * 32 + ".pack"):
        assert pack_of_key(stray) is None
