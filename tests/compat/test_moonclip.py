"""A program written for moonclip runs unchanged: its arguments and defaults, what goes in and what comes out.

The signatures are those of moonclip 0.3.1, taken with `inspect` from its wheel; C and a number are faults that it had.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moonclipfs.compat import moonclip_arguments  # noqa: E402
from moonclipfs.compat.moonclip import CheckpointManager  # noqa: E402
from moonclipfs.errors import CorruptError, NotFoundError  # noqa: E402
from moonclipfs.store.store import Store  # noqa: E402
from moonclipfs.torch.manager import CheckpointManager as Manager  # noqa: E402

_STATE = dict.fromkeys(("model", "optimizer", "scheduler", "scaler"))
_NEEDED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "__init__": {
        "storage_root": "./checkpoints", "compression_level": 3, "max_full_snapshots": 5, "max_deltas_per_full": 10,
        "full_every_steps": 5000, "delta_max_ratio": 0.95, "world_size": None, "rank": None, "merge_stride": 0,
        "merge_max_chain": 10, "save_dtype": None, "max_total_snapshots": None, "async_save": True,
        "keep_base_in_memory": True, "pin_device_copies": True, "kwargs": _NEEDED,
    },
    "save": {"step": _NEEDED, **_STATE, "extra": None, "metadata": None},
    "save_raw": {"step": _NEEDED, "tensors": _NEEDED, "metadata": None},
    "save_best": {
        "step": _NEEDED, "metric": _NEEDED, **_STATE, "metric_name": "val_loss", "lower_is_better": True,
        "metadata": None,
    },
    "save_final": {"step": _NEEDED, **_STATE, "metadata": None},
    "save_to_pt": {"path": _NEEDED, **_STATE},
    "save_to_safetensors": {"path": _NEEDED, "model": None, "metadata": None},
    "load": {"snap_id": _NEEDED, **_STATE},
    "load_latest": _STATE,
    "resume": _STATE,
    "load_tensors": {"snap_id": _NEEDED, "names": _NEEDED},
    "describe": {"snap_id": _NEEDED},
    **{
        name: {}
        for name in (
            "describe_latest", "flush", "last_queue_wait", "list_snapshots", "merge_now", "print_stats",
            "restore_from_remote", "stats", "sync_now",
        )
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That class has no close: what its managers still do is waited for, before the store is removed."""
    made: list[Manager] = []

    class Kept(Manager):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr("moonclipfs.compat.moonclip.Manager", Kept)
    yield
    for manager in made:
        with contextlib.suppress(Exception):
            manager.close()


