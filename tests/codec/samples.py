"""Elements that look like weights and their updates, and hypothesis strategies for everything else."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moonclipfs import _codec
from moonclipfs.codec.choose import Base
from moonclipfs.types import DType

FLOATS = (DType.F64, DType.F32, DType.BF16, DType.F16, DType.F8_E4M3, DType.F8_E5M2)
KERNELS = ("scalar", "avx2", "avx512")


def available_kernels() -> list[str]:
    """The kernel sets that this processor has."""
    before = _codec.kernel()
    found = []
    for name in KERNELS:
        try:
            _codec.use_kernel(name)
        except Exception:
            continue
        found.append(name)
    _codec.use_kernel(before)
    return found


def weights(n: int, dtype: DType, seed: int = 0) -> bytes:
    """n normally distributed elements of standard deviation 0.02."""
    values = np.random.default_rng(seed).normal(scale=0.02, size=n).astype(np.float32)
    return values.tobytes() if dtype is DType.F32 else _codec.cast(values.tobytes(), DType.F32, dtype)


def updated(n: int, dtype: DType, share: float = 1.0, scale: float = 1e-6, seed: int = 0) -> tuple[bytes, bytes]:
    """Weights, and the same after an update of `scale` in a `share` of their rows of 96."""
    rng = np.random.default_rng(seed + 1)
    before = np.frombuffer(weights(n, DType.F32, seed), np.float32)
    rows = np.repeat(rng.random(-(-n // 96)) < share, 96)[:n]
    after = (before + rng.normal(scale=scale, size=n) * rows).astype(np.float32)
    if dtype is DType.F32:
        return before.tobytes(), after.tobytes()
    return tuple(_codec.cast(values.tobytes(), DType.F32, dtype) for values in (before, after))  # type: ignore[return-value]


@st.composite
def any_raw(draw: st.DrawFn, longest: int = 3000) -> bytes:
    """Bytes of many kinds: short, random, constant, few symbols, runs, lengths around the borders of groups."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=80))
    length = draw(st.integers(0, longest))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    kind = draw(st.sampled_from(["random", "constant", "few", "sparse", "runs", "geometric"]))
    if kind == "random":
        return rng.bytes(length)
    if kind == "constant":
        return bytes([draw(st.integers(0, 255))]) * length
    if kind == "few":
        return rng.choice(rng.integers(0, 256, 3), length).astype(np.uint8).tobytes()
    if kind == "sparse":
        return (rng.integers(1, 256, length) * (rng.random(length) < 0.03)).astype(np.uint8).tobytes()
    if kind == "runs":
        return np.repeat(rng.integers(0, 256, length // 50 + 1), 50)[:length].astype(np.uint8).tobytes()
    return np.minimum(rng.geometric(0.3, length) - 1, 255).astype(np.uint8).tobytes()


@st.composite
def any_case(draw: st.DrawFn) -> tuple[bytes, DType, list[Base]]:
    """Raw bytes, their type, and bases: unrelated ones, near copies, short ones, of any type and start."""
    raw, dtype = draw(any_raw()), draw(st.sampled_from(DType))
    bases = []
    for _ in range(draw(st.integers(0, 2))):
        base_raw = draw(any_raw())
        if draw(st.booleans()) and raw:
            near = bytearray(raw)
            for at in draw(st.lists(st.integers(0, len(raw) - 1), max_size=20)):
                near[at] ^= draw(st.integers(0, 3))
            base_raw = bytes(near)
        bases.append(Base(base_raw, draw(st.sampled_from(DType)), draw(st.integers(0, 40))))
    return raw, dtype, bases
