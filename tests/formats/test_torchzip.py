"""The zip archive of torch.save: names and places of every storage, beside torch itself; and hostile archives."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonclipfs import limits
from moonclipfs.formats.cut import CutRules, cut
from moonclipfs.formats.layout import Layout, RegionKind
from moonclipfs.formats.sniff import parse
from moonclipfs.types import BytesSource, DType
from tests.formats.samples import (
    CORPUS,
    CountingSource,
    Opcodes,
    by_name,
    bytes_of,
    check_layout,
    check_pieces,
    layout_of,
    sparse_zip,
    torch_zip,
    zip_bytes,
)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch writes the file here")


def saved(torch: Any, value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def assert_same(torch: Any, data: bytes, layout: Layout, expected: dict[str, Any]) -> None:
    """Fail unless the layout's tensors are exactly `expected`, bit for bit, read through their strides."""
    found = by_name(layout)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        view = found[name]
        assert view.dtype_name == str(tensor.dtype).removeprefix("torch."), name
        raw = torch.frombuffer(bytearray(data[view.offset : view.offset + view.length]), dtype=tensor.dtype)
        if view.strides is not None:
            raw = raw.as_strided(view.shape, view.strides)
        assert view.shape == tuple(tensor.shape)
        assert torch.equal(raw.flatten().clone().view(torch.uint8), tensor.flatten().clone().view(torch.uint8)), name


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_model_and_optimizer_have_the_names_of_their_keys(torch: Any, protocol: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "rng": torch.get_rng_state()}
    data = saved(torch, state, pickle_protocol=protocol)
    expected = {f"model.{name}": tensor for name, tensor in model.state_dict().items()} | {"rng": state["rng"]}
    for number, moments in optimizer.state_dict()["state"].items():
        expected |= {f"optimizer.state.{number}.{name}": tensor for name, tensor in moments.items()}
    layout = layout_of(data)
    assert layout.format == "torch" and not layout.reason
    assert_same(torch, data, layout, expected)
    assert {r.name for r in layout.regions if r.kind is RegionKind.TENSOR} == expected.keys()


def test_every_dtype_of_torch(torch: Any) -> None:
    names = [
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
        "uint8", "bool", "complex128", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    ]  # fmt: skip
    raw = torch.arange(64, dtype=torch.uint8)
    state = {name: raw.to(torch.bool) if name == "bool" else raw.view(getattr(torch, name)) for name in names}
    # Each in a storage of its own class, as a program that made it so has it.
    state = {name: tensor.clone() for name, tensor in state.items()}
    data = saved(torch, state)
    layout = layout_of(data)
    assert_same(torch, data, layout, state)
    assert all(tensor.dtype is not DType.BYTES for tensor in layout.tensors)


def test_views_share_the_region_of_their_storage(torch: Any) -> None:
    base = torch.randn(6, 4)
    state = {"tied": base, "base": base, "rows": base[2:4], "column": base[:, 1], "t": base.t(), "flat": base.view(-1)}
    data = saved(torch, state)
    layout = layout_of(data)
    assert_same(torch, data, layout, state)
    regions = [region for region in layout.regions if region.kind is RegionKind.TENSOR]
    assert [(region.name, region.shape, region.length) for region in regions] == [("tied", (6, 4), 96)]
    strided = layout_of(saved(torch, {"t": base.t(), "base": base}))
    assert [r.shape for r in strided.regions if r.kind is RegionKind.TENSOR] == [(24,)]


def test_parameters_modules_and_subclasses(torch: Any) -> None:
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3)})
    parameter = torch.nn.Parameter(torch.randn(3))
    parameter.note = "kept as an attribute"
    sparse = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse()
    layout = layout_of(saved(torch, {"module": model, "parameter": parameter, "sparse": sparse, "alone": [parameter]}))
    names = by_name(layout).keys()
    assert {"module.layer.weight", "module.layer.bias", "parameter", "alone.0"} <= names
    assert sum(name.startswith("sparse.") for name in names) == 2 and not layout.reason


def test_a_tensor_that_is_the_whole_file(torch: Any) -> None:
    data = saved(torch, torch.arange(5))
    assert bytes_of(data, by_name(layout_of(data))["tensor"]) == torch.arange(5).numpy().tobytes()


