"""Comparing: what is matched with what, how much a tensor changed, and what is never read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moonclipfs.errors import LimitError
from moonclipfs.formats.layout import Tensor
from moonclipfs.store import changes, compare
from moonclipfs.store.compare import Change
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.sides import Side, path_side, store_side
from moonclipfs.store.store import Store
from moonclipfs.types import BytesSource, DType, Extent
from tests.store.kit import publish

NAMES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL", "float64": "F64"}


def safetensors_bytes(tensors: dict[str, NDArray[np.generic]], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at, data = 0, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": NAMES.get(array.dtype.name, "BF16"),
            "shape": list(array.shape),
            "data_offsets": [at, at + len(raw)],
        }
        at, data = at + len(raw), data + raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def save(path: Path, tensors: dict[str, NDArray[np.generic]], metadata: dict[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return path


def found(report: compare.DiffReport) -> dict[str, Change]:
    return {tensor.name: tensor.change for tensor in report.tensors}


def test_added_removed_changed_shape_and_dtype(tmp_path: Path) -> None:
    a = np.arange(8, dtype=np.float32)
    left = {"same": a, "gone": a, "moved": a, "shaped": a, "typed": a}
    right = {"same": a, "new": a, "moved": a + 1, "shaped": a.reshape(2, 4), "typed": a.astype(np.float16)}
    report = compare.diff(path_side(save(tmp_path / "l.safetensors", left)), path_side(save(tmp_path / "r.st", right)))
    assert found(report) == {
        "same": Change.UNCHANGED, "gone": Change.REMOVED, "new": Change.ADDED, "moved": Change.CHANGED,
        "shaped": Change.SHAPE, "typed": Change.DTYPE,
    }  # fmt: skip
    values = {tensor.name: tensor.values for tensor in report.tensors}
    assert values["moved"] == changes.ValueChange(8, 8, 0, 1.0, 1.0, math.sqrt(8))
    assert values["typed"] == changes.ValueChange(8, 0, 0, 0.0, 0.0, 0.0)
    assert report.different


def test_numbers_of_a_change(tmp_path: Path) -> None:
    a = np.zeros(1000, np.float32)
    b = a.copy()
    b[10], b[20] = 3, -4
    report = compare.diff(path_side(save(tmp_path / "a", {"w": a})), path_side(save(tmp_path / "b", {"w": b})))
    values = report.tensors[0].values
    assert values == changes.ValueChange(1000, 2, 0, 4.0, 7 / 1000, 5.0)
    assert values.share == 0.002


def test_nan_and_infinity_are_counted_apart(tmp_path: Path) -> None:
    a = np.array([1, np.nan, np.inf, np.inf, 5, 0.0], np.float32)
    b = np.array([np.nan, np.nan, np.inf, -np.inf, 7, -0.0], np.float32)
    report = compare.diff(path_side(save(tmp_path / "a", {"w": a})), path_side(save(tmp_path / "b", {"w": b})))
    assert report.tensors[0].values == changes.ValueChange(6, 4, 2, 2.0, 0.5, 2.0)
    wide = {"w": b.astype(np.float64)}
    report = compare.diff(path_side(save(tmp_path / "a", {"w": a})), path_side(save(tmp_path / "c", wide)))
    assert report.tensors[0].values == changes.ValueChange(6, 3, 2, 2.0, 0.5, 2.0), "-0.0 equals 0.0 between dtypes"


def test_any_formats_matched_by_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="writes the torch file")
    weights = {"a.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4), "b": torch.ones(5)}
    torch.save({**weights, "t": weights["a.weight"].t()}, tmp_path / "m.pt")
    arrays = {
        "a.weight": np.arange(12, dtype=np.float32).view(np.uint32).reshape(3, 4),
        "b": np.ones(5, np.float32),
    }
    raw = safetensors_bytes({"b": arrays["b"]})
    (tmp_path / "m.safetensors").write_bytes(raw)
    report = compare.diff(path_side(tmp_path / "m.pt"), path_side(tmp_path / "m.safetensors"))
    assert found(report) == {"a.weight": Change.REMOVED, "t": Change.REMOVED, "b": Change.UNCHANGED}
    wide = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b": arrays["b"]}
    wide["t"] = np.ascontiguousarray(wide["a.weight"].T)
    report = compare.diff(path_side(tmp_path / "m.pt"), path_side(save(tmp_path / "w.safetensors", wide)))
    assert found(report) == {"a.weight": Change.DTYPE, "t": Change.DTYPE, "b": Change.UNCHANGED}
    assert all(tensor.values and not tensor.values.changed for tensor in report.tensors)
    assert report.files[0].change is Change.UNCHANGED, "two formats share nothing but tensors"


def test_values_in_a_pickle_count_and_names_of_archives_do_not(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="writes the torch files")
    weight = torch.ones(100)
    for name, step in (("a", 1), ("b", 1), ("c", 2)):
        torch.save({"w": weight, "step": step}, tmp_path / f"{name}.pt")
    assert (tmp_path / "a.pt").read_bytes() != (tmp_path / "b.pt").read_bytes()
    assert not compare.diff(path_side(tmp_path / "a.pt"), path_side(tmp_path / "b.pt")).different
    report = compare.diff(path_side(tmp_path / "a.pt"), path_side(tmp_path / "c.pt"))
    assert found(report) == {"w": Change.UNCHANGED}
    assert report.different


def test_metadata_counts_and_the_order_of_a_header_does_not(tmp_path: Path) -> None:
    a, b = np.ones(10, np.float32), np.zeros(10, np.float32)
    one = path_side(save(tmp_path / "1", {"a": a, "b": b}, {"k": "v"}))
    other_order = path_side(save(tmp_path / "2", {"b": b, "a": a}, {"k": "v"}))
    other_metadata = path_side(save(tmp_path / "3", {"a": a, "b": b}, {"k": "w"}))
    assert not compare.diff(one, other_order).different
    report = compare.diff(one, other_metadata)
    assert report.different
    assert [file.change for file in report.files] == [Change.CHANGED]


def test_directories_match_by_path_then_by_name(tmp_path: Path) -> None:
    a, b = np.zeros(4, np.float32), np.ones(4, np.float32)
    for side, shards in (("l", ({"x": a}, {"y": a, "z": b})), ("r", ({"x": a, "y": a}, {"z": b}))):
        for number, tensors in enumerate(shards):
            save(tmp_path / side / f"model-{number}.safetensors", tensors)
        # The same names again in another file: the path keeps them apart.
        save(tmp_path / side / "ema" / "model.safetensors", {"x": b, "y": b})
        (tmp_path / side / "config.json").write_text("{}" if side == "l" else "{ }")
        (tmp_path / side / "same.txt").write_text("same")
        (tmp_path / side / "link").symlink_to("same.txt")
    (tmp_path / "l" / "old.txt").write_text("")
    report = compare.diff(path_side(tmp_path / "l"), path_side(tmp_path / "r"))
    assert [tensor.change for tensor in report.tensors] == [Change.UNCHANGED] * 5
    moved = [(t.left.path, t.right.path) for t in report.tensors if t.left and t.right and t.left.path != t.right.path]
    assert moved == [(b"model-1.safetensors", b"model-0.safetensors")]
    assert {file.path: file.change for file in report.files if file.change is not Change.UNCHANGED} == {
        b"config.json": Change.CHANGED,
        b"old.txt": Change.REMOVED,
    }
    assert report.different


def test_a_file_of_tensors_on_one_side_is_told_by_its_tensors(tmp_path: Path) -> None:
    save(tmp_path / "l" / "model.safetensors", {"x": np.ones(4, np.float32)})
    save(tmp_path / "r" / "renamed.safetensors", {"x": np.ones(4, np.float32)})
    report = compare.diff(path_side(tmp_path / "l"), path_side(tmp_path / "r"))
    assert {file.change for file in report.files} == {Change.ADDED, Change.REMOVED}
    assert not report.different


def test_expect_unchanged(tmp_path: Path) -> None:
    a = np.ones(4, np.float32)
    left = path_side(save(tmp_path / "l", {"base.w": a, "base.b": a, "head.w": a}))
    right = path_side(save(tmp_path / "r", {"base.w": a, "base.b": a * 2, "head.w": a * 2}))
    assert compare.diff(left, right, expect_unchanged=["base.w*"]).violations == ()
    assert compare.diff(left, right, expect_unchanged=["base.*"]).violations == ("base.*: base.b is changed",)
    assert compare.diff(left, right, expect_unchanged=["bsae.*"]).violations == ("bsae.*: matches no tensor",)


def test_windows_give_what_one_look_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal(5000).astype(np.float32)
    b = np.where(rng.random(5000) < 0.1, a + 0.5, a).astype(np.float32)
    old, new = (Tensor("w", DType.F32, (5000,), 0, 20000) for _ in "ab")
    whole = changes.compare_values(BytesSource(a.tobytes()), old, BytesSource(b.tobytes()), new, [(0, 20000)])
    monkeypatch.setattr("moonclipfs.limits.COMPARE_WINDOW_BYTES", 256)
    parts = changes.compare_values(BytesSource(a.tobytes()), old, BytesSource(b.tobytes()), new, [(0, 20000)])
    assert (parts.changed, parts.max_abs) == (whole.changed, whole.max_abs)
    assert parts.norm == pytest.approx(whole.norm)
    assert parts.mean_abs == pytest.approx(whole.mean_abs)


@given(st.sampled_from([DType.F4, DType.F6_E2M3, DType.U8, DType.BF16, DType.F64, DType.C128]), st.data())
def test_ranges_never_miss_a_change(dtype: DType, data: st.DataObject) -> None:
    """Elements that a differing byte touches are all counted, and none twice."""
    unit = {4: 1, 6: 3}.get(dtype.bits, dtype.bits // 8)
    length = unit * data.draw(st.integers(1, 40))
    old = bytearray(length)
    new = bytearray(length)
    marks = sorted(data.draw(st.sets(st.integers(0, length - 1), max_size=10)))
    for at in marks:
        new[at] = 0x11
    tensor = Tensor("w", dtype, (length * 8 // dtype.bits,), 0, length)
    ranges = [(at, 1) for at in marks]
    some = changes.compare_values(BytesSource(bytes(old)), tensor, BytesSource(bytes(new)), tensor, ranges)
    all_ = changes.compare_values(BytesSource(bytes(old)), tensor, BytesSource(bytes(new)), tensor, [(0, length)])
    assert (some.changed, some.max_abs) == (all_.changed, all_.max_abs)


@st.composite
def pieces(draw: st.DrawFn) -> list[Extent]:
    ids = [bytes([number]) * 32 for number in range(1, 4)]
    made = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 5))
        kind = draw(st.sampled_from(["hole", "literal", "object"]))
        if kind == "hole":
            made.append(Extent(length))
        elif kind == "literal":
            made.append(Extent(length, literal=draw(st.sampled_from([b"\1", b"\2"])) * length))
        else:
            made.append(Extent(length, draw(st.sampled_from(ids)), draw(st.integers(0, 2))))
    return made


def content(extents: list[Extent]) -> list[object]:
    """One token a byte: equal tokens are bytes known to be equal."""
    tokens: list[object] = []
    for extent in extents:
        for at in range(extent.length):
            if extent.literal is not None:
                tokens.append(extent.literal[at])
            elif extent.object_id is None:
                tokens.append("hole")
            else:
                tokens.append((extent.object_id, extent.object_offset + at))
    return tokens


@given(pieces(), pieces(), st.data())
def test_differing_ranges_are_exact(left: list[Extent], right: list[Extent], data: st.DataObject) -> None:
    ours, theirs = content(left), content(right)
    length = data.draw(st.integers(0, min(len(ours), len(theirs))))
    a = data.draw(st.integers(0, len(ours) - length))
    b = data.draw(st.integers(0, len(theirs) - length))
    marked: set[int] = set()
    for at, count in changes.differing_ranges(Recipe(left), a, Recipe(right), b, length):
        assert count > 0
        assert not marked.intersection(range(at, at + count))
        marked |= set(range(at, at + count))
    # Literals are compared a common part at a time, so equal bytes may lie in a part that differs; never the reverse.
    differing = {at for at in range(length) if ours[a + at] != theirs[b + at]}
    assert differing <= marked
    assert all(isinstance(ours[a + at], int) and isinstance(theirs[b + at], int) for at in marked - differing)


def test_an_empty_side_and_an_empty_tensor(tmp_path: Path) -> None:
    empty = save(tmp_path / "e", {"x": np.zeros((0, 4), np.float32), "s": np.float32(1).reshape(())})
    assert not compare.diff(path_side(empty), path_side(empty)).different
    report = compare.diff(Side({}), path_side(empty))
    assert found(report) == {"x": Change.ADDED, "s": Change.ADDED}


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_views_of_one_order_need_no_memory(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed on both sides: element by element as they lie. In different orders: put in order, if that is small."""
    monkeypatch.setattr("moonclipfs.limits.COMPARE_STRIDED_BYTES", limit)
    monkeypatch.setattr("moonclipfs.limits.COMPARE_WINDOW_BYTES", 64)
    a = np.arange(600, dtype=np.float32).reshape(20, 30)
    b = a.copy()
    b[3, 4] += 2
    transposed = Tensor("w", DType.F32, (30, 20), 0, a.nbytes, strides=(1, 30))
    expected = changes.ValueChange(600, 1, 0, 2.0, 2 / 600, 2.0)
    left, right = BytesSource(a.tobytes()), BytesSource(b.tobytes())
    assert changes.compare_values(left, transposed, right, transposed, [(0, a.nbytes)]) == expected
    plain = Tensor("w", DType.F32, (30, 20), 0, a.nbytes)
    unfolded = BytesSource(np.ascontiguousarray(b.T).tobytes())
    if limit:
        assert changes.compare_values(left, transposed, unfolded, plain, [(0, a.nbytes)]) == expected
    else:
        with pytest.raises(LimitError, match="in another order"):
            changes.compare_values(left, transposed, unfolded, plain, [(0, a.nbytes)])


