"""DTensors: the part that a rank holds is saved, and read into the part that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moonclipfs import CheckpointManager
from moonclipfs.errors import UsageError
from tests.torch.kit import same

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.DeviceMesh]:
    place = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_local_part_of_a_dtensor_is_saved_and_read_in_place(mesh: dist.DeviceMesh, tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    tensors = {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "whole": distribute_tensor(whole, mesh, [Replicate()]),
    }
    with CheckpointManager(tmp_path / "store", "r") as manager:
        manager.save_raw(1, tensors)
        target = {name: distribute_tensor(torch.zeros(6, 4), mesh, one.placements) for name, one in tensors.items()}
        place = target["sharded"].to_local().data_ptr()
        manager.load(1, target)
        assert all(isinstance(one, DTensor) for one in target.values())
        assert target["sharded"].to_local().data_ptr() == place
        assert same(target["sharded"].to_local(), whole) and same(target["whole"].to_local(), whole)
        found = manager.load_tensors(1, ["sharded"])["sharded"]
        assert not isinstance(found, DTensor) and same(found, whole)


def test_a_module_of_dtensors_is_read_in_place(mesh: dist.DeviceMesh, tmp_path: Path) -> None:
    def module(value: float) -> torch.nn.Module:
        made = torch.nn.Linear(4, 4)
        made.weight = torch.nn.Parameter(distribute_tensor(torch.full((4, 4), value), mesh, [Shard(0)]))
        return made

    with CheckpointManager(tmp_path / "store", "r") as manager:
        first, second = module(1.5), module(0.0)
        manager.save(1, first)
        weight = second.weight
        manager.load(1, second)
        assert second.weight is weight and same(weight.to_local().detach(), torch.full((4, 4), 1.5))  # type: ignore[operator]
        with pytest.raises(UsageError, match="is a TwoTensor, which is made of several tensors"):
            from torch.testing._internal.two_tensor import TwoTensor

            manager.save_raw(2, {"odd": TwoTensor(torch.ones(2), torch.ones(2))})
