"""A small byte-level GPT, and the text to train it on that every Python brings along."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


def quiet_torch() -> None:
    """One thread, and matrix products in bf16 where the processor has them.

    The layers are so small that threads would wait for each other more than they compute, without end on a busy
    machine; and one thread makes the same bytes on every machine of a kind.
    """
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")


def corpus(limit: int = 16 << 20) -> Tensor:
    """Up to about `limit` bytes of the standard library's sources, as uint8."""
    text = bytearray()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            text += path.read_bytes()
        if len(text) > limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(text: Tensor, context: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of the text: inputs and what comes next, each (size, context) of int64."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context - 1, (size,), generator=generator)
        windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
        yield windows[:, :-1], windows[:, 1:]


class Experts(nn.Module):
    """A feed-forward layer of one expert, or a mixture in which a router sends each token to two of several."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False) if count > 1 else None
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(count))
        self.load = torch.zeros(count)

    def _expert(self, number: int, tokens: Tensor) -> Tensor:
        result: Tensor = self.down[number](functional.gelu(self.up[number](tokens)))
        return result

    def forward(self, tokens: Tensor) -> Tensor:
        if self.router is None:
            return self._expert(0, tokens)
        flat = tokens.reshape(-1, tokens.shape[-1])
        shares, chosen = self.router(flat).float().softmax(-1).topk(2, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        self.load = torch.bincount(chosen.flatten(), minlength=len(self.up)).float() / chosen.numel()
        mixed = torch.zeros_like(flat)
        for number in range(len(self.up)):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                part = self._expert(number, flat[rows]) * shares[rows, place, None].to(flat.dtype)
                mixed = mixed.index_add(0, rows, part.to(flat.dtype))
        return mixed.view_as(tokens)


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the stream."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm_attention, self.norm_experts = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.experts = Experts(width, 4 * width, experts)

    def forward(self, stream: Tensor) -> Tensor:
        size, length, width = stream.shape
        qkv = self.qkv(self.norm_attention(stream)).view(size, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.out(seen.transpose(1, 2).reshape(size, length, width))
        result: Tensor = stream + self.experts(self.norm_experts(stream))
        return result


class GPT(nn.Module):
    """Predicts the next byte; 12 x layers x width^2 parameters, and as many more feed-forwards as it has experts."""

    def __init__(self, layers: int, width: int, context: int, experts: int = 1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        stream = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> list[float]:
    """Take so many steps, in bf16 autocast unless the weights are bf16 already; the loss of each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = []
    for _ in range(steps):
        inputs, following = next(data)
        with torch.autocast("cpu", torch.bfloat16, enabled=parameters[0].dtype == torch.float32):
            logits = model(inputs)
        loss = functional.cross_entropy(logits.float().view(-1, VOCABULARY), following.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise ArithmeticError(f"training diverged: loss {losses[-1]}")
    return losses
