"""Saves and mounts: what is saved is files in a mount at once, and a dry run takes no saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moonclipfs import CheckpointManager
from moonclipfs.errors import UsageError
from moonclipfs.fuse.control import ask
from tests.fuse.conftest import Mounted, Mounter, eventually, fuse, mounter
from tests.torch.kit import adam, model, same, train

__all__ = ["fuse", "mounter"]


def test_what_was_saved_is_in_a_mount_at_once(mounter: Mounter, tmp_path: Path) -> None:
    module = model()
    optimizer = adam(module)
    train(module, optimizer)
    with CheckpointManager(tmp_path / "store", "r") as manager:
        manager.save(1, module, optimizer, extra_files={"config.json": "{}", "notes": b"x"})
        manager.flush()
        mounted = mounter(tmp_path / "store")
        manager.save(2, module, optimizer, extra_files={"config.json": Path(__file__)})
        manager.flush()
        eventually((mounted.path / "r/step-000002").exists)
        place = mounted.path / "r/step-000001"
        assert sorted(path.name for path in place.iterdir()) == [
            "config.json", "model.safetensors", "notes", "optimizer.safetensors", "state.json",
        ]  # fmt: skip
        assert same(load_file(place / "model.safetensors"), dict(sorted(module.state_dict().items())))
        with safe_open(place / "optimizer.safetensors", "pt") as lazy:
            weight = module[1].weight  # type: ignore[index]
            assert same(lazy.get_slice("1.weight.exp_avg")[3:5], optimizer.state[weight]["exp_avg"][3:5])
        assert (mounted.path / "r/step-000002/config.json").read_text() == Path(__file__).read_text()


def test_a_mount_stands_for_its_store_and_a_dry_run_for_nothing(mounter: Mounter, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "store", "r") as manager:
        manager.save_raw(1, {"a": torch.ones(3)})
    mounted: Mounted = mounter(tmp_path / "store", read_only=False)
    with CheckpointManager(mounted.path, "r") as manager:
        assert manager.save_raw(2, {"a": torch.ones(3)}) == "r/step-000002"
        manager.flush()
        assert manager._place.path == tmp_path / "store"
    eventually((mounted.path / "r/step-000002").exists)
    with pytest.raises(UsageError, match=r"inside a mount: give its store, .*/store, and the name of the run"):
        CheckpointManager(mounted.path / "r")
    with pytest.raises(UsageError, match="inside a mount"):
        CheckpointManager(mounted.path / "new")
    ask(str(mounted.path), "overlay_create", None, name="dry", base="r/step-000001", dry_run=True)
    for place in ("@overlays/dry", "@overlays/dry/new/one"):
        with pytest.raises(UsageError, match=r"dry run|overlay"):
            CheckpointManager(mounted.path / place)
