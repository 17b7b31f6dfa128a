"""`Trainer` on a small model: what the tests of it share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.models import examples, llama


class AwaitSeal(TrainerCallback):
    """Let each checkpoint become a snapshot before training goes on, as steps that take minutes would."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wait for the newest one."""
        name = f"{Path(args.output_dir).relative_to(self.workspace.path)}/checkpoint-{state.global_step}"
        self.workspace.await_version(name, 1)


def trainer(
    output: Path, model: LlamaForCausalLM | None = None, callbacks: list[TrainerCallback] | None = None, **options: Any
) -> Trainer:
    """A trainer that takes 8 steps and saves every second one, unless told otherwise."""
    settings: dict[str, Any] = {
        "max_steps": 8,
        "save_steps": 2,
        "logging_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }
    return Trainer(
        model or llama(),
        TrainingArguments(str(output), **settings),
        train_dataset=examples(32),
        eval_dataset=examples(4, seed=1000),
        callbacks=callbacks,
    )
