"""`Trainer` on a mount, beside the same training in a plain directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.models import same
from tests.ecosystem.training import AwaitSeal, trainer


def checkpoint(place: Path) -> dict[str, Any]:
    """What training goes on from."""
    return {
        "model": load_file(place / "model.safetensors"),
        "optimizer": torch.load(place / "optimizer.pt", weights_only=True),
        "scheduler": torch.load(place / "scheduler.pt", weights_only=True),
    }


def steps(place: Path) -> list[int]:
    """The checkpoints in a directory."""
    return sorted(int(path.name.split("-")[1]) for path in place.glob("checkpoint-*"))


def test_R045_save_total_limit(workspace: Workspace, tmp_path: Path) -> None:
    """The newest ones stay; what the trainer removed is in `@versions` still."""
    plain, place = tmp_path / "plain", workspace.path / "run"
    trainer(plain, save_total_limit=2).train()
    trainer(place, save_total_limit=2, callbacks=[AwaitSeal(workspace)]).train()
    assert steps(plain) == steps(place) == [6, 8]
    workspace.await_snapshots("run/checkpoint-6", "run/checkpoint-8")

    def check() -> None:
        assert steps(place) == [6, 8]
        for step in (6, 8):
            assert sorted(path.name for path in (place / f"checkpoint-{step}").iterdir()) == sorted(
                path.name for path in (plain / f"checkpoint-{step}").iterdir()
            )
            assert same(checkpoint(place / f"checkpoint-{step}"), checkpoint(plain / f"checkpoint-{step}"))
        for step in (2, 4):
            kept = max((workspace.path / f"@versions/run/checkpoint-{step}").iterdir())
            assert checkpoint(kept)["scheduler"]["last_epoch"] == step

    workspace.everywhere(check)


def test_R045_the_best_one_stays_and_is_loaded_at_the_end(workspace: Workspace, tmp_path: Path) -> None:
    """With a learning rate that spoils the model, an early checkpoint is the best, and outlives the limit of one."""
    options = {
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
    }
    plain, place = tmp_path / "plain", workspace.path / "run"
    expected, trained = trainer(plain, **options), trainer(place, callbacks=[AwaitSeal(workspace)], **options)
    expected.train()
    trained.train()
    best = Path(trained.state.best_model_checkpoint)
    assert best.parent == place and best.name == Path(expected.state.best_model_checkpoint).name
    assert best.name != "checkpoint-8"
    assert (
        [f"checkpoint-{step}" for step in steps(place)]
        == [f"checkpoint-{step}" for step in steps(plain)]
        == [best.name]
    )
    assert same(trained.model.state_dict(), expected.model.state_dict())
    workspace.await_snapshots(f"run/{best.name}")

    def check() -> None:
        loaded = AutoModelForCausalLM.from_pretrained(best)
        assert same(loaded.state_dict(), expected.model.state_dict())

    workspace.everywhere(check)


@pytest.mark.parametrize("remounted", [False, True])
def test_resume(workspace: Workspace, tmp_path: Path, remounted: bool) -> None:
    """A run that is stopped and goes on from its last checkpoint ends as one that was not stopped."""
    plain, place = tmp_path / "plain", workspace.path / "run"
    trainer(plain).train()
    trainer(place).train()
    shutil.rmtree(place / "checkpoint-6")
    shutil.rmtree(place / "checkpoint-8")
    workspace.await_snapshots("run/checkpoint-2", "run/checkpoint-4")
    if remounted:
        workspace.remount()
    trainer(place).train(resume_from_checkpoint=True)
    workspace.await_snapshots(*(f"run/checkpoint-{step}" for step in (2, 4, 6, 8)))

    def check() -> None:
        for step in (2, 4, 6, 8):
            assert same(checkpoint(place / f"checkpoint-{step}"), checkpoint(plain / f"checkpoint-{step}"))

    workspace.everywhere(check)


def test_what_trainer_writes_beside_its_checkpoints(workspace: Workspace) -> None:
    """`save_model` and `save_state` into the directory of the run, which is no unit: its checkpoints are."""
    place = workspace.path / "run"
    trained = trainer(place, save_steps=4)
    trained.train()
    trained.save_model()
    trained.save_state()
    workspace.await_snapshots("run/checkpoint-4", "run/checkpoint-8")

    def check() -> None:
        loaded = AutoModelForCausalLM.from_pretrained(place)
        assert same(loaded.state_dict(), trained.model.state_dict())
        assert (place / "trainer_state.json").read_text()

    workspace.everywhere(check)
