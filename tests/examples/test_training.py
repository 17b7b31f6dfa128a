"""The examples of data-parallel and of sharded training: each ends, goes on, and comes to what it would have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from moonclipfs import CheckpointManager
from moonclipfs.torch.dcp import StorageReader

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's own, of loading without a group


def torchrun(example: str, store: Path, steps: int, processes: int) -> str:
    """Run an example; returns what it printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    program = ["-m", f"tests.examples.{example}", str(store), str(steps)]
    done = subprocess.run([*launch, *program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_data_parallel_training_goes_on(tmp_path: Path) -> None:
    torchrun("ddp", tmp_path / "straight", 6, 2)
    assert "began at 0" in torchrun("ddp", tmp_path / "store", 4, 2)
    assert "began at 4" in torchrun("ddp", tmp_path / "store", 6, 2)
    weights = []
    for store in ("straight", "store"):
        with CheckpointManager(tmp_path / store, "ddp") as manager:
            assert [one.step for one in manager.list_snapshots()] == [1, 3, 5]
            weights.append(manager.load(5).state)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_sharded_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    torchrun("fsdp2", tmp_path / "straight", 6, 1)
    assert "began at 0" in torchrun("fsdp2", tmp_path / "store", 4, 2)
    assert "began at 4" in torchrun("fsdp2", tmp_path / "store", 6, 1)
    weights = []
    for store in ("straight", "store"):
        found = {"model": {"0.weight": torch.zeros(64, 32), "2.bias": torch.zeros(8)}}
        load(found, storage_reader=StorageReader(tmp_path / store), checkpoint_id="fsdp2/step-5", no_dist=True)
        weights.append(found)
    torch.testing.assert_close(weights[0], weights[1])
