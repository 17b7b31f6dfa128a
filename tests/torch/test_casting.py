"""Saving in a narrower dtype: rounding to the bit, and which tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moonclipfs
from moonclipfs import CheckpointManager
from moonclipfs.errors import UsageError
from moonclipfs.torch.casting import Cast, CastRules, cast, plan, restored
from tests.torch.kit import bits, same

TARGETS = {"bf16": (torch.bfloat16, 8, 8), "fp16": (torch.float16, 5, 11), "fp32": (torch.float32, 8, 24)}
"""dtype, bits of the exponent, bits of the significand with the hidden one."""
FP8 = {torch.float8_e4m3fn: (-6, 4, 448.0), torch.float8_e5m2: (-14, 3, 57344.0)}


def rounded(value: float, least_exponent: int, significand: int) -> Fraction:
    """The nearest number of that many bits, ties to even, by exact arithmetic."""
    exact = Fraction(value)
    exponent = max(least_exponent, math.frexp(value)[1] - 1) if value else least_exponent
    unit = Fraction(2) ** (exponent - significand + 1)
    return round(exact / unit) * unit  # Python rounds ties to even


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_doubles_are_rounded_once(values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float64)
    for dtype, exponent, significand in TARGETS.values():
        got = cast(source, Cast(torch.float64, dtype)).to(torch.float64).tolist()
        most = Fraction(2) ** (2 ** (exponent - 1)) - Fraction(2) ** (2 ** (exponent - 1) - significand)
        for value, found in zip(values, got, strict=True):
            expected = rounded(value, 2 - 2 ** (exponent - 1), significand)
            if abs(expected) > most:
                assert found == math.copysign(math.inf, value)
            else:
                assert Fraction(found) == expected, (value, dtype)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_eight_bit_floats_are_rounded_once_after_an_exact_scaling(values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float32)
    for dtype, (least, significand, most) in FP8.items():
        how = plan(source, dtype, "x")
        assert how is not None
        got = cast(source, how).to(torch.float64).tolist()
        scale = Fraction(2) ** how.exponent
        for value, found in zip(values, got, strict=True):
            expected = rounded(float(Fraction(value) * scale), least, significand)
            assert Fraction(found) == expected and abs(expected) <= most, (value, how)
        largest = max(map(abs, values))
        assert not largest or Fraction(largest) * scale * 2 > most


@pytest.mark.parametrize("name", TARGETS)
def test_nan_keeps_its_sign_and_infinities_stay(name: str) -> None:
    """Case 13: a NaN whose payload lies below bit 16 is no infinity afterwards."""
    words = [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF]
    source = torch.from_numpy(np.array(words, np.uint32).view(np.float32))
    values = source if name != "fp32" else source.to(torch.float64)
    got = cast(values, Cast(values.dtype, TARGETS[name][0])).to(torch.float32)
    assert torch.isnan(got).tolist() == torch.isnan(source).tolist()
    assert torch.signbit(got).tolist() == [bool(word >> 31) for word in words]
    assert got[4] == math.inf and got[5] == -math.inf


def test_nan_keeps_its_sign_in_eight_bits_too() -> None:
    source = torch.from_numpy(np.array([0x7F800001, 0xFF800001, 0x3F800000], np.uint32).view(np.float32))
    for dtype in FP8:
        how = plan(source, dtype, "x")
        assert how is not None
        got = cast(source, how)
        assert torch.signbit(got.to(torch.float32)).tolist() == [False, True, False]
        assert torch.isnan(got.to(torch.float32)).tolist() == [True, True, False]


@pytest.mark.parametrize("count", [1, 3, 8, 17])
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (source, dtype)
        for source in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, *FP8)
        if dtype.itemsize <= source.itemsize
    ],
)
def test_nan_has_its_sign_when_it_comes_back(source: torch.dtype, dtype: torch.dtype, count: int) -> None:
    """Also at the end of a tensor, where torch converts fp16 one by one, and drops it."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[source.itemsize]
    negative = torch.full((count,), -1, dtype=words).view(source)
    how = Cast(source, dtype)
    back = restored(cast(negative, how), how)
    assert torch.isnan(back).all() and (back.view(words) < 0).all()


