"""Tensors as bytes, and element types of the store's formats as those of torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from moonclipfs.errors import UsageError
from moonclipfs.torch.dtypes import BY_WORD, dtype_named
from moonclipfs.types import DType

_UNNAMED = {DType.C128: "complex128", DType.F8_E8M0: "float8_e8m0fnu"}
"""What the safetensors library does not read back as such; npz files have the first, other writers use the second."""
TORCH_DTYPES: dict[DType, torch.dtype] = {
    **{DType[word]: dtype for word, dtype in BY_WORD.items()},
    **{dtype: found for dtype, name in _UNNAMED.items() if (found := dtype_named(name)) is not None},
}
"""Elements of whole bytes; an older torch lacks some of them."""
_DTYPES = {there: here for here, there in TORCH_DTYPES.items()}


def dtype_of(name: str, tensor: torch.Tensor) -> DType:
    """Return the element type of a plain tensor; raises UsageError for a sparse or quantised one."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(f'"{name}" is a {tensor.layout} tensor of {tensor.dtype}, which no file here can hold')
    return dtype


def is_transposed(tensor: torch.Tensor) -> bool:
    """True for what NumPy calls Fortran order: contiguous only when its dimensions are taken in reverse."""
    return not tensor.is_contiguous() and reversed_dimensions(tensor).is_contiguous()


def reversed_dimensions(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements with the dimensions in reverse order."""
    return tensor.permute(*range(tensor.ndim - 1, -1, -1))


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return the elements of a tensor in row-major order, as bytes: a view where they lie so in RAM, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    array: NDArray[np.uint8] = plain.reshape(-1).view(torch.uint8).numpy()
    return array


def empty(dtype: DType, shape: tuple[int, ...], *, pinned: bool = False) -> torch.Tensor:
    """Return a tensor in RAM whose elements are yet to be read; `pinned` memory is fast to copy to a GPU."""
    with torch.inference_mode(False):  # one made in inference mode could not be used by a model that trains
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype], pin_memory=pinned)


def in_ram(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in RAM, without its history, that can be trained with: in the same memory where possible."""
    with torch.inference_mode(False):
        plain = tensor.detach().cpu()
        return plain.clone() if plain.is_inference() else plain
