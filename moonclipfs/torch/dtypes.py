"""Torch's element types and those of a safetensors file: every dtype has one place there, or is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moonclipfs.errors import UsageError


@dataclass(frozen=True, slots=True)
class Carrier:
    """How a dtype lies in a file: as elements of `dtype`, called `word` there.

    With `parts` above 1 the file's shape has one dimension more, of that many (real and imaginary part). `exact` is
    False where the file's word does not tell the dtype, which then stands in `state.json`.
    """

    word: str
    dtype: torch.dtype
    parts: int = 1
    exact: bool = True


_NATIVE = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "complex64": "C64",
}  # fmt: skip
"""What the safetensors library reads back as the same dtype."""
_CARRIED = {
    "complex128": ("F64", "float64", 2), "complex32": ("F16", "float16", 2), "float8_e8m0fnu": ("U8", "uint8", 1),
    "float4_e2m1fn_x2": ("U8", "uint8", 1),
}  # fmt: skip
"""What it has no word for: these lie there as their parts, or as their bytes."""


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype that torch calls `name`, without "torch."; None where this torch has none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")


def _carriers() -> dict[torch.dtype, Carrier]:
    found = {}
    for name, word in _NATIVE.items():
        if (dtype := dtype_named(name)) is not None:
            found[dtype] = Carrier(word, dtype)
    for name, (word, under, parts) in _CARRIED.items():
        if (dtype := dtype_named(name)) is not None:
            found[dtype] = Carrier(word, getattr(torch, under), parts, exact=False)
    return found


CARRIERS = _carriers()
"""Every dtype that can be saved; what can be saved can be loaded."""
BY_WORD = {carrier.word: dtype for dtype, carrier in CARRIERS.items() if carrier.exact}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def carrier_of(tensor: torch.Tensor, where: str) -> Carrier:
    """How `tensor` is stored. Raises UsageError, which names it by `where`, for what cannot be."""
    if tensor.is_quantized:
        raise UsageError(f"{where} is a quantised tensor ({tensor.dtype}): save its int_repr() and its scales instead")
    if tensor.layout is not torch.strided:
        raise UsageError(f"{where} is a sparse tensor ({tensor.layout}): save its indices and values, or to_dense()")
    if tensor.device.type == "meta":
        raise UsageError(f"{where} is on the meta device: it has no values to save")
    carrier = CARRIERS.get(tensor.dtype)
    if carrier is None:
        raise UsageError(f"{where} has the dtype {tensor.dtype}, which cannot be saved")
    return carrier


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size, where there are such: copied and compared whatever their dtype."""
    size = tensor.element_size()
    return tensor.view(_SAME_SIZE[size]) if size in _SAME_SIZE else tensor


def memory_of(flat: torch.Tensor) -> memoryview:
    """The memory of flat bytes on the host, for whoever knows no tensors."""
    return flat.numpy().data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as flat bytes."""
    return tensor.reshape(-1).view(torch.uint8)
