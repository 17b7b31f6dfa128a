"""The Python reader: files and tensors of snapshots without a mount."""

from __future__ import annotations

import errno
import io
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import moonclipfs
from moonclipfs import errors
from moonclipfs.api import RawFile, read_tensor
from moonclipfs.formats.layout import Tensor
from moonclipfs.store import target as targets
from moonclipfs.store.add import add
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.types import DType
from tests.cli.conftest import checkpoint, safetensors, weights
from tests.nobody import Nobody


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A store with run1/step-2 (two versions) and run1/step-10."""
    with Store.create(tmp_path / "store") as store:
        for number, (name, step) in enumerate([("step-2", 1), ("step-2", 2), ("step-10", 10)]):
            add(store, [checkpoint(tmp_path / str(number), step)], name=f"run1/{name}")
    return tmp_path / "store"


@pytest.fixture
def snapshot(where: Path) -> Iterator[moonclipfs.Snapshot]:
    with moonclipfs.open(where, "run1/step-2") as opened:
        yield opened


def put(where: Path, name: str, files: dict[str, bytes]) -> None:
    source = where.parent / f"put-{name}"
    source.mkdir()
    for path, data in files.items():
        (source / path).write_bytes(data)
    with Store.open(where, write=True) as store:
        add(store, [source], name=name)


def test_snapshots_and_versions(where: Path) -> None:
    with moonclipfs.open(where) as reader:
        assert reader.snapshots() == ["run1/step-2", "run1/step-10"]
        assert reader.snapshots("run1/step-1") == ["run1/step-10"]
        assert reader.versions("run1/step-2") == [1, 2]
        assert reader.versions("absent") == []
        assert reader.snapshot("run1/step-2@1").version.number == 1
        with pytest.raises(errors.NotFoundError, match="did you mean"):
            reader.snapshot("run1/step-3")
        with pytest.raises(errors.NotFoundError, match="no snapshot run1; there are snapshots below it"):
            reader.snapshot("run1")
        with pytest.raises(errors.UsageError, match="a path inside a snapshot: open run1/step-2@2"):
            reader.snapshot("run1/step-2/notes")


def test_a_snapshot_is_named_in_every_way(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(where.parent)
    for store, name in [
        (f"{where}:run1/step-2@1", None),
        ("store:run1/step-2@1", None),
        ("store:/run1/", "step-2@1"),
        ("store", "run1/step-2@1"),
        (where, "run1/step-2@1"),
    ]:
        with moonclipfs.open(store, name) as snapshot:
            assert (snapshot.name, snapshot.version.number) == ("run1/step-2", 1)
    with moonclipfs.open("store") as reader:
        assert reader.snapshots()
    for text, kind in [
        ("store:run1", errors.NotFoundError),
        ("store:run1/step-2/notes", errors.UsageError),
        ("absent", errors.NotFoundError),
        (str(where.parent), errors.FormatVersionError),
    ]:
        with pytest.raises(kind):
            moonclipfs.open(text)
    assert not list((where / "leases").iterdir())


def test_a_path_inside_a_mount_names_a_snapshot(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount's answers are played here; tests/cli/test_process.py asks a real one."""
    place = where.parent / "mnt" / "step-2"
    place.mkdir(parents=True)
    answers = {targets.XATTR_STORE: str(where), targets.XATTR_SNAPSHOT: "run1/step-2", targets.XATTR_VERSION: "1"}
    monkeypatch.setattr(targets, "_xattr", lambda path, name: answers.get(name) if path == str(place) else None)
    with moonclipfs.open(place) as snapshot:
        assert (snapshot.name, snapshot.version.number) == ("run1/step-2", 1)


def test_what_is_opened_is_closed_and_what_is_given_is_not(where: Path) -> None:
    with Store.open(where) as store:
        with moonclipfs.open(store) as reader, moonclipfs.open(store, "run1/step-2") as snapshot:
            assert reader.snapshots()
            assert snapshot.files()
        assert store.names().bound()
    with pytest.raises(errors.NotFoundError):
        moonclipfs.open(where, "absent")
    assert not list((where / "leases").iterdir())


