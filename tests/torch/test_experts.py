"""Expert files: the bytes that other programs write and read, whole or by tensor, and what is no expert."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from moonclipfs.errors import CorruptError, NotFoundError, ReadOnlyError, UsageError
from moonclipfs.torch import ExpertStore
from moonclipfs.torch.experts import ExpertId
from moonclipfs.types import DType
from tests.nobody import Nobody
from tests.torch.expertkit import CountingPath, Place, bits, expert, files, with_moments

FORMATS = ["safetensors", "npz"]


def awkward() -> dict[str, torch.Tensor]:
    """Every bit pattern of bfloat16, NaNs and infinities, no elements, no dimensions, transposed memory, a gap."""
    return {
        "all": torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16),
        "nan": torch.tensor([0x7F800001, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "transposed": torch.arange(6, dtype=torch.int64).view(2, 3).T,
        "strided": torch.arange(20, dtype=torch.uint8)[::2],
        "flags": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]).conj(),
    }


@pytest.mark.parametrize("file_format", FORMATS)
def test_tensors_come_back_bit_for_bit(place: Place, file_format: str) -> None:
    store = ExpertStore(place, file_format=file_format)
    assert store.ids() == [] and not store.exists(7)
    size = store.write(7, awkward())
    assert store.ids() == [7] and store.exists(7)
    assert bits(store.read(7)) == bits(awkward()) and list(store.read(7)) == list(awkward())
    assert files(place).keys() == {f"e00007.{file_format}"} and store.stat(7).size == size
    assert store.holds(7, awkward())
    for changed in (
        {**awkward(), "scalar": torch.tensor(2.0, dtype=torch.float64)},
        {**awkward(), "flags": torch.tensor([1, 0])},
        {**awkward(), "more": torch.ones(1)},
        {name: tensor for name, tensor in awkward().items() if name != "flags"},
        {**awkward(), "transposed": torch.zeros(3, 2, dtype=torch.int64)},
    ):
        assert not store.holds(7, changed)


@pytest.mark.parametrize("file_format", FORMATS)
def test_only_the_bytes_of_the_wanted_tensors_are_read(tmp_path: Path, file_format: str) -> None:
    large = {name: torch.randn(1 << 20) for name in ("w1", "w1_m", "w2", "w2_m")}
    ExpertStore(tmp_path, file_format=file_format).write(0, large)
    store = ExpertStore(CountingPath(tmp_path))
    CountingPath.bytes_read = 0
    assert bits(store.read(0, ["w2"])) == bits({"w2": large["w2"]})
    overhead = CountingPath.bytes_read - large["w2"].nbytes
    assert 0 < overhead < 80_000, "headers, and the end of an archive where its directory is looked for"
    CountingPath.bytes_read = 0
    assert store.stat(0).tensors["w2_m"] == (DType.F32, (1 << 20,))
    assert CountingPath.bytes_read < 80_000
    CountingPath.bytes_read = 0
    assert not store.holds(0, {**large, "w1": large["w1"] + 1})
    assert CountingPath.bytes_read < 1_200_000, "a comparison ends at the first difference"
    with pytest.raises(NotFoundError, match=r"e00000\.\w+ has no tensor w3; it has w1, w1_m, w2, w2_m"):
        store.read(0, ["w1", "w3"])


def numpy_arrays(moments: str) -> dict[str, np.ndarray]:
    """What mini-AGI saves of an expert: weights in float32, moments in bfloat16 as int16, or, long ago, in float32."""
    tensors = with_moments(3, torch.bfloat16 if moments == "packed" else torch.float32)
    return {
        name: (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("moments", ["packed", "float32"])
def test_a_file_that_numpy_wrote_is_read_and_written_again_with_the_same_bytes(tmp_path: Path, moments: str) -> None:
    arrays = numpy_arrays(moments)
    np.savez(tmp_path / "e00003.npz", **arrays)
    original = (tmp_path / "e00003.npz").read_bytes()
    store = ExpertStore(tmp_path)
    read = store.read(3)
    assert bits(read) == bits(with_moments(3, torch.bfloat16 if moments == "packed" else torch.float32))
    store.write(3, read)
    assert (tmp_path / "e00003.npz").read_bytes() == original
    store.write(4, read)
    with np.load(tmp_path / "e00004.npz") as loaded:
        assert {name: loaded[name].tobytes() for name in loaded.files} == {
            name: array.tobytes() for name, array in arrays.items()
        }


def test_arrays_of_other_kinds_are_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    arrays = {
        "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        "one": np.float32(3),
        "lonely_m": np.arange(4, dtype=np.int16),  # int16 beside no "lonely": no moment, so it stays int16
        "many": np.zeros((1,) * 20, np.uint8),  # a header longer than most
    }
    np.savez(tmp_path / "e00000.npz", **arrays)
    original = (tmp_path / "e00000.npz").read_bytes()
    store = ExpertStore(tmp_path)
    read = store.read(0)
    assert read["lonely_m"].dtype == torch.int16 and np.array_equal(read["fortran"].numpy(), arrays["fortran"])
    store.write(0, read)
    assert (tmp_path / "e00000.npz").read_bytes() == original
    assert store.holds(0, read)


def test_bfloat16_weights_in_npz_are_what_numpy_s_extension_type_is_saved_as(tmp_path: Path) -> None:
    weights = torch.randn(3).bfloat16()
    ExpertStore(tmp_path, file_format="npz").write(0, {"w": weights})
    with np.load(tmp_path / "e00000.npz") as loaded:
        assert (
            loaded["w"].dtype == np.dtype("V2") and loaded["w"].tobytes() == weights.view(torch.int16).numpy().tobytes()
        )
    with zipfile.ZipFile(tmp_path / "e00000.npz") as archive:
        assert b"'descr': '<V2'" in archive.read("w.npy")


def test_a_safetensors_file_is_that_of_the_library_and_keeps_its_metadata(tmp_path: Path) -> None:
    save_file(with_moments(1), tmp_path / "e00001.safetensors", {"format": "pt"})
    original = (tmp_path / "e00001.safetensors").read_bytes()
    store = ExpertStore(tmp_path)
    store.write(1, store.read(1))
    assert (tmp_path / "e00001.safetensors").read_bytes() == original
    store.write(2, store.read(1))
    assert (tmp_path / "e00002.safetensors").read_bytes() == save(with_moments(1))


@pytest.mark.parametrize(
    ("file_format", "tensors", "message"),
    [
        ("npz", {"w": torch.ones(2), "w_m": torch.ones(2, dtype=torch.int16)}, "read as bfloat16"),
        ("npz", {"w": torch.ones(2).to(torch.float8_e5m2)}, "use safetensors"),
        ("safetensors", {"w": torch.ones(2).to_sparse()}, "no file here can hold"),
        ("safetensors", {"__metadata__": torch.ones(2)}, "cannot hold it"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_leaves_the_old_expert(
    tmp_path: Path, file_format: str, tensors: Mapping[str, torch.Tensor], message: str
) -> None:
    store = ExpertStore(tmp_path, file_format=file_format)
    store.write(0, expert(0))
    with pytest.raises(UsageError, match=message):
        store.write(0, tensors)
    assert bits(store.read(0)) == bits(expert(0)) and len(os.listdir(tmp_path)) == 1


def damage(tmp_path: Path, kind: str) -> None:
    """Write an expert whose file is wrong."""
    path = tmp_path / "e00000.npz"
    if kind == "compressed":
        np.savez_compressed(path, w=np.ones(3))
    elif kind == "big-endian":
        np.savez(path, w=np.ones(3, ">f4"))
    elif kind == "objects":
        np.savez(path, w=np.array([{}], dtype=object))
    elif kind == "too-short-array":
        buffer = io.BytesIO()
        np.save(buffer, np.ones(3))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", buffer.getvalue()[:-1])
    elif kind == "cut":
        np.savez(path, w=np.ones(3))
        path.write_bytes(path.read_bytes()[:-30])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "empty-safetensors":
        (tmp_path / "e00000.safetensors").write_bytes(b"")
    elif kind == "cut-safetensors":
        (tmp_path / "e00000.safetensors").write_bytes(save({"w": torch.ones(3)})[:-1])
    elif kind == "no-safetensors":
        (tmp_path / "e00000.safetensors").write_bytes(b"a" * 100)
    else:
        header = b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
        (tmp_path / "e00000.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")


@pytest.mark.parametrize(
    "kind",
    [
        "compressed", "big-endian", "objects", "too-short-array", "cut", "empty", "empty-safetensors",
        "cut-safetensors", "no-safetensors", "dtype",
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_by_name_and_can_be_replaced(tmp_path: Path, kind: str) -> None:
    damage(tmp_path, kind)
    store = ExpertStore(tmp_path)
    with pytest.raises(CorruptError, match=r"/e00000\.(npz|safetensors): ."):
        store.read(0)
    assert not store.holds(0, expert(0)) and not store.holds(0, {"w": torch.ones(3)})
    store.write(0, expert(0))
    assert bits(store.read(0)) == bits(expert(0))


def test_what_is_no_expert_is_never_listed(place: Place) -> None:
    store = ExpertStore(place, file_format="npz")
    for number in (2, 123456):
        store.write(number, expert(number))
    for name in (
        ".e00001.npz.0123456789abcdef.tmp", "e00001.npz.tmp.npz", "e00001.npz.tmp", "e1.npz", "e000001.npz",
        "E00001.npz", "e00001.npz~", "e00001.bin", "manifest.json", "e00001.npz\n", "L1", "L0001",
    ):  # fmt: skip
        (place / name).write_bytes(b"half an expert")
    assert store.ids() == [2, 123456]
    assert not store.exists(1)


def test_a_walker_never_sees_a_temporary_of_a_writer_as_an_expert(place: Place) -> None:
    store = ExpertStore(place)
    store.write(0, expert(0))
    done, seen, troubles = threading.Event(), set(), []

    def walk() -> None:
        reader = ExpertStore(place, read_only=True)
        while not done.is_set():
            for number in reader.ids():
                seen.add(number)
                if bits(reader.read(number)) not in [bits(expert(seed)) for seed in range(3)]:
                    troubles.append(number)

    walker = threading.Thread(target=walk)
    walker.start()
    for turn in range(30):
        store.write(turn % 2, expert(turn % 3))
    done.set()
    walker.join()
    assert seen <= {0, 1} and not troubles


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ExpertStore(tmp_path)
    store.write(0, expert(0))
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        store.write(0, expert(1))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = [name for name in os.listdir(tmp_path) if name != "e00000.safetensors"]
    assert len(left) == 1 and left[0].startswith("."), "the temporary is hidden"
    again = ExpertStore(tmp_path)
    assert again.ids() == [0] and bits(again.read(0)) == bits(expert(0))


def test_numbers_are_never_used_again(place: Place) -> None:
    store = ExpertStore(place)
    assert [store.create(expert(one)) for one in range(3)] == [0, 1, 2]
    store.delete(2)
    store.delete(0)
    assert store.ids() == [1] and not store.exists(2)
    assert store.create(expert(3)) == 3
    store.delete(3)
    again = ExpertStore(place)
    assert again.create(expert(4)) == 4
    with pytest.raises(UsageError, match=r"expert 3 of .* was deleted"):
        again.write(3, expert(3))
    with pytest.raises(NotFoundError, match=r"expert 3 is not in"):
        again.delete(3)
    again.write(9, expert(9))
    assert again.create(expert(5)) == 10
    assert again.ids() == [1, 4, 9, 10]


def test_a_count_of_numbers_that_is_damaged_is_told(tmp_path: Path) -> None:
    store = ExpertStore(tmp_path)
    store.write(0, expert(0))
    store.delete(0)
    (tmp_path / ".next-expert").write_text("x")
    with pytest.raises(CorruptError, match=r"\.next-expert does not hold a number"):
        store.create(expert(0))


def test_experts_of_layers_have_two_numbers(place: Place) -> None:
    store = ExpertStore(place)
    numbers: list[ExpertId] = [(3, 17), (0, 2), (1000, 0)]
    for number in numbers:
        store.write(number, expert(number[1]))
    assert store.ids() == sorted(numbers)
    assert bits(store.read((3, 17))) == bits(expert(17)) and (place / "L003" / "e00017.safetensors").exists()
    assert store.create(expert(1), layer=3) == (3, 18)
    store.delete((3, 18))
    assert ExpertStore(place).create(expert(1), layer=3) == (3, 19)
    assert ExpertStore(place).create(expert(1), layer=0) == (0, 3)
    store.write(5, expert(5))
    assert store.ids()[:2] == [5, (0, 2)]


def test_new_files_are_of_the_format_that_is_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "e00000.npz", **numpy_arrays("packed"))
    ExpertStore(tmp_path).write(1, expert(1))
    assert (tmp_path / "e00001.npz").exists()
    (tmp_path / "e00001.safetensors").write_bytes(save(expert(1)))
    with pytest.raises(UsageError, match="two files of expert 1"):
        ExpertStore(tmp_path).ids()
    with pytest.raises(UsageError, match="safetensors or npz, not pt"):
        ExpertStore(tmp_path, file_format="pt")


def test_a_store_for_reading_refuses_every_change(tmp_path: Path) -> None:
    ExpertStore(tmp_path).write(0, expert(0))
    before = files(tmp_path)
    store = ExpertStore(tmp_path, read_only=True)
    for change in (lambda: store.write(0, expert(1)), lambda: store.create(expert(1)), lambda: store.delete(0)):
        with pytest.raises(ReadOnlyError, match="open for reading only"):
            change()
    assert files(tmp_path) == before and bits(store.read(0)) == bits(expert(0))
    with pytest.raises(NotFoundError, match="no directory of experts"):
        ExpertStore(tmp_path / "absent", read_only=True)


def test_a_directory_that_cannot_be_written_is_read_by_a_user_without_rights(nobody: Nobody, tmp_path: Path) -> None:
    ExpertStore(tmp_path / "experts").write(0, expert(0))
    with nobody.copy(tmp_path / "experts") as copy:
        (copy / "e00000.safetensors").chmod(0o400)
        copy.chmod(0o500)

        def use() -> None:
            store = ExpertStore(copy)
            assert bits(store.read(0)) == bits(expert(0))
            with pytest.raises(PermissionError):
                store.write(0, expert(1))

        nobody.run(use)
        assert bits(ExpertStore(copy).read(0)) == bits(expert(0)) and len(os.listdir(copy)) == 1


def test_a_read_in_inference_mode_gives_tensors_that_can_be_trained_with(tmp_path: Path) -> None:
    store = ExpertStore(tmp_path)
    store.write(0, expert(0))
    with torch.inference_mode():
        read = store.read(0)
    assert not read["w1"].is_inference()


def test_without_torch_the_import_says_what_is_missing() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport moonclipfs.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: moonclipfs.torch needs PyTorch: pip install 'moonclipfs[torch]'"
    )
