"""A callback with which Hugging Face's `Trainer` saves through a checkpoint manager, and goes on from what was saved.

    manager = moonclipfs.CheckpointManager("/data/store", "run1")
    Trainer(..., TrainingArguments(..., save_strategy="no"), callbacks=[CheckpointCallback(manager, every_steps=500)])

The data begins anew when training goes on, in the order that the trainer's seed gives.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moonclipfs.torch.manager import CheckpointManager


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Saves model, optimizer and scheduler every so many steps, and at the end; `train` begins after the newest one."""

    def __init__(self, manager: CheckpointManager, every_steps: int) -> None:
        self.manager = manager
        self.every_steps = every_steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Load the newest snapshot that is intact."""
        state.global_step = max(0, self.manager.resume(*self._parts(**objects)) - 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Save when it is time, and after the last step."""
        if state.global_step % self.every_steps == 0 or state.global_step >= state.max_steps:
            self.manager.save(state.global_step, *self._parts(**objects))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Return when all that was saved is durable."""
        self.manager.flush()

    def _parts(self, model: Any, optimizer: Any = None, lr_scheduler: Any = None, **_: Any) -> tuple[Any, Any, Any]:
        return model, optimizer, lr_scheduler
