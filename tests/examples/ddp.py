"""Data-parallel training that goes on where it ended: `torchrun --nproc_per_node=2 ddp.py STORE STEPS`.

Every rank saves; what all have alike is stored once. It may go on with another number of ranks.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from moonclipfs import CheckpointManager


def main(store: str, steps: int) -> None:
    """Train, saving every other step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with CheckpointManager(store, "ddp", world_size="auto") as manager:
        start = manager.resume(model, optimizer)
        for step in range(start, steps):
            data = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
            model(torch.randn(16, 32, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 1:
                manager.save(step, model, optimizer)
    if dist.get_rank() == 0:
        print(f"began at {start}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
