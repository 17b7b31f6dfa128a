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


def test_R067_nothing_in_the_package_unpickles() -> None:
    package = Path(__file__).parents[2] / "moonclipfs"
    for path in package.rglob("*.py"):
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


def changed(data: bytes, magic: bytes, at: int, form: str, value: int, *, last: bool = False) -> bytes:
    start = (data.rindex(magic) if last else data.index(magic)) + at
    raw = struct.pack(form, value)
    return data[:start] + raw + data[start + len(raw) :]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("the name in the member's header", lambda d: d.replace(b"archive/data/0", b"archive/data/1", 1)),
        ("its method", lambda d: changed(d, b"PK\3\4", 8, "<H", 8)),
        ("its flags", lambda d: changed(d, b"PK\3\4", 6, "<H", 1)),
        ("its checksum", lambda d: changed(d, b"PK\3\4", 14, "<I", 1)),
        ("where the directory says it starts", lambda d: changed(d, b"PK\1\2", 42, "<I", 7)),
        ("the number of entries", lambda d: changed(d, b"PK\6\6", 24, "<Q", 1)),
        ("more entries than the limit", lambda d: changed(d, b"PK\6\6", 32, "<Q", 1 << 40)),
        ("the start of the directory", lambda d: changed(d, b"PK\6\6", 48, "<Q", 1 << 60)),
        ("the length of the directory", lambda d: changed(d, b"PK\6\6", 40, "<Q", 1 << 60)),
        ("where the zip64 end record is", lambda d: changed(d, b"PK\6\7", 8, "<Q", 1 << 62)),
        ("the short number of entries", lambda d: changed(d, b"PK\5\6", 10, "<H", 1)),
        ("a second disk", lambda d: changed(d, b"PK\5\6", 4, "<H", 1)),
        ("the lengths in the zip64 extra field", lambda d: changed(d, b"archive/data/0\x01", 18, "<Q", 1 << 63)),
    ],
)  # fmt: skip
def test_an_archive_that_contradicts_itself_is_opaque(what: str, change: Callable[[bytes], bytes]) -> None:
    data = zip_bytes(SIMPLE)
    hostile = change(data)
    assert hostile != data, what
    layout = layout_of(hostile)
    assert layout.format == "opaque" and layout.reason.startswith("zip: "), what


def test_members_that_overlap_or_share_a_name_are_opaque() -> None:
    data = zip_bytes(SIMPLE)
    start = data.index(b"PK\1\2")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        first, second = archive.infolist()[:2]
    at = data.index(second.filename.encode(), start) - 46
    assert struct.unpack_from("<H", data, at + 28)[0] == len(second.filename)
    inside = data.index(struct.pack("<Q", second.header_offset), at)
    moved = data[:inside] + struct.pack("<Q", first.header_offset + 40) + data[inside + 8 :]
    assert layout_of(moved).format == "opaque"
    twice = io.BytesIO(data)
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", b"other")
    assert "twice" in layout_of(twice.getvalue()).reason


def test_an_archive_without_its_end_is_truncated() -> None:
    layout = layout_of((CORPUS / "torch.pt").read_bytes()[:-1])
    assert layout.truncated and "central directory" in layout.reason


def test_compressed_storages_stay_opaque_regions() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in SIMPLE.items():
            archive.writestr(name, content, zipfile.ZIP_STORED if name.endswith(".pkl") else None)
    layout = layout_of(changed_byte_order(buffer.getvalue()))
    assert not layout.tensors and "not in the file" in layout.reason


def changed_byte_order(data: bytes) -> bytes:
    """Return the archive with its byte order stored, since a compressed one is not read."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            kind = zipfile.ZIP_STORED if info.filename.endswith("byteorder") else info.compress_type
            new.writestr(info.filename, old.read(info), kind)
    return buffer.getvalue()


def test_another_zip_is_opaque() -> None:
    assert "neither torch's" in layout_of(zip_bytes({"a.txt": b"hello"})).reason
