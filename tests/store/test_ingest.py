"""Bytes in: what is stored once, in which order, within which memory, and what a failure leaves."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import BusyError, LeaseLostError, MissingObjectError, NoSpaceError
from moonclipfs.store import sinks
from moonclipfs.store.add import add
from moonclipfs.store.gc import collect
from moonclipfs.store.ingest import IngestStats
from moonclipfs.store.packs import pack_key
from moonclipfs.store.publish import Ingest
from moonclipfs.store.sinks import PackSink
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Attributes, BytesSource, DType, Entry, EntryType, Kind, ObjectId
from tests.faults import FaultyOps
from tests.store.kit import contents, noise, packs, publish, series


def safetensors(tensors: Mapping[str, tuple[str, bytes]], pad: int = 0, metadata: str = "") -> bytes:
    """A file of flat tensors: name -> (dtype, bytes)."""
    widths, at = {"F32": 4, "BF16": 2, "U8": 1}, 0
    header: dict[str, object] = {"__metadata__": {"x": metadata}} if metadata else {}
    for name, (dtype, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [len(data) // widths[dtype]], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors.values())


def floats(seed: int, count: int = 50_000) -> bytes:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32).tobytes()


def put(store: Store, data: bytes) -> IngestStats:
    """Store bytes as a file and read them back; what it took."""
    with store.ingest() as ingest:
        child, size, stats = ingest.put_file(BytesSource(data))
        entry = Entry(b"f", EntryType.FILE, Attributes(0o644), size, child)
        ingest.publish("x", ingest.put_directory([entry]), {})
    assert store.open_file(store.lookup(store.resolve("x"), b"f")).read(0, len(data)) == data
    return stats


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from([b"\0", b"a", b"\xff\x01"]), st.integers(0, 70_000)), max_size=4),
    st.binary(max_size=300),
)
def test_any_bytes_come_back(store: Store, runs: list[tuple[bytes, int]], tail: bytes) -> None:
    data = b"".join(part * count for part, count in runs) + tail
    stats = put(store, data)
    assert stats.raw_bytes == len(data)
    assert stats.shared_bytes + stats.hole_bytes + stats.literal_bytes + stats.delta_bytes + stats.full_bytes == len(
        data
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=5),
        st.tuples(st.sampled_from(["F32", "BF16", "U8"]), st.integers(0, 3000), st.integers(0, 2)),
        max_size=8,
    )
)
def test_any_tensors_come_back(store: Store, tensors: dict[str, tuple[str, int, int]]) -> None:
    put(store, safetensors({name: (dtype, floats(seed, count)) for name, (dtype, count, seed) in tensors.items()}))


def test_a_tensor_that_grew_is_stored_whatever_it_was_before(store: Store, tmp_path: Path) -> None:
    """A base may end before the place of the new object at which it is tried."""
    put(store, safetensors({"w": ("F32", floats(1, 75_000))}))
    (tmp_path / "new").mkdir()
    (tmp_path / "new/f").write_bytes(safetensors({"w": ("F32", floats(1, 375_000))}))
    assert add(store, [tmp_path / "new"], dry_run=True).stats.stored_bytes
    put(store, (tmp_path / "new/f").read_bytes())


def test_an_empty_file_is_no_object(store: Store) -> None:
    with store.ingest() as ingest:
        assert ingest.put_file(BytesSource(b"")) == (NO_ID, 0, IngestStats(files=1))
        assert ingest.stats.objects == 0


def test_R065_tied_tensors_are_stored_once(store: Store) -> None:
    tied = floats(1, 262_144)
    stats = put(store, safetensors({"a": ("F32", tied), "b": ("F32", tied)}))
    assert stats.shared_bytes == len(tied)
    assert stats.stored_bytes <= len(tied) + 65_536


def test_R057_a_shifted_header_costs_nothing(store: Store) -> None:
    tensors = {name: ("BF16", floats(seed, 262_144)) for seed, name in enumerate("ab")}
    put(store, safetensors(tensors))
    stats = put(store, safetensors(tensors, pad=14_055, metadata="longer"))
    assert stats.stored_bytes < 65_536
    assert stats.shared_bytes >= 2 * 1_048_576


def test_R059_zip_archives_of_the_same_storages_share_them(store: Store) -> None:
    def archive(root: str, serial: str) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
            file.writestr(f"{root}/data.pkl", b"\x80\x02}q\x00.")
            file.writestr(f"{root}/byteorder", b"little")
            for number in range(4):
                file.writestr(f"{root}/data/{number}", floats(number, 262_144))
            file.writestr(f"{root}/version", b"3\n")
            file.writestr(f"{root}/.data/serialization_id", serial)
        return out.getvalue()

    put(store, archive("a", "1" * 40))
    assert put(store, archive("checkpoint-200", "2" * 40)).stored_bytes < 65_536


def test_the_same_tensor_under_other_dtypes_names_and_formats_is_one_object(store: Store) -> None:
    data = floats(3)
    put(store, safetensors({"a": ("F32", data)}))
    assert put(store, safetensors({"z": ("U8", data)})).full_stored < 2000


def test_zeros_become_holes_and_short_pieces_literals(store: Store) -> None:
    stats = put(store, bytes(300_000))
    assert (stats.hole_bytes, stats.stored_bytes - stats.tree_stored) == (300_000, 0)
    stats = put(store, b"tiny")
    assert (stats.literal_bytes, stats.objects) == (4, 1)


def test_threads_that_bring_the_same_bytes_encode_them_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[ObjectId] = []
    plain = PackSink.put

    def slow(self: PackSink, kind: Kind, raw: bytes, object_id: ObjectId, hints: sinks.Hints) -> object:
        encoded.append(object_id)
        time.sleep(0.05)
        return plain(self, kind, raw, object_id, hints)

    monkeypatch.setattr(PackSink, "put", slow)
    data = floats(1)
    stats = put(store, safetensors({f"t{number}": ("F32", data) for number in range(10)}))
    assert stats.shared_bytes == 9 * len(data)
    assert len(set(encoded)) == len(encoded)


def test_pieces_in_work_stay_within_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 100_000
    monkeypatch.setattr(limits, "INGEST_BYTES", 4 * 3 * piece)
    monkeypatch.setattr(limits, "OBJECT_BYTES", piece // 4)  # so that memory, not the number of workers, is the bound
    lock, now, most = threading.Lock(), 0, 0
    plain = Ingest._put_piece

    def counted(self: Ingest, *arguments: object) -> object:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        try:
            time.sleep(0.005)
            return plain(self, *arguments)  # type: ignore[arg-type]
        finally:
            with lock:
                now -= 1

    monkeypatch.setattr(Ingest, "_put_piece", counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    put(store, safetensors({f"t{number}": ("F32", floats(number, piece // 4)) for number in range(30)}))
    assert 2 <= most <= 4, "the header is a piece beside three tensors"


MEMORY = """
import json, resource, sys
import numpy as np
from moonclipfs.store.store import Store

