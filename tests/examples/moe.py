"""A small language model whose experts are files: it pages them through a few slots, and learns while it reads.

A directory holds the model: `core.safetensors`, and `experts/e00000.safetensors` and so on, each with its own moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional

from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.torch import ExpertStore, ExpertTiers, PagedExperts

Place = Path | LayerPath
VOCABULARY = 256
WIDTH, HIDDEN, CONTEXT = 64, 128, 32
BATCH = 16


class Mixture(nn.Module):
    """Each batch asks for the experts that suit it best, as many as there are slots, and is shared among them."""

    def __init__(self, experts: PagedExperts, count: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.curiosity = 1.0
        """How much chance has a say, while the model learns, in which experts are asked for."""

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.router(tokens)
        wishes = scores.detach().softmax(-1).mean((0, 1)).log()
        if self.training:
            wishes = wishes - self.curiosity * torch.empty_like(wishes).exponential_().log()
        chosen = wishes.topk(len(self.experts.slots)).indices.tolist()
        self.experts.swap_to(chosen)
        up, down = self.experts.stacked("up", chosen), self.experts.stacked("down", chosen)
        shares = scores[..., chosen].softmax(-1)
        hidden = functional.gelu(torch.einsum("btw,ehw->bteh", tokens, up))
        return torch.einsum("bteh,ewh,bte->btw", hidden, down, shares)


class Model(nn.Module):
    """Predicts the next byte by attention, and by a mixture of paged experts."""

    def __init__(self, experts: PagedExperts, count: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norm_attention, self.norm_mixture = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True, bias=False)
        self.mixture = Mixture(experts, count)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        stream = self.tokens(text) + self.positions.weight[: text.shape[1]]
        unseen = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool).triu(1)
        attended = self.norm_attention(stream)
        stream = stream + self.attention(attended, attended, attended, attn_mask=unseen, need_weights=False)[0]
        stream = stream + self.mixture(self.norm_mixture(stream))
        logits: Tensor = self.head(stream)
        return logits


def create(place: Place, count: int, seed: int = 0) -> None:
    """Make a model that knows nothing, of so many experts, in an empty directory."""
    generator = torch.Generator().manual_seed(seed)
    store = ExpertStore(place / "experts")
    for _ in range(count):
        up = torch.randn(HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
        down = torch.randn(WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
        store.create({"up": up, "down": down})
    torch.manual_seed(seed)
    save_core(Model(PagedExperts(ExpertTiers(store), 1), count), place)


def open_model(place: Place, slots: int, ram: int) -> Model:
    """Open the model of a directory: `slots` experts on the device at a time, `ram` of them in RAM."""
    store = ExpertStore(place / "experts")
    model = Model(PagedExperts(ExpertTiers(store, ram), slots), len(store.ids()))
    model.load_state_dict(load((place / "core.safetensors").read_bytes()), strict=False)
    return model


def save_core(model: Model, place: Place) -> None:
    """Write what is no expert to the directory of the model."""
    core = {name: one.detach() for name, one in model.named_parameters() if not name.startswith("mixture.experts.")}
    (place / "core.safetensors").write_bytes(save(core))


def windows(text: bytes, count: int) -> Iterator[Tensor]:
    """Yield so many batches of windows of a text, in its order: int64, (BATCH, CONTEXT + 1)."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.linspace(0, len(data) - CONTEXT - 1, count * BATCH).long().view(count, BATCH)
    for row in starts.tolist():
        yield torch.stack([data[start : start + CONTEXT + 1] for start in row]).long()


def loss_of(model: Model, batch: Tensor) -> Tensor:
    """Return the mean loss of a batch, in nats a byte."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


@torch.no_grad()
def measure(model: Model, text: bytes) -> float:
    """Return how well a text is predicted, in nats a byte; nothing is learned."""
    model.eval()
    losses = [loss_of(model, batch).item() for batch in windows(text, 8)]
    return sum(losses) / len(losses)


def read(model: Model, place: Place, text: bytes, steps: int, rate: float = 5e-3) -> None:
    """Read a text in so many steps and learn from it; the files of the directory hold what was learned then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.mixture.experts.attach_optimizer(optimizer)
    model.train()
    for batch in windows(text, steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    save_core(model, place)
    model.mixture.experts.flush()
