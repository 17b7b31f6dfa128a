"""Small random models, text to train them on, and exact comparison."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.demo.gpt import batches, corpus

CONTEXT = 32


def llama(width: int = 64, layers: int = 2, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A small random model over bytes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        num_key_value_heads=max(1, width // 32),
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return LlamaForCausalLM(config)


@cache
def _text() -> Tensor:
    return corpus(1 << 20)


def examples(count: int, context: int = CONTEXT, seed: int = 0) -> list[dict[str, Tensor]]:
    """Windows of text, as `Trainer` takes them."""
    inputs = (next(iter(batches(_text(), context, 1, seed + number)))[0][0] for number in range(count))
    return [{"input_ids": one, "labels": one} for one in inputs]


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal to the bit, tensors inside them too."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a).equal(_bits(b))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
