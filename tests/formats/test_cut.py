"""Where files are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonclipfs import limits
from moonclipfs.errors import LimitError, ParseError
from moonclipfs.formats.cut import CutRules, Piece, cut
from moonclipfs.formats.layout import Layout, Region, RegionKind, cover, opaque
from moonclipfs.types import BytesSource, DType
from tests.formats.samples import SMALL_RULES, CountingSource, check_layout, check_pieces, entry, layout_of, safetensors


def tensor(offset: int, length: int, dtype: DType = DType.F32, shape: tuple[int, ...] | None = None) -> Region:
    shape = (length * 8 // dtype.bits,) if shape is None else shape
    return Region(offset, length, RegionKind.TENSOR, f"t{offset}", dtype, shape)


def pieces_of(size: int, regions: list[Region], rules: CutRules = CutRules()) -> list[Piece]:  # noqa: B008
    layout = Layout("test", cover(size, regions))
    source = CountingSource(size, {})
    pieces = list(cut(source, layout, rules))
    assert sum(piece.length for piece in pieces) == size and source.longest <= limits.MIB
    return pieces


@pytest.mark.parametrize(
    ("dtype", "step"),
    [(DType.F32, 16), (DType.BF16, 8), (DType.U8, 4), (DType.F64, 16), (DType.F4, 2), (DType.F6_E2M3, 3),
     (DType.C64, 16), (DType.C128, 16), (DType.BYTES, 4)],
)  # fmt: skip
def test_tensors_are_cut_on_a_grid_of_elements_from_their_start(dtype: DType, step: int) -> None:
    length = 96 * limits.MIB + 48
    pieces = pieces_of(length + 5000, [tensor(5000, length, dtype)])[1:]
    assert [piece.offset for piece in pieces] == list(range(5000, 5000 + length, step * limits.MIB))
    assert {piece.length for piece in pieces[:-1]} == {step * limits.MIB}
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert sum(piece.shape[0] for piece in pieces) * dtype.bits == length * 8


def test_a_tensor_in_two_dtypes_has_pieces_that_face_each_other() -> None:
    elements = 9 * limits.MIB
    cuts = [
        [piece.shape for piece in pieces_of(elements * dtype.width, [tensor(0, elements * dtype.width, dtype)])]
        for dtype in (DType.F32, DType.BF16, DType.F8_E4M3)
    ]
    assert cuts[0] == cuts[1] == cuts[2]


def test_stacked_experts_are_cut_at_each_leading_index() -> None:
    shape = (8, 1024, 6 * 1024)
    length = 8 * 1024 * 6 * 1024 * 4
    pieces = pieces_of(length, [tensor(0, length, DType.F32, shape)])
    assert [(piece.length // limits.MIB, piece.index) for piece in pieces] == [
        (size, 2 * expert + part) for expert in range(8) for part, size in enumerate((16, 8))
    ]
    small = pieces_of(length // 4, [tensor(0, length // 4, DType.F32, (8, 1024, 1536))])
    assert {piece.shape for piece in small} == {(1024, 1536)}


@pytest.mark.parametrize("shape", [(64, 512, 128), (8, 512 * 1024), (1, 64, 65536)])
def test_short_slices_and_matrices_are_not_stacked(shape: tuple[int, ...]) -> None:
    length = 4 * 64 * 65536
    assert [piece.shape for piece in pieces_of(length, [tensor(0, length, DType.F32, shape)])] == [shape]


def test_an_expert_is_the_same_pieces_in_a_stack_and_alone() -> None:
    expert = random.Random(1).randbytes(256)
    stacked = safetensors({"e": entry("U8", [3, 16, 16], 0, 768)}, bytes(256) + expert + bytes(256))
    alone = safetensors({"e.1": entry("U8", [16, 16], 0, 256)}, expert)
    contents = [
        {data[p.offset : p.offset + p.length] for p in check_pieces(data, layout_of(data)) if p.name}
        for data in (stacked, alone)
    ]
    assert contents[1] <= contents[0]


def test_neighbouring_small_regions_become_one_piece() -> None:
    regions = [
        Region(0, 100, RegionKind.HEADER),
        tensor(100, 400),
        tensor(500, 4092),
        tensor(4592, 4096),
        tensor(8688, 4),
    ]
    pieces = pieces_of(9000, regions)
    assert [(p.offset, p.length, p.name, p.dtype) for p in pieces] == [
        (0, 4592, "", DType.BYTES),
        (4592, 4096, "t4592", DType.F32),
        (8688, 312, "", DType.BYTES),
    ]


def test_small_tensors_of_one_dtype_stay_numbers() -> None:
    pieces = pieces_of(1200, [tensor(0, 400), tensor(400, 800)])
    assert [(p.length, p.name, p.dtype, p.shape) for p in pieces] == [(1200, "t0", DType.F32, (300,))]
    mixed = pieces_of(1200, [tensor(0, 400), Region(400, 800, RegionKind.TENSOR, "x", DType.BF16, (400,))])
    assert [(p.length, p.name, p.dtype) for p in mixed] == [(1200, "", DType.BYTES)]


def test_small_tensors_of_one_dtype_keep_it_and_the_first_name() -> None:
    pieces = pieces_of(1000, [tensor(0, 400), tensor(400, 600)])
    assert [(p.length, p.name, p.dtype, p.shape) for p in pieces] == [(1000, "t0", DType.F32, (250,))]
    mixed = pieces_of(1000, [tensor(0, 400), tensor(400, 600, DType.BF16)])
    assert [(p.length, p.name, p.dtype) for p in mixed] == [(1000, "", DType.BYTES)]


def test_a_small_tensor_that_stands_alone_keeps_its_name() -> None:
    assert [(p.name, p.shape) for p in pieces_of(400, [tensor(0, 400)])] == [("t0", (100,))]


def test_many_small_regions_stay_within_an_object() -> None:
    regions = [tensor(offset, 4092) for offset in range(0, 10_000 * 4092, 4092)]
    pieces = pieces_of(10_000 * 4092, regions)
    assert len(pieces) == 3 and max(piece.length for piece in pieces) <= limits.OBJECT_BYTES


def test_unknown_bytes_are_cut_by_content_and_cuts_survive_an_insertion() -> None:
    data = random.Random(2).randbytes(8 * limits.MIB)
    before, after = (chunks(part) for part in (data, data[:100] + b"inserted" + data[100:]))
    assert max(map(len, before)) <= limits.CHUNK_MAX and min(map(len, before[:-1])) >= limits.CHUNK_MIN
    assert len(set(after) - set(before)) <= 2


def chunks(data: bytes) -> list[bytes]:
    layout = opaque(len(data), "test")
    return [data[piece.offset : piece.offset + piece.length] for piece in cut(BytesSource(data), layout, CutRules())]


def test_a_longer_header_moves_no_cut_of_a_tensor() -> None:
    weights = random.Random(3).randbytes(6000)
    contents = []
    for note in ("", "n" * 777):
        data = safetensors({"__metadata__": {"note": note}, "w": entry("BF16", [3000], 0, 6000)}, weights)
        pieces = check_pieces(data, layout_of(data))
        contents.append([data[piece.offset : piece.offset + piece.length] for piece in pieces if piece.name])
    assert contents[0] == contents[1] and b"".join(contents[0]) == weights


@pytest.mark.parametrize(
    "rules",
    [{"object_bytes": 0}, {"object_elements": 12}, {"object_elements": -8}, {"slice_bytes": 0}, {"chunk_min": -1},
     {"chunk_min": 63}, {"chunk_average": 1000},
     {"object_bytes": 64}, {"chunk_max": 1 << 30}, {"small_region_bytes": 1 << 30}, {"small_region_bytes": 0}],
)  # fmt: skip
def test_rules_that_cannot_cut_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(LimitError, match="cut rule"):
        CutRules(**rules)


def test_an_empty_file_has_no_pieces() -> None:
    assert check_pieces(b"", layout_of(b"")) == []


DTYPES = st.sampled_from([DType.F32, DType.BF16, DType.U8, DType.F4, DType.F6_E3M2, DType.C128, DType.BYTES])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[bytes, Layout]:
    """Layouts of any regions over random bytes."""
    regions, offset = [], 0
    for _ in range(draw(st.integers(0, 8))):
        offset += draw(st.sampled_from([0, 0, 3, 50]))
        if draw(st.booleans()):
            dtype = draw(DTYPES)
            shape = (*draw(st.lists(st.integers(1, 6), max_size=3)), 8)
            length = 8 * dtype.bits // 8
            for size in shape[:-1]:
                length *= size
            regions.append(tensor(offset, length, dtype, shape))
        else:
            length = draw(st.integers(1, 700))
            regions.append(Region(offset, length, draw(st.sampled_from([RegionKind.OPAQUE, RegionKind.HEADER]))))
        offset += length
    size = offset + draw(st.integers(0, 100))
    return random.Random(size).randbytes(size), Layout("test", cover(size, regions))


@given(layouts())
def test_pieces_cover_any_layout(drawn: tuple[bytes, Layout]) -> None:
    data, layout = drawn
    check_layout(layout, len(data))
    pieces = check_pieces(data, layout, SMALL_RULES)
    assert pieces == check_pieces(data, layout, SMALL_RULES)
    for piece in pieces:
        inside = [r for r in layout.regions if r.offset < piece.offset + piece.length and piece.offset < r.end]
        if piece.name:
            assert piece.name == inside[0].name and {region.dtype for region in inside} == {piece.dtype}
        if len(inside) > 1:
            assert max(region.length for region in inside) < SMALL_RULES.small_region_bytes


@pytest.mark.parametrize(
    "regions", [[tensor(0, 8), tensor(4, 8)], [tensor(96, 8)], [tensor(0, 104)], [Region(8, -8, RegionKind.OPAQUE)]]
)
def test_regions_that_do_not_fit_are_refused(regions: list[Any]) -> None:
    with pytest.raises(ParseError):
        cover(100, regions)
