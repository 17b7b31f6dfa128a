"""What each of several processes does, joined by gloo: `python -m tests.torch.rankprograms NAME DIRECTORY`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from moonclipfs import CheckpointManager
from moonclipfs.torch.dcp import StorageReader, StorageWriter
from tests.torch.kit import adam, model, same, train


def run(name: str, directory: Path, processes: int, timeout: float = 120.0) -> list[str]:
    """Run a program in so many processes; returns what each printed. All have to end well."""
    meeting = directory / f"meeting-{name}-{processes}"
    meeting.unlink(missing_ok=True)
    started = [start(name, directory, processes, rank) for rank in range(processes)]
    told = [one.communicate(timeout=timeout) for one in started]
    assert all(one.returncode == 0 for one in started), "\n".join(errors for _, errors in told)
    return [out for out, _ in told]


def start(name: str, directory: Path, processes: int, rank: int) -> subprocess.Popen[str]:
    """Start one of the processes."""
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    command = [sys.executable, "-m", "tests.torch.rankprograms", name, str(directory)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def whole(step: int) -> dict[str, torch.Tensor]:
    """A state that everyone knows, unsharded."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(40, 24, generator=generator)
    return {
        "rows": weights + step * 1e-5,
        "columns": weights.bfloat16() * 2,
        "uneven": torch.randn(7, 3, generator=generator),
        "bias": weights[0] * step,
        "odd": torch.complex(weights[:4], weights[4:8]).to(torch.complex128),
        "scalar": torch.tensor(step, dtype=torch.int64),
        "nothing": torch.zeros(0, 5),
    }


def sharded(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rows or columns to each process, or all to everyone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = {"rows": Shard(0), "columns": Shard(1), "uneven": Shard(0), "odd": Shard(0)}
    return {
        name: value
        if name in ("scalar", "nothing")
        else distribute_tensor(value, mesh, [places.get(name, Replicate())])
        for name, value in values.items()
    }


def state_of(step: int) -> dict[str, Any]:
    """What is saved: tensors, and values of other kinds."""
    return {"model": sharded(whole(step)), "step": step, "about": {"names": ["a", ("b", 2)], "rate": float("inf")}}


def check(state: dict[str, Any], step: int) -> None:
    """What was loaded is what was saved."""
    assert state["step"] == step
    assert same(state["about"], {"names": ["a", ("b", 2)], "rate": float("inf")})
    for name, value in whole(step).items():
        found = state["model"][name]
        assert same(found.full_tensor() if isinstance(found, DTensor) else found, value), name


def dcp_save(directory: Path) -> None:
    """At once, in the background, and once more under the same name."""
    writer = StorageWriter(directory / "store")
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id="dcp/step-1")
    state = state_of(2)
    saving = dcp.async_save(state, storage_writer=writer, checkpoint_id="dcp/step-2")
    for value in state["model"].values():
        (value.to_local() if isinstance(value, DTensor) else value).zero_()  # training goes on meanwhile
    saving.result()
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in (3, 4):
        dcp.save(state_of(step), storage_writer=writer, checkpoint_id="dcp/last", planner=planner)
    writer.close()


def dcp_load(directory: Path) -> None:
    """On however many ranks."""
    reader = StorageReader(directory / "store")
    for name, step in (("dcp/step-1", 1), ("dcp/step-2", 2), ("dcp/last@1", 3), ("dcp/last", 4)):
        state = state_of(0)
        state["model"] = sharded({name: torch.ones_like(value) for name, value in whole(0).items()})
        dcp.load(state, storage_reader=reader, checkpoint_id=name)
        check(state, step)
    reader.close()


PROGRAMS = {one.__name__: one for one in (dcp_save, dcp_load)}


def main(name: str, directory: Path) -> None:
    """Join the others, and run one program."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = directory / f"meeting-{name}-{size}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    for one in name.split("+"):
        PROGRAMS[one](directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
