"""Sharded tensors: a DTensor is saved and loaded as the part that this rank holds, with a note of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moonclipfs.errors import UsageError


def _dtensor_type() -> type | None:
    """DTensor, if this program uses it: only who loaded the module has any."""
    import sys

    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def is_sharded(value: torch.Tensor) -> bool:
    """True for a DTensor."""
    dtensor = _dtensor_type()
    return dtensor is not None and isinstance(value, dtensor)


def describe_sharding(value: torch.Tensor) -> dict[str, Any] | None:
    """Shape of the whole, placements and mesh of a DTensor as JSON values; None for any other tensor."""
    if not is_sharded(value):
        return None
    whole: Any = value
    return {
        "shape": list(whole.shape),
        "placements": [str(placement) for placement in whole.placements],
        "mesh": list(whole.device_mesh.shape),
    }


def local_of(value: torch.Tensor, where: str) -> torch.Tensor:
    """The plain tensor that this rank holds. Raises UsageError for other tensors that are made of several."""
    if is_sharded(value):
        whole: Any = value
        local: torch.Tensor = whole.detach().to_local()
        return local
    odd: Any = value
    if value.is_nested or is_traceable_wrapper_subclass(odd):
        raise UsageError(f"{where} is a {type(value).__qualname__}, which is made of several tensors: save those")
    return value.detach()


def as_shard(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A DTensor of this rank's part, laid out as another one whose part has the same shape; else `local` as it is."""
    if not is_sharded(like):
        return local
    whole: Any = like
    if whole.to_local().shape != local.shape:
        return local
    made: torch.Tensor = type(whole).from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made
