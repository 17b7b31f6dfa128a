"""The callbacks for `Trainer`s: real runs that end, and go on, beside runs that do not."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import moonclipfs
from moonclipfs import CheckpointManager
from moonclipfs.compat.lightning import CheckpointCallback as LightningCallback
from moonclipfs.compat.transformers import CheckpointCallback as TransformersCallback
from tests.ecosystem.models import examples, llama, same
from tests.ecosystem.test_lightning import Module
from tests.ecosystem.training import trainer


def train(place: Path, steps: int, manager: CheckpointManager | None = None, seed: int = 0) -> Any:
    """Train on data that is the same at each step, since it begins anew when training goes on."""
    callbacks: list[Any] = [] if manager is None else [TransformersCallback(manager, every_steps=2)]
    options = {
        "max_steps": steps,
        "save_strategy": "no",
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
    }
    one = trainer(place, llama(seed=seed), callbacks, **options)
    one.train_dataset = examples(1) * 32
    one.train()
    return one


def test_trainer_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    straight = train(tmp_path, 7)
    with CheckpointManager(tmp_path / "store", "run") as manager:
        train(tmp_path, 3, manager)
        assert [one.step for one in manager.list_snapshots()] == [2, 3]
    with CheckpointManager(tmp_path / "store", "run") as manager:
        again = train(tmp_path, 7, manager, seed=1)
        assert again.state.global_step == 7
        assert [one.step for one in manager.list_snapshots()] == [2, 3, 4, 6, 7]
        assert manager.load(7).state["scheduler"]["last_epoch"] == 7
    assert same(again.model.state_dict(), straight.model.state_dict())


def fit(place: Path, epochs: int, manager: CheckpointManager | None = None) -> Module:
    """Train over four steps an epoch, whose data is the same: an epoch that is cut off begins anew."""
    torch.manual_seed(0)
    module = Module()
    one = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, default_root_dir=place, logger=False, enable_checkpointing=False,
        callbacks=[] if manager is None else [LightningCallback(manager, every_steps=3)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    one.fit(module, DataLoader(examples(4) * 4, batch_size=4))  # type: ignore[arg-type]
    return module


def test_lightning_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    straight = fit(tmp_path / "plain", 4)
    with CheckpointManager(tmp_path / "store", "run") as manager:
        fit(tmp_path / "run", 2, manager)
        assert [one.step for one in manager.list_snapshots()] == [3, 6]
    with CheckpointManager(tmp_path / "store", "run") as manager:
        module = fit(tmp_path / "run", 4, manager)
        assert [one.step for one in manager.list_snapshots()] == [3, 6, 9, 12, 15]
    assert same(module.state_dict(), straight.state_dict())


def test_a_model_that_a_manager_saved_is_served_from_files(tmp_path: Path) -> None:
    """`from_pretrained`, of an export, with the configuration as an extra file."""
    module = llama()
    with CheckpointManager(tmp_path / "store", "run") as manager:
        manager.save(1, module, extra_files={"config.json": module.config.to_json_string()})
    loaded: AutoModelForCausalLM
    with moonclipfs.open(tmp_path / "store", "run/step-000001") as snapshot:
        for name in ("model.safetensors", "config.json"):
            (tmp_path / name).write_bytes(snapshot.read(name))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(loaded.state_dict(), module.state_dict())


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_callbacks_are_short(name: str) -> None:
    tree = ast.parse((Path(moonclipfs.__file__).parent / f"compat/{name}.py").read_text())
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(lengths) == 1 and lengths[0] <= 30