def test_torchscript_is_read_as_far_as_it_is_data(torch: Any, tmp_path: Path) -> None:
    members = torch_zip(Opcodes().op(b"}").text("w").tensor("0", 2, (2,), (1,)).op(b"s").done(), {"0": b"abcdefgh"})
    constants = Opcodes().op(b"(").tensor("0", 1, (1,), (1,)).op(b"t").done()
    members |= {"archive/constants.pkl": constants, "archive/constants/0": b"1234", "archive/code/a.py": b"print()"}
    layout = layout_of(zip_bytes(members))
    assert {name: tensor.length for name, tensor in by_name(layout).items()} == {"w": 8, "constants.0": 4}


def test_R059_the_storages_are_the_same_objects_whatever_the_archive_is_called(torch: Any) -> None:
    state = {str(number): torch.randn(64, 1024) for number in range(4)}
    pieces = []
    for path in ("a", "checkpoint-200"):
        members = dict(zipfile_members(saved(torch, state)))
        data = zip_bytes({f"{path}/{name.partition('/')[2]}": content for name, content in members.items()})
        layout = layout_of(data)
        pieces.append({
            (piece.name, piece.index, data[piece.offset : piece.offset + piece.length])
            for piece in cut(BytesSource(data), layout, CutRules())
            if piece.name
        })  # fmt: skip
    assert pieces[0] == pieces[1] and {name for name, _, _ in pieces[0]} == {"0", "1", "2", "3"}


