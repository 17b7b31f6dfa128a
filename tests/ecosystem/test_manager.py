"""What the checkpoint manager saves is what other programs load."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moonclipfs import CheckpointManager
from tests.ecosystem.models import llama, same
from tests.fuse.conftest import Mounter, eventually


def test_a_saved_model_is_loaded_by_from_pretrained(mounter: Mounter, tmp_path: Path) -> None:
    model = llama(64, 2, tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "store", "run", max_shard_bytes=40_000) as manager:
        manager.save(1, model, optimizer, extra_files={"config.json": model.config.to_json_string()})
    with CheckpointManager(tmp_path / "store", "whole") as manager:
        manager.save(1, model, extra_files={"config.json": model.config.to_json_string()})
        manager.flush()
        mounted = mounter(tmp_path / "store")
        assert len(list((mounted.path / "run/step-000001").glob("model-*.safetensors"))) > 1
        for name in ("run", "whole"):
            loaded = AutoModelForCausalLM.from_pretrained(mounted.path / name / "step-000001", dtype="auto")
            assert same(loaded.state_dict(), model.state_dict())
        narrow = CheckpointManager(tmp_path / "store", "narrow", save_dtype="bf16")
        narrow.save_final(1, model, extra_files={"config.json": model.bfloat16().config.to_json_string()})
        narrow.close()
    place = mounted.path / "narrow/step-000001/model.safetensors"
    eventually(place.exists)
    found = load_file(place)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
