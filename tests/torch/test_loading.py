"""Loading: straight into what exists, checked before anything changes, past what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonclipfs import CheckpointManager
from moonclipfs.errors import CorruptError, NotFoundError, UsageError
from moonclipfs.store.store import Store
from moonclipfs.store.thin import thin
from tests.torch.kit import adam, model, same, train


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "store", "r") as made:
        yield made


@pytest.fixture
def trained(manager: CheckpointManager) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = model()
    optimizer = adam(module)
    train(module, optimizer)
    manager.save(1, module, optimizer)
    return module, optimizer


def places(state: dict[Any, Any]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in state.items()}


Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


def test_tensors_are_read_into_the_memory_that_they_have(manager: CheckpointManager, trained: Trained) -> None:
    module, optimizer = model(1), None
    optimizer = adam(module)
    train(module, optimizer, 2)
    before = places(module.state_dict()), [places(one) for one in optimizer.state.values()]
    manager.load(1, module, optimizer)
    assert (places(module.state_dict()), [places(one) for one in optimizer.state.values()]) == before
    assert same(module.state_dict(), trained[0].state_dict())
    assert same(optimizer.state_dict(), trained[1].state_dict())


def test_names_that_do_not_match_are_told_before_anything_changes(manager: CheckpointManager, trained: Trained) -> None:
    other = torch.nn.Sequential(*model(1), torch.nn.Linear(4, 4))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(UsageError, match=r"does not fit the model: it lacks 3\.bias, 3\.weight \(strict=False"):
        manager.load(1, other)
    assert same(dict(other.state_dict()), before)
    manager.load(1, other, strict=False)
    assert same(other[0].state_dict(), trained[0][0].state_dict())  # type: ignore[index]
    assert same(other[3].weight.detach(), before["3.weight"])
    with pytest.raises(UsageError, match=r"it has also 2\.bias, 2\.weight"):
        manager.load(1, model(1)[:2])  # type: ignore[index]


def test_shapes_that_do_not_match_are_told_before_anything_changes(
    manager: CheckpointManager, trained: Trained
) -> None:
    other = model(1, width=16)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(UsageError, match=r"0\.weight is saved as \(50, 32\), and \(50, 16\) in the model"):
            manager.load(1, other, strict=strict)
    assert same(dict(other.state_dict()), before)


def test_a_model_of_another_dtype_or_layout_gets_the_values(manager: CheckpointManager, trained: Trained) -> None:
    module = model(1).to(torch.bfloat16)
    manager.load(1, module)
    assert same(module.state_dict(), trained[0].to(torch.bfloat16).state_dict())
    turned = torch.nn.Linear(32, 32)
    turned.weight = torch.nn.Parameter(torch.zeros(32, 32).t())
    manager.save(2, trained[0][1])  # type: ignore[index]
    manager.load(2, turned)
    assert torch.equal(turned.weight, trained[0][1].weight)  # type: ignore[index]


def test_tied_weights_are_read_once_and_stay_tied(manager: CheckpointManager) -> None:
    def tied() -> torch.nn.ModuleDict:
        one, two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        two.weight = one.weight
        return torch.nn.ModuleDict({"one": one, "two": two})

    first, second = tied(), tied()
    manager.save(1, first)
    manager.load(1, second)
    assert second["one"].weight is second["two"].weight
    assert same(second.state_dict(), first.state_dict())


def test_a_model_on_the_meta_device_gets_its_tensors(manager: CheckpointManager, trained: Trained) -> None:
    with torch.device("meta"):
        module = model()
    manager.load(1, module)
    assert same(module.state_dict(), trained[0].state_dict())


class Counted(torch.nn.Module):
    """Has extra state, and a hook that sees what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_module_with_state_of_its_own_gets_it(manager: CheckpointManager) -> None:
    module, other = Counted(), Counted()
    module.count = 7
    manager.save(1, module)
    manager.load(1, other)
    assert other.count == 7 and same(other.inner.state_dict(), module.inner.state_dict())
    with pytest.raises(UsageError, match=r"does not fit the model: .*size mismatch for inner\.weight"):
        other.inner = torch.nn.Linear(5, 5)
        manager.load(1, other)


def test_hooks_of_a_module_see_what_is_loaded(manager: CheckpointManager) -> None:
    old = torch.nn.Linear(3, 3)
    manager.save_raw(1, {"old.weight": old.weight, "old.bias": old.bias})
    module = torch.nn.Linear(3, 3)

    def rename(module: torch.nn.Module, state: dict[str, Any], *_: object) -> None:
        for name in list(state):
            state[name.removeprefix("old.")] = state.pop(name)

    module.register_load_state_dict_pre_hook(rename)
    manager.load(1, module)
    assert same(module.state_dict(), old.state_dict())


