"""A callback with which Lightning's `Trainer` saves through a checkpoint manager, and goes on from what was saved.

    manager = moonclipfs.CheckpointManager("/data/store", "run1")
    Trainer(..., enable_checkpointing=False, callbacks=[CheckpointCallback(manager, every_steps=500)])

Training goes on in the middle of an epoch as it does from a checkpoint of Lightning's own. For one optimizer.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from moonclipfs.torch.manager import CheckpointManager


class CheckpointCallback(Callback):  # type: ignore[misc]
    """Saves module, optimizer, scheduler and progress every so many steps; `fit` begins after the newest snapshot."""

    def __init__(self, manager: CheckpointManager, every_steps: int) -> None:
        self.manager = manager
        self.every_steps = every_steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the newest snapshot, if there is one."""
        if self.manager.list_snapshots():
            loaded = self.manager.load_latest(*self._parts(trainer, pl_module))
            trainer.fit_loop.load_state_dict(loaded.extra["progress"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save when it is time."""
        if trainer.global_step and trainer.global_step % self.every_steps == 0:
            progress = {"progress": trainer.fit_loop.state_dict()}
            self.manager.save(trainer.global_step, *self._parts(trainer, pl_module), extra=progress)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return when all that was saved is durable."""
        self.manager.flush()

    def _parts(self, trainer: Trainer, module: LightningModule) -> tuple[Any, Any, Any]:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        return module, trainer.optimizers[0], schedulers[0] if schedulers else None
