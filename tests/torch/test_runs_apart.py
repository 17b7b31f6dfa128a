"""No rule of a run reaches what it does not speak of: saves that nothing asked to forget stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moonclipfs
from moonclipfs import CheckpointManager, Rules
from moonclipfs.errors import NotFoundError, UsageError


def steps(manager: CheckpointManager) -> list[int]:
    return [info.step for info in manager.list_snapshots()]


@pytest.mark.parametrize("rules", [Rules(), Rules(keep_versions=2), Rules(pinned=("other",))])
def test_rules_without_a_rule_forget_nothing(tmp_path: Path, rules: Rules) -> None:
    with CheckpointManager(tmp_path / "store", "r", retention=rules) as manager:
        for step in range(3):
            manager.save(step, extra=step)
        assert steps(manager) == [0, 1, 2]


def test_rules_of_a_run_leave_the_runs_below_it_alone(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "store", "exp/ablation") as below:
        for step in range(4):
            below.save(step, extra=step)
        with CheckpointManager(tmp_path / "store", "exp", retention=Rules(keep_last=1)) as manager:
            for step in range(3):
                manager.save(step, extra=step)
            assert steps(manager) == [2]
        assert steps(below) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": "3"},
        {"keep_total": 1.5},
        {"keep_every": 0},
        {"keep_every": 5, "keep_every_last": -1},
        {"keep_every_last": 3},
        {"keep_best": -1},
        {"keep_best": True},
    ],
)
def test_rules_that_make_no_sense_are_told_before_anything_is_saved(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--keep-"):
        Rules(**wrong)


def test_what_thinning_left_is_loaded_by_name(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "store", "r") as manager:
        for step in (1, 2):
            manager.save(step, module, optimizer)
        manager.flush()
        moonclipfs.thin(tmp_path / "store", "r", keep_optimizer_last=1)
        assert torch.equal(manager.load_tensors(1, ["weight"])["weight"], module.weight)
        with pytest.raises(NotFoundError, match=r"no tensor weight\.exp_avg .* optimizer\.safetensors is gone"):
            manager.load_tensors(1, ["weight.exp_avg"])
