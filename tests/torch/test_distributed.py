"""Processes that gloo joins: data parallel and sharded training, and torch's own distributed checkpoints."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import moonclipfs
from moonclipfs import CheckpointManager
from moonclipfs.errors import NotFoundError, UsageError
from moonclipfs.store.gc import collect
from moonclipfs.store.store import Store
from moonclipfs.torch.dcp import StorageReader, StorageWriter
from moonclipfs.types import EntryType
from tests.torch.kit import adam, model, same
from tests.torch.rankprograms import run, whole

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what it is about to change


def loaded(store: Path, name: str) -> dict[str, Any]:
    """A checkpoint in one process, without a process group."""
    state: dict[str, Any] = {"model": {name: torch.ones_like(one) for name, one in whole(0).items()}, "step": 0}
    state["about"] = {"names": None, "rate": 0.0}
    reader = StorageReader(store)
    load(state, storage_reader=reader, checkpoint_id=name, no_dist=True)
    reader.close()
    return state


def tensors_of(store: Path, name: str) -> dict[str, torch.Tensor]:
    """All tensors of a snapshot's files, by file and name."""
    with moonclipfs.open(store, name) as snapshot:
        files = [file for file in snapshot.files() if file.endswith(".safetensors")]
        return {
            f"{file}:{one.name}": snapshot.torch(one.name, file) for file in files for one in snapshot.tensors(file)
        }


def test_two_processes(tmp_path: Path, expect_log: Callable[[str], None]) -> None:
    run("dcp_save+ddp+fsdp", tmp_path, 2)
    store = tmp_path / "store"
    checkpoints_load_in_one_process(store)
    checkpoints_are_readable_files(store)
    replicated_tensors_are_there_once(store)
    expect_log("saved by 2 ranks, and what each gave as extra is not loaded here")
    data_parallel_state_loads_in_one_process(store)
    a_shard_does_not(store)
    nothing_is_held_when_all_have_ended(store)


def checkpoints_load_in_one_process(store: Path) -> None:
    for name, step in (("dcp/step-1", 1), ("dcp/step-2", 2), ("dcp/last@1", 3), ("dcp/last", 4)):
        state = loaded(store, name)
        assert same(state["model"], whole(step)), name
        assert state["step"] == step and state["about"] == {"names": ["a", ("b", 2)], "rate": float("inf")}


def checkpoints_are_readable_files(store: Path) -> None:
    found = tensors_of(store, "dcp/step-1")
    values = whole(1)
    halves = [found[f"rank-0000{rank}.safetensors:model.rows[{20 * rank}:{20 * rank + 20},0:24]"] for rank in (0, 1)]
    assert same(torch.cat(halves), values["rows"])
    halves = [found[f"rank-0000{rank}.safetensors:model.columns[0:40,{12 * rank}:{12 * rank + 12}]"] for rank in (0, 1)]
    assert same(torch.cat(halves, 1), values["columns"])
    with moonclipfs.open(store, "dcp/step-1") as snapshot:
        about = json.loads(snapshot.read("state.json"))
    assert "pickle" not in json.dumps(about) and about["dcp"]["tensors"]["model.rows"]["size"] == [40, 24]


def replicated_tensors_are_there_once(store: Path) -> None:
    names = [name.partition(":")[2] for name in tensors_of(store, "dcp/step-1")]
    assert names.count("model.bias") == names.count("model.scalar") == names.count("model.nothing") == 1
    with moonclipfs.open(store, "ddp/step-000002") as snapshot:
        assert [name for name in snapshot.files() if name.endswith("safetensors") and "rank" not in name] == [
            "model.safetensors", "optimizer.safetensors",
        ]  # fmt: skip


def data_parallel_state_loads_in_one_process(store: Path) -> None:
    module = model(seed=9)
    with CheckpointManager(store, "ddp") as manager:
        manager.load(5, module, adam(module))
        assert same(manager.load_tensors(5, ["1.weight"])["1.weight"], module[1].weight.detach())  # type: ignore[index]


def a_shard_does_not(store: Path) -> None:
    with CheckpointManager(store, "fsdp") as manager, pytest.raises(UsageError, match="saved by 2 ranks"):
        manager.resume(model(width=30))


