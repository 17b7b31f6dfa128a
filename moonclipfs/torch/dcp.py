"""A storage writer and reader for `torch.distributed.checkpoint`, which reshards between numbers of ranks.

    import torch.distributed.checkpoint as dcp
    from moonclipfs.torch.dcp import StorageReader, StorageWriter

    dcp.save(state, storage_writer=StorageWriter("/data/store"), checkpoint_id="run1/step-500")
    dcp.load(state, storage_reader=StorageReader("/data/store"), checkpoint_id="run1/step-500")

A checkpoint is a snapshot: each rank's tensors are in `rank-00000.safetensors` and so on, a whole one under its own
name, a piece of one as `NAME[0:4,8:16]`; what else there is, and what torch knows of it all, is in `state.json`. No
pickle is kept, and none that came from a store is loaded.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from moonclipfs import limits
from moonclipfs.errors import RanksError, UsageError
from moonclipfs.store.leases import live_leases
from moonclipfs.store.paths import check_path
from moonclipfs.store.publish import Ingest
from moonclipfs.torch import pickled
from moonclipfs.torch.casting import CastRules
from moonclipfs.torch.dcpmetadata import Place as ItemPlace
from moonclipfs.torch.dcpmetadata import encode
from moonclipfs.torch.dcpreader import RAW, VALUE, StorageReader
from moonclipfs.torch.dtypes import as_bytes, carrier_of
from moonclipfs.torch.parts import STATE_FILE, Part
from moonclipfs.torch.place import Place
from moonclipfs.torch.profile import Profile
from moonclipfs.torch.ranks import RankPart, directory_of, encoded
from moonclipfs.torch.saving import FORMAT, VERSION, Job, Writing, files_of, ingesting
from moonclipfs.torch.sharded import local_of
from moonclipfs.torch.staging import Staged
from moonclipfs.torch.statedict import Taker
from moonclipfs.torch.waiting import Holding
from moonclipfs.torch.workers import Workers, thread_count
from moonclipfs.types import Entry, Kind

__all__ = ["StorageReader", "StorageWriter"]


@dataclass(frozen=True, slots=True)
class _Result:
    """What a rank tells of one item: its place, and, with the first of its items, of all that it stored."""

    place: ItemPlace
    part: dict[str, Any] | None = None
    lease: str = ""


class StorageWriter(storage.StorageWriter):
    """Writes checkpoints into a store, which is made if there is none; one object may write any number of them."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        """`checkpoint_id` is the name of the snapshot, unless the save says it. With `allow_pickle`, values that
        nothing but a pickle can hold are kept as one.
        """
        self._store = os.fspath(store)
        self._path = "" if checkpoint_id is None else check_path(os.fspath(checkpoint_id))
        self._allow_pickle = allow_pickle
        self._is_coordinator = False
        self._place: Place | None = None
        self._workers: Workers | None = None
        self._holding: Holding | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A save in the background may happen in another process, which opens the store by itself.
        return {**self.__dict__, "_place": None, "_workers": None, "_holding": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, to the snapshot `checkpoint_id`. Raises UsageError for what cannot be a name."""
        if checkpoint_id is not None:
            self._path = check_path(os.fspath(checkpoint_id))
        self._release()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch's. Raises UsageError without a name, and for a save without collectives."""
        self._is_coordinator = is_coordinator
        if not self._path:
            raise UsageError("give the name of the snapshot as checkpoint_id")
        if not kwargs.get("use_collectives", True):
            raise UsageError("use_collectives=False: the parts of the ranks would not become one snapshot")

    def storage_meta(self) -> StorageMeta | None:
        """See torch's."""
        return StorageMeta(checkpoint_id=self._path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See torch's."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number, and make the store if there is none. See torch's."""
        self._opened()
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store what the plan names. See torch's."""
        results = self._write(plan, planner) if plan.items else []
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make a snapshot of what all ranks stored. Raises RanksError when one of them has ended by now."""
        told = [one.storage_data for of_rank in results for one in of_rank]
        bringers = {one.lease: RankPart.from_note(one.part) for one in told if one.part is not None}
        places = {one.index: one.storage_data.place for of_rank in results for one in of_rank}
        state = _state_file(self._path)
        for part in bringers.values():
            state["parts"] |= part.state["parts"]
        state["dcp"] = encode(metadata, places)
        store = self._opened().for_saving()
        job = self._job({}, {}, {})
        with ingesting(store, job, self._pool()) as ingest:
            writing = Writing(store, ingest, job)
            if bringers.keys() - {lease.name for lease in live_leases(store.path)}:
                raise RanksError(f"there is no snapshot {self._path}: a rank ended before it was whole; save it again")
            recipes = {recipe for part in bringers.values() for recipe, _ in part.files.values()}
            ingest.take_over((Kind.RECIPE, recipe) for recipe in recipes)
            entries: list[Entry] = []
            for part in bringers.values():
                entries += [writing.entry(name, *file) for name, file in part.files.items()]
            entries += writing.put({}, {STATE_FILE: encoded(state)})
            writing.publish(entries, {})
        self._release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be the name of a snapshot."""
        try:
            check_path(os.fspath(checkpoint_id))
        except UsageError:
            return False
        return True

    def close(self) -> None:
        """Close the store. It is opened again when a save begins."""
        self._release()
        if self._workers is not None:
            self._workers.shutdown()
        if self._place is not None:
            self._place.close()
        self._place = self._workers = None

    def _opened(self) -> Place:
        if self._place is None:
            self._place = Place(self._store, made_elsewhere=not self._is_coordinator)
        self._place.for_saving()
        return self._place

    def _pool(self) -> Workers:
        if self._workers is None:
            self._workers = Workers(thread_count())
        return self._workers

    def _release(self) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.end()

    def _job(self, tree: Any, tensors: dict[str, torch.Tensor], staged: dict[str, Staged], part: str = "") -> Job:
        parts, copies = ({part: Part(tree, tensors)}, {part: staged}) if part else ({}, {})
        step = int(_state_file(self._path)["step"])
        return Job(self._path, step, parts, copies, [], {}, {}, CastRules(None), Profile(self._path))

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        part = directory_of(int(plan.storage_data))
        tensors, tree, names = _taken(plan.items, planner, self._allow_pickle)
        staged = {name: _staged(tensor) for name, tensor in tensors.items()}
        job = self._job(tree, tensors, staged, part)
        store = self._opened().for_saving()
        files, plain = files_of(job, limits.SHARD_BYTES)
        state = json.loads(plain.pop(STATE_FILE))
        holding = Holding(store, ingesting(store, job, self._pool()))
        try:
            ingest: Ingest = holding.ingest
            entries = Writing(store, ingest, job).put(files, plain)
            ingest.hand_over()
        except BaseException:
            holding.end()
            raise
        stored = {entry.name.decode(): (entry.child, entry.size) for entry in entries}
        holding.until_bound(self._path, [recipe for recipe, _ in stored.values()])
        self._holding = holding
        brought = RankPart(stored, state).to_note(self._path)
        return [
            WriteResult(item.index, _size(item), _Result((part, name), None if at else brought, store.backend.owner))
            for at, (item, name) in enumerate(zip(plan.items, names, strict=True))
        ]


def _taken(
    items: Iterable[WriteItem], planner: SavePlanner, allow_pickle: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[str]]:
    """The tensors of a plan by name, the tree of its other values, and the name of each item."""
    taker = Taker("the state", allow_pickle=allow_pickle)
    tree: dict[str, Any] = {}
    names = []
    for item in items:
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            name = _name_of(item)
            carrier_of(data, name)
            taker.tensors[name] = local_of(data, name)
        else:
            name = item.index.fqn
            tree[name] = _value(taker, name, data)
        names.append(name)
    return taker.tensors, tree, names


def _name_of(item: WriteItem) -> str:
    """The name of a tensor in its file: its own when it is whole."""
    about = item.tensor_data
    if about is None or tuple(about.chunk.sizes) == tuple(about.size):
        return str(item.index.fqn)
    ranges = zip(about.chunk.offsets, about.chunk.sizes, strict=True)
    return f"{item.index.fqn}[{','.join(f'{start}:{start + length}' for start, length in ranges)}]"


def _value(taker: Taker, name: str, data: io.BytesIO) -> dict[str, Any]:
    """What a planner pickled, as a tree; what it wrote in a way of its own, as its bytes."""
    try:
        value = pickled.load_own_file(data.getvalue())
    except ValueError:
        return {RAW: taker.tree(data.getvalue())}
    return {VALUE: taker.tree(value, (name,))}


def _staged(tensor: torch.Tensor) -> Staged:
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return Staged(tensor.dtype, tuple(tensor.shape), as_bytes(whole), unchanged=False)


def _state_file(path: str) -> dict[str, Any]:
    """What stands in the `state.json` of any checkpoint; the step is the number at the end of its name, else 0."""
    found = re.search(r"(\d{1,18})$", path)
    step = int(found[1]) if found else 0
    return {"format": FORMAT, "version": VERSION, "step": step, "metadata": {}, "parts": {}, "shared": []}


def _size(item: WriteItem) -> int:
    return int(item.tensor_storage_size() or 0)
