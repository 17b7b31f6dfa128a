"""NumPy's .npy and .npz, beside NumPy itself."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest

from moonclipfs import limits
from moonclipfs.formats.layout import RegionKind
from moonclipfs.types import DType
from tests.formats.samples import by_name, bytes_of, check_pieces, layout_of, zip_bytes


def npy(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def with_header(text: str, data: bytes = b"", *, major: int = 1) -> bytes:
    length = struct.pack("<H" if major == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([major, 0]) + length + text.encode() + data


@pytest.mark.parametrize(
    ("descr", "dtype"),
    [
        ("?", DType.BOOL), ("i1", DType.I8), ("u1", DType.U8), ("<i2", DType.I16), ("<u2", DType.U16),
        ("<i4", DType.I32), ("<u4", DType.U32), ("<i8", DType.I64), ("<u8", DType.U64), ("<f2", DType.F16),
        ("<f4", DType.F32), ("<f8", DType.F64), ("<c8", DType.C64), ("<c16", DType.C128), ("<M8[ns]", DType.I64),
        ("<m8[s]", DType.I64), ("V2", DType.BF16), ("V3", DType.BYTES), (">f4", DType.BYTES), ("S5", DType.BYTES),
        ("<U3", DType.BYTES), (">i1", DType.I8),
    ],
)  # fmt: skip
def test_every_plain_dtype(descr: str, dtype: DType) -> None:
    array = np.zeros((3, 4), descr)
    data = npy(array)
    layout = layout_of(data)
    tensor = by_name(layout)["array"]
    assert (tensor.dtype, tensor.shape, tensor.length, layout.reason) == (dtype, (3, 4), array.nbytes, "")
    assert tensor.dtype_name == str(np.lib.format.dtype_to_descr(array.dtype))
    check_pieces(data, layout)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_shapes_and_orders(shape: tuple[int, ...], order: Any) -> None:
    array = np.asarray(np.arange(np.prod(shape, dtype=int), dtype="<f4").reshape(shape), order=order)
    data = npy(array)
    tensor = by_name(layout_of(data))["array"]
    raw = np.frombuffer(data, "<f4", tensor.length // 4, tensor.offset)
    strides = tensor.strides and tuple(4 * stride for stride in tensor.strides)
    assert np.array_equal(np.ndarray(shape, "<f4", raw, strides=strides) if raw.size else raw.reshape(shape), array)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_header(version: tuple[int, int]) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.arange(4), version)
    data = buffer.getvalue()
    assert bytes_of(data, by_name(layout_of(data))["array"]) == np.arange(4).tobytes()


def test_objects_and_records_are_bytes_with_a_reason() -> None:
    for array in (np.array([{}], object), np.zeros(3, [("a", "<f4"), ("b", "<i8")])):
        layout = layout_of(npy(array, allow_pickle=True))
        assert [r.kind for r in layout.regions] == [RegionKind.HEADER, RegionKind.OPAQUE]
        assert layout.reason and not layout.truncated and not layout.tensors


def test_what_follows_an_array_is_kept() -> None:
    data = npy(np.arange(4)) + npy(np.arange(2))
    layout = layout_of(data)
    assert [r.kind for r in layout.regions] == [RegionKind.HEADER, RegionKind.TENSOR, RegionKind.PADDING]


def test_R051_a_short_array_is_truncated() -> None:
    data = npy(np.arange(4))
    assert layout_of(data[:-1]).reason == "data short by 1 byte"
    for length in range(6, len(data)):
        assert layout_of(data[:length]).truncated


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{}",
        "__import__('os').system('true')",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (,1)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (%s)}" % ("9" * 30),
        "{'descr': '<f4', 'fortran_order': False, 'shape': (%s)}" % ("1," * 33),
        "{'descr': '<f4', 'fortran_order': False, 'shape': (%s)}" % ("9999999999," * 3),
        "{'descr': '<q9', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': " + "(" * 9000 + ", 'fortran_order': False, 'shape': (1,)}",
        "{'descr': [" + "]," * 20000 + "'fortran_order': False, 'shape': (1,)",
    ],
)
def test_headers_that_numpy_does_not_write_are_opaque(header: str) -> None:
    layout = layout_of(with_header(header, bytes(16)))
    assert layout.format == "opaque" and layout.reason.startswith("npy: ") and not layout.truncated


def test_the_header_of_an_array_is_bounded() -> None:
    text = " " * (limits.NPY_HEADER_BYTES + 1)
    assert "at most" in layout_of(with_header(text, major=2)).reason
    assert "version 4" in layout_of(with_header("{}", major=4)).reason


def test_an_archive_of_arrays() -> None:
    arrays: dict[str, Any] = {
        "w": np.arange(12, dtype="<f4").reshape(3, 4),
        "sub/b": np.ones(3, "<i8"),
        "f": np.eye(3, order="F"),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    data = buffer.getvalue()
    layout = layout_of(data)
    assert layout.format == "npz" and not layout.reason
    found = by_name(layout)
    assert {name: (tensor.shape, tensor.length) for name, tensor in found.items()} == {
        name: (array.shape, array.nbytes) for name, array in arrays.items()
    }
    assert bytes_of(data, found["w"]) == arrays["w"].tobytes()
    check_pieces(data, layout)


def test_compressed_arrays_are_opaque() -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, w=np.zeros(100))
    layout = layout_of(buffer.getvalue())
    assert layout.format == "opaque" and "compressed" in layout.reason


def test_members_that_are_no_plain_arrays_are_kept_as_bytes() -> None:
    good = npy(np.arange(3))
    data = zip_bytes(
        {
            "bad.npy": good[:-1],
            "o.npy": npy(np.array([None]), allow_pickle=True),
            "w.npy": good,
            "x": b"y",
            "z.npy": bytes(99),
        }
    )
    layout = layout_of(data)
    assert list(by_name(layout)) == ["w"] and "4 of 5 members" in layout.reason and not layout.truncated
