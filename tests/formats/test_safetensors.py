"""Safetensors: beside the reference library, and the files that break other readers."""

from __future__ import annotations

import json

import pytest

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.layout import RegionKind
from moonclipfs.formats.safetensors import make_header
from moonclipfs.formats.sniff import parse
from moonclipfs.types import BytesSource, DType
from tests.formats.samples import (
    by_name,
    bytes_of,
    check_layout,
    check_pieces,
    counting,
    entry,
    layout_of,
    safetensors,
)

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@pytest.mark.parametrize("name", BITS)
def test_every_dtype_has_the_size_that_the_library_gives_it(name: str) -> None:
    data = safetensors({"a": entry(name, [8], 0, BITS[name])}, bytes(BITS[name]))
    tensor = by_name(layout_of(data))["a"]
    assert (tensor.dtype, tensor.dtype.bits, tensor.length) == (DType[name], BITS[name], BITS[name])
    library = pytest.importorskip("safetensors", reason="safetensors is the reference here")
    assert library.deserialize(data)[0][1]["dtype"] == name


def test_a_file_of_the_real_writer() -> None:
    torch = pytest.importorskip("torch", reason="torch and safetensors write the file here")
    library = pytest.importorskip("safetensors.torch", reason="torch and safetensors write the file here")
    tensors = {"b": torch.randn(3, 5), "a": torch.arange(7, dtype=torch.int64), "scalar": torch.tensor(2.5).bfloat16()}
    data = library.save(tensors, {"format": "pt"})
    layout = layout_of(data)
    assert layout.format == "safetensors" and layout.metadata == {"format": "pt"} and not layout.reason
    found = by_name(layout)
    assert {name: bytes_of(data, found[name]) for name in tensors} == {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }
    assert {name: found[name].shape for name in tensors} == {name: tuple(tensors[name].shape) for name in tensors}


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"w": entry("F32", [1000, 1000], 0, 4)}, b"abcd", 'ShapeMismatch("w")'),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"abcdef", 'Overlap("b")'),
        ({"w": entry("U8", [4], 8, 4)}, b"abcdefgh", 'ReversedRange("w")'),
        ({"w": entry("U8", [2**32, 2**32], 0, 4)}, b"abcd", 'Overflow("w")'),
        ({"w": entry("U8", [2**64], 0, 4)}, b"abcd", "unsigned 64-bit"),
        ({"w": entry("U8", [-1], 0, 4)}, b"abcd", "unsigned 64-bit"),
        ({"w": entry("U8", [True], 0, 1)}, b"a", "unsigned 64-bit"),
        ({"w": entry("U8", [1.0], 0, 1)}, b"a", "unsigned 64-bit"),  # type: ignore[list-item]
        ({"w": entry("U8", [1] * 33, 0, 1)}, b"a", "33 dimensions"),
        ({"w": entry("Q3", [1], 0, 1)}, b"a", 'UnknownDtype("w")'),
        ({"w": {"dtype": [], "shape": [1], "data_offsets": [0, 1]}}, b"a", 'UnknownDtype("w")'),
        ({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"a", "not two numbers"),
        ({"w": {"dtype": "U8", "shape": [1]}}, b"a", "has the fields"),
        ({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "x": 1}}, b"a", "has the fields"),
        ({"w": 1}, b"a", "not a JSON object"),
        ({"n" * 2000: entry("U8", [1], 0, 1)}, b"a", "longer than 1024 bytes"),
        (b'{"\\ud800": 1}', b"a", "not Unicode text"),
        (b'{"w": NaN}', b"", "not JSON"),
        (b'{"w": ' + b"[" * 100_000, b"", "not JSON"),
        (b'{"w": ' + b"1" * 5000 + b"}", b"", "not JSON"),
        (b'{"w"', b"", "not JSON"),
        (b'{"\xff": 1}', b"", "not JSON"),
        (b"{}x", b"", "not JSON"),
    ],
)
def test_R055_each_wrong_header_has_its_own_reason(header: object, data: bytes, reason: str) -> None:
    layout = layout_of(safetensors(header, data))
    assert layout.format == "opaque" and layout.reason.startswith("safetensors: ") and reason in layout.reason
    assert not layout.truncated