PIECE, COUNT = 16 << 20, 24
tile = np.random.default_rng(0).standard_normal(PIECE // 4).astype(np.float32).tobytes()
text = json.dumps({"w": {"dtype": "F32", "shape": [COUNT * PIECE // 4], "data_offsets": [0, COUNT * PIECE]}}).encode()
head = len(text).to_bytes(8, "little") + text

class Generated:
    size = len(head) + COUNT * PIECE

    def read(self, offset, length):
        if offset < len(head):
            return head[offset : offset + length]
        number, at = divmod(offset - len(head), PIECE)
        return (number.to_bytes(8, "little") + tile[8:])[at : at + length]

with Store.open(sys.argv[1], write=True) as store:
    with store.ingest() as ingest:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _, size, stats = ingest.put_file(Generated())
    assert size == Generated.size and stats.objects == COUNT + 1, stats
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_file_longer_than_the_memory_it_takes(store: Store) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, store.path], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 320, "MiB, for a file of 384"


class Failing(BytesSource):
    """A file that becomes shorter while it is read."""

    def __init__(self, data: bytes, after: int) -> None:
        super().__init__(data)
        self._after = after

    def read(self, offset: int, length: int) -> bytes:
        if offset + length > self._after:
            raise BusyError("it changed")
        return bytes(super().read(offset, length))


def test_a_source_that_fails_leaves_nothing_and_no_worker_reading(store: Store) -> None:
    data = safetensors({f"t{number}": ("F32", floats(number)) for number in range(20)})
    threads = threading.active_count()
    with store.ingest() as ingest:
        with pytest.raises(BusyError, match="it changed"):
            ingest.put_file(Failing(data, 1_000_000))
        assert not ingest._flights
    assert threading.active_count() == threads
    assert not store.names().bound()
    assert not packs(store)


def test_an_ingest_that_is_not_published_leaves_objects_that_the_next_one_finds(store: Store) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "PACK_BYTES", 1_000_000)
        with store.ingest() as ingest:
            ingest.put_file(BytesSource(safetensors({f"t{n}": ("F32", floats(n, 300_000)) for n in range(5)})))
    assert len(packs(store)) >= 2
    stats = put(store, safetensors({f"t{n}": ("F32", floats(n, 300_000)) for n in range(5)}))
    assert stats.shared_bytes >= 2 * 1_200_000


def test_a_full_disk_is_an_error_and_changes_nothing(store: Store) -> None:
    publish(store, "a", {"f": noise(1)})
    before = store.names()
    for at in range(50):
        plain, store.backend.ops = store.backend.ops, FaultyOps(at, errno.ENOSPC)
        try:
            publish(store, "b", {"f": noise(2, 100_000)})
        except NoSpaceError:
            assert store.log.refresh().bound() == before.bound()
        finally:
            store.backend.ops = plain
        if "b" in store.names().bound():
            break
    else:
        pytest.fail("never got through")
    assert at > 3
    assert contents(store, "a") == {"f": noise(1)}
    assert contents(store, "b") == {"f": noise(2, 100_000)}


def test_what_was_condemned_meanwhile_is_stored_again(store: Store) -> None:
    files = series(4)
    for number, data in enumerate(files[:3]):
        publish(store, f"run/{number}", {"w": data})
    old = packs(store)
    store.log.forget([(f"run/{number}", 1) for number in range(3)])
    with Store.open(store.path, write=True) as other, store.ingest() as ingest:
        entries = []
        for name, data in (("known", files[2]), ("new", files[3])):
            child, size, stats = ingest.put_file(BytesSource(data))
            entries.append(Entry(name.encode(), EntryType.FILE, Attributes(0o644), size, child))
        assert stats.delta_bytes > 0
        assert collect(other).waiting_packs == 3, "condemned, but not deleted while the ingest lives"
        ingest.publish("run/3", ingest.put_directory(entries), {})
    store.names()
    with Store.open(store.path, write=True) as other:
        collect(other)
        assert not packs(store) & old
        assert contents(other, "run/3") == {"known": files[2], "new": files[3]}
        depths = {place.depth for place in other.index.iterate()}
        assert max(depths) <= limits.CHAIN_DEPTH
    assert contents(store, "run/3") == {"known": files[2], "new": files[3]}


def test_R073_gc_between_storing_and_binding_takes_nothing(store: Store) -> None:
    with Store.open(store.path, write=True) as other, store.ingest() as ingest:
        child, size, _ = ingest.put_file(BytesSource(noise(1)))
        ingest._packs_sink.flush()
        collect(other)
        entry = Entry(b"f", EntryType.FILE, Attributes(0o644), size, child)
        ingest.publish("a", ingest.put_directory([entry]), {})
        collect(other)
    collect(store)
    assert contents(store, "a") == {"f": noise(1)}


def test_R083_a_process_that_was_taken_for_dead_publishes_nothing(store: Store) -> None:
    assert store.lease is not None
    with store.ingest() as ingest:
        child, size, _ = ingest.put_file(BytesSource(noise(1)))
        root = ingest.put_directory([Entry(b"f", EntryType.FILE, Attributes(0o644), size, child)])
        for lease in (Path(store.path) / "leases").iterdir():
            lease.unlink()
        with pytest.raises(LeaseLostError):
            ingest.publish("a", root, {})
    assert not store.log.refresh().bound()


def test_a_check_that_refuses_stops_the_publish(store: Store) -> None:
    def refuse(names: object) -> None:
        raise BusyError("not now")

    with store.ingest() as ingest:
        root = ingest.put_directory([])
        with pytest.raises(BusyError, match="not now"):
            ingest.publish("a", root, {}, check=refuse)
    assert not store.names().bound()


KILLED = """
import sys
from pathlib import Path
from moonclipfs import limits
from moonclipfs.store.store import Store
from moonclipfs.types import BytesSource
from tests.store.test_ingest import floats, safetensors

limits.PACK_BYTES = 1_000_000
with Store.open(sys.argv[1], write=True) as store, store.ingest() as ingest:
    ingest.put_file(BytesSource(safetensors({f"t{n}": ("F32", floats(n, 300_000)) for n in range(5)})))
    print("stored", flush=True)
    sys.stdin.read()
"""


def test_a_killed_ingest_leaves_only_what_gc_takes(store: Store) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, store.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stored\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert packs(store)
    assert not store.names().bound()
    collect(store)
    assert not packs(store)
    assert not list((Path(store.path) / "tmp").iterdir())


def test_an_object_that_vanished_before_the_ingest_is_stored_anew(store: Store) -> None:
    data = safetensors({"w": ("F32", floats(1))})
    put(store, data)
    for pack in packs(store):
        os.unlink(store.backend.path(pack_key(pack)))
    assert put(store, data).shared_bytes == 0


def test_no_stored_object_is_typed_wrongly(store: Store) -> None:
    put(store, safetensors({"w": ("F32", floats(1)), "b": ("BF16", floats(2))}))
    kinds = {(place.kind, place.dtype) for place in store.index.iterate()}
    assert {(Kind.DATA, DType.F32), (Kind.DATA, DType.BF16), (Kind.RECIPE, DType.BYTES)} <= kinds


def test_missing_objects_are_errors_of_reading_only(store: Store) -> None:
    with pytest.raises(MissingObjectError):
        store.objects.load(b"\x01" * 32, Kind.DATA)
