"""How much a bf16 fine-tune through `Trainer` takes: six checkpoints, weights and optimizer."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import LlamaForCausalLM

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.models import llama
from tests.ecosystem.training import AwaitSeal, trainer

CHECKPOINTS, STEPS = 6, 40


def pretrained(scratch: Path) -> LlamaForCausalLM:
    """A model that has learnt something, in bf16."""
    model = llama(192, 4)
    trainer(scratch, model, max_steps=40, save_strategy="no", per_device_train_batch_size=4).train()
    return model.bfloat16()


def test_six_checkpoints_of_a_bf16_fine_tune(workspace: Workspace, tmp_path: Path) -> None:
    """Model files under a fifth of their size, everything under a half."""
    place = workspace.path / "run"
    model = pretrained(tmp_path / "scratch")
    trainer(
        place, model, [AwaitSeal(workspace)], max_steps=STEPS * CHECKPOINTS, save_steps=STEPS, learning_rate=2e-5
    ).train()
    names = [f"run/checkpoint-{STEPS * (number + 1)}" for number in range(CHECKPOINTS)]
    workspace.await_snapshots(*names)
    trained = {name: (workspace.path / name / "model.safetensors").read_bytes() for name in names}

    def check() -> None:
        for name in names:
            assert (workspace.path / name / "model.safetensors").read_bytes() == trained[name]

    workspace.everywhere(check)
    everything = sum(path.stat().st_size for path in place.glob("checkpoint-*/*"))
    models = [workspace.path / name / "model.safetensors" for name in names]
    size = sum(path.stat().st_size for path in models)
    stored = sum(int(os.getxattr(path, "user.moonclip.stored_size")) for path in models)
    print(f"models {size:,} -> {stored:,}; everything {everything:,} -> {workspace.stored_bytes():,}")
    assert stored < size / 5
    assert workspace.stored_bytes() < everything / 2