def test_files(snapshot: moonclipfs.Snapshot, where: Path) -> None:
    assert snapshot.files() == ["config.json", "model.safetensors", "notes/a b.txt"]
    source = where.parent / "1"
    for path in snapshot.files():
        assert snapshot.read(path) == (source / path).read_bytes()
    assert snapshot.name == "run1/step-2"
    assert snapshot.metadata["files"] == 3


def test_a_file_object_behaves_as_one_of_the_disk(snapshot: moonclipfs.Snapshot, where: Path) -> None:
    with snapshot.open("model.safetensors") as stored, open(where.parent / "1" / "model.safetensors", "rb") as plain:
        assert stored.readable()
        assert stored.seekable()
        assert not stored.writable()
        for offset, whence, size in [
            (0, 0, 8),
            (100, 1, 50),
            (-10, 2, 100),
            (1 << 40, 0, 5),
            (5, 0, -1),
            (70000, 0, 1),
        ]:
            assert stored.seek(offset, whence) == plain.seek(offset, whence)
            assert stored.read(size) == plain.read(size)
            assert stored.tell() == plain.tell()
        for file in (plain, stored):
            with pytest.raises(OSError, match="Invalid argument"):
                file.seek(-1)
        with pytest.raises(io.UnsupportedOperation):
            stored.write(b"x")
    with pytest.raises(ValueError, match="closed"):
        stored.read()


def test_links_are_followed_inside_the_snapshot_only(where: Path, expect_log: Callable[[str], None]) -> None:
    expect_log("2 symbolic links lead out of .*/links, the first is .*/links/absolute")
    source = where.parent / "links"
    (source / "blobs").mkdir(parents=True)
    (source / "deep" / "er").mkdir(parents=True)
    (source / "blobs" / "b").write_bytes(b"blob")
    for name, target in [
        ("deep/er/up", "../../blobs/b"),
        ("dir", "deep/er"),
        ("out", "../store/config.json"),
        ("absolute", "/etc/passwd"),
        ("circle", "circle"),
        ("dangling", "nothing"),
    ]:
        (source / name).symlink_to(target)
    with Store.open(where, write=True) as store:
        add(store, [source], name="links")
    with moonclipfs.open(where, "links") as snapshot:
        assert snapshot.read("deep/er/up") == b"blob"
        assert snapshot.read("dir/up") == b"blob"
        assert snapshot.read("./deep/../blobs//b") == b"blob"
        refused = {
            "out": "leads out of",
            "absolute": "leads out of",
            "../x": "leads out of",
            "circle": "in a circle",
            "dangling": "no nothing",
            "blobs/b/c": "no c in b",
        }
        for name, words in refused.items():
            with pytest.raises(errors.NotFoundError, match=words):
                snapshot.read(name)
        assert snapshot.entry("circle", follow=False).target == b"circle"
        with pytest.raises(errors.UsageError, match="a directory, not a file"):
            snapshot.open("blobs")


def test_tensors(snapshot: moonclipfs.Snapshot) -> None:
    infos = {info.name: info for info in snapshot.tensors()}
    assert infos["scale"] == moonclipfs.TensorInfo("scale", "model.safetensors", "BF16", (4096,), 8192)
    assert snapshot.tensors("config.json") == []
    for name, values in weights(2).items():
        found = snapshot.tensor(name)
        assert found.dtype == values.dtype
        assert np.array_equal(found, values)
        assert found.flags.writeable
    with pytest.raises(errors.NotFoundError, match=r"no tensor heads in run1/step-2; did you mean head\?"):
        snapshot.tensor("heads")
    with pytest.raises(errors.NotFoundError, match=r"in config\.json"):
        snapshot.tensor("head", "config.json")


