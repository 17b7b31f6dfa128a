"""Lightning's `ModelCheckpoint` on a mount."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.models import examples, llama, same


class Module(lightning.LightningModule):
    """The small model, to be trained by Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = llama()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """One step; the loss is what checkpoints are ranked by."""
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As usual."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(place: Path, epochs: int, save_last: Any, resume: Path | None = None) -> tuple[Module, ModelCheckpoint]:
    """Train, keeping the two best and the last."""
    torch.manual_seed(0)
    module = Module()
    keeper = ModelCheckpoint(monitor="loss", save_top_k=2, save_last=save_last, filename="{epoch}-{step}")
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=place,
        callbacks=[keeper],
        logger=CSVLogger(place, "logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    data = DataLoader(examples(16), batch_size=4)  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=resume)
    return module, keeper


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint(workspace: Workspace, tmp_path: Path, save_last: Any) -> None:
    expected, _ = fit(tmp_path / "plain", 4, save_last)
    fit(workspace.path / "run", 2, save_last)
    workspace.flush()
    module, keeper = fit(
        workspace.path / "run", 4, save_last, workspace.path / "run/logs/version_0/checkpoints/last.ckpt"
    )
    assert same(module.state_dict(), expected.state_dict())
    checkpoints = workspace.path / "run/logs/version_1/checkpoints"
    assert Path(keeper.best_model_path).parent == checkpoints
    assert len([path for path in checkpoints.glob("epoch*") if not path.is_symlink()]) == 2
    assert (checkpoints / "last.ckpt").is_symlink() == (save_last == "link")
    workspace.await_snapshots("run/logs/version_0/checkpoints", "run/logs/version_1/checkpoints")

    def check() -> None:
        last = Module.load_from_checkpoint(checkpoints / "last.ckpt", map_location="cpu", weights_only=False)
        assert same(last.state_dict(), expected.state_dict())
        metrics = (workspace.path / "run/logs/version_1/metrics.csv").read_text()
        assert metrics.splitlines()[0].split(",")[-1] == "step"

    workspace.everywhere(check)
