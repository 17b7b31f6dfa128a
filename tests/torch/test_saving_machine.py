"""Random changes, ties, failures and interruptions between saves: every snapshot is what was given."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moonclipfs import CheckpointManager
from moonclipfs.torch import saving
from tests.torch.kit import same

STEPS = 15
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = (1, 7, 1000, 1500, 40_000, 300_000)


class InterruptedSaveError(Exception):
    """Stands for whatever may end a save."""


def change(rng: random.Random, tensors: dict[str, torch.Tensor]) -> None:
    """One random change: a tensor goes, comes, is tied to another, changes in a bit, or lies elsewhere."""
    name, what = f"t{rng.randint(0, 6)}", rng.random()
    if what < 0.2:
        tensors.pop(name, None)
    elif what < 0.5 or name not in tensors:
        tensors[name] = (
            torch.randn(rng.choice(SIZES), dtype=rng.choice(DTYPES)) if rng.random() < 0.8 else torch.zeros(9)
        )
    elif what < 0.7:
        tensors[name] = tensors[rng.choice(list(tensors))]
    elif what < 0.85:
        tensors[name].data.view(torch.uint8)[rng.randrange(tensors[name].numel())] ^= 1
    else:
        tensors[name] = tensors[name].clone()


def fail(*_: object) -> None:
    raise InterruptedSaveError


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_every_snapshot_is_what_was_given(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    manager = CheckpointManager(tmp_path / "store", "r")
    tensors: dict[str, torch.Tensor] = {}
    expected = {}
    for step in range(STEPS):
        for _ in range(rng.randint(0, 3)):
            change(rng, tensors)
        with pytest.MonkeyPatch.context() as patch:
            what = rng.random()
            if what < 0.2:
                patch.setattr(saving, "store_job" if what < 0.1 else "groups", fail)
            try:
                manager.save_raw(step, tensors)
                manager.flush()
                expected[step] = {name: tensor.clone() for name, tensor in tensors.items()}
            except InterruptedSaveError:
                assert what < 0.2
        if rng.random() < 0.1:
            manager.close()
            manager = CheckpointManager(tmp_path / "store", "r")
    assert [info.step for info in manager.list_snapshots()] == list(expected)
    for step, given in expected.items():
        assert same(manager.load(step).state["model"], given)
    manager.close()
