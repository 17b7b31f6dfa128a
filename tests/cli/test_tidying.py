"""pin, thin, optimize, and the rules of forget: what stays, and why."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from tests.cli.conftest import Run, safetensors


def test_pin_keeps_what_forget_would_drop(run: Run, filled: Path) -> None:
    assert run("pin", f"{filled}:run1/step-1").code == 0
    assert run("pin", filled).out == "run1/step-1@1  pinned\n"
    assert run("pin", "--json", filled).json == {"pins": [{"name": "run1/step-1", "version": 1, "reasons": ["pinned"]}]}
    done = run("forget", "--dry-run", "--keep-last", 1, f"{filled}:run1")
    assert [line.split() for line in done.out.splitlines()[:3]] == [
        ["keep", "run1/step-1@1", "pinned"],
        ["would", "forget", "run1/step-2@1", "no", "rule", "keeps", "it"],
        ["keep", "run1/step-10@1", "newest", "of", "its", "line,", "among", "the", "last", "1"],
    ]
    refused = run("forget", f"{filled}:run1/step-1")
    assert refused.code == 2 and "run1/step-1@1 is pinned" in refused.err
    assert run("pin", "--undo", f"{filled}:run1/step-1").code == 0
    assert run("forget", f"{filled}:run1/step-1").code == 0
    assert run("pin", "--undo", filled).code == 2
    assert run("pin", f"{filled}:nothing").code == 3


def test_forget_by_points_best_and_total(run: Run, filled: Path) -> None:
    done = run("forget", "--dry-run", "--json", "--keep-every", 2, "--keep-every-last", 1, filled).json
    assert [one["name"] for one in done["keep"]] == ["other", "run1/step-10"]
    done = run("forget", "--dry-run", "--json", "--keep-total", 2, f"{filled}:run1").json
    assert [one["reasons"] for one in done["drop"]] == [["more than 2 in all"]]
    assert run("forget", "--keep-every-last", 1, filled).code == 2
    assert run("forget", "--dry-run", "--keep-best", 1, f"{filled}:run1").code == 0


def test_optimize_tells_what_it_does(run: Run, filled: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=40_000).astype("f4")
    for step in range(4):
        shutil.rmtree(tmp_path / "step", ignore_errors=True)
        (tmp_path / "step").mkdir()
        (tmp_path / "step" / "m.safetensors").write_bytes(safetensors({"w": values}))
        assert run("add", filled, tmp_path / "step", "--as", f"long/step-{step}").code == 0
        values = values * (1 + rng.normal(size=40_000).astype("f4") * np.float32(1e-5))
    told = run("optimize", "--dry-run", "--json", f"{filled}:long").json
    assert (told["snapshots"], told["objects"], told["gc"]) == (["long/step-3@1"], 1, None) and told["links"] > 1
    done = run("optimize", f"{filled}:long")
    assert done.code == 0 and "stored 1 object anew" in done.out
    assert "nothing to store anew" in run("optimize", f"{filled}:long").out
    assert run("optimize", f"{filled}:long/step-3@1").code == 2
    assert run("verify", filled).code == 0


def test_thin_tells_what_it_does(run: Run, filled: Path, tmp_path: Path) -> None:
    for step in range(2):
        shutil.rmtree(tmp_path / "step", ignore_errors=True)
        (tmp_path / "step").mkdir()
        for name in ("model", "optimizer"):
            data = np.random.default_rng(step).bytes(50_000) + name.encode()
            (tmp_path / "step" / f"{name}.safetensors").write_bytes(data)
        assert run("add", filled, tmp_path / "step", "--as", f"tuned/step-{step}").code == 0
    arguments = ("thin", "--keep-optimizer-last", 1, f"{filled}:tuned")
    told = run(*arguments, "--dry-run", "--json").json
    assert [one["dropped"] for one in told["snapshots"]] == [["optimizer.safetensors"], []]
    done = run(*arguments)
    assert done.code == 0 and "thinned 1 snapshot\n" in done.out and "freed" in done.out
    assert [line.split()[-1] for line in run("ls", f"{filled}:tuned/step-0").out.splitlines()][-1:] == [
        "model.safetensors"
    ]
    assert run("thin", "--keep-optimizer-last", 1, filled).code == 2
    assert run("thin", "--keep-optimizer-last", 0, f"{filled}:tuned").code == 2
    assert run("thin", f"{filled}:tuned").code == 2
