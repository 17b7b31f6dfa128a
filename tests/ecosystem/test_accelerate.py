"""accelerate's `save_state` and `load_state` on a mount."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.models import examples, llama, same


class Run:
    """A model, its optimizer and its data, prepared by accelerate."""

    def __init__(self, workspace: Workspace, seed: int) -> None:
        config = ProjectConfiguration(str(workspace.path / "run"), automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        model = llama(seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        data = DataLoader(examples(16), batch_size=4)  # type: ignore[arg-type]
        prepared = self.accelerator.prepare(model, optimizer, schedule, data)
        self.model, self.optimizer, self.schedule, self.data = prepared

    def epoch(self) -> None:
        """Train on all data once."""
        for batch in self.data:
            self.accelerator.backward(self.model(**batch).loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        """All that training goes on from."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr": self.schedule.get_last_lr(),
        }


def test_save_state_and_load_state(workspace: Workspace) -> None:
    run, states = Run(workspace, 0), []
    for number in range(4):
        run.epoch()
        run.accelerator.save_state()
        states.append({name: _copy(value) for name, value in run.state.items()})
        workspace.await_version(f"run/checkpoints/checkpoint_{number}", 1)
    workspace.await_snapshots("run/checkpoints/checkpoint_2", "run/checkpoints/checkpoint_3")

    def check() -> None:
        other = Run(workspace, 1)
        for number in (2, 3):
            other.accelerator.load_state(str(workspace.path / f"run/checkpoints/checkpoint_{number}"))
            assert same(other.state, states[number])

    workspace.everywhere(check)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value
