"""What each process of a distributed save does: `torchrun distributed.py save|load|async DIR STEP`.

The state is sharded by rows, and is known in full to everyone, so that a load can be compared.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def whole(step: int) -> dict[str, Tensor]:
    """The state of a step, unsharded."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(400, 300, generator=generator)
    return {"weights": weights + step * 1e-5, "narrow": weights[:50].bfloat16(), "bias": weights[0] * step}


def sharded(values: dict[str, Tensor]) -> dict[str, DTensor]:
    """Rows to each process; what has none to everyone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = {}
    for name, value in values.items():
        placed[name] = distribute_tensor(value, mesh, [Shard(0) if value.dim() > 1 else Replicate()])
    return placed


def main(action: str, directory: str, step: int) -> None:
    """Save a step, or load and compare it."""
    dist.init_process_group("cpu:gloo")
    state: dict[str, Any] = {"model": sharded(whole(step)), "step": step}
    if action == "save":
        dcp.save(state, checkpoint_id=directory)
    elif action == "async":
        saving = dcp.async_save(state, checkpoint_id=directory)
        for value in state["model"].values():
            value.to_local().zero_()  # training goes on meanwhile
        saving.result()
    else:
        zeros = {name: torch.zeros_like(value) for name, value in whole(step).items()}
        state = {"model": sharded(zeros), "step": 0}
        dcp.load(state, checkpoint_id=directory)
        assert state["step"] == step
        for name, value in whole(step).items():
            assert torch.equal(state["model"][name].full_tensor(), value), name
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