def test_a_compiled_or_wrapped_module_is_the_one_inside(manager: CheckpointManager, trained: Trained) -> None:
    class DataParallel(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped = DataParallel(model(1))
    manager.load(1, wrapped)
    assert same(wrapped.module.state_dict(), trained[0].state_dict())
    manager.save(2, wrapped, adam(wrapped))
    assert list(manager.load(2).state["model"]) == list(trained[0].state_dict())


def test_resume_passes_over_what_is_damaged_and_says_so(
    manager: CheckpointManager, tmp_path: Path, expect_log: Callable[[str], None]
) -> None:
    """Case 32."""
    tensors = {step: {"a": torch.full((50_000,), float(step)) + torch.randn(50_000)} for step in range(3)}
    for step, one in tensors.items():
        manager.save_raw(step, one)
    manager.flush()
    packs = sorted((tmp_path / "store" / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(packs[-1].read_bytes())
    data[2000:2100] = bytes(100)
    packs[-1].write_bytes(data)
    expect_log("r/step-000002@1 is damaged, so an earlier snapshot is resumed")
    expect_log("damaged")
    with CheckpointManager(tmp_path / "store", "r") as again:
        target = {"a": torch.zeros(50_000)}
        assert again.resume(target) == 2
        assert same(target, tensors[1])
        again.save_raw(5, tensors[0])
        assert same(again.load_latest().state["model"], tensors[0]), "later saves work"


def test_a_thinned_snapshot_says_that_nothing_goes_on_from_it(
    manager: CheckpointManager, trained: Trained, tmp_path: Path
) -> None:
    train(*trained)
    manager.save(2, *trained)
    manager.flush()
    with Store.open(tmp_path / "store", write=True) as store:
        thin(store, "r", keep_optimizer_last=1)
    module = model(1)
    with pytest.raises(UsageError, match=r"was thinned: optimizer\.safetensors is gone"):
        manager.load(1, module, adam(module))
    manager.load(1, module)
    assert [info.thinned for info in manager.list_snapshots()] == [("optimizer.safetensors",), ()]
    assert manager.load_latest().step == 2
    assert list(manager.describe(1)["parts"]) == ["model"]


def test_a_snapshot_is_described_without_reading_it(manager: CheckpointManager, trained: Trained) -> None:
    manager.save(2, trained[0], metadata={"loss": "0.5"}, extra={"x": torch.ones(2, 3, dtype=torch.complex128)})
    found = manager.describe("step-000002")
    assert (found["id"], found["step"], found["metadata"]) == ("r/step-000002@1", 2, {"loss": "0.5"})
    assert found["parts"]["model"]["0.weight"] == {"dtype": "float32", "shape": [50, 32]}
    assert found["parts"]["extra"]["x"] == {"dtype": "complex128", "shape": [2, 3]}
    stats = manager.stats()
    assert stats["snapshots"] == 2 and stats["latest_step"] == 2 and stats["ratio"] > 1


def test_parts_that_were_not_saved_are_missed_by_name(manager: CheckpointManager) -> None:
    manager.save(1, model())
    module = model()
    with pytest.raises(NotFoundError, match="r/step-000001@1 has no optimizer; it has model"):
        manager.load(1, module, adam(module))
    with pytest.raises(NotFoundError, match="r/step-000001@1 has no optimizer; it has model"):
        manager.resume(module, adam(module))


def test_a_best_of_the_model_alone_is_in_the_way_of_no_resume(
    manager: CheckpointManager, expect_log: Callable[[str], None]
) -> None:
    whole = model()
    manager.save(1, whole, adam(whole))
    manager.save_best(2, 0.5, model(3))
    module = model(1)
    assert manager.resume(module, adam(module)) == 2
    assert same(module.state_dict(), whole.state_dict())
    expect_log("r/step-000001@1 is resumed: r/step-000002@1 has no optimizer; it has model")
    assert manager.resume(module) == 3


def test_snapshots_of_others_are_not_taken_for_saves(manager: CheckpointManager, tmp_path: Path) -> None:
    from moonclipfs.store.add import add

    manager.save_raw(1, {"a": torch.ones(1)})
    manager.flush()
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "model.safetensors").write_bytes(b"x")
    with Store.open(tmp_path / "store", write=True) as store:
        add(store, [tmp_path / "checkpoint-5"], name="r/")
    assert [info.step for info in manager.list_snapshots()] == [1]
    with pytest.raises(NotFoundError, match="was not saved by a checkpoint manager"):
        manager.load("checkpoint-5")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("moonclipfs-state", "other"),
        lambda text: text.replace('"version":1', '"version":9'),
        lambda text: text[:-5],
        lambda text: text.replace('"files"', '"fields"'),
        lambda text: text.replace('"$":"t"', '"$":"?"'),
        lambda text: text.replace("model.safetensors", "muddle.safetensors"),
        lambda text: text.replace('"shared":[]', '"shared":[[["model","a",1,[1]]]]'),
        lambda text: text.replace('"tree":{"a"', '"tree":{"$":"float","v":"zz","a"'),
    ],
    ids=["format", "newer", "cut", "keys", "kind", "file", "shared", "value"],
)
def test_a_state_file_that_makes_no_sense_is_an_error(
    manager: CheckpointManager, tmp_path: Path, change: Callable[[str], str]
) -> None:
    from moonclipfs.store.add import add

    manager.save_raw(1, {"a": torch.ones(1000)})
    manager.flush()
    with Store.open(tmp_path / "store", write=True) as store:
        version = store.resolve("r/step-000001")
        text = store.open_file(store.lookup(version, b"state.json"))
        data = text.read(0, text.size).decode()
        assert change(data) != data
        model_file = store.open_file(store.lookup(version, b"model.safetensors"))
        (tmp_path / "step-000002").mkdir()
        (tmp_path / "step-000002" / "model.safetensors").write_bytes(model_file.read(0, model_file.size))
        (tmp_path / "step-000002" / "state.json").write_text(change(data))
        add(store, [tmp_path / "step-000002"], name="r/")
    with pytest.raises((CorruptError, UsageError, NotFoundError), match=r"r/step-000002@1|state\.json"):
        manager.load("step-000002")


def test_loading_reads_each_byte_once_and_holds_little(manager: CheckpointManager) -> None:
    import tracemalloc

    tensors = {f"t{number}": torch.randn(1_000_000) for number in range(8)}
    manager.save_raw(1, tensors)
    manager.flush()
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    manager._workers.submit(abs, 1).result()
    tracemalloc.start()
    manager.load(1, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert same(target, tensors)
    assert peak < 16_000_000, "half of the state"
