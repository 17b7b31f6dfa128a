"""The example: a model that is trained with its experts paged from a mount reads a text, on trial and for good."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import re
from pathlib import Path

import pytest
import torch

import moonclipfs
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.store.overlaydirs import overlay_infos
from moonclipfs.store.store import Store
from tests.cli.conftest import Run, run
from tests.demo.gpt import corpus
from tests.examples.dry_read import RAM, SLOTS, main
from tests.examples.moe import create, measure, open_model, read
from tests.fuse.conftest import Mounter, fuse, mounter

__all__ = ["fuse", "mounter", "run"]

PYTHON = corpus(1 << 19).numpy().tobytes()
ENGLISH = Path(pydoc_data.topics.__file__)
EXPERTS = 6


@pytest.fixture(autouse=True)
def steady() -> None:
    """One thread, and the same numbers in every run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def everything(root: Path) -> dict[str, tuple[object, ...]]:
    """Of every file and directory below a path: what stat tells, but the time of the last read, and a digest."""
    found = {}
    for path in (root, *sorted(root.rglob("*"))):
        stat = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(root))] = (
            stat.st_ino, stat.st_mode, stat.st_nlink, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, digest,
        )  # fmt: skip
    return found


def example(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[float, float, str]:
    """Run the program; returns the loss before and after, and its last line."""
    capsys.readouterr()
    main([str(argument) for argument in arguments])
    out = capsys.readouterr().out
    losses = re.search(r"loss ([\d.]+) before, ([\d.]+) after", out)
    assert losses is not None, out
    return float(losses[1]), float(losses[2]), out.splitlines()[-1]


def test_a_model_reads_a_text_on_trial_and_for_good(
    store: Store, mounter: Mounter, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    mounted = mounter(store.path, read_only=False, seal_after=None)
    place = mounted.path / "run" / "model"
    place.mkdir(parents=True)
    create(place, EXPERTS)
    model = open_model(place, SLOTS, RAM)
    untrained = measure(model, PYTHON)
    read(model, place, PYTHON, 40)
    trained = measure(model, PYTHON)
    assert trained < untrained - 2
    report = model.mixture.experts.report()
    assert report["evictions"] > EXPERTS and report["writebacks"] > EXPERTS, "experts were paged while it was trained"
    assert moonclipfs.seal(place) == "run/model@1"

    before = everything(place)
    first, learned, last = example(capsys, mounted.path, "run/model", ENGLISH, "--steps", 20)
    assert learned < first - 0.3 and last == "nothing was kept"
    assert everything(place) == before
    assert list((mounted.path / "@overlays").iterdir()) == [] and list(store.names().bound()) == ["run/model"]

    again, learned, last = example(capsys, mounted.path, "run/model", ENGLISH, "--steps", 20, "--commit", "run/model-2")
    assert again == first and learned < first - 0.3 and last == "kept as run/model-2@1"
    assert everything(place) == before
    kept = open_model(mounted.path / "run" / "model-2", SLOTS, RAM)
    assert round(measure(kept, ENGLISH.read_bytes()), 3) == learned
    assert round(measure(open_model(place, SLOTS, RAM), PYTHON), 3) == round(trained, 3)

    result = run("diff", f"{store.path}:run/model", f"{store.path}:run/model-2", "--json")
    assert result.code == 1
    changed = {(tensor["name"], tensor["left"]["path"]) for tensor in result.json["tensors"]}
    assert ("head.weight", "core.safetensors") in changed
    assert {path for name, path in changed if name == "up"} <= {
        f"experts/e{one:05}.safetensors" for one in range(EXPERTS)
    }
    assert all(tensor["change"] == "changed" and tensor["values"]["max_abs"] > 0 for tensor in result.json["tensors"])
    assert not result.json["files"], "no file came or went"
    assert "ERROR" not in mounted.log_text()


def test_a_dry_run_of_experts_is_no_checkpoint(store: Store, mounter: Mounter) -> None:
    mounted = mounter(store.path, read_only=False, seal_after=None)
    create(mounted.path / "model", EXPERTS)
    moonclipfs.seal(mounted.path / "model")
    with moonclipfs.dry_run(mounted.path, "model") as place:
        model = open_model(place, SLOTS, RAM)
        with pytest.raises(RuntimeError, match="is in a temporary overlay, which is thrown away"):
            model.state_dict()
    with moonclipfs.dry_run(mounted.path, "model", commit="model-2") as place:
        assert "mixture.experts._extra_state" in open_model(place, SLOTS, RAM).state_dict()


def test_without_a_mount_it_is_the_same(store: Store) -> None:
    with moonclipfs.dry_run(store.path, mount=False, commit="model") as place:
        assert isinstance(place, LayerPath)
        create(place, EXPERTS)
    with moonclipfs.dry_run(store.path, "model", mount=False) as place:
        model = open_model(place, SLOTS, RAM)
        before = measure(model, PYTHON)
        read(model, place, PYTHON, 10)
        assert measure(model, PYTHON) < before - 1
        with pytest.raises(RuntimeError, match="is in a temporary overlay"):
            model.state_dict()
    assert list(store.log.refresh().bound()) == ["model"]
    assert overlay_infos(store.path) == []
