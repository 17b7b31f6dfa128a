"""What does not fit is told in one line, before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moonclipfs import CheckpointManager
from moonclipfs.errors import UsageError
from moonclipfs.torch.casting import CastRules
from moonclipfs.torch.fitting import check_optimizer
from moonclipfs.torch.runs import checked_step
from tests.torch.kit import adam, model, train


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    return list(model(seed).parameters())


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    module = model()
    optimizer = adam(module)
    train(module, optimizer)
    state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    return state


UNFIT: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "groups of 5 parameters, and has 2 and 3": lambda: torch.optim.AdamW(
        [{"params": parameters()[:2]}, {"params": parameters()[2:]}]
    ),
    "groups of 5 parameters, and has 4": lambda: torch.optim.AdamW(parameters()[:4]),
    "exp_avg of its parameter 0 is saved as": lambda: torch.optim.AdamW(parameters()[::-1]),
    "a SGD has dampening, momentum": lambda: torch.optim.SGD(parameters(), 0.1, momentum=0.9),
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_state_of_another_optimizer_is_told(saved: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_optimizer("r/step-000001@1", UNFIT[message](), saved)


def test_the_same_optimizer_fits_also_before_its_first_step_and_after_a_scheduler(saved: dict[str, Any]) -> None:
    check_optimizer("r", torch.optim.AdamW(parameters()), saved)
    check_optimizer("r", torch.optim.Adam(parameters()), saved)  # the same state
    scheduled = torch.optim.AdamW(parameters())
    torch.optim.lr_scheduler.OneCycleLR(scheduled, 0.1, total_steps=10)
    check_optimizer("r", scheduled, saved)
    check_optimizer("r", torch.optim.AdamW(parameters()), scheduled.state_dict())
    older = copy.deepcopy(saved)
    del older["param_groups"][0]["fused"]
    check_optimizer("r", torch.optim.AdamW(parameters()), older)


@pytest.mark.parametrize("step", [np.int64(5), torch.tensor(5), 5])
def test_a_step_may_be_a_number_of_any_library(step: Any) -> None:
    assert checked_step(step) == 5 and type(checked_step(step)) is int


@pytest.mark.parametrize("step", [1.0, "5", None, True, -1, torch.ones(2)])
def test_what_is_no_step_is_told(step: Any) -> None:
    with pytest.raises(UsageError, match="a step is"):
        checked_step(step)


def test_steps_of_other_libraries_are_found_and_odd_ones_are_told(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "store") as manager:
        manager.save(5, extra=1)
        any_step: Any = np.int64(5)
        assert manager.load(any_step).extra == 1
        for wrong in (None, 1.5):
            with pytest.raises(UsageError, match="a step is a whole number"):
                manager.load(wrong)  # type: ignore[arg-type]


def test_a_dtype_of_torch_is_a_dtype_to_save_in() -> None:
    assert CastRules(torch.bfloat16).dtype_for("w", torch.float32) is torch.bfloat16
    assert CastRules({"*": torch.float16}).dtype_for("w", torch.float32) is torch.float16
    with pytest.raises(UsageError, match=r"there is no dtype 'torch\.int8'"):
        CastRules(torch.int8)


def test_an_extra_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "store") as manager:
        for wrong in (tmp_path, tmp_path / "none"):
            with pytest.raises(UsageError, match=r"'config\.json' cannot be read"):
                manager.save(1, extra=1, extra_files={"config.json": wrong})
        assert manager.list_snapshots() == []


def test_a_module_that_never_ran_is_told(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "store") as manager:
        with pytest.raises(UsageError, match="model: weight has no shape yet"):
            manager.save(1, torch.nn.LazyLinear(3))
        manager.save(2, torch.nn.Linear(2, 3))
        with pytest.raises(UsageError, match="run the model once"):
            manager.load(2, torch.nn.LazyLinear(3))


@pytest.mark.parametrize("array", [np.array(["a"]), np.arange(3, dtype=">i4")])
def test_an_array_that_cannot_be_kept_is_named_by_its_dtype(tmp_path: Path, array: Any) -> None:
    told = rf"extra\['x'\] is a numpy\.ndarray of {array.dtype}, which cannot"
    with CheckpointManager(tmp_path / "store") as manager, pytest.raises(UsageError, match=told):
        manager.save(1, extra={"x": array})
