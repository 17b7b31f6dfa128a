"""Running commands in this process, and a store with something in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from moonclipfs.cli.main import main

WORDS = {"float32": "F32", "uint16": "BF16", "int64": "I64", "uint8": "U8"}


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command; its output is kept apart from that of others. Nobody's store is the default."""
    monkeypatch.delenv("MOONCLIPFS_STORE", raising=False)
    monkeypatch.delenv("MOONCLIPFS_TRACEBACK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert "bug:" not in captured.err
        return Result(code, captured.out, captured.err)

    return call


def safetensors(tensors: dict[str, NDArray[Any]]) -> bytes:
    """A safetensors file; uint16 arrays are the bits of BF16."""
    header, data = {}, b""
    for name, values in tensors.items():
        raw = values.tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": WORDS[values.dtype.name], "shape": list(values.shape), "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def weights(step: int) -> dict[str, NDArray[Any]]:
    """Tensors of a small model that drifts by step; `frozen` does not."""
    rng = np.random.default_rng(7)
    base = {
        "frozen": rng.normal(size=(64, 256)).astype("f4"),
        "head": rng.normal(size=(128, 256)).astype("f4"),
        "scale": rng.integers(0, 1 << 16, 4096).astype("u2"),
    }
    for turn in range(step):
        base["head"] += np.random.default_rng(turn).normal(size=(128, 256)).astype("f4") * np.float32(1e-4)
    return base


def checkpoint(directory: Path, step: int) -> Path:
    """A directory as a trainer leaves it."""
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(safetensors(weights(step)))
    (directory / "config.json").write_text(json.dumps({"step": step}))
    (directory / "notes").mkdir()
    (directory / "notes" / "a b.txt").write_text("note\n" * step)
    (directory / "latest").symlink_to("model.safetensors")
    return directory


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store of the snapshots run1/step-1, run1/step-2, run1/step-10 and other, and their sources."""
    root = tmp_path_factory.mktemp("template")
    store = root / "store"
    (root / "other.bin").write_bytes(bytes(range(256)) * 40)
    commands: list[list[object]] = [["init", store], ["add", store, root / "other.bin", "--as", "other"]]
    for step in (1, 2, 10):
        source = checkpoint(root / "src" / f"step-{step}", step)
        commands.append(["add", store, source, "--as", f"run1/step-{step}"])
    for command in commands:
        assert main([str(argument) for argument in command]) == 0
    return root


@pytest.fixture
def filled(tmp_path: Path, template: Path) -> Path:
    """A copy of the store of `template`; its sources are in src/ beside it."""
    shutil.copytree(template, tmp_path, symlinks=True, dirs_exist_ok=True)
    return tmp_path / "store"
