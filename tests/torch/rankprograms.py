"""What each of several processes does, joined by gloo: `python -m tests.torch.rankprograms NAME DIRECTORY`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from moonclipfs import CheckpointManager
from moonclipfs.store.ranks import Group
from moonclipfs.torch.dcp import StorageReader, StorageWriter
from tests.torch.kit import adam, model, same


def run(name: str, directory: Path, processes: int, timeout: float = 120.0) -> list[str]:
    """Run a program in so many processes; returns what each printed. All have to end well."""
    meeting = directory / f"meeting-{name}-{processes}"
    meeting.unlink(missing_ok=True)
    started = [start(name, directory, processes, rank) for rank in range(processes)]
    told = [one.communicate(timeout=timeout) for one in started]
    assert all(one.returncode == 0 for one in started), "\n".join(errors for _, errors in told)
    return [out for out, _ in told]


def start(name: str, directory: Path, processes: int, rank: int, **more: str) -> subprocess.Popen[str]:
    """Start one of the processes, with more in its environment."""
    environment = {
        **more,
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
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
    placed: dict[str, Any] = dict(values)
    for name, value in values.items():
        if name not in ("scalar", "nothing"):
            placed[name] = distribute_tensor(value, mesh, [places.get(name, Replicate())])
    return placed


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
    save(state_of(1), storage_writer=writer, checkpoint_id="dcp/step-1")
    state = state_of(2)
    saving: Any = async_save(state, storage_writer=writer, checkpoint_id="dcp/step-2")
    for value in state["model"].values():
        (value.to_local() if isinstance(value, DTensor) else value).zero_()  # training goes on meanwhile
    saving.result()
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in (3, 4):
        save(state_of(step), storage_writer=writer, checkpoint_id="dcp/last", planner=planner)
    writer.close()


def dcp_load(directory: Path) -> None:
    """On however many ranks."""
    reader = StorageReader(directory / "store")
    for name, step in (("dcp/step-1", 1), ("dcp/step-2", 2), ("dcp/last@1", 3), ("dcp/last", 4)):
        state = state_of(0)
        state["model"] = sharded({name: torch.ones_like(value) for name, value in whole(0).items()})
        load(state, storage_reader=reader, checkpoint_id=name)
        check(state, step)
    reader.close()


def batches(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on what only this rank sees of each batch."""
    for step in steps:
        module(torch.arange(12) + 7 * dist.get_rank() + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(directory: Path) -> None:
    """Data parallel training that ends, and goes on with another model as if it had not."""
    straight = DistributedDataParallel(model())
    batches(straight, adam(straight), range(6))
    for start, stop in ((0, 3), (3, 6)):
        module = DistributedDataParallel(model(seed=start))
        optimizer = adam(module)
        torch.manual_seed(dist.get_rank() + start)
        with CheckpointManager(directory / "store", "ddp", world_size="auto") as manager:
            assert manager.resume(module, optimizer) == start
            if start:
                noise = manager.load(start - 1).extra["rng"]
                assert torch.equal(noise, torch.manual_seed(dist.get_rank()).get_state())
            for step in range(start, stop):
                batches(module, optimizer, range(step, step + 1))
                manager.save(step, module, optimizer, extra={"rng": torch.get_rng_state()})
    # Sums of more than two numbers depend on the order.
    compare = torch.testing.assert_close if dist.get_world_size() > 2 else assert_same
    compare(module.module.state_dict(), straight.module.state_dict())


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit."""
    assert same(one, other)


def fsdp(directory: Path) -> None:
    """Sharded training that goes on from a manager's snapshot on as many ranks, and from one of DCP."""
    straight, steps = fully(model(width=30)), adam
    batches(straight, steps(straight), range(6))
    module = fully(model(width=30))
    optimizer = steps(module)
    batches(module, optimizer, range(3))
    with CheckpointManager(directory / "store", "fsdp", world_size="auto") as manager:
        manager.save(2, module, optimizer)
        again = fully(model(seed=1, width=30))
        schedule = steps(again)
        assert manager.resume(again, schedule) == 3
    batches(again, schedule, range(3, 6))
    assert_same(shards(again), shards(straight))

    writer = StorageWriter(directory / "store")
    state, optim = get_state_dict(module, optimizer)
    save({"model": state, "optimizer": optim}, storage_writer=writer, checkpoint_id="fsdp-dcp/step-2")
    writer.close()


def fsdp_load(directory: Path) -> None:
    """What `fsdp` saved, on however many ranks."""
    module = fully(model(seed=2, width=30))
    optimizer = adam(module)
    state, optim = get_state_dict(module, optimizer)
    reader = StorageReader(directory / "store")
    load({"model": state, "optimizer": optim}, storage_reader=reader, checkpoint_id="fsdp-dcp/step-2")
    reader.close()
    set_state_dict(module, optimizer, model_state_dict=state, optim_state_dict=optim)
    whole = {name: one.full_tensor() for name, one in module.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(whole, directory / f"loaded-{dist.get_world_size()}.pt")


def fully(module: torch.nn.Module) -> torch.nn.Module:
    """Shard a model over all ranks."""
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module


def shards(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What this rank has of a model."""
    return {name: one.to_local() for name, one in module.state_dict().items()}


def restart(directory: Path) -> None:
    """Rank 1 dies in its second save; whoever starts all again has them save that step once more."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    hand_in = Group.hand_in

    def dying(group: Group, number: int, body: Mapping[str, Any]) -> None:
        if number == 2 and attempt == 0:
            os._exit(9)
        hand_in(group, number, body)

    Group.hand_in = dying  # type: ignore[assignment, method-assign]
    with CheckpointManager(directory / "store", "run", world_size="auto") as manager:
        start = manager.resume({"weight": torch.zeros(8)})
        assert start == attempt
        for step in range(start, 3):
            manager.save(step, {"weight": torch.full((8,), 100.0 * attempt + 10 * step + rank)})
            manager.flush()


def endless(directory: Path) -> None:
    """Save until killed: what each rank saves at a step of an attempt is the same number."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["ATTEMPT"])
    with CheckpointManager(directory / "store", "run", world_size="auto") as manager:
        step = manager.resume({"weight": torch.zeros(40_000), "bias": torch.zeros(8)})
        while True:
            value = 1000.0 * attempt + step
            mine = {
                "weight": torch.full((40_000,), value) + torch.arange(40_000) * rank,
                "bias": torch.full((8,), value),
            }
            manager.save(step, mine)
            step += 1


PROGRAMS = {one.__name__: one for one in (dcp_save, dcp_load, ddp, fsdp, fsdp_load, restart, endless)}


def main(name: str, directory: Path) -> None:
    """Join the others, and run one program."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if name in ("restart", "endless"):  # what the environment says is enough
        PROGRAMS[name](directory)
        return
    meeting = directory / f"meeting-{name}-{size}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    for one in name.split("+"):
        PROGRAMS[one](directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
