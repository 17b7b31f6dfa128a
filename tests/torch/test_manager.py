"""Saving and resuming a training run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import moonclipfs
from moonclipfs import CheckpointManager
from moonclipfs.errors import CorruptError, FormatVersionError, NotFoundError, UsageError
from moonclipfs.store.retention import Rules
from moonclipfs.store.store import Store
from tests.torch.kit import adam, model, same, train


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "store", "run1") as made:
        yield made


def test_a_run_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    module = model()
    optimizer = adam(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with CheckpointManager(tmp_path / "store", "run1") as manager:
        assert manager.resume(module, optimizer, scheduler) == 0
        for step in range(3):
            train(module, optimizer)
            scheduler.step()
            manager.save(step, module, optimizer, scheduler)
    again, other = model(1), None
    other = adam(again)
    schedule = torch.optim.lr_scheduler.StepLR(other, 2)
    with CheckpointManager(tmp_path / "store", "run1") as manager:
        assert manager.resume(again, other, schedule) == 3
    assert same(again.state_dict(), module.state_dict())
    assert same(other.state_dict(), optimizer.state_dict())
    assert same(schedule.state_dict(), scheduler.state_dict())
    train(module, optimizer)
    train(again, other)
    assert same(again.state_dict(), module.state_dict())


def test_a_snapshot_is_a_directory_of_safetensors_files(manager: CheckpointManager, tmp_path: Path) -> None:
    module = model()
    optimizer = adam(module)
    train(module, optimizer)
    assert manager.save(500, module, optimizer) == "run1/step-000500"
    manager.flush()
    with moonclipfs.open(tmp_path / "store", "run1/step-000500") as snapshot:
        assert snapshot.files() == ["model.safetensors", "optimizer.safetensors", "state.json"]
        assert [one.name for one in snapshot.tensors("model.safetensors")] == sorted(module.state_dict())
        names = {one.name for one in snapshot.tensors("optimizer.safetensors")}
        assert names == {
            f"{name}.{state}" for name, _ in module.named_parameters() for state in ("exp_avg", "exp_avg_sq", "step")
        }
        assert torch.equal(snapshot.torch("1.weight", "model.safetensors"), module[1].weight)  # type: ignore[index]


def test_latest_is_what_was_saved_last_whatever_its_step(manager: CheckpointManager) -> None:
    """Case 23: steps repeat and go back."""
    for step in (5, 5, 3):
        manager.save_raw(step, {"a": torch.tensor([float(step)])})
    assert [info.id for info in manager.list_snapshots()] == ["run1/step-000005@2", "run1/step-000003@1"]
    assert manager.load_latest().step == 3
    assert manager.resume() == 4


def test_a_typo_in_a_path_makes_no_store(tmp_path: Path) -> None:
    """Case 38."""
    with CheckpointManager(tmp_path / "typo", "run1") as manager:
        assert manager.list_snapshots() == []
        assert manager.resume(model()) == 0
        with pytest.raises(NotFoundError, match="no snapshot"):
            manager.load_latest(model())
        with pytest.raises(NotFoundError, match="no snapshot of step 5"):
            manager.load(5)
    assert not (tmp_path / "typo").exists()
    with pytest.raises(NotFoundError, match="there is no directory"):
        CheckpointManager(tmp_path / "no" / "where")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("")
    with pytest.raises(FormatVersionError, match="not a store"):
        CheckpointManager(tmp_path / "mine")


def test_pins_are_seen_by_others(manager: CheckpointManager, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        manager.save_raw(step, {"a": torch.arange(step)})
    manager.pin(2)
    with CheckpointManager(tmp_path / "store", "run1") as other:
        assert other.pinned_steps() == [2]
        other.pin("run1/step-000001")
        other.unpin(2)
    assert manager.pinned_steps() == [1]
    with pytest.raises(NotFoundError):
        manager.pin(7)


def test_named_tensors_are_read_alone(manager: CheckpointManager) -> None:
    module = model()
    optimizer = adam(module)
    train(module, optimizer)
    manager.save(1, module, optimizer, extra={"1.weight": torch.ones(3)})
    found = manager.load_tensors(1, ["1.weight.exp_avg", "model:1.weight"])
    assert same(found["model:1.weight"], module[1].weight.detach())  # type: ignore[index]
    assert same(found["1.weight.exp_avg"], optimizer.state[module[1].weight]["exp_avg"])  # type: ignore[index]
    with pytest.raises(UsageError, match=r"say model:1\.weight"):
        manager.load_tensors(1, ["1.weight"])
    with pytest.raises(NotFoundError, match=r"did you mean 1\.weight"):
        manager.load_tensors(1, ["1.weights"])


def test_the_final_snapshot_is_one_link_from_a_full_one(
    manager: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 15: it returns when that is done, and a failure is raised."""
    torch.manual_seed(0)
    weights = torch.randn(100_000)
    for step in range(5):
        manager.save_raw(step, {"a": weights + step * 1e-4 * torch.randn(100_000)})
    last = {"a": weights + 1e-3}
    assert manager.save_final(5, last) == "run1/step-000005"
    with Store.open(tmp_path / "store") as store:
        entry = store.lookup(store.resolve("run1/step-000005"), b"model.safetensors")
        links = [len(store.objects.chain(one)) - 1 for one in store.recipe(entry).object_ids()]
        assert max(links) <= 1
    assert same(manager.load_latest().state["model"], last)

    def fail(*_: object, **__: object) -> None:
        raise CorruptError("it does not read back")

    monkeypatch.setattr("moonclipfs.torch.manager.optimize", fail)
    with pytest.raises(CorruptError, match="it does not read back"):
        manager.save_final(6, last)


