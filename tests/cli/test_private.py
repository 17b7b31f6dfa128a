"""Commands on a private store: they read through it, tell of the base store, and leave that alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.store import Store
from tests.cli.conftest import Run
from tests.store.test_alternates import digests


@pytest.fixture
def state(run: Run, filled: Path, tmp_path: Path) -> Path:
    """A private store over a filled one, with a snapshot that was committed from an overlay."""
    state = tmp_path / "state"
    assert run("overlay", "create", filled, "arm", "--base", "run1/step-2", "--state", state).code == 0
    with Store.open(state, write=True) as opened, Overlays(opened) as overlays:
        (LayerPath(overlays.get("arm")) / "new").write_bytes(b"new" * 3000)
    assert run("overlay", "commit", state, "arm", "--as", "run1/arm").code == 0
    return state


def test_commands_on_a_private_store(run: Run, filled: Path, state: Path, tmp_path: Path) -> None:
    assert run("export", f"{filled}:run1/step-2", tmp_path / "base-out").code == 0
    before = digests(filled)
    assert "run1/arm" in run("ls", state).out and "run1/step-2" not in run("ls", state).out
    told = run("verify", state)
    assert told.code == 0 and f"in the base store {filled}, and were only looked for" in told.out
    assert run("verify", "--json", state).json["base_objects"] > 0
    assert "in the base store" in run("stats", state).out
    assert run("stats", "--json", state).json["in_base"]["raw"] > 100_000
    doctor = run("doctor", state)
    assert doctor.code == 0 and "base store" in doctor.out and str(filled) in doctor.out
    assert run("gc", state).code == 0
    assert run("export", f"{state}:run1/arm", tmp_path / "out").code == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "base-out/model.safetensors").read_bytes()
    assert (tmp_path / "out/new").read_bytes() == b"new" * 3000
    assert run("overlay", "discard", state, "arm").code == 0
    assert digests(filled) == before


def test_a_base_store_that_is_gone_is_named_by_every_command(run: Run, filled: Path, state: Path) -> None:
    moved = filled.rename(filled.with_name("moved"))
    for command in (("ls",), ("verify",), ("gc",), ("overlay", "diff")):
        told = run(*command, state, *(["arm"] if len(command) > 1 else []))
        assert told.code == 3 and str(filled) in told.err and "--state" in told.err and told.err.count("\n") == 1
    assert run("overlay", "list", state).out.startswith("NAME"), "which needs nothing of it"
    assert str(filled) in run("doctor", state).out
    assert run("overlay", "create", moved, "other", "--base", "run1/step-2", "--state", state).code == 0
    assert run("verify", state).code == 0
    shutil.rmtree(moved)