def zipfile_members(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


SIMPLE = torch_zip(
    Opcodes().op(b"}").text("w").tensor("0", 4, (2, 2), (2, 1)).op(b"s").done(), {"0": b"0123456789abcdef"}
)


@pytest.mark.parametrize("descriptor", [False, True])
def test_R061_zip64_with_and_without_data_descriptors(descriptor: bool) -> None:
    data = zip_bytes(SIMPLE, descriptor=descriptor)
    tensor = by_name(layout_of(data))["w"]
    assert bytes_of(data, tensor) == b"0123456789abcdef" and tensor.shape == (2, 2)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:  # the standard library reads the same archive
        assert archive.read("archive/data/0") == b"0123456789abcdef"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_R061_an_archive_to_which_python_appended(compression: int) -> None:
    buffer = io.BytesIO((CORPUS / "torch.pt").read_bytes())
    with zipfile.ZipFile(buffer, "a", compression) as archive:
        archive.writestr("torch/ai-models.json", b"{}" * 100)
    layout = layout_of(buffer.getvalue())
    before = layout_of((CORPUS / "torch.pt").read_bytes())
    assert not layout.reason and layout.tensors == before.tensors
    check_pieces(buffer.getvalue(), layout)


def test_R061_a_sparse_record_of_5_gib_is_parsed_from_its_ends() -> None:
    length = 5 * limits.GIB
    pickle_ = Opcodes().op(b"}").text("w").tensor("0", length // 4, (length // 4,), (1,)).op(b"s").done()
    for descriptor in (False, True):
        source = CountingSource(*sparse_zip(torch_zip(pickle_, {"0": length, "1": b"tail"}), descriptor=descriptor))
        layout = parse(source)
        check_layout(layout, source.size)
        assert by_name(layout)["w"].length == length and not layout.reason
        pieces = list(cut(source, layout, CutRules()))
        assert sum(piece.length for piece in pieces) == source.size
        assert sum(piece.name == "w" for piece in pieces) == length // limits.OBJECT_BYTES
        assert source.longest <= limits.MIB and source.bytes_read < limits.MIB


def test_R067_a_pickle_that_would_run_code_is_only_read(tmp_path: Path) -> None:
    marker = tmp_path / "pwn"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            import os

            return os.system, (f"touch {marker}",)

    for protocol in range(2, 6):
        hostile = pickle.dumps({"a": Evil(), "b": [Evil()]}, protocol)
        layout = layout_of(zip_bytes(torch_zip(hostile, {"0": b"abcd"})))
        assert not marker.exists()
        assert [r.name for r in layout.regions if r.kind is RegionKind.TENSOR] == ["storage/0"]
    pickle.loads(pickle.dumps(Evil()))  # the same pickle does run code where one lets it
    assert marker.exists()


def test_R067_nothing_that_reads_files_unpickles() -> None:
    """Of the rest of the package, tests/test_floors.py tells the one module that may, when it is asked to."""
    package = Path(__file__).parents[2] / "moonclipfs"
    for path in (
        path for room in ("codec", "formats", "store", "layers", "fuse") for path in (package / room).glob("*.py")
    ):
        text = path.read_text()
        assert "import pickle" not in text and "torch.load" not in text and "pickle.load" not in text, path


@pytest.mark.parametrize("opcode", [b"P0\n", b"I1\n", b"\x82\x01", b"\xff"])
def test_storages_of_a_pickle_that_is_not_understood_have_numbers(opcode: bytes) -> None:
    layout = layout_of(zip_bytes(torch_zip(b"\x80\x02" + opcode + b".", {"0": b"abcd", "1": b"efgh"})))
    assert [r.name for r in layout.regions if r.kind is RegionKind.TENSOR] == ["storage/0", "storage/1"]
    assert layout.format == "torch" and "opcode" in layout.reason and not layout.truncated


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [((5,), (1,), 0), ((2, 2), (3, 1), 0), ((2,), (1,), 3), ((1 << 62,), (1 << 62,), 0), ((2,), (1 << 62,), 0)],
)
def test_a_tensor_outside_its_storage_is_left_out(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    body = Opcodes().op(b"}").text("w").tensor("0", 4, shape, strides, offset=offset).op(b"s")
    body.text("fits").tensor("0", 4, (4,), (1,)).op(b"s")
    layout = layout_of(zip_bytes(torch_zip(body.done(), {"0": bytes(16)})))
    assert list(by_name(layout)) == ["fits"] and "outside its storage" in layout.reason


def test_odd_storages_are_bytes_and_unknown_ones_are_named() -> None:
    body = Opcodes().op(b"}").text("odd").tensor("0", 1, (1,), (1,)).op(b"s")
    body.text("gone").tensor("7", 1, (1,), (1,)).op(b"s").text("new").tensor("1", 1, (1,), (1,), storage="X").op(b"s")
    layout = layout_of(zip_bytes(torch_zip(body.done(), {"0": b"abcde", "1": b"abcd"})))
    assert [(r.name, r.dtype, r.shape) for r in layout.regions if r.kind is RegionKind.TENSOR] == [
        ("odd", DType.BYTES, (5,)),
        ("storage/1", DType.BYTES, (4,)),
    ]
    assert "2 tensors left out" in layout.reason


def test_names_are_unique_bounded_and_bytes_that_are_no_utf8_survive() -> None:
    body = (
        Opcodes().op(b"}").number(1).tensor("0", 1, (1,), (1,)).op(b"s").text("1").tensor("0", 1, (1,), (1,)).op(b"s")
    )
    body.op(b"X\x02\x00\x00\x00\xff\xfe").tensor("0", 1, (1,), (1,)).op(b"s")
    body.text("n" * 2000).tensor("0", 1, (1,), (1,)).op(b"s").op(b"N").tensor("0", 1, (1,), (1,)).op(b"s")
    layout = layout_of(zip_bytes(torch_zip(body.done(), {"0": b"abcd"})))
    assert list(by_name(layout)) == ["1", "1#2", "\udcff\udcfe", "?"]


def test_big_endian_storages_are_opaque() -> None:
    layout = layout_of(zip_bytes(SIMPLE | {"archive/byteorder": b"big"}))
    assert layout.format == "opaque" and "little-endian" in layout.reason


def changed(data: bytes, magic: bytes, at: int, form: str, *values: int, last: bool = False) -> bytes:
    start = (data.rindex(magic) if last else data.index(magic)) + at
    raw = struct.pack(form, *values)
    return data[:start] + raw + data[start + len(raw) :]


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("no header of that name", lambda d: d.replace(b"archive/data/0", b"archive/data/1", 1)),
        ("disagrees with the central directory", lambda d: changed(d, b"PK\3\4", 8, "<H", 8)),
        ("disagrees with the central directory", lambda d: changed(d, b"PK\3\4", 6, "<H", 1)),
        ("disagrees with the central directory", lambda d: changed(d, b"PK\3\4", 14, "<I", 1)),
        ("no header of that name", lambda d: changed(d, b"PK\1\2", 42, "<I", 7)),
        ("starts outside the file", lambda d: changed(d, b"PK\1\2", 42, "<I", 1 << 31)),
        ("several disks", lambda d: changed(d, b"PK\1\2", 34, "<H", 1)),
        ("no entry of the central directory", lambda d: changed(d, b"PK\1\2", 0, "<I", 0)),
        ("extra field is too short", lambda d: changed(d, b"PK\1\2", 30, "<H", 12)),
        ("extra field is too short", lambda d: changed(d, b"PK\1\2", 46 + 18, "<H", 8)),
        ("starts outside the file", lambda d: changed(d, b"PK\1\2", 46 + 16, "<H", 9)),
        ("several disks", lambda d: changed(d, b"PK\6\6", 24, "<Q", 1)),
        ("bytes follow the last entry", lambda d: changed(changed(d, b"PK\6\6", 24, "<Q", 1), b"PK\6\6", 32, "<Q", 1)),
        ("over the limit", lambda d: changed(changed(d, b"PK\6\6", 24, "<Q", 1 << 40), b"PK\6\6", 32, "<Q", 1 << 40)),
        ("does not end where", lambda d: changed(d, b"PK\6\6", 48, "<Q", 1 << 60)),
        ("over the limit", lambda d: changed(d, b"PK\6\6", 40, "<Q", 1 << 60)),
        ("does not point at", lambda d: changed(d, b"PK\6\7", 8, "<Q", 0)),
        ("points outside", lambda d: changed(d, b"PK\6\7", 8, "<Q", 1 << 62)),
        ("disagrees with the end record", lambda d: changed(d, b"PK\5\6", 10, "<H", 1)),
        ("several disks", lambda d: changed(d, b"PK\5\6", 4, "<H", 1)),
        ("ends outside the file", lambda d: changed(d, b"archive/data/0\1", 26, "<Q", 1 << 63, last=True)),
        ("its two lengths differ", lambda d: changed(
            changed(d, b"archive/data/0\1", 18, "<Q", 15, last=True), b"archive/data/0\1", 18, "<Q", 15)),
    ],
)  # fmt: skip
def test_an_archive_that_contradicts_itself_is_opaque(reason: str, change: Callable[[bytes], bytes]) -> None:
    data = zip_bytes(SIMPLE)
    hostile = change(data)
    assert hostile != data and len(hostile) == len(data)
    layout = layout_of(hostile)
    assert layout.format == "opaque" and layout.reason.startswith("zip: ") and reason in layout.reason