def test_R053_a_key_twice_is_named() -> None:
    a = json.dumps(entry("U8", [1], 0, 1)), json.dumps(entry("U8", [1], 1, 2))
    layout = layout_of(safetensors(f'{{"a":{a[0]},"a":{a[1]}}}', b"xy"))
    assert 'DuplicateKey("a")' in layout.reason
    inner = layout_of(safetensors('{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"))
    assert 'DuplicateKey("dtype")' in inner.reason
    metadata = layout_of(safetensors('{"__metadata__":{"k":"1","k":"2"}}'))
    assert 'DuplicateKey("k")' in metadata.reason


def test_R051_a_file_without_its_last_byte_keeps_the_tensors_that_are_whole() -> None:
    data = safetensors({"a": entry("U8", [4], 0, 4), "b": entry("F32", [2], 4, 12)}, b"abcdefghijkl")
    layout = layout_of(data[:-1])
    assert layout.truncated and layout.reason == "data short by 1 byte" and layout.format == "safetensors"
    assert list(by_name(layout)) == ["a"]
    check_pieces(data[:-1], layout)


def test_R051_cut_anywhere_it_is_covered_and_said_to_be_short() -> None:
    data = safetensors({"a": entry("U8", [4], 0, 4), "b": entry("F32", [2], 4, 12)}, b"abcdefghijkl")
    assert not layout_of(data).truncated
    for length in range(9, len(data)):
        layout = layout_of(data[:length])
        assert layout.truncated and f"short by {len(data) - length if layout.tensors else ''}" in layout.reason


def test_R057_data_may_start_anywhere() -> None:
    for padding in range(8):
        header = json.dumps({"w": entry("F32", [2], 0, 8)}) + " " * padding
        data = safetensors(header, b"abcdefgh")
        assert bytes_of(data, by_name(layout_of(data))["w"]) == b"abcdefgh"


@pytest.mark.parametrize(
    ("dtype", "shape", "length"),
    [("F4", [2, 8], 8), ("F6_E2M3", [4], 3), ("F8_E8M0", [5], 5), ("C64", [1], 8), ("F4", [], None), ("F4", [3], None)],
)
def test_R063_sizes_below_a_byte(dtype: str, shape: list[int], length: int | None) -> None:
    layout = layout_of(safetensors({"w": entry(dtype, shape, 0, length or 2)}, bytes(length or 2)))
    if length is None:
        assert 'MisalignedSize("w")' in layout.reason
    else:
        assert (by_name(layout)["w"].length, by_name(layout)["w"].shape) == (length, tuple(shape))


def test_R065_two_names_for_the_same_bytes_are_an_overlap() -> None:
    layout = layout_of(safetensors({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, b"abcd"))
    assert 'Overlap("b")' in layout.reason


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [({}, ""), ({"k": "v"}, ""), ({"k": 1}, "not a string"), ({"k": None}, "not a string"), ([], "not a JSON object"),
     (None, "not a JSON object")],
)  # fmt: skip
def test_R069_metadata_goes_by_the_presence_of_the_key(metadata: object, reason: str) -> None:
    layout = layout_of(safetensors({"__metadata__": metadata, "w": entry("U8", [1], 0, 1)}, b"x"))
    assert reason in layout.reason and len(layout.tensors) == (0 if reason else 1)


@pytest.mark.parametrize(("text", "length"), [("a", 1), ("\u00e9", 2), ("\ud800", 3)])
def test_long_metadata_is_described(text: str, length: int) -> None:
    """In other words for another text, so that two files can be compared."""
    count = limits.METADATA_BYTES // length
    short, long, other = text * count, text * (count + 1), text * count + "b" * length
    metadata = [layout_of(safetensors({"__metadata__": {"k": value}})).metadata["k"] for value in (short, long, other)]
    assert metadata[0] == short
    assert metadata[1].startswith(f"({length * (count + 1)} bytes, SHA-256 ") and metadata[1] != metadata[2]


def test_keys_of_metadata_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "METADATA_PAIRS", 3)
    metadata = {f"k{number}": "v" for number in range(4)}
    assert "4 keys, at most 3" in layout_of(safetensors({"__metadata__": metadata})).reason
    del metadata["k0"]
    assert not layout_of(safetensors({"__metadata__": metadata})).reason
    assert "longer than" in layout_of(safetensors({"__metadata__": {"k" * 2000: "v"}})).reason


def test_key_order_gaps_and_a_tail_are_kept() -> None:
    header = {"z": entry("U8", [2], 6, 8), "empty": entry("F32", [0, 3], 4, 4), "a": entry("U8", [3], 0, 3)}
    layout = layout_of(safetensors(header, b"aaa...zztail"))
    assert [(r.kind, r.length, r.name) for r in layout.regions[1:]] == [
        (RegionKind.TENSOR, 3, "a"),
        (RegionKind.PADDING, 3, ""),
        (RegionKind.TENSOR, 2, "z"),
        (RegionKind.PADDING, 4, ""),
    ]
    assert [tensor.name for tensor in layout.tensors] == ["z", "empty", "a"]


def test_a_header_over_the_limit_is_not_read() -> None:
    size = limits.HEADER_BYTES + 100
    source = counting((size - 8).to_bytes(8, "little") + b"{")
    source.size = size
    layout = parse(source)
    check_layout(layout, size)
    assert "at most" in layout.reason and source.bytes_read < 1000


def test_a_header_of_more_values_than_the_limit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JSON_VALUES", 10)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the header was read"))
    assert "more than 10 values" in layout_of(safetensors(b'{"a":[' + b"[]," * 9 + b"[]]}")).reason