def test_the_best_survives_a_restart(manager: CheckpointManager, tmp_path: Path) -> None:
    assert manager.save_best(1, 0.5, {"a": torch.ones(1)}) == "run1/step-000001"
    assert manager.save_best(2, 0.7, {"a": torch.ones(1)}) is None
    assert manager.save_best(3, float("nan"), {"a": torch.ones(1)}) is None
    assert manager.save_best(3, 0.2, {"a": torch.ones(1)}, metric_name="accuracy", lower_is_better=False) is not None
    manager.flush()
    with CheckpointManager(tmp_path / "store", "run1", retention=Rules(keep_last=1)) as again:
        assert again.save_best(4, 0.5, {"a": torch.ones(1)}) is None
        assert again.save_best(5, 0.4, {"a": torch.ones(1)}) == "run1/step-000005"
        assert again.save_best(6, 0.1, {"a": torch.ones(1)}, metric_name="accuracy", lower_is_better=False) is None
        for step in (7, 8):
            again.save_raw(step, {"a": torch.ones(1)})
        assert [info.step for info in again.list_snapshots()] == [3, 5, 8], "the best by each metric, and the last"


def test_rules_of_a_manager_are_for_its_run_alone(manager: CheckpointManager, tmp_path: Path) -> None:
    """Case 6: the newest always stays; what a rule lets go does not take its base with it."""
    for step in range(3):
        manager.save_raw(step, {"a": torch.randn(5000)})
    manager.flush()
    with CheckpointManager(tmp_path / "store", "run2", retention=Rules(keep_total=1)) as other:
        for step in range(4):
            tensors = {"a": torch.full((50_000,), float(step))}
            other.save_raw(step, tensors)
        assert [info.step for info in other.list_snapshots()] == [3]
        assert same(other.load_latest().state["model"], tensors)
    assert [info.step for info in manager.list_snapshots()] == [0, 1, 2]


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)])
def test_a_step_of_numpy_or_torch_is_a_step(manager: CheckpointManager, step: int) -> None:
    assert manager.save_raw(step, {"a": torch.ones(1)}) == "run1/step-000007"
    manager.flush()
    assert manager.load_latest().step == 7


@pytest.mark.parametrize("step", [-1, 1.0, "5", None, True])
def test_what_is_no_step_is_told_at_once(manager: CheckpointManager, step: int) -> None:
    with pytest.raises(UsageError, match="step"):
        manager.save_raw(step, {"a": torch.ones(1)})


def test_a_closed_manager_saves_nothing_and_says_so(manager: CheckpointManager) -> None:
    manager.save_raw(1, {"a": torch.ones(1)})
    manager.close()
    with pytest.raises(UsageError, match="is closed"):
        manager.save_raw(2, {"a": torch.ones(1)})


def test_an_optimizer_that_does_not_fit_is_told_before_anything_is_changed(manager: CheckpointManager) -> None:
    module = model()
    optimizer = adam(module)
    train(module, optimizer)
    manager.save(1, module, optimizer)
    other = model(1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for unfit in (adam(torch.nn.Linear(2, 2)), torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)):
        with pytest.raises(UsageError, match="does not fit the optimizer"):
            manager.resume(other, unfit)
        assert same(dict(other.state_dict()), before)
