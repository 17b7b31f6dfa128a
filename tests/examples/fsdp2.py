"""Sharded training (FSDP2) that goes on where it ended, on any number of ranks.

`torchrun --nproc_per_node=2 fsdp2.py STORE STEPS`
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moonclipfs
from moonclipfs.torch.dcp import StorageReader, StorageWriter


def main(store: str, steps: int) -> None:
    """Train, saving every other step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = resume(store, model, optimizer)
    dist.barrier()  # all have looked before anyone saves
    writer = StorageWriter(store)
    for step in range(start, steps):
        data = torch.Generator().manual_seed(step)
        model(torch.randn(16, 32, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 1:
            weights, moments = get_state_dict(model, optimizer)
            save({"model": weights, "optimizer": moments}, storage_writer=writer, checkpoint_id=f"fsdp2/step-{step}")
    if dist.get_rank() == 0:
        print(f"began at {start}")
    dist.destroy_process_group()


def resume(store: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; returns the step to go on with."""
    try:
        with moonclipfs.open(store) as reader:
            saved = reader.snapshots("fsdp2/")
    except moonclipfs.MoonclipError:
        saved = []
    if not saved:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": moments}, storage_reader=StorageReader(store), checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(saved[-1].rpartition("-")[2]) + 1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
