"""safetensors on a mount: a temporary file, cut to its full size at first, is renamed over the target."""

from __future__ import annotations

import os

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, load_model, save_file, save_model

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.models import llama, same


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(300, 200, generator=generator),
        "b": torch.randn(100_000, generator=generator).to(torch.bfloat16),
        "c": torch.arange(1000),
        "fp8": torch.randn(512, generator=generator).to(torch.float8_e5m2),
    }


def test_R021_save_file_over_the_file_that_is_mapped(workspace: Workspace) -> None:
    path = workspace.path / "run/model.safetensors"
    path.parent.mkdir()
    save_file(tensors(1), path, metadata={"format": "pt"})
    for _ in range(3):
        save_file(load_file(path), path, metadata={"format": "pt"})
        assert same(load_file(path), tensors(1))
    old = load_file(path)
    with safe_open(path, framework="pt") as opened:
        save_file(tensors(2), path)
        assert same(load_file(path), tensors(2))
        workspace.flush()
        assert same(old, tensors(1))
        assert same({name: opened.get_tensor(name) for name in opened.keys()}, tensors(1))  # noqa: SIM118
        assert opened.metadata() == {"format": "pt"}
    del old, opened
    assert os.listdir(path.parent) == ["model.safetensors"]
    workspace.await_snapshots("run")

    def check() -> None:
        assert same(load_file(path), tensors(2))
        with safe_open(path, framework="pt") as again:
            assert torch.equal(again.get_slice("a")[10:20, 5:], tensors(2)["a"][10:20, 5:])

    workspace.everywhere(check)


def test_save_model_and_numpy(workspace: Workspace) -> None:
    place = workspace.path / "run/step-1"
    place.mkdir(parents=True)
    model = llama(tie_word_embeddings=True)
    save_model(model, str(place / "model.safetensors"))
    arrays = {"x": np.random.default_rng(0).normal(size=(64, 64)), "y": np.arange(10, dtype=np.int16)}
    save_arrays(arrays, place / "arrays.safetensors")
    workspace.await_snapshots("run/step-1")

    def check() -> None:
        other = llama(seed=1, tie_word_embeddings=True)
        assert not same(other.state_dict(), model.state_dict())
        load_model(other, place / "model.safetensors")
        assert same(other.state_dict(), model.state_dict())
        loaded = load_arrays(place / "arrays.safetensors")
        assert all(np.array_equal(loaded[name], arrays[name]) for name in arrays)

    workspace.everywhere(check)