def test_a_view_that_would_unfold_without_bound_is_not_unfolded() -> None:
    wide = Tensor("w", DType.F32, (1 << 20, 1 << 20), 0, 4, strides=(0, 0))
    assert not changes._same_order(wide, wide)
    with pytest.raises(LimitError, match="in another order, and more than"):
        changes.compare_values(BytesSource(b"1234"), wide, BytesSource(b"5678"), wide, [(0, 4)])


def test_what_a_store_keeps_as_the_same_objects_is_not_read(store: Store, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    frozen, head = rng.standard_normal((200, 200)).astype(np.float32), rng.standard_normal(5000).astype(np.float32)
    before = safetensors_bytes({"backbone.w": frozen, "head.w": head})
    after = safetensors_bytes({"backbone.w": frozen, "head.w": head + 1, "long.header": np.zeros(3, np.float32)})
    old = publish(store, "base", {"model.safetensors": before})
    new = publish(store, "tuned", {"model.safetensors": after})
    with Store.open(store.path, index_path=tmp_path / "fresh.sqlite") as fresh:
        sides = [store_side(fresh, version) for version in (old, new)]
        for side in sides:
            assert side.files[b"model.safetensors"].layout.tensors
        counted = fresh.objects.counters.bytes_decoded
        report = compare.diff(*sides)
        read = fresh.objects.counters.bytes_decoded - counted
    assert found(report) == {
        "backbone.w": Change.UNCHANGED, "head.w": Change.CHANGED, "long.header": Change.ADDED,
    }  # fmt: skip
    assert {tensor.name: tensor.values is None for tensor in report.tensors}["backbone.w"]
    assert read < 3 * head.nbytes + 20_000 < frozen.nbytes


def test_a_store_beside_a_plain_directory(store: Store, tmp_path: Path) -> None:
    data = safetensors_bytes({"w": np.arange(5000, dtype=np.float32)})
    version = publish(store, "a", {"model.safetensors": data, "config.json": b"{}"})
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "model.safetensors").write_bytes(data)
    (plain / "config.json").write_text("{}")
    assert not compare.diff(store_side(store, version), path_side(plain)).different
    assert not compare.diff(
        store_side(store, version, b"model.safetensors"), path_side(plain / "model.safetensors")
    ).different
    (plain / "config.json").write_text("[]")
    report = compare.diff(store_side(store, version), path_side(plain))
    assert [file.path for file in report.files if file.change is Change.CHANGED] == [b"config.json"]
