"""`save_pretrained` and `from_pretrained`, and peft's adapters, on a mount."""

from __future__ import annotations

import json

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from tests.ecosystem.conftest import Workspace
from tests.ecosystem.models import llama, same
from tests.fuse.conftest import eventually


def is_model(workspace: Workspace, name: str, model: LlamaForCausalLM) -> None:
    """Check what `from_pretrained` loads."""
    loaded = AutoModelForCausalLM.from_pretrained(workspace.path / name, dtype="auto")
    assert same(loaded.state_dict(), model.state_dict())


def test_save_pretrained_in_shards(workspace: Workspace) -> None:
    model = llama(128, 3)
    place = workspace.path / "models/tiny"
    model.save_pretrained(place, max_shard_size="500KB")
    index = json.loads((place / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2
    workspace.await_snapshots("models/tiny")
    workspace.everywhere(lambda: is_model(workspace, "models/tiny", model))


def test_R049_saved_again_in_fewer_shards(workspace: Workspace) -> None:
    """It leaves the index of the shards that it removes: the directory stays open until that is gone, too."""
    first, second = llama(128, 3), llama(128, 3, seed=1)
    place = workspace.path / "models/tiny"
    first.save_pretrained(place, max_shard_size="500KB")
    workspace.await_snapshots("models/tiny")
    kept = workspace.snapshots()["models/tiny"]
    second.save_pretrained(place, max_shard_size="5GB")
    assert not list(place.glob("model-*"))
    eventually(lambda: bool(workspace.missing("models/tiny")), 60)
    assert any("model.safetensors.index.json" in line for line in workspace.missing("models/tiny"))
    (place / "model.safetensors.index.json").unlink()
    workspace.await_version("models/tiny", kept + 1)

    def check() -> None:
        is_model(workspace, "models/tiny", second)
        is_model(workspace, f"@versions/models/tiny/{kept}", first)

    workspace.everywhere(check)


def test_bf16_and_float32_of_one_model(workspace: Workspace) -> None:
    model = llama(128, 3, tie_word_embeddings=True)
    model.save_pretrained(workspace.path / "models/float32")
    model.generation_config = GenerationConfig(max_new_tokens=3)
    workspace.await_snapshots("models/float32")
    narrow = llama(128, 3, tie_word_embeddings=True).bfloat16()
    narrow.save_pretrained(workspace.path / "models/bf16")
    workspace.await_snapshots("models/float32", "models/bf16")

    def check() -> None:
        is_model(workspace, "models/float32", model)
        is_model(workspace, "models/bf16", narrow)

    workspace.everywhere(check)


def test_adapters_of_peft(workspace: Workspace) -> None:
    base = llama(128, 3)
    base.save_pretrained(workspace.path / "models/base")
    adapted = get_peft_model(
        llama(128, 3), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    for name in ("first", "second"):
        for key, value in adapted.named_parameters():
            if "lora_" in key:
                value.data *= 1.5
        adapted.save_pretrained(workspace.path / f"adapters/{name}")
    workspace.await_snapshots("models/base", "adapters/first", "adapters/second")

    def check() -> None:
        loaded = AutoModelForCausalLM.from_pretrained(workspace.path / "models/base")
        model = PeftModel.from_pretrained(loaded, workspace.path / "adapters/second")
        assert same(dict(model.state_dict()), dict(adapted.state_dict()))
        first = model.load_adapter(workspace.path / "adapters/first", "first")
        assert not first.unexpected_keys
        merged = PeftModel.from_pretrained(llama(128, 3), workspace.path / "adapters/second").merge_and_unload()
        assert same(merged.state_dict(), model.merge_and_unload().state_dict())

    workspace.everywhere(check)