def nothing_is_held_when_all_have_ended(store: Path) -> None:
    with Store.open(store, write=True) as opened:
        assert not list(opened.backend.list("tmp/"))


def test_checkpoints_without_a_process_group(tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0), "nested": {"list": [torch.ones(2), {"deep": 1}], "none": None, "b": b"\0\1"}}
    writer = StorageWriter(tmp_path / "store", "run/step-7")
    save(state, storage_writer=writer, no_dist=True)
    with Store.open(tmp_path / "store") as store:
        version = store.resolve("run/step-7")
        assert version.metadata["step"] == 7
        assert [entry.type for _, entry in store.walk(version)] == [EntryType.FILE] * 2
    found: dict[str, Any] = {
        "weight": torch.zeros(6), "nested": {"list": [torch.zeros(2), {"deep": 0}], "none": 1, "b": b""},
    }  # fmt: skip
    reader = StorageReader(tmp_path / "store", "run/step-7")
    load(found, storage_reader=reader, no_dist=True)
    assert same(found, state)
    for name, message in (("run/step-8", "no snapshot run/step-8"), ("plain", "not saved with torch.distributed")):
        if name == "plain":
            with CheckpointManager(tmp_path / "store", "p") as manager:
                manager.save(0, {"weight": torch.zeros(6)})
            name = "p/step-000000"
        with pytest.raises(CheckpointException, match=message):
            load(found, storage_reader=StorageReader(tmp_path / "store"), checkpoint_id=name, no_dist=True)
    with pytest.raises(CheckpointException, match=r"\(6,\) is wanted|Size mismatch|size"):
        load({"weight": torch.zeros(7)}, storage_reader=StorageReader(tmp_path / "store", "run/step-7"), no_dist=True)


def test_a_part_of_a_checkpoint_is_loaded_and_rows_of_it(tmp_path: Path) -> None:
    state = {"a": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3), "c": {"d": torch.zeros(2), "e": "text"}}
    save(state, storage_writer=StorageWriter(tmp_path / "store", "run/1"), no_dist=True)
    found: dict[str, Any] = {"c": {"d": torch.ones(2)}, "a": torch.zeros(4, 6).t().contiguous().t()}
    load(found, storage_reader=StorageReader(tmp_path / "store", "run/1"), no_dist=True)
    assert same(found["c"]["d"], torch.zeros(2)) and torch.equal(found["a"], state["a"])  # type: ignore[arg-type]
    with pytest.raises(CheckpointException, match="not_there"):
        load({"not_there": torch.zeros(1)}, storage_reader=StorageReader(tmp_path / "store", "run/1"), no_dist=True)


def test_a_writer_goes_to_another_process_and_saves_there(tmp_path: Path) -> None:
    """As `async_save` in a process does it."""
    writer = StorageWriter(tmp_path / "store")
    save({"a": torch.ones(1000)}, storage_writer=writer, checkpoint_id="run/1", no_dist=True)
    other = pickle.loads(pickle.dumps(writer))
    save({"a": torch.ones(1000) * 2}, storage_writer=other, checkpoint_id="run/2", no_dist=True)
    for number in (1, 2):
        found = {"a": torch.zeros(1000)}
        load(found, storage_reader=StorageReader(tmp_path / "store"), checkpoint_id=f"run/{number}", no_dist=True)
        assert torch.equal(found["a"], torch.full((1000,), float(number)))


class OwnSaving(DefaultSavePlanner):
    """Writes text in a way of its own."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        """Other things as usual."""
        return io.BytesIO(object.encode()) if isinstance(object, str) else super().transform_object(write_item, object)


class OwnLoading(DefaultLoadPlanner):
    """Reads that."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Other things as usual."""
        if read_item.dest_index.fqn == "text":
            self.original_state_dict["text"] = value.read().decode()
        else:
            super().load_bytes(read_item, value)


def test_what_a_planner_writes_in_a_way_of_its_own_comes_back_as_it_is(tmp_path: Path) -> None:
    state = {"text": "no pickle at all", "number": 3, "tensor": torch.ones(2)}
    save(state, storage_writer=StorageWriter(tmp_path / "store", "run/1"), planner=OwnSaving(), no_dist=True)
    found: dict[str, Any] = {"text": "", "number": 0, "tensor": torch.zeros(2)}
    load(found, storage_reader=StorageReader(tmp_path / "store", "run/1"), planner=OwnLoading(), no_dist=True)
    assert same(found, state)