def test_half_precision_subnormals_survive_every_cast() -> None:
    """Case 19: all of fp16, cast wide and back, is what it was."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    every = words.view(torch.float16)
    finite = every[torch.isfinite(every)]
    for dtype in (torch.float16, torch.float32):
        assert bits(restored(cast(finite, Cast(torch.float16, dtype)), Cast(torch.float16, dtype))) == bits(finite)
    small = torch.arange(1, 1 << 10, dtype=torch.int16).view(torch.float16).to(torch.float32)
    assert torch.equal(cast(small, Cast(torch.float32, torch.float16)).to(torch.float32), small)


def test_infinities_are_kept_where_the_type_has_them(expect_log: Callable[[str], None]) -> None:
    source = torch.tensor([math.inf, 1.0, -math.inf])
    how = plan(source, torch.float8_e5m2, "x")
    assert how is not None and restored(cast(source, how), how).tolist() == source.tolist()
    expect_log("x holds infinities, which fp8 e4m3 has not")
    assert plan(source, torch.float8_e4m3fn, "x") is None


@pytest.mark.parametrize(
    "rules", ["bf61", "", {}, {"": "bf16"}, {"*.weight": "int8"}, {"*": None}, {3: "bf16"}, 16], ids=repr
)
def test_a_typo_in_save_dtype_is_an_error(rules: object, tmp_path: Path) -> None:
    """Case 17."""
    with pytest.raises(UsageError, match="save_dtype"):
        CheckpointManager(tmp_path / "store", save_dtype=rules)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing_is_told_once(tmp_path: Path, expect_log: Callable[[str], None]) -> None:
    expect_log(r"the pattern '\*.wieght' matches no tensor; one is called a")
    with CheckpointManager(tmp_path / "store", save_dtype={"*.wieght": "bf16"}) as manager:
        manager.save_raw(1, {"a": torch.ones(3)})


def test_the_first_pattern_decides() -> None:
    rules = CastRules({"*.bias": "keep", "head.*": "fp16", "*": "bf16"})
    assert rules.dtype_for("head.bias", torch.float32) is torch.float32
    assert rules.dtype_for("head.weight", torch.float32) is torch.float16
    assert rules.dtype_for("body.weight", torch.float64) is torch.bfloat16
    assert rules.dtype_for("body.weight", torch.float16) is torch.bfloat16
    assert rules.dtype_for("ids", torch.int64) is torch.int64
    assert CastRules("fp32").dtype_for("small", torch.bfloat16) is torch.bfloat16, "nothing is made wider"


@pytest.mark.parametrize("word", ["bf16", "fp16", "fp8", "fp8_e5m2", "fp32"])
def test_what_was_cast_comes_back_in_its_own_dtype(word: str, tmp_path: Path) -> None:
    """Case 17: float64, float16 and bfloat16 are cast like float32; integers and bool are not."""
    torch.manual_seed(0)
    tensors = {
        **{str(dtype): torch.randn(40, 30).to(dtype) for dtype in
           (torch.float64, torch.float32, torch.float16, torch.bfloat16)},
        "ids": torch.arange(7), "mask": torch.tensor([True, False]), "scalar": torch.tensor(1001.0),
        "complex": torch.randn(3, dtype=torch.complex64), "empty": torch.empty(0, 3),
    }  # fmt: skip
    with CheckpointManager(tmp_path / "store", "r", save_dtype=word) as manager:
        manager.save_raw(1, tensors)
        found = manager.load(1).state["model"]
        target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        manager.load(1, target)
        only = manager.load_tensors(1, ["torch.float64"])["torch.float64"]
        with moonclipfs.open(tmp_path / "store", "r/step-000001") as snapshot:
            words = {one.name: one.dtype for one in snapshot.tensors("model.safetensors")}
    stored = {"bf16": "BF16", "fp16": "F16", "fp8": "F8_E4M3", "fp8_e5m2": "F8_E5M2", "fp32": "F32"}[word]
    assert words["torch.float64"] == stored and words["ids"] == "I64" and words["scalar"] == "F32"
    assert same(target, found) and same(only, found["torch.float64"])
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        if not tensor.is_floating_point() or not tensor.dim():
            assert same(found[name], tensor)
        else:
            error = {"bf16": 2**-8, "fp16": 2**-10, "fp8": 2**-4, "fp8_e5m2": 2**-3, "fp32": 2**-24}[word]
            assert torch.allclose(found[name], tensor, rtol=error, atol=1e-2 if "fp8" in word else 0.0)


def test_ties_go_to_even() -> None:
    pairs = [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0x7F7FFFFF, 0x7F80)]
    source = torch.tensor([struct.unpack("<f", struct.pack("<I", word))[0] for word, _ in pairs])
    got = cast(source, Cast(torch.float32, torch.bfloat16)).view(torch.int16).tolist()
    assert got == [word for _, word in pairs]


def test_patterns_may_name_the_part() -> None:
    rules = CastRules({"model/*": "keep", "optimizer/*.exp_avg": "bf16", "typo/*": "fp16"})
    assert rules.dtype_for("w", torch.float32, "model") is torch.float32
    assert rules.dtype_for("w.exp_avg", torch.float32, "optimizer") is torch.bfloat16
    assert rules.dtype_for("w.exp_avg_sq", torch.float32, "optimizer") is torch.float32
    assert rules.without_match([("model", "w"), ("optimizer", "w.exp_avg")]) == ["typo/*"]
