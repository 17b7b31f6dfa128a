"""import-moonclip: what is said of each snapshot, and the exit code."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.cli.conftest import Run

pytest.importorskip("xxhash")
CORPUS = Path(__file__).parents[1] / "corpus" / "moonclip" / "0.3.1"


def test_import_moonclip_tells_each_snapshot(run: Run, filled: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(CORPUS / "run.zip").extractall(tmp_path / "moonclip")
    done = run("import-moonclip", tmp_path / "moonclip", filled, "--as", "old/run")
    assert done.code == 0
    assert [line.split()[:2] for line in done.out.splitlines()[:2]] == [
        ["imported", "old/run/step-000010@1"],
        ["imported", "old/run/step-000020@1"],
    ]
    assert done.out.splitlines()[-1] == "imported 6 of 6 snapshots"
    assert run("pin", filled).out.split() == ["old/run/step-000020@2", "pinned", "old/run/step-000040@1", "pinned"]
    told = run("import-moonclip", tmp_path / "moonclip", filled, "--as", "old/run", "--json").json["snapshots"]
    assert [(one["step"], one["there"], one["reason"]) for one in told][:2] == [(10, True, ""), (20, True, "")]
    listed = run("ls", f"{filled}:old/run/step-000050").out
    assert [line.split()[-1] for line in listed.splitlines()] == [
        *("model.safetensors", "optimizer.safetensors", "state.json")
    ]


def test_import_moonclip_tells_what_it_leaves_out(run: Run, filled: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(CORPUS / "odd.zip").extractall(tmp_path / "moonclip")
    packs = sorted((tmp_path / "moonclip").glob("snapshots/*/rank_0.pack"), key=lambda path: path.stat().st_size)
    packs[0].write_bytes(b"MOONPACK" + bytes(4088))
    done = run("import-moonclip", tmp_path / "moonclip", filled)
    assert done.code == 1 and done.err.startswith("left out: ") and "imported 1 of 2 snapshots" in done.out
    assert run("import-moonclip", tmp_path / "nothing", filled).code == 3
    assert run("import-moonclip", filled, filled).code == 3
    assert run("import-moonclip", tmp_path / "moonclip", filled, "--as", "@x").code == 2
