"""Small models and optimizers for the tests of this room, and how states are compared: to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def model(seed: int = 0, width: int = 32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Embedding(50, width), torch.nn.Linear(width, width), torch.nn.LayerNorm(width))


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        module(torch.arange(20) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, types included: tensors, arrays, numbers, and containers of them."""
    if type(one) is not type(other) and not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
