"""Small checkpoints with experts, as bytes of files, for tests of `@experts`."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save

Arrays = dict[str, np.ndarray]
Expert = Mapping[str, bytes]
"""The bytes of each tensor of an expert, by its name in the file."""


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that differ from place to place."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def mixtral(layers: int, experts: int, rows: int = 16) -> Arrays:
    """Three matrices for each expert, and an embedding."""
    arrays = {"model.embed_tokens.weight": random(8, 8)}
    for layer in range(layers):
        for number in range(experts):
            for at, part in enumerate(("w1", "w2", "w3")):
                name = f"model.layers.{layer}.block_sparse_moe.experts.{number}.{part}.weight"
                arrays[name] = random(rows, 8, seed=1000 * layer + 10 * number + at)
    return arrays


def mixtral_expert(arrays: Arrays, layer: int, number: int) -> Expert:
    """What the file of an expert of `mixtral` has to hold."""
    start = f"model.layers.{layer}.block_sparse_moe.experts.{number}."
    return {name.removeprefix(start): array.tobytes() for name, array in arrays.items() if name.startswith(start)}


def shards(arrays: Arrays) -> dict[str, bytes]:
    """Two files of `arrays`, so that the parts of each expert lie in both."""
    first = {name: array for name, array in arrays.items() if "w2" not in name}
    second = {name: array for name, array in arrays.items() if "w2" in name}
    return {
        "model-00001-of-00002.safetensors": save(first, metadata={"format": "pt"}),
        "model-00002-of-00002.safetensors": save(second, metadata={"format": "pt"}),
    }


def fused(experts: int, inner: int = 12, outer: int = 8) -> Arrays:
    """Stacks of rows, as Qwen3-MoE has them in memory."""
    at = "model.layers.3.mlp.experts"
    return {
        f"{at}.gate_up_proj": random(experts, 2 * inner, outer, seed=1),
        f"{at}.down_proj": random(experts, outer, inner, seed=2),
    }


def fused_expert(arrays: Arrays, number: int) -> Expert:
    """What the file of an expert of `fused` has to hold."""
    gate_up, down = (arrays[f"model.layers.3.mlp.experts.{part}_proj"][number] for part in ("gate_up", "down"))
    half = len(gate_up) // 2
    return {"gate_proj": gate_up[:half].tobytes(), "up_proj": gate_up[half:].tobytes(), "down_proj": down.tobytes()}


def gguf(tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]]) -> bytes:
    """A GGUF file: of each tensor the GGML type, the shape with the innermost dimension first, and the bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
    data = b""
    for name, (kind, shape, content) in tensors.items():
        data += bytes(-len(data) % 32)
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, len(data))
        data += content
    return head + bytes(-len(head) % 32) + data


def torch_file(arrays: Arrays) -> bytes:
    """What torch.save makes of them."""
    import io

    import torch

    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, buffer)
    return buffer.getvalue()
