"""Train a small GPT and save it on the way, in the files that people save."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests.demo.gpt import GPT, batches, corpus, train


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the model and of its text, and lengths of its training."""

    text_bytes: int
    layers: int
    width: int
    context: int
    batch: int
    pretrain_steps: int
    tune_steps: int
    checkpoints: int
    """Of the pre-training; the fine-tune saves half as many."""


FULL = Scale(
    text_bytes=16 << 20, layers=6, width=256, context=128, batch=4, pretrain_steps=300, tune_steps=60, checkpoints=6
)
QUICK = Scale(
    text_bytes=1 << 20, layers=2, width=64, context=32, batch=2, pretrain_steps=8, tune_steps=4, checkpoints=2
)


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint directory: the snapshot name it gets, and how long writing its files took."""

    name: str
    directory: Path
    save_seconds: float
    loss: float


def _save(
    directory: Path,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scheduler: CosineAnnealingLR,
    losses: list[float],
    *,
    export: bool,
) -> float:
    """Write one checkpoint directory; seconds it took."""
    directory.mkdir(parents=True)
    started = time.perf_counter()
    everything = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "step": len(losses),
    }
    torch.save(everything, directory / "checkpoint.pt")
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    if export:
        narrow = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        save_file(narrow, directory / "model-bf16.safetensors", metadata={"format": "pt"})
    numpy.save(directory / "losses.npy", numpy.array(losses, dtype=numpy.float32))
    return time.perf_counter() - started


def checkpoints(root: Path, scale: Scale) -> Iterator[Saved]:
    """Pre-train, then fine-tune with a frozen backbone; yields each checkpoint once it is saved."""
    torch.manual_seed(0)
    text = corpus(scale.text_bytes)
    half = len(text) // 2
    model = GPT(scale.layers, scale.width, scale.context)
    yield from _run(root, "pretrain", model, text[:half], 3e-4, scale.pretrain_steps, scale.checkpoints, scale)
    model.requires_grad_(False)
    model.blocks[-1].requires_grad_(True)
    model.head.requires_grad_(True)
    yield from _run(root, "finetune", model, text[half:], 1e-4, scale.tune_steps, scale.checkpoints // 2, scale)


def _run(
    root: Path, run: str, model: GPT, text: torch.Tensor, rate: float, steps: int, saves: int, scale: Scale
) -> Iterator[Saved]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = CosineAnnealingLR(optimizer, T_max=2 * steps)
    data, losses = batches(text, scale.context, scale.batch, seed=1), []
    for _ in range(saves):
        losses += train(model, optimizer, data, steps // saves, scheduler)
        name = f"{run}/step-{len(losses)}"
        seconds = _save(root / name, model, optimizer, scheduler, losses, export=run == "pretrain")
        yield Saved(name, root / name, seconds, losses[-1])