def test_what_is_written_is_kept_from_gc_until_it_is_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.create(tmp_path / "store").close()
    finish, reports = StorageWriter.finish, []

    def late(writer: StorageWriter, metadata: Any, results: Any) -> None:
        with Store.open(tmp_path / "store", write=True) as store:
            reports.append(collect(store, pressed=True, wait_seconds=0))
        finish(writer, metadata, results)

    monkeypatch.setattr(StorageWriter, "finish", late)
    writer = StorageWriter(tmp_path / "store", "run/1")
    save({"a": torch.rand(5000)}, storage_writer=writer, no_dist=True)
    assert reports and not reports[0].deleted_packs
    load({"a": torch.zeros(5000)}, storage_reader=StorageReader(tmp_path / "store", "run/1"), no_dist=True)
    monkeypatch.setattr("moonclipfs.torch.dcp.live_leases", lambda path: [])
    monkeypatch.setattr(StorageWriter, "finish", finish)
    with pytest.raises(CheckpointException, match="a rank ended before it was whole"):
        save({"a": torch.rand(5000)}, storage_writer=writer, no_dist=True)


class Odd:
    """Nothing but a pickle can hold it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)


def test_no_pickle_is_kept_or_loaded_unless_it_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"odd.*Odd, which cannot be kept"):
        save({"odd": Odd()}, storage_writer=StorageWriter(tmp_path / "store", "run/1"), no_dist=True)
    save({"odd": Odd()}, storage_writer=StorageWriter(tmp_path / "store", "run/1", allow_pickle=True), no_dist=True)
    found: dict[str, Any] = {"odd": 0}
    with pytest.raises(CheckpointException, match="was saved as a pickle, which may run code"):
        load(found, storage_reader=StorageReader(tmp_path / "store", "run/1"), no_dist=True)
    load(found, storage_reader=StorageReader(tmp_path / "store", "run/1", allow_pickle=True), no_dist=True)
    assert found == {"odd": Odd()}


@pytest.mark.parametrize("name", ["", "../up", "@latest"])
def test_what_cannot_be_a_snapshot_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    assert not StorageWriter.validate_checkpoint_id(name) and not StorageReader.validate_checkpoint_id(name)
    with pytest.raises(UsageError):
        save({"a": torch.zeros(1)}, storage_writer=StorageWriter(tmp_path / "store"), checkpoint_id=name, no_dist=True)
    with pytest.raises((NotFoundError, UsageError)):
        StorageReader(tmp_path / "store", name or None).read_metadata()


@pytest.mark.slow
def test_checkpoints_are_resharded_between_two_four_and_one(tmp_path: Path) -> None:
    run("dcp_save+fsdp", tmp_path, 2)
    run("dcp_load+fsdp_load", tmp_path, 4)
    run("dcp_load+fsdp_load", tmp_path, 2)
    run("dcp_load+fsdp_load", tmp_path, 1)
    one = [torch.load(tmp_path / f"loaded-{size}.pt", weights_only=True) for size in (1, 2, 4)]
    assert same(one[0], one[1]) and same(one[0], one[2])


@pytest.mark.slow
def test_four_processes(tmp_path: Path, expect_log: Callable[[str], None]) -> None:
    run("dcp_save+dcp_load+ddp+fsdp+fsdp_load", tmp_path, 4)
    run("dcp_load", tmp_path, 1)
    run("dcp_load", tmp_path, 2)
    checkpoints_load_in_one_process(tmp_path / "store")
    expect_log("saved by 4 ranks, and what each gave as extra is not loaded here")
    data_parallel_state_loads_in_one_process(tmp_path / "store")


@pytest.mark.slow
def test_torchrun_starts_all_again_when_a_rank_dies_in_a_save(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    program = ["-m", "tests.torch.rankprograms", "restart", str(tmp_path)]
    done = subprocess.run([*launch, *program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        with CheckpointManager(tmp_path / "store", "run", world_size=2, rank=rank) as manager:
            values = [float(manager.load(step).state["model"]["weight"][0]) for step in range(3)]
            assert values == [rank, 110.0 + rank, 120.0 + rank]
