"""Series of checkpoints from real training on the CPU, for benchmarks and tests.

    python -m tests.bench.series DIR [--series pretrain,moe,...] [--size tiny|small|full]
                                     [--checkpoints 6] [--every 20] [--warm 200]

Each series is DIR/<series>/step-NNNNNN.safetensors; the same seed, size and torch give the same bytes.

    pretrain       byte-level GPT, fp32 weights and both AdamW moments (betas 0.9 and 0.95)
    weights        the same training goes on, weights only, saved every 10 steps
    weights_late   the same at the end of a schedule: learning rate 1e-5 instead of 3e-4
    finetune       all weights, fp32, learning rate 2e-5, from the last pretrain checkpoint, on other text
    finetune_bf16  the same with weights and moments in bf16, so that small updates round away
    cast_bf16, cast_fp16, cast_fp8
                   finetune exported in fewer bits (fp8 with a power-of-two scale for each tensor)
    lora           a frozen backbone and rank-8 adapters, all of it saved each time
    moe            a mixture of 8 experts with moments; after the warm-up only the 3 busiest of each layer train

The models are small and young: learning rate, distance between steps and dtype set the ratio of a delta far more
than size does, but compare series of your own before you plan a disk by these.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.demo.gpt import GPT, Block, batches, corpus, quiet_torch, train


@dataclass(frozen=True, slots=True)
class Size:
    """Layers, width and context of the GPT and of the mixture of experts, and the batch of both."""

    gpt: tuple[int, int, int]
    moe: tuple[int, int, int]
    batch: int


SIZES = {
    "tiny": Size(gpt=(2, 64, 64), moe=(2, 64, 64), batch=2),
    "small": Size(gpt=(6, 256, 128), moe=(2, 128, 128), batch=4),
    "full": Size(gpt=(10, 512, 256), moe=(4, 256, 128), batch=2),
}
LORA_RANK = 8
EXPERTS = 8
BUSY_EXPERTS = 3
WEIGHTS_EVERY = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a series goes, how large its model is, and when it is saved."""

    out: Path
    size: str = "small"
    checkpoints: int = 6
    every: int = 20
    warm: int = 200
    seed: int = 0

    @property
    def dimensions(self) -> Size:
        """The model sizes of this plan."""
        return SIZES[self.size]

    def file(self, series: str, step: int) -> Path:
        """Where the checkpoint of one step goes."""
        return self.out / series / f"step-{step:06d}.safetensors"

    def text(self, context: int, part: int = 0, parts: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches from one part of the corpus."""
        everything = corpus()
        length = len(everything) // parts
        return batches(
            everything[part * length : (part + 1) * length], context, self.dimensions.batch, self.seed + part
        )


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, part)
    part.rename(path)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments; zeros for parameters that have not been trained."""
    state = {}
    for name, parameter in model.named_parameters():
        state["model." + name] = parameter
        for moment in ("exp_avg", "exp_avg_sq"):
            state[f"{moment}.{name}"] = optimizer.state[parameter].get(moment, torch.zeros_like(parameter))
    return state


def _adamw(model: nn.Module, rate: float, beta2: float = 0.999, decay: float = 0.01) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, betas=(0.9, beta2), weight_decay=decay)


def _schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Fifty steps up, then down by a cosine to a tenth over twice the steps of the run."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * step / (2 * steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def pretrain(plan: Plan) -> None:
    """Train from nothing; save weights and moments after the warm-up and then at every interval."""
    layers, width, context = plan.dimensions.gpt
    model = GPT(layers, width, context)
    optimizer = _adamw(model, 3e-4, beta2=0.95, decay=0.1)
    scheduler, data = _schedule(optimizer, plan.warm + plan.checkpoints * plan.every), plan.text(context)
    step = plan.warm
    train(model, optimizer, data, plan.warm, scheduler)
    for _ in range(plan.checkpoints):
        _save(plan.file("pretrain", step), _state(model, optimizer))
        train(model, optimizer, data, plan.every, scheduler)
        step += plan.every


def _weights(plan: Plan, series: str, rate: float) -> None:
    model, state = _base(plan)
    optimizer = _adamw(model, rate, beta2=0.95, decay=0.1)
    for name, parameter in model.named_parameters():
        moments = {moment: state[f"{moment}.{name}"] for moment in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(plan.warm)), **moments}
    data = plan.text(plan.dimensions.gpt[2])
    for number in range(plan.checkpoints):
        _save(plan.file(series, number * WEIGHTS_EVERY), model.state_dict())
        train(model, optimizer, data, WEIGHTS_EVERY)


def weights(plan: Plan) -> None:
    """Go on from the last pretrain checkpoint with its moments, at the full learning rate."""
    _weights(plan, "weights", 3e-4)


def weights_late(plan: Plan) -> None:
    """The same at the learning rate where a schedule ends."""
    _weights(plan, "weights_late", 1e-5)


