"""Tensors that lie in the same memory: tied weights and views, which come back as such."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Key = tuple[str, str]
"""Part and name of a tensor."""


def groups(tensors: Mapping[Key, torch.Tensor]) -> list[list[list[Any]]]:
    """Those that share bytes, together: [part, name, offset in bytes from where the group begins, strides] of each."""
    spans = []
    for key, tensor in tensors.items():
        if tensor.numel():
            start = tensor.data_ptr()
            last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), key))
    found: list[list[Any]] = []
    run: list[tuple[str, int, int, Key]] = []
    end = 0
    for span in sorted(spans):
        if run and (span[0] != run[0][0] or span[1] >= end):
            found += _group(run, tensors)
            run, end = [], 0
        run.append(span)
        end = max(end, span[2])
    return found + _group(run, tensors)


def _group(run: list[tuple[str, int, int, Key]], tensors: Mapping[Key, torch.Tensor]) -> list[list[Any]]:
    if len(run) < 2:
        return []
    first = run[0][1]
    return [[[*key, start - first, list(tensors[key].stride())] for _, start, _, key in run]]


def same_place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same bytes in the same order."""
    return str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj()


def shared_tensors(
    group: list[list[Any]], tensors: Mapping[Key, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
) -> dict[Key, torch.Tensor]:
    """New tensors in one new memory, as those of `group` lay in theirs; only those that are in `tensors`.

    `tensors` has dtype and shape of each. Raises ValueError for a group that makes no sense.
    """
    members = [((part, name), offset, strides) for part, name, offset, strides in group if (part, name) in tensors]
    end = 0
    for key, offset, strides in members:
        dtype, shape = tensors[key]
        if len(strides) != len(shape) or offset < 0 or offset % dtype.itemsize or min(strides, default=0) < 0:
            raise ValueError(f"strides {strides} at {offset} of a tensor {shape}")
        last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        end = max(end, offset + (last + 1) * dtype.itemsize)
    memory = torch.empty(end, dtype=torch.uint8, device=device).untyped_storage()
    made = {}
    for key, offset, strides in members:
        dtype, shape = tensors[key]
        empty = torch.empty(0, dtype=dtype, device=device)
        made[key] = empty.set_(memory, offset // dtype.itemsize, shape, strides)
    return made