BY_NAME_ONLY = {
    "rollback_interval_steps": 10000, "max_rollback_snapshots": 3, "s3_bucket": None, "s3_region": "us-east-1",
    "s3_prefix": "", "s3_endpoint": None, "s3_access_key": None, "s3_secret_key": None, "s3_path_style": False,
    "sync_every_n_saves": 100, "s3_session_token": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing was told yet, there is no launcher, and nothing is at work when `tmp_path` goes."""
    monkeypatch.setattr(moonclip_arguments, "_told", set())
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    for thread in threading.enumerate():  # it has no close() that would wait for these
        if thread.name in ("moonclipfs gc", "merge"):
            thread.join()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(40, 40)
        self.head = torch.nn.Linear(40, 3)

    def forward(self, values: Any) -> Any:
        return self.head(torch.relu(self.inner(values)))


def parts() -> tuple[Any, Any, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def train(net: Any, optimizer: Any, scheduler: Any) -> None:
    optimizer.zero_grad()
    net(torch.randn(4, 40)).square().mean().backward()
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_moonclip(name: str) -> None:
    found = inspect.signature(getattr(CheckpointManager, name)).parameters
    assert {key: one.default for key, one in found.items() if key != "self"} == SIGNATURES[name]
    assert [key for key in found if key != "self"] == list(SIGNATURES[name]), (
        "the order is that of positional arguments"
    )


def test_arguments_by_name_and_their_defaults() -> None:
    assert moonclip_arguments.FURTHER == BY_NAME_ONLY
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        CheckpointManager("nowhere", foo=1)


def test_the_example_of_its_readme_runs(tmp_path: Path) -> None:
    net, optimizer, scheduler = parts()
    root = str(tmp_path / "deep" / "checkpoints")

    def run(stop: int = 12) -> int:
        manager = CheckpointManager(root, save_dtype="bf16", max_total_snapshots=3)
        start = manager.resume(model=net, optimizer=optimizer, scheduler=scheduler)
        for step in range(start, stop):
            train(net, optimizer, scheduler)
            if step % 2 == 0:
                manager.save(step=step, model=net, optimizer=optimizer, metadata={"loss": f"{step:.4f}"})
        manager.flush()
        return start

    assert run() == 0
    assert run(stop=14) == 11
    manager = CheckpointManager(root)
    snapshots = manager.list_snapshots()
    assert [one["step"] for one in snapshots] == [0, 8, 10, 12], "the last three, and step 0, a rollback point"
    assert manager.resume(net, optimizer) == 13 and manager.last_resume_metadata == {"loss": "12.0000"}


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    net, optimizer, scheduler = parts()
    train(net, optimizer, scheduler)
    manager = CheckpointManager(str(tmp_path / "c"))
    assert manager.resume(net) == 0 and manager.last_resume_metadata == {}
    assert manager.list_snapshots() == [] and manager.stats() == {"total_snapshots": 0}
    with pytest.raises(RuntimeError, match="Checkpoint not found"):
        manager.load_latest()
    found = manager.save(5, net, optimizer, scheduler, extra={"a": {"x": torch.ones(2)}, "b": 3}, metadata={"k": "v"})
    (snapshot,) = manager.list_snapshots()
    assert (snapshot["id"], snapshot["step"], snapshot["metadata"], snapshot["ranks"]) == (found, 5, {"k": "v"}, 1)
    assert set(snapshot) == {
        "step", "id", "is_delta", "total_compressed", "total_raw", "skipped_tensors", "delta_tensors", "full_tensors",
        "ranks", "metadata",
    }  # fmt: skip
    loaded = manager.load(found)
    assert set(loaded) == {"model", "optimizer", "scheduler", "extra/a", "extra/b"} and loaded["extra/b"] == 3
    assert torch.equal(loaded["extra/a"]["x"], torch.ones(2))
    other, other_optimizer, _ = parts()
    latest, state = manager.load_latest(model=other, optimizer=other_optimizer)
    assert latest == found and torch.equal(other.inner.weight, net.inner.weight)
    assert torch.equal(state["model"]["head.bias"], net.head.bias)
    assert other_optimizer.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    raw = manager.load_tensors(found, ["model/inner.weight"])
    assert raw == {"model/inner.weight": bytearray(net.inner.weight.detach().numpy().tobytes())}
    about = manager.describe(found)
    assert about == manager.describe_latest() and about["metadata"] == {"k": "v"} and about["step"] == 5
    (weight,) = [one for one in about["tensors"] if one["name"] == "model/inner.weight"]
    assert (weight["shape"], weight["dtype"], weight["raw_size"]) == ([40, 40], "float32", 6400)
    for wrong in ("run/step-000099", "00000000-0000-0000-0000-000000000000"):
        with pytest.raises(RuntimeError):
            manager.load(wrong)
    with pytest.raises(RuntimeError):
        manager.load_tensors(found, ["model/nothing"])
    assert manager.stats()["total_snapshots"] == 1
    manager.print_stats()
    assert manager.last_queue_wait() >= 0 and manager.restore_from_remote() is False
    manager.sync_now()


def test_raw_tensors_as_tensors_and_as_bytes(tmp_path: Path) -> None:
    manager = CheckpointManager(str(tmp_path / "c"), async_save=False)
    found = manager.save_raw(9, {"a": torch.ones(2), "model/b": ([2], "float32", b"\0" * 8)}, {"raw": "yes"})
    state = manager.load(found)["model"]
    assert torch.equal(state["a"], torch.ones(2)) and torch.equal(state["model/b"], torch.zeros(2))
    with pytest.raises(ValueError, match="no dtype 'float31'"):
        manager.save_raw(9, {"a": ([1], "float31", b"\0")})


def test_the_best_survives_a_restart_and_retention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, *_ = parts()
    root = str(tmp_path / "c")
    manager = CheckpointManager(root, max_total_snapshots=2)
    assert manager.save_best(1, 0.5, net) and manager.save_best(2, 0.6, net) is None
    manager.flush()
    manager = CheckpointManager(root, max_total_snapshots=2)
    assert manager.save_best(3, 0.55, net) is None, "it is remembered what was the best"
    for step in range(4, 8):
        manager.save(step, net)
    manager.flush()
    assert [(one["step"], one["metadata"].get("val_loss")) for one in manager.list_snapshots()] == [
        *((1, "0.500000"), (6, None), (7, None))
    ]
    assert "New best val_loss=0.500000 at step 1" in capsys.readouterr().out


def test_c14_c29_c30_rollback_points_and_pins_and_arguments_given_at_reopen(tmp_path: Path) -> None:
    net, *_ = parts()
    root = str(tmp_path / "c")
    manager = CheckpointManager(root, max_full_snapshots=1, max_deltas_per_full=1, rollback_interval_steps=10,
                                max_rollback_snapshots=1)  # fmt: skip
    for step in (5, 10, 15, 20, 25):
        manager.save(step, net)
        if step == 5:
            assert manager.pin(5) is True and manager.pin(99) is False
    manager.flush()
    assert [one["step"] for one in manager.list_snapshots()] == [5, 20, 25] and manager.pinned_steps() == [5]
    manager = CheckpointManager(root, max_total_snapshots=1, max_rollback_snapshots=0)
    assert manager.unpin(5) is True
    manager.save_final(30, net)
    assert [one["step"] for one in manager.list_snapshots()] == [30]


def test_merging_makes_the_newest_quick_to_read_and_deletes_nothing(tmp_path: Path) -> None:
    """C15: save_final returns when it is complete; C01: what was gained and lost since comes out right."""
    torch.manual_seed(0)
    net, optimizer, scheduler = parts()
    root = tmp_path / "c"
    manager = CheckpointManager(str(root), merge_stride=2)
    for step in range(1, 6):
        train(net, optimizer, scheduler)
        manager.save(step, net, optimizer)
    net.more = torch.nn.Linear(5, 5)
    del net.head
    manager.save_final(6, net)
    with Store.open(root) as store:
        links = [
            len(store.objects.chain(one)) - 1
            for _, entry in store.walk(store.resolve("run/step-000006"))
            for one in store.recipe(entry).object_ids()
        ]
    assert max(links) <= 1 and [one["step"] for one in manager.list_snapshots()] == [1, 2, 3, 4, 5, 6]
    assert set(manager.load("run/step-000006")["model"]) == set(net.state_dict())
    assert "head.weight" in manager.load("run/step-000005")["model"]


def test_c15_save_final_raises_what_its_merge_failed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **rest: Any) -> Any:
        raise CorruptError("a tensor is damaged")

    monkeypatch.setattr("moonclipfs.compat.moonclip.optimize", broken)
    net, *_ = parts()
    manager = CheckpointManager(str(tmp_path / "c"))
    with pytest.raises(RuntimeError, match="a tensor is damaged"):
        manager.save_final(1, net)
    assert [one["step"] for one in manager.list_snapshots()] == [1], "it is saved all the same"


def test_meaningless_arguments_are_told_once(tmp_path: Path, expect_log: Callable[[str], None]) -> None:
    expect_log("compression_level=9 has no meaning here")
    for _ in range(2):
        CheckpointManager(str(tmp_path / "c"), compression_level=9)
    assert moonclip_arguments._told == {"compression_level"}


def test_precision_by_part_and_typos(tmp_path: Path, expect_log: Callable[[str], None]) -> None:
    net, optimizer, scheduler = parts()
    train(net, optimizer, scheduler)
    manager = CheckpointManager(
        str(tmp_path / "c"),
        async_save=False,
        save_dtype={"model/*": "none", "optimizer/*": "bf16", "weight[?]": "fp16"},
    )
    expect_log("pattern 'weight.*' matches no tensor")
    found = manager.load(manager.save(1, net, optimizer))
    assert torch.equal(found["model"]["inner.weight"], net.inner.weight)
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], moment.to(torch.bfloat16).float())
    with pytest.raises(RuntimeError, match="bf17"):
        CheckpointManager(str(tmp_path / "c"), save_dtype="bf17")
    assert CheckpointManager(str(tmp_path / "c"), save_dtype="none").save_dtype == "none"


def test_the_topology_has_to_be_said_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="rank 1 of 4"):
        CheckpointManager(str(tmp_path / "c"))
    for topology in ({"world_size": "auto", "rank": "auto"}, {"world_size": 4, "rank": 1}):
        shared = CheckpointManager(str(tmp_path / "c"), **topology)
        assert (shared.world_size, shared.rank) == (4, 1)
    manager = CheckpointManager(str(tmp_path / "c"), world_size=1, rank=0)
    assert (manager.world_size, manager.rank) == (1, 0)


_RANK = """
import sys, torch
from moonclipfs.compat.moonclip import CheckpointManager
torch.set_num_threads(1)
manager = CheckpointManager(sys.argv[1], world_size="auto", rank="auto", merge_stride=1)
start = manager.resume({"w": torch.zeros(50, 50)})
for step in range(start, start + 2):
    state = {"mine": torch.full((20, 20), float(step + manager.rank))}
    manager.save(step, {"w": torch.full((50, 50), float(step))}, state, metadata={"of": "two"})
manager.flush()
loaded = manager.load(f"run/step-{start + 1:06}")
assert float(loaded["model"]["w"][0, 0]) == start + 1
assert float(loaded["optimizer"]["mine"][0, 0]) == start + 1 + manager.rank
assert manager.list_snapshots()[-1]["ranks"] == 2
"""


def test_ranks_share_one_store(tmp_path: Path) -> None:
    manager = CheckpointManager(str(tmp_path / "c"))
    manager.save(0, {"w": torch.zeros(50, 50)})
    manager.flush()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(tmp_path / "c")], env={**os.environ, "WORLD_SIZE": "2", "RANK": str(rank)}
        )
        for rank in (0, 1)
    ]
    assert [one.wait(120) for one in ranks] == [0, 0]
    assert [one["step"] for one in manager.list_snapshots()] == [0, 1, 2]


def test_a_bucket_is_refused_and_not_silently_left_out(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not copied to a bucket"):
        CheckpointManager(str(tmp_path / "c"), s3_bucket="b")
    assert not (tmp_path / "c").exists()


def test_a_store_of_moonclip_itself_is_told_how_to_import(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RuntimeError, match="import-moonclip"):
        CheckpointManager(str(tmp_path))


def test_ours_and_this_one_read_the_same_snapshots(tmp_path: Path) -> None:
    net, optimizer, scheduler = parts()
    train(net, optimizer, scheduler)
    manager = CheckpointManager(str(tmp_path / "c"))
    manager.save(3, net, optimizer, scheduler)
    manager.flush()
    with Manager(tmp_path / "c") as ours:
        other, other_optimizer, _ = parts()
        assert ours.resume(other, other_optimizer) == 4 and torch.equal(other.head.weight, net.head.weight)


def test_exports(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    net, optimizer, _ = parts()
    manager = CheckpointManager(str(tmp_path / "c"))
    path = manager.save_to_pt(str(tmp_path / "x.pt"), net, optimizer)
    assert set(torch.load(path)) == {"model", "optimizer"}
    path = manager.save_to_safetensors(str(tmp_path / "x.safetensors"), net, {"a": "b"})
    assert torch.equal(load_file(path)["head.weight"], net.head.weight)
    with pytest.raises(ValueError, match="model"):
        manager.save_to_safetensors(str(tmp_path / "y"))


def test_what_was_never_saved_is_passed_over_here_and_an_error_in_ours(tmp_path: Path) -> None:
    net, optimizer, scheduler = parts()
    manager = CheckpointManager(str(tmp_path / "c"))
    manager.save(3, net)
    assert manager.resume(net, optimizer, scheduler) == 4
    with Manager(tmp_path / "c") as ours, pytest.raises(NotFoundError, match="has no scheduler; it has model"):
        ours.resume(net, scheduler=scheduler)
