"""Choosing bases: by line, name and likeness, with short chains and short distances."""

from __future__ import annotations

import numpy as np
import pytest

from moonclipfs import limits
from moonclipfs.codec.sketch import NO_SKETCH, sketch
from moonclipfs.formats.cut import Piece
from moonclipfs.formats.layout import Layout, Region, RegionKind
from moonclipfs.store.bases import Candidate, Line, candidates, label_of, pick
from moonclipfs.store.packs import Location
from moonclipfs.store.recipes import Recipe
from moonclipfs.types import NO_ID, DType, Extent, Kind, ObjectId

ELEMENTS = 1000


class Memory:
    """Objects that are known, the newest last."""

    def __init__(self) -> None:
        self.locations: list[Location] = []
        self.unusable: set[ObjectId] = set()

    def find(self, object_id: ObjectId) -> Location | None:
        found = [one for one in self.locations if one.object_id == object_id and object_id not in self.unusable]
        return found[-1] if found else None

    def by_label(self, label: int, limit: int) -> list[Location]:
        return [one for one in reversed(self.locations) if one.label == label and label][:limit]

    def by_elements(self, elements: int, limit: int) -> list[Location]:
        return [one for one in reversed(self.locations) if one.raw_length // one.dtype.width == elements][:limit]

    def add(self, piece: Piece, marks: bytes, base: Candidate | None = None) -> Location:
        location = Location(
            len(self.locations).to_bytes(32, "big")[1:] + b"x",
            "pack",
            0,
            1,
            piece.length,
            Kind.DATA,
            piece.dtype,
            0 if base is None else base.location.depth + 1,
            NO_ID if base is None else base.location.object_id,
            0 if base is None else base.start,
            label_of(piece),
            marks,
            0 if base is None else base.generation,
        )
        self.locations.append(location)
        return location


def piece(name: str = "w", dtype: DType = DType.F32, elements: int = ELEMENTS) -> Piece:
    return Piece(0, elements * dtype.width, dtype, name, (elements,), 0)


def marks(seed: int, drift: float = 0.0) -> bytes:
    """The sketch of a tensor; a small drift changes a few places of it."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(ELEMENTS) + drift * np.random.default_rng(99).standard_normal(ELEMENTS)
    return sketch(values.astype(np.float32).tobytes(), DType.F32)


def test_labels_tell_parts_of_tensors_apart_but_not_dtypes() -> None:
    one = Piece(0, 4000, DType.F32, "w", (1000,), 0)
    assert label_of(one) == label_of(Piece(96, 2000, DType.BF16, "w", (1000,), 0))
    others = [
        Piece(0, 4000, DType.F32, "v", (1000,), 0),
        Piece(0, 4000, DType.F32, "w", (500, 2), 0),
        Piece(0, 4000, DType.F32, "w", (1000,), 1),
    ]
    assert len({label_of(one), *map(label_of, others)}) == 4
    assert label_of(Piece(0, 4000, DType.BYTES, "", (4000,), 0)) == 0
    assert 0 < label_of(Piece(0, 4, DType.F32, "\udcff", (1,), 0)) < 1 << 64


def test_a_long_line_keeps_chains_and_distances_short() -> None:
    known, tensor = Memory(), piece()
    before: Location | None = None
    distances = []
    for _ in range(600):
        line = None if before is None else (before.object_id, 0)
        options = candidates(known, tensor, marks(1), line)
        assert len(options) == (before is not None)
        if options:
            distances.append(len(known.locations) - known.locations.index(options[0].location))
        before = known.add(tensor, marks(1), options[0] if options else None)
    depths = [one.depth for one in known.locations]
    assert max(depths) == limits.CHAIN_DEPTH
    assert depths[:7] == [0, 1, 2, 3, 2, 3, 3]
    assert max(one.generation for one in known.locations) < 256
    near = [distance for distance, depth in zip(distances, depths[1:], strict=True) if depth == limits.CHAIN_DEPTH]
    assert max(near) <= 2
    assert sum(distance <= 3 for distance in distances) > 0.8 * len(distances)


def test_a_narrower_copy_hangs_on_its_master_whatever_the_place_in_the_line() -> None:
    known, master, copy = Memory(), piece(), piece(dtype=DType.BF16)
    before: Location | None = None
    for step in range(20):
        line = None if before is None else (before.object_id, 0)
        options = candidates(known, master, marks(1), line)
        same = [option for option in options if option.location.dtype is DType.F32]
        before = known.add(master, marks(1), same[0] if same else None)
        options = candidates(known, copy, marks(1), None)
        exact = [option for option in options if option.location is before]
        assert exact or step == 0 or before.depth == limits.CHAIN_DEPTH
        if step > 3:
            assert exact, "after the first copies, masters leave them a link"
        known.add(copy, marks(1), exact[0] if exact else None)


def test_all_masters_that_look_the_same_are_offered_to_a_copy() -> None:
    known, copy = Memory(), piece(dtype=DType.BF16)
    masters = [known.add(piece(), marks(1)) for _ in range(2)]
    known.add(piece(), marks(5))
    assert [option.location for option in candidates(known, copy, marks(1), None)] == masters[::-1]


def test_of_several_runs_with_one_architecture_the_own_is_found_by_likeness() -> None:
    known, tensor = Memory(), piece()
    runs = [known.add(tensor, marks(seed)) for seed in range(6)]
    for seed in range(6):
        assert [option.location for option in candidates(known, tensor, marks(seed, 0.001), None)] == [runs[seed]]


def test_the_line_wins_over_equals_and_loses_to_what_is_more_alike() -> None:
    known, tensor = Memory(), piece()
    line = known.add(tensor, marks(1))
    known.add(tensor, marks(1))
    assert candidates(known, tensor, marks(1), (line.object_id, 0))[0].location is line
    better = known.add(tensor, marks(2))
    assert candidates(known, tensor, marks(2), (line.object_id, 0))[0].location is better


def test_a_renamed_tensor_is_found_by_its_sketch_and_an_unlike_one_is_not() -> None:
    known = Memory()
    old = known.add(piece("model.w"), marks(1))
    known.add(piece("other", elements=ELEMENTS + 1), marks(1))
    assert [option.location for option in candidates(known, piece("module.model.w"), marks(1, 0.01), None)] == [old]
    assert candidates(known, piece("module.model.w"), marks(7), None) == []


def test_bytes_have_no_base() -> None:
    known = Memory()
    known.add(Piece(0, 4000, DType.BYTES, "", (4000,), 0), NO_SKETCH)
    assert candidates(known, Piece(0, 4000, DType.BYTES, "", (4000,), 0), NO_SKETCH, None) == []


def test_a_chain_that_is_not_whole_is_no_base() -> None:
    known, tensor = Memory(), piece()
    first = known.add(tensor, marks(1))
    second = known.add(tensor, marks(1), Candidate(first, 0, 1))
    known.unusable.add(first.object_id)
    assert candidates(known, tensor, marks(1), (second.object_id, 0)) == []
    known.unusable.clear()
    # The base is known only in an encoding that hangs on what hangs on it.
    known.add(tensor, marks(1))
    known.locations[-1] = Location(
        first.object_id, "p", 0, 1, tensor.length, Kind.DATA, DType.F32, 2, second.object_id, 0, 0, marks(1), 2
    )
    assert candidates(known, tensor, marks(1), (second.object_id, 0)) == []


def layout(*tensors: tuple[str, DType, tuple[int, ...], int]) -> Layout:
    """Tensors after each other from byte 100 on, the last number being the length."""
    regions, at = [Region(0, 100, RegionKind.HEADER)], 100
    for name, dtype, shape, length in tensors:
        regions.append(Region(at, length, RegionKind.TENSOR, name, dtype, shape))
        at += length
    return Layout("test", tuple(regions))


def test_a_line_finds_the_object_that_holds_a_tensor() -> None:
    ids = [bytes([number]) * 32 for number in range(4)]
    half = limits.BLOCK_ELEMENTS
    before = layout(("a", DType.F32, (2 * half,), 8 * half), ("b", DType.F32, (10,), 40))
    recipe = Recipe(
        [Extent(100, literal=bytes(100)), Extent(4 * half, ids[0]), Extent(4 * half, ids[1], 64), Extent(40, ids[2])]
    )
    line = Line(before, recipe)
    same = Region(500, 8 * half, RegionKind.TENSOR, "a", DType.F32, (2 * half,))
    assert line.find(same, 0) == (ids[0], 0)
    assert line.find(same, 4 * half) is None, "blocks would face two blocks"
    narrow = Region(500, 4 * half, RegionKind.TENSOR, "a", DType.BF16, (2 * half,))
    assert line.find(narrow, 0) == (ids[0], 0)
    assert line.find(Region(0, 40, RegionKind.TENSOR, "b", DType.F32, (10,)), 0) == (ids[2], 0)
    assert line.find(Region(0, 40, RegionKind.TENSOR, "b", DType.F32, (5, 2)), 0) is None
    grown = Region(0, 80, RegionKind.TENSOR, "b", DType.F32, (20,))
    assert line.find(grown, 0) == (ids[2], 0)
    assert line.find(grown, 40) is None
    assert line.find(Region(0, 40, RegionKind.TENSOR, "c", DType.F32, (10,)), 0) is None
    assert line.find(Region(0, 80, RegionKind.TENSOR, "b", DType.I64, (10,)), 0) is None


@pytest.mark.parametrize("elements", [2000, 3 * limits.BLOCK_ELEMENTS])
def test_pick_takes_the_base_that_predicts_best_or_none_but_tries_a_short_one_untested(elements: int) -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal(elements).astype(np.float32)
    raws = {
        b"near": (values + rng.standard_normal(elements).astype(np.float32) * np.float32(1e-6)).tobytes(),
        b"far": (values + rng.standard_normal(elements).astype(np.float32) * np.float32(1e-3)).tobytes(),
        b"unlike": rng.standard_normal(elements).astype(np.float32).tobytes(),
    }
    options = [
        Candidate(Location(name, "pack", 0, 1, len(raw), Kind.DATA, DType.F32), 0, 1) for name, raw in raws.items()
    ]
    reads: list[int] = []

    def read(option: Candidate, offset: int, length: int) -> bytes:
        reads.append(length)
        return raws[option.location.object_id][offset : offset + length]

    raw = values.tobytes()
    assert pick(options, raw, DType.F32, read) is options[0]
    assert pick(options[1:], raw, DType.F32, read) is options[1]
    assert pick(options[2:], raw, DType.F32, read) is (options[2] if elements == 2000 else None)
    assert pick([], raw, DType.F32, read) is None
    assert max(reads) <= limits.BLOCK_ELEMENTS * 4