def test_a_name_in_several_files_needs_the_file(where: Path) -> None:
    one, two = np.zeros((2, 3), "f4"), np.ones((2, 3), "f4")
    put(where, "twice", {"a.safetensors": safetensors({"w": one}), "b.safetensors": safetensors({"w": two})})
    with moonclipfs.open(where, "twice") as snapshot:
        with pytest.raises(errors.UsageError, match=r"in a\.safetensors and b\.safetensors"):
            snapshot.tensor("w")
        assert np.array_equal(snapshot.tensor("w", "b.safetensors"), two)


def test_scalars_and_empty_tensors(where: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {"scalar": np.array(7, "i8"), "none": np.empty((0, 5), "f4")}
    put(where, "odd", {"x.safetensors": safetensors(arrays)})
    with moonclipfs.open(where, "odd") as snapshot:
        assert snapshot.tensor("scalar").shape == ()
        assert snapshot.tensor("scalar") == 7
        assert snapshot.tensor("none").shape == (0, 5)


def test_a_large_tensor_is_decoded_once(where: Path) -> None:
    large = np.random.default_rng(5).integers(0, 1 << 16, (20 << 20) // 2).astype("u2")
    put(where, "large", {"large.safetensors": safetensors({"w": large})})
    with moonclipfs.open(where, "large") as snapshot:
        snapshot.tensors()
        before = snapshot.store.objects.counters.bytes_decoded
        assert np.array_equal(snapshot.tensor("w"), large)
        assert snapshot.store.objects.counters.bytes_decoded - before == large.nbytes
        assert snapshot.read("large.safetensors") == safetensors({"w": large})


def forget(where: Path, name: str, number: int, wait_seconds: float = 5) -> bool:
    """Forget a version and reclaim; True when everything that became dead is gone."""
    with Store.open(where, write=True) as store:
        store.log.forget([(name, number)])
        report = collect(store, wait_seconds=wait_seconds)
        assert report.dead_bytes
        return not report.waiting_packs


def reclaimed(where: Path, wait_seconds: float = 5) -> bool:
    with Store.open(where, write=True) as store:
        return not collect(store, wait_seconds=wait_seconds).waiting_packs


def test_what_is_open_outlives_forgetting(where: Path) -> None:
    plain = (where.parent / "2" / "model.safetensors").read_bytes()
    with moonclipfs.open(where) as reader:
        snapshot = reader.snapshot("run1/step-10")
        file = snapshot.open("model.safetensors")
        assert file.read(10) == plain[:10]
        assert not forget(where, "run1/step-10", 1, wait_seconds=1.5)
        assert "run1/step-10" not in reader.snapshots()
        assert snapshot.read("model.safetensors") == plain
        snapshot.close()
        with pytest.raises(errors.UsageError, match="closed"):
            snapshot.read("model.safetensors")
        assert not reclaimed(where, wait_seconds=1.5)
        file.seek(0)
        assert file.read() == plain
        file.close()
        assert reclaimed(where)


def test_what_is_collected_is_closed(where: Path) -> None:
    file = moonclipfs.open(where, "run1/step-10").open("model.safetensors")
    assert not forget(where, "run1/step-10", 1, wait_seconds=1.5)
    assert file.read() == (where.parent / "2" / "model.safetensors").read_bytes()
    del file
    assert reclaimed(where)
    wait_for(lambda: not list((where / "leases").iterdir()))


def test_an_idle_reader_is_in_nobodys_way(where: Path) -> None:
    with moonclipfs.open(where) as reader, reader.snapshot("run1/step-2").open("model.safetensors") as file:
        assert forget(where, "run1/step-10", 1)
        assert file.read() == (where.parent / "1" / "model.safetensors").read_bytes()


def test_a_given_store_says_by_itself_what_it_saw(where: Path) -> None:
    with Store.open(where) as store, moonclipfs.open(store) as reader:
        version = store.resolve("run1/step-10")
        snapshot = reader.snapshot("run1/step-2")
        assert not forget(where, "run1/step-10", 1, wait_seconds=1.5)
        assert list(store.walk(version))
        store.names()
        assert reclaimed(where)
        assert snapshot.files()


def test_an_idle_reader_keeps_no_interpreter_alive_and_survives_a_fork(where: Path) -> None:
    program = f"""
import os, moonclipfs
snapshot = moonclipfs.open({str(where)!r}, "run1/step-10")
for _ in range(20):
    if not os.fork():
        snapshot.open("config.json").read()
        snapshot.close()
        os._exit(0)
    assert os.wait()[1] == 0
print(snapshot.read("config.json").decode())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ('{"step": 10}\n', "")


def test_a_file_object_raises_os_errors(snapshot: moonclipfs.Snapshot, where: Path) -> None:
    file = snapshot.open("model.safetensors")
    for pack in (where / "packs").iterdir():
        pack.unlink()
    for read in (file.read, lambda: file.read(100), lambda: file.readinto(bytearray(1 << 20))):
        with pytest.raises(OSError, match="object") as caught:
            read()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, "model.safetensors")


def test_long_reads_are_few(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(5).bytes(9 << 20)
    put(where, "long", {"long.bin": data})
    calls: list[int] = []
    for name in ("read_into", "stream_into"):
        real = getattr(FileReader, name)
        monkeypatch.setattr(FileReader, name, lambda self, at, out, real=real: calls.append(at) or real(self, at, out))
    buffer = bytearray(len(data) + 5)
    with moonclipfs.open(where, "long") as snapshot, snapshot.open("long.bin") as file:
        assert file.read() == data
        assert file.read() == b""
        file.seek(3)
        assert file.readinto(buffer) == len(data) - 3
        assert buffer[: len(data) - 3] == data[3:]
        file.seek(len(data) + 7)
        assert file.read() == b""
        assert file.tell() == len(data) + 7
    assert len(calls) < 12


class TestHostileTensors:
    """A layout comes from a file, so nothing in it may be believed."""

    @given(
        st.lists(st.integers(-1, 1 << 63) | st.integers(0, 4), max_size=4),
        st.lists(st.integers(-(1 << 63), 1 << 63) | st.integers(-2, 4), min_size=4, max_size=4),
        st.booleans(),
        st.integers(-4, 80),
        st.integers(0, 80),
        st.sampled_from(DType),
    )
    @example([1, 4], [1 << 62, 2, 0, 0], True, 0, 28, DType.F32)
    @example([1 << 50], [0, 0, 0, 0], True, 0, 4, DType.F32)
    @example([0, 1 << 62], [1, 1, 0, 0], False, 0, 0, DType.F32)
    @example([5], [1, 1, 0, 0], False, 50, 20, DType.F32)
    def test_a_layout_is_read_or_refused(
        self, shape: list[int], strides: list[int], strided: bool, offset: int, length: int, dtype: DType
    ) -> None:
        how = tuple(strides[: len(shape)]) if strided else None
        tensor = Tensor("w", dtype, tuple(shape), offset, length, how)
        data = bytes(range(64))
        try:
            found = read_tensor(InMemory(data), tensor)  # type: ignore[arg-type]
        except (errors.CorruptError, errors.LimitError):
            return
        assert set(found.tobytes()) <= set(data[offset : offset + length])

    def test_overlapping_elements(self) -> None:
        tensor = Tensor("w", DType.U8, (1, 3, 2), 1, 4, (1 << 62, 1, 1))
        assert read_tensor(InMemory(bytes(range(64))), tensor).tolist() == [[[1, 2], [2, 3], [3, 4]]]  # type: ignore[arg-type]


class InMemory:
    """What `read_tensor` needs of a reader."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)

    def read_into(self, offset: int, out: memoryview) -> int:
        out[:] = self.data[offset : offset + len(out)]
        return len(out)

    stream_into = read_into


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_reading_from_many_threads(snapshot: moonclipfs.Snapshot) -> None:
    wanted = weights(2)
    with ThreadPoolExecutor(8) as pool:
        names = list(wanted) * 10
        for name, found in zip(names, pool.map(snapshot.tensor, names), strict=True):
            assert np.array_equal(found, wanted[name])


def test_a_flipped_bit_is_an_error_and_never_data(where: Path) -> None:
    for pack in (where / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        for place in range(200, len(data) // 2, 997):
            data[place] ^= 4
        pack.chmod(0o600)
        pack.write_bytes(data)
    with moonclipfs.open(where, "run1/step-2@1") as snapshot, pytest.raises(errors.CorruptError):
        snapshot.read("model.safetensors")


def test_a_read_only_store_can_be_read(where: Path, nobody: Nobody) -> None:
    with nobody.copy(where) as copy:
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o500 if path.is_dir() else 0o400)

        def read() -> None:
            with pytest.raises(errors.PermissionDeniedError):
                Store.open(copy, write=True)
            with moonclipfs.open(copy, "run1/step-2") as snapshot:
                assert np.array_equal(snapshot.tensor("head"), weights(2)["head"])

        nobody.run(read)


def test_raw_file_reads_short_only_at_the_end(snapshot: moonclipfs.Snapshot) -> None:
    raw = RawFile(snapshot.reader("model.safetensors"), "model.safetensors")
    size = raw.seek(0, os.SEEK_END)
    raw.seek(size - 3)
    buffer = bytearray(10)
    assert raw.readinto(buffer) == 3
    assert raw.readinto(buffer) == 0


class TestTorch:
    """Where torch is installed."""

    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch", reason="torch is not installed")

    def test_tensors_of_every_dtype(self, torch: Any, where: Path, tmp_path: Path) -> None:
        tensors = {
            str(dtype): torch.arange(-8, 16).view(torch.uint8)[:96].clone().view(dtype).reshape(2, -1)
            for dtype in (
                *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32),
                *(torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
            )
        }
        tensors["bool"] = torch.tensor([True, False, True])
        tensors["scalar"] = torch.tensor(1.5, dtype=torch.bfloat16)
        tensors["turned"] = torch.arange(12.0).reshape(3, 4).t()
        tensors["slice"] = torch.arange(24.0).reshape(4, 6)[1:3, ::2]
        buffer = io.BytesIO()
        torch.save({"model": tensors}, buffer)
        put(where, "torch", {"all.pt": buffer.getvalue()})
        with moonclipfs.open(where, "torch") as snapshot:
            for name, wanted in tensors.items():
                found = snapshot.torch(f"model.{name}")
                assert found.dtype == wanted.dtype
                assert found.shape == wanted.shape
                raw = [value.contiguous().reshape(-1).view(torch.uint8) for value in (found, wanted)]
                assert torch.equal(*raw), name

    def test_a_dtype_that_torch_lacks(self, torch: Any, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with moonclipfs.open(where, "run1/step-2") as snapshot:
            monkeypatch.delattr(torch, "bfloat16")
            with pytest.raises(errors.UsageError, match=r"scale: this torch has no dtype for BF16; use tensor\(\)"):
                snapshot.torch("scale")


def test_types_without_whole_bytes_come_as_bytes(where: Path) -> None:
    raw = bytes(range(16))
    header = b'{"q":{"dtype":"F4","shape":[4,8],"data_offsets":[0,16]}}'
    header += b" " * (-len(header) % 8)
    put(where, "f4", {"q.safetensors": len(header).to_bytes(8, "little") + header + raw})
    with moonclipfs.open(where, "f4") as snapshot:
        (info,) = snapshot.tensors()
        assert (info.dtype, info.shape) == ("F4", (4, 8))
        found = snapshot.tensor("q")
        assert found.dtype == np.uint8
        assert found.tobytes() == raw
        assert math.prod(info.shape) == 2 * len(raw)
