"""GGUF, beside the gguf package."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from moonclipfs import limits
from moonclipfs.formats import gguf as parser
from moonclipfs.formats.cut import CutRules, cut
from moonclipfs.formats.layout import RegionKind
from moonclipfs.formats.sniff import parse
from moonclipfs.types import DType
from tests.formats.samples import by_name, bytes_of, check_layout, check_pieces, counting, layout_of


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def info(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(pairs: list[bytes], infos: list[bytes], data: bytes = b"", *, version: int = 3, alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def test_the_table_of_types_is_that_of_the_package() -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is the reference here")
    for kind, sizes in package.GGML_QUANT_SIZES.items():
        known = parser._TYPES[kind.value]
        assert (known.name, (known.block, known.block_bytes)) == (kind.name, sizes)


def test_a_file_of_the_real_writer(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf", reason="the gguf package writes the file here")
    weight = np.arange(64, dtype="<f4").reshape(2, 32)
    blocks = np.arange(3 * 2 * 34, dtype=np.uint8).reshape(3, 2, 34)
    writer = package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b"])
    writer.add_chat_template("x" * 5000)
    writer.add_float32("f", 0.5)
    writer.add_tensor("weight", weight)
    writer.add_tensor("experts", blocks, raw_dtype=package.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = (tmp_path / "m.gguf").read_bytes()
    layout = layout_of(data)
    found = by_name(layout)
    assert layout.format == "gguf" and not layout.reason
    assert bytes_of(data, found["weight"]) == weight.tobytes() and found["weight"].shape == (2, 32)
    experts = found["experts"]
    assert bytes_of(data, experts) == blocks.tobytes()
    assert (experts.dtype, experts.dtype_name, experts.shape) == (DType.BYTES, "Q8_0", (3, 2, 32))
    assert [r.shape for r in layout.regions if r.name == "experts"] == [(3, 2, 34)]
    assert layout.metadata["general.architecture"] == "llama" and layout.metadata["f"] == "0.5"
    assert layout.metadata["tokenizer.ggml.tokens"].startswith("(2 values, SHA-256 ")
    digest = hashlib.sha256(b"x" * 5000).hexdigest()
    assert layout.metadata["tokenizer.chat_template"] == f"(5000 bytes, SHA-256 {digest})"
    check_pieces(data, layout)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(version: int) -> None:
    data = gguf([], [info("w", (2, 3), 0, 0)], bytes(range(24)), version=version)
    tensor = by_name(layout_of(data))["w"]
    assert bytes_of(data, tensor) == bytes(range(24)) and tensor.shape == (3, 2)


W = [info("w", (4,), 0, 0)]
NESTED = struct.pack("<IQ", 9, 1) * 5 + struct.pack("<IQ", 0, 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (gguf([], W, bytes(16), version=1), "only 2 and 3"),
        (gguf([], W, bytes(16), version=0x03000000), "only 2 and 3"),
        (gguf([], [info("w", (4,), 4, 0)], bytes(16)), "GGML type 4 is unknown"),
        (gguf([], [info("w", (4,), 1 << 31, 0)], bytes(16)), "is unknown"),
        (gguf([], [info("w", (33,), 8, 0)], bytes(64)), "MisalignedSize"),
        (gguf([], [info("w", (), 8, 0)], bytes(64)), "MisalignedSize"),
        (gguf([], [info("w", (1 << 40, 1 << 40), 0, 0)], bytes(64)), "Overflow"),
        (gguf([], [info("w", (1,) * 33, 0, 0)], bytes(64)), "33 dimensions"),
        (gguf([], [*W, *W], bytes(32)), "same name"),
        (gguf([], [*W, info("v", (4,), 0, 8)], bytes(32)), 'Overlap("v")'),
        (gguf([], [info("n" * 2000, (4,), 0, 0)], bytes(32)), "a name of 2000 bytes"),
        (gguf([pair("a", 4, bytes(4)), pair("a", 4, bytes(4))], W, bytes(16)), 'DuplicateKey("a")'),
        (gguf([pair("a", 13, b"")], W, bytes(16)), "metadata type 13"),
        (gguf([pair("a", 9, NESTED)], W, bytes(16)), "nested deeper"),
        (gguf([pair("general.alignment", 4, bytes(4))], W, bytes(16)), "general.alignment"),
        (gguf([pair("general.alignment", 8, text("x" * 100))], W, bytes(16)), "general.alignment"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0) + bytes(99), "at most"),
    ],
)
def test_a_wrong_header_has_a_reason(data: bytes, reason: str) -> None:
    layout = layout_of(data)
    assert layout.format == "opaque" and reason in layout.reason and not layout.truncated


def test_R051_a_short_file_keeps_the_tensors_that_are_whole() -> None:
    data = gguf([pair("a", 8, text("b"))], [info("v", (4,), 0, 0), info("w", (4,), 0, 32)], bytes(48))
    assert not layout_of(data).reason
    for length in range(8, len(data)):
        assert layout_of(data[:length]).truncated
    layout = layout_of(data[:-1])
    assert layout.reason == "data short by 1 byte" and list(by_name(layout)) == ["v"]


LONG = limits.METADATA_BYTES + 1
STRINGS = struct.pack("<IQ", 8, 2)


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (8, text("a" * LONG), text("a" * (LONG - 1) + "b")),
        (9, STRINGS + text("a") + text("b"), STRINGS + text("a") + text("c")),
        (9, struct.pack("<IQHH", 2, 2, 1, 2), struct.pack("<IQHH", 2, 2, 1, 3)),
    ],
    ids=["string", "strings", "numbers"],
)
def test_metadata_that_is_not_kept_can_still_be_compared(kind: int, one: bytes, other: bytes) -> None:
    first, again, second = (layout_of(gguf([pair("k", kind, raw)], [])).metadata for raw in (one, one, other))
    assert first == again != second
    assert len(first["k"]) < 120


def test_pairs_of_metadata_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "METADATA_PAIRS", 3)
    pairs = [pair(f"k{number}", 0, b"\1") for number in range(4)]
    assert not layout_of(gguf(pairs[:3], W, bytes(16))).reason
    assert "4 pairs of metadata, at most 3" in layout_of(gguf(pairs, W, bytes(16))).reason


@pytest.mark.parametrize("raw", [struct.pack("<IQ", 8, 1 << 60), struct.pack("<IQ", 4, 1 << 60)])
def test_announced_arrays_allocate_nothing(raw: bytes) -> None:
    source = counting(gguf([pair("a", 9, raw)], W, bytes(1000)))
    layout = parse(source)
    check_layout(layout, source.size)
    assert layout.truncated and source.bytes_read < 4000


def test_only_the_header_of_a_large_file_is_read() -> None:
    experts, rows, columns = 8, 4096, 4096
    length = experts * rows * columns // 256 * 144
    data = gguf([], [info("blk.0.ffn_up_exps.weight", (columns, rows, experts), 12, 0)])
    source = counting(data)
    source.size = len(data) + length
    layout = parse(source)
    check_layout(layout, source.size)
    pieces = list(cut(source, layout, CutRules()))
    assert source.bytes_read < limits.MIB
    # Each expert is cut from its own start, so that one expert's bytes are the same objects wherever it stands.
    starts = {piece.offset - len(data) for piece in pieces if piece.name}
    assert {number * length // experts for number in range(experts)} <= starts
    assert [r.shape for r in layout.regions if r.kind is RegionKind.TENSOR] == [(8, 4096, 4096 // 256 * 144)]
