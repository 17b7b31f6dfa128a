"""`torch.save` and `torch.load` on a mount."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moonclipfs.cli.main import main
from tests.ecosystem.conftest import Workspace
from tests.ecosystem.models import same


def state(seed: int = 0, scale: float = 0.0, *, fp8: bool = False) -> dict[str, Any]:
    """A checkpoint with tensors of several dtypes, shared storage, views, and plain values."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256).to(torch.bfloat16), nn.LayerNorm(256))
    for parameter in model.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    shared = torch.randn(1000)
    return {
        "model": dict(model.state_dict()),
        "shared": (shared, shared[100:200], shared.view(10, 100).t()),
        "ints": torch.arange(5000),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "complex": torch.randn(64, dtype=torch.complex64),
        "small": torch.randn(4096).to(torch.float8_e4m3fn if fp8 else torch.float16),
        "flags": torch.rand(3000) > 0.5,
        "step": 7,
        "name": "run",
    }


@pytest.mark.parametrize("kind", ["zip", "legacy", "mmap"])
def test_torch_save_and_load(workspace: Workspace, kind: str) -> None:
    is_zip = kind != "legacy"  # which knows no fp8
    for step in (1, 2, 3):
        place = workspace.path / f"run/step-{step}"
        place.mkdir(parents=True)
        saved = state(scale=step * 1e-5, fp8=is_zip)
        torch.save(saved, place / "model.pt", _use_new_zipfile_serialization=is_zip)
    workspace.await_snapshots("run/step-1", "run/step-2", "run/step-3")

    def check() -> None:
        for step in (1, 2, 3):
            loaded = torch.load(workspace.path / f"run/step-{step}/model.pt", mmap=kind == "mmap", weights_only=True)
            assert same(loaded, state(scale=step * 1e-5, fp8=is_zip))
            first, part, turned = loaded["shared"]
            assert first.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
            assert turned.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()

    workspace.everywhere(check)


def test_a_file_loaded_by_mmap_keeps_its_bytes_while_it_is_encoded_and_saved_anew(workspace: Workspace) -> None:
    path = workspace.path / "run/last.pt"
    path.parent.mkdir()
    torch.save(state(1), path)
    mapped = torch.load(path, mmap=True, weights_only=True)
    workspace.flush()
    assert same(mapped, state(1))
    torch.save(state(2), workspace.path / "run/next.tmp")
    os.replace(workspace.path / "run/next.tmp", path)
    workspace.flush()
    assert same(mapped, state(1))
    del mapped
    workspace.everywhere(lambda: check_loaded(workspace, "run/last.pt", 2))


def check_loaded(workspace: Workspace, name: str, seed: int) -> None:
    assert same(torch.load(workspace.path / name, weights_only=True), state(seed))


def test_a_checkpoint_saved_in_place_has_a_version_for_each_save(workspace: Workspace) -> None:
    path = workspace.path / "run/last.ckpt"
    path.parent.mkdir()
    for seed in (1, 2, 3):
        torch.save(state(seed), path)
        workspace.await_version("run", seed)

    def check() -> None:
        check_loaded(workspace, "run/last.ckpt", 3)
        for seed in (1, 2, 3):
            check_loaded(workspace, f"@versions/run/{seed}/last.ckpt", seed)

    workspace.everywhere(check)


def test_one_directory_of_many_files_is_one_snapshot(workspace: Workspace) -> None:
    """`weights_0001.pt`, `weights_0002.pt`, ... side by side, as many training loops have it."""
    place = workspace.path / "weights"
    place.mkdir()
    for step in range(6):
        torch.save(state(scale=step * 1e-6), place / f"weights_{step:04}.pt")
    workspace.await_snapshots("weights")

    def check() -> None:
        for step in range(6):
            loaded = torch.load(place / f"weights_{step:04}.pt", weights_only=True)
            assert same(loaded, state(scale=step * 1e-6))

    workspace.everywhere(check)
    assert workspace.stored_bytes() < workspace.saved_bytes() / 2


def test_R059_the_same_weights_under_another_file_name(workspace: Workspace) -> None:
    """torch writes the name of the file into every record of it, and an identifier of its own."""
    for name in ("first", "checkpoint-200"):
        (workspace.path / "run" / name).mkdir(parents=True)
        torch.save(state(1), workspace.path / f"run/{name}/{name}.pt")
        workspace.await_version(f"run/{name}", 1)
        if name == "first":
            workspace.flush()
            before = workspace.stored_bytes()
    first, second = (workspace.path / f"run/{name}/{name}.pt" for name in ("first", "checkpoint-200"))
    assert first.read_bytes() != second.read_bytes()
    workspace.everywhere(lambda: check_loaded(workspace, "run/checkpoint-200/checkpoint-200.pt", 1))
    assert workspace.stored_bytes() - before < 64 << 10


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_R067_no_pickle_is_run(workspace: Workspace, tmp_path: Path) -> None:
    """Not by the mount, nor by the commands that look into checkpoints."""
    sprung = tmp_path / "sprung"
    for step in (1, 2):
        (workspace.path / f"run/step-{step}").mkdir(parents=True)
        torch.save({**state(step), "trap": Trap(sprung)}, workspace.path / f"run/step-{step}/model.pt")
    workspace.await_snapshots("run/step-1", "run/step-2")
    workspace.everywhere(lambda: None)
    store = str(workspace.store.path)
    first, second = f"{store}:run/step-1", f"{store}:run/step-2"
    assert main(["show", first]) == main(["verify", "--contents", store]) == main(["gc", store]) == 0
    assert main(["diff", first, second]) == 1
    assert not sprung.exists()
    torch.load(workspace.path / "run/step-1/model.pt", weights_only=False)
    assert sprung.exists()