def _base(plan: Plan) -> tuple[GPT, dict[str, Tensor]]:
    """The pretrained model, and everything that its last checkpoint holds."""
    make(plan, ["pretrain"])
    state = load_file(max((plan.out / "pretrain").glob("*.safetensors")))
    model = GPT(*plan.dimensions.gpt)
    model.load_state_dict({name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")})
    return model, state


def _tune(plan: Plan, series: str, model: nn.Module, rate: float) -> None:
    optimizer, data = _adamw(model, rate), plan.text(plan.dimensions.gpt[2], part=1, parts=2)
    for number in range(plan.checkpoints):
        _save(plan.file(series, number * plan.every), model.state_dict())
        train(model, optimizer, data, plan.every)


def finetune(plan: Plan) -> None:
    """All weights in fp32, with a small learning rate."""
    _tune(plan, "finetune", _base(plan)[0], 2e-5)


def finetune_bf16(plan: Plan) -> None:
    """Weights and optimizer in bf16 throughout."""
    _tune(plan, "finetune_bf16", _base(plan)[0].to(torch.bfloat16), 2e-5)


class _Adapted(nn.Module):
    """A frozen linear layer and a trained low-rank change of it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(LORA_RANK, frozen.in_features) / math.sqrt(LORA_RANK))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, LORA_RANK))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.frozen(values) + 2.0 * (values @ self.down.T @ self.up.T)
        return result


def lora(plan: Plan) -> None:
    """Adapters on every attention layer of a frozen model."""
    model = _base(plan)[0].requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = _Adapted(block.qkv), _Adapted(block.out)
    _tune(plan, "lora", model, 2e-4)


def _train_busiest(blocks: list[Block]) -> None:
    """Freeze all experts but those that the last batch sent most tokens to."""
    for block in blocks:
        busiest = set(block.experts.load.topk(BUSY_EXPERTS).indices.tolist())
        for number, (up, down) in enumerate(zip(block.experts.up, block.experts.down, strict=True)):
            up.requires_grad_(number in busiest)
            down.requires_grad_(number in busiest)


def moe(plan: Plan) -> None:
    """A mixture of experts; each interval trains on its own part of the text, and only the experts busy there."""
    layers, width, context = plan.dimensions.moe
    model = GPT(layers, width, context, experts=EXPERTS)
    optimizer = _adamw(model, 3e-4, decay=0.1)
    scheduler = _schedule(optimizer, plan.warm + plan.checkpoints * plan.every)
    train(model, optimizer, plan.text(context), plan.warm, scheduler)
    for number in range(plan.checkpoints):
        _save(plan.file("moe", plan.warm + number * plan.every), _state(model, optimizer))
        _train_busiest(list(model.blocks))
        train(model, optimizer, plan.text(context, number, plan.checkpoints), plan.every, scheduler)


def _to_fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    scale = 2.0 ** math.floor(math.log2(448.0 / max(tensor.abs().max().item(), 1e-12)))
    return {name: (tensor * scale).to(torch.float8_e4m3fn), name + "_scale_inv": torch.tensor(1.0 / scale)}


CASTS: dict[str, Callable[[str, Tensor], dict[str, Tensor]]] = {
    "cast_bf16": lambda name, tensor: {name: tensor.to(torch.bfloat16)},
    "cast_fp16": lambda name, tensor: {name: tensor.to(torch.float16)},
    "cast_fp8": _to_fp8,
}


def _cast(plan: Plan, series: str) -> None:
    make(plan, ["finetune"])
    for path in sorted((plan.out / "finetune").glob("*.safetensors")):
        exported: dict[str, Tensor] = {}
        for name, tensor in load_file(path).items():
            exported.update(CASTS[series](name, tensor))
        _save(plan.out / series / path.name, exported)


TRAINED: dict[str, Callable[[Plan], None]] = {
    "pretrain": pretrain,
    "weights": weights,
    "weights_late": weights_late,
    "finetune": finetune,
    "finetune_bf16": finetune_bf16,
    "lora": lora,
    "moe": moe,
}
SERIES = (*TRAINED, *CASTS)


def make(plan: Plan, names: list[str]) -> list[list[Path]]:
    """Make the series that are not there yet; the files of each, in order."""
    made = []
    for name in names:
        files = sorted((plan.out / name).glob("*.safetensors"))
        if len(files) < plan.checkpoints:
            started = time.monotonic()
            torch.manual_seed(plan.seed)
            if name in CASTS:
                _cast(plan, name)
            else:
                TRAINED[name](plan)
            files = sorted((plan.out / name).glob("*.safetensors"))
            print(f"series {name}: {len(files)} files, {time.monotonic() - started:.0f} s", flush=True)
        made.append(files)
    return made


def main() -> None:
    """Make series from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--series", default=",".join(SERIES))
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--warm", type=int, default=200)
    arguments = parser.parse_args()
    quiet_torch()
    plan = Plan(arguments.out, arguments.size, arguments.checkpoints, arguments.every, arguments.warm)
    make(plan, arguments.series.split(","))


if __name__ == "__main__":
    main()