def test_members_that_overlap_are_opaque() -> None:
    inner = zip_bytes({"b": b"inside"})
    data = zip_bytes({"a": inner, "b": b"inside"})
    outer = data.rindex(b"b\1\0\x18\0") + 1 + 20
    nested = data[:outer] + struct.pack("<Q", data.index(inner)) + data[outer + 8 :]
    assert "overlaps" in layout_of(nested).reason
    beyond = changed(data, b"b\1\0\x18\0", 5, "<QQ", 60, 60, last=True)
    assert "overlaps" in layout_of(changed(beyond, b"b\1\0\x10\0", 5, "<QQ", 60, 60, last=True)).reason


def test_members_that_share_a_name_are_opaque() -> None:
    twice = io.BytesIO(zip_bytes(SIMPLE))
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", b"other")
    assert "twice" in layout_of(twice.getvalue()).reason


def test_an_archive_without_its_end_is_truncated() -> None:
    layout = layout_of((CORPUS / "torch.pt").read_bytes()[:-1])
    assert layout.truncated and "central directory" in layout.reason


@pytest.mark.parametrize(("compressed", "reason"), [("data/0", "is not in the file"), ("data.pkl", "have no names")])
def test_compressed_members_stay_opaque_regions(compressed: str, reason: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in SIMPLE.items():
            assert isinstance(content, bytes)
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if name.endswith(compressed) else None)
    layout = layout_of(buffer.getvalue())
    assert layout.format == "torch" and not layout.tensors and reason in layout.reason
    assert sum(region.kind is RegionKind.OPAQUE for region in layout.regions) == 1


def test_another_zip_is_opaque() -> None:
    assert "neither torch's" in layout_of(zip_bytes({"a.txt": b"hello"})).reason
