"""Writes the stores of `tests/corpus/moonclip` with moonclip itself, and what it loads from them.

    pip install moonclip==0.3.1 torch
    python tests/compat/make_moonclip.py tests/corpus/moonclip/0.3.1

Each store is a zip; `expected.json` has for each snapshot, in moonclip's order, the step, the metadata, and the dtype,
shape and SHA-256 of each tensor as moonclip's own `load` gives it, and for `exotic` of what was saved.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import moonclip
import numpy as np
import torch
from make_net import Net

EPOCH = (2026, 1, 1, 0, 0, 0)


def train(net: Net, optimizer: Any, scheduler: Any, steps: int) -> None:
    """A few real steps."""
    for _ in range(steps):
        ids = torch.randint(0, 23, (16,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(ids), ids).backward()
        optimizer.step()
        scheduler.step()


def odd_tensors() -> dict[str, torch.Tensor]:
    """Every dtype that can be saved, and shapes that are easily got wrong."""
    values = torch.tensor([0.0, -0.0, 1.5, -2.25, float("inf"), float("-inf"), float("nan"), 3e-8, 6.1e-5])
    found = {f"of/{name}": values.to(getattr(torch, name)) for name in ("float64", "float32", "float16", "bfloat16")}
    for name in ("float8_e4m3fn", "float8_e5m2"):
        found[f"of/{name}"] = values.nan_to_num(0.0, 1.0, -1.0).to(getattr(torch, name))
    for name in ("int8", "int16", "int32", "int64", "uint8", "bool"):
        found[f"of/{name}"] = torch.tensor([0, 1, 2, 100]).to(getattr(torch, name))
    for name in ("complex64", "complex128"):
        found[f"of/{name}"] = torch.tensor([1 + 2j, -3.5j, complex("nan")], dtype=getattr(torch, name))
    found |= {
        "scalar": torch.tensor(7.5),
        "empty": torch.zeros(0, 4),
        "long": (torch.arange(1_300_000) % 7).float().reshape(1000, 1300),
        "same.a": torch.arange(50).float(),
        "same.b": torch.arange(50).float(),
        "dots.and/slashes ünd": torch.ones(3, 1, 2),
    }
    return found


def seal(root: Path, target: Path, name: str, manager: Any) -> list[dict[str, Any]]:
    """Pack a store, and return what moonclip says of it."""
    manager.flush()
    told = []
    for head in manager.list_snapshots():
        raw = manager._mgr.load(head["id"])
        about = {}
        if hasattr(manager._mgr, "describe"):
            about = {one["name"]: [one["dtype"], one["shape"]] for one in manager._mgr.describe(head["id"])["tensors"]}
        tensors = {
            key: [*about.get(key, [None, None]), hashlib.sha256(bytes(value)).hexdigest()] for key, value in raw.items()
        }
        told.append({"id": head["id"], "step": head["step"], "metadata": dict(head["metadata"]), "tensors": tensors})
    pack(root, target, name)
    return told


def pack(root: Path, target: Path, name: str) -> None:
    """Zip a store, the same bytes for the same files."""
    with zipfile.ZipFile(target / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file():
                info = zipfile.ZipInfo(str(path.relative_to(root)), EPOCH)
                archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)


def make(target: Path) -> None:
    """Write all stores into the directory `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    expected: dict[str, Any] = {"version": moonclip.__version__}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        manager = moonclip.CheckpointManager(str(place / "run"), async_save=False, full_every_steps=30)
        extra = {
            "rng": torch.get_rng_state()[:64],
            "seen": {"ids": [1, 2, (3, None)], "name": "tëst", "big": 1 << 70},
            "numpy": np.arange(6, dtype=np.float32).reshape(2, 3),
            "size": torch.Size([2, 3]),
        }
        for step in (10, 20, 30, 20, 40):
            train(net, optimizer, scheduler, 2)
            manager.save(
                step,
                net,
                optimizer,
                scheduler,
                extra=extra if step == 30 else None,
                metadata={"loss": f"{1 / step:.4f}"},
            )
        manager.save(50, net, optimizer, scheduler)
        if hasattr(manager._mgr, "pin"):
            manager._mgr.pin(20)
            manager._mgr.pin(40)
            expected["pinned"] = manager._mgr.pinned_steps()
        expected["run"] = seal(place / "run", target, "run", manager)

        manager = moonclip.CheckpointManager(str(place / "odd"), async_save=False)
        tensors = odd_tensors()
        manager.save_raw(1, {name: tensor.contiguous() for name, tensor in tensors.items()})
        tensors["long"][3, 7] += 1
        del tensors["scalar"]
        tensors["gained"] = torch.arange(10)
        manager.save_raw(2, {name: tensor.contiguous() for name, tensor in tensors.items()})
        expected["odd"] = seal(place / "odd", target, "odd", manager)

        net = Net()
        net.register_buffer("freqs", torch.polar(torch.ones(6), torch.arange(6.0)).reshape(2, 3))
        net.register_buffer("turned", torch.arange(6).to(torch.complex64).reshape(2, 3).T[1:])
        net.register_buffer("eighth", torch.randn(7).to(torch.float8_e4m3fn))
        net.register_buffer("wide", torch.arange(4).to(torch.uint32))
        manager = moonclip.CheckpointManager(str(place / "exotic"), async_save=False)
        manager.save(1, net)
        expected["exotic"] = seal(place / "exotic", target, "exotic", manager)
        expected["exotic_state"] = {
            name: [
                str(one.dtype).removeprefix("torch."),
                list(one.shape),
                hashlib.sha256(bytes(one.contiguous().view(torch.uint8).numpy())).hexdigest(),
            ]
            for name, one in net.state_dict().items()  # moonclip saves them, and torch cannot load all of them
            if one.dim()
        }

        managers = [moonclip.MoonclipManager(str(place / "ranks"), world_size=2, rank=rank) for rank in (0, 1)]
        net = Net()
        expected["ranks"] = []
        for step in (1, 2):
            found = managers[0].create_snapshot(step=step, metadata={"ranks": "two"})
            for rank, one in enumerate(managers):
                moments = {
                    "state": {0: {"exp_avg": torch.full((4, 3), step + rank / 2), "step": step}},
                    "lr": [0.1, rank],
                }
                model, _ = moonclip.flatten_state_dict(net.state_dict(), "model")
                optimizer, _ = moonclip.flatten_state_dict(moments, "optimizer")
                one.save_rank(found, {**model, **optimizer})
            managers[0].finalize_snapshot(found)
            expected["ranks"].append({"id": found, "step": step})
        pack(place / "ranks", target, "ranks")

        for name in ("bf16", "fp16", "fp8", "fp64"):
            manager = moonclip.CheckpointManager(
                str(place / name), async_save=False, save_dtype=name, compression_level=0
            )
            values = {
                f"w.{kind}": torch.randn(300).to(getattr(torch, kind)) for kind in ("float32", "float16", "bfloat16")
            }
            values["w.int"] = torch.arange(4)
            for step in (1, 2):
                manager.save_raw(step, dict(values))
                values["w.float32"] = values["w.float32"] * 1.01
            expected[name] = seal(place / name, target, name, manager)
    (target / "expected.json").write_text(json.dumps(expected, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