def test_the_number_of_tensors_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    header = {str(number): entry("U8", [1], number, number + 1) for number in range(11)}
    assert not layout_of(safetensors(header, bytes(11))).reason
    monkeypatch.setattr(limits, "TENSORS", 10)
    assert "11 tensors, at most 10" in layout_of(safetensors(header, bytes(11))).reason


def test_only_the_header_of_a_large_file_is_read() -> None:
    data = safetensors({"w": entry("U8", [1 << 40], 0, 1 << 40)})
    source = counting(data)
    source.size = len(data) + (1 << 40)
    layout = parse(source)
    check_layout(layout, source.size)
    assert layout.tensors[0].length == 1 << 40 and source.bytes_read < 1000


def test_a_source_that_fails_is_not_taken_for_a_broken_file() -> None:
    class Failing(BytesSource):
        def read(self, offset: int, length: int) -> bytes:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        parse(Failing(b"12345678{}"))


@pytest.mark.parametrize("metadata", [None, {"f\u00e9": '\\n"'}])
def test_a_header_that_is_made_is_the_one_of_the_library(metadata: dict[str, str] | None) -> None:
    torch = pytest.importorskip("torch", reason="torch and safetensors write the file here")
    library = pytest.importorskip("safetensors.torch", reason="torch and safetensors write the file here")
    tensors = {
        "b": torch.ones(2, 3),
        'a\u00e9"\\\n': torch.ones(3).half(),
        "c": torch.tensor(1.0),
        "e": torch.empty(0, 3),
    }
    data = library.save(tensors, metadata)
    layout = layout_of(data)
    parts = [(tensor.name, tensor.dtype, tensor.shape) for tensor in layout.tensors]
    made = make_header(
        sorted(parts, key=lambda part: data.index(json.dumps(part[0], ensure_ascii=False).encode())), metadata
    )
    assert data.startswith(made) and len(made) == layout.regions[0].length


@pytest.mark.parametrize("names", [["w", "w"], ["__metadata__"]])
def test_a_header_names_each_tensor_once(names: list[str]) -> None:
    with pytest.raises(ParseError, match="cannot hold it"):
        make_header([(name, DType.U8, (1,)) for name in names])
