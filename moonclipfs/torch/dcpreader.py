"""Reads what the writer of `dcp.py` wrote: of each tensor the rows that are wanted, straight to where they belong."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from moonclipfs import limits
from moonclipfs.errors import CorruptError, NotFoundError, UsageError
from moonclipfs.store.log import parse_spec
from moonclipfs.store.paths import check_path
from moonclipfs.torch.dcpmetadata import Place as ItemPlace
from moonclipfs.torch.dcpmetadata import decode
from moonclipfs.torch.place import Place
from moonclipfs.torch.reading import read_all
from moonclipfs.torch.saved import Saved, SavedTensor
from moonclipfs.torch.statedict import Maker
from moonclipfs.torch.workers import Workers, thread_count

VALUE = "value"
"""Key of a value that a planner pickled, and that is kept as a tree."""
RAW = "raw"
"""Key of bytes that a planner wrote in a way of its own."""


class StorageReader(storage.StorageReader):
    """Reads checkpoints that `StorageWriter` wrote, whatever the number of ranks."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        """`checkpoint_id` is NAME or NAME@N, unless the load says it. `allow_pickle` loads values that were saved as a
        pickle: only from whom you trust.
        """
        self._store = os.fspath(store)
        self._path = "" if checkpoint_id is None else os.fspath(checkpoint_id)
        self._allow_pickle = allow_pickle
        self._place: Place | None = None
        self._saved: Saved | None = None
        self._places: Mapping[Any, ItemPlace] = {}
        self._open = ExitStack()
        """Keeps what is being read from gc."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of the snapshot `checkpoint_id`."""
        self._open.close()
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch's. Raises NotFoundError for a snapshot that is not there or was saved in another way."""
        if not self._path:
            raise UsageError("give the name of the snapshot as checkpoint_id")
        self._open.close()
        if self._place is None:
            self._place = Place(self._store)
        self._open.enter_context(self._place.reading())
        store = self._place.store()
        self._saved = saved = Saved(store, store.resolve(self._path))
        if "dcp" not in saved.state:
            raise NotFoundError(f"{saved.id} was not saved with torch.distributed.checkpoint: load it with a manager")
        return decode(saved.state["dcp"], saved.id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See torch's."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See torch's."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See torch's."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan names into where the planner says. See torch's. Raises CorruptError."""
        workers = Workers(thread_count())
        try:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._value(item))
            tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            _Reading(self._found(), self._places, planner, workers).read(tensors)
        finally:
            workers.shutdown()
            self._open.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can be the name of a snapshot, or of a version of one."""
        try:
            check_path(parse_spec(os.fspath(checkpoint_id))[0])
        except UsageError:
            return False
        return True

    def close(self) -> None:
        """Close the store. It is opened again when a load begins."""
        self._open.close()
        if self._place is not None:
            self._place.close()
        self._place = self._saved = None

    def _found(self) -> Saved:
        if self._saved is None:
            raise UsageError("read_metadata() comes before read_data()")
        return self._saved

    def _value(self, item: ReadItem) -> io.BytesIO:
        """A value in the form that planners load: a pickle that is made here, of what is kept without one."""
        saved = self._found()
        part, name = _place_of(self._places, item)
        node = saved.tree(part).get(name)
        if not isinstance(node, dict) or not {VALUE, RAW} & node.keys():
            raise CorruptError(f"{saved.id}: there is no value {name} in {part}")
        if RAW in node:
            return io.BytesIO(base64.b64decode(node[RAW]["v"]))
        value = Maker(lambda name, node, path: self._inner(part, name), allow_pickle=self._allow_pickle).value(
            node[VALUE], (name,)
        )
        made = io.BytesIO()
        torch.save(value, made)
        made.seek(0)
        return made

    def _inner(self, part: str, name: str) -> torch.Tensor:
        """A tensor inside of a value."""
        workers = Workers(1)
        one = _tensor_of(self._found(), (part, name))
        made = torch.empty(one.shape, dtype=one.dtype)
        try:
            read_all([(one, made)], workers)
        finally:
            workers.shutdown()
        return made


class _Reading:
    """Tensors on their way."""

    def __init__(self, saved: Saved, places: Mapping[Any, ItemPlace], planner: LoadPlanner, workers: Workers) -> None:
        self._saved = saved
        self._places = places
        self._planner = planner
        self._workers = workers

    def read(self, items: list[ReadItem]) -> None:
        """Rows that are wanted whole are decoded in place. Of others, copies are made of so many bytes at a time."""
        targets = [self._planner.resolve_tensor(item).detach() for item in items]
        direct: list[tuple[SavedTensor, torch.Tensor]] = []
        through: list[tuple[ReadItem, SavedTensor, torch.Tensor]] = []
        for item, target in zip(items, targets, strict=True):
            if tuple(target.shape) != tuple(item.lengths):
                raise UsageError(
                    f"{item.dest_index.fqn}: {tuple(item.lengths)} is wanted of {self._saved.id}, and "
                    f"{tuple(target.shape)} is there to take it"
                )
            rows = _rows(_tensor_of(self._saved, _place_of(self._places, item)), item)
            if rows.shape == tuple(item.lengths):
                direct.append((rows, target))
            else:
                through.append((item, rows, target))
                if sum(one.length for _, one, _ in through) > limits.INGEST_BYTES:
                    self._copy(through)
                    through = []
        read_all(direct, self._workers)
        self._copy(through)
        for item, target in zip(items, targets, strict=True):
            self._planner.commit_tensor(item, target)

    def _copy(self, through: list[tuple[ReadItem, SavedTensor, torch.Tensor]]) -> None:
        copies = [torch.empty(rows.shape, dtype=rows.dtype) for _, rows, _ in through]
        read_all(((rows, copy) for (_, rows, _), copy in zip(through, copies, strict=True)), self._workers)
        for (item, _, target), copy in zip(through, copies, strict=True):
            ranges = zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
            target.copy_(copy[(slice(None), *(slice(start, start + length) for start, length in ranges))])


def _place_of(places: Mapping[Any, ItemPlace], item: ReadItem) -> ItemPlace:
    try:
        return places[item.storage_index]
    except KeyError:
        raise CorruptError(f"{item.storage_index.fqn}: the snapshot does not tell where it is") from None


def _tensor_of(saved: Saved, place: ItemPlace) -> SavedTensor:
    part, name = place
    try:
        return saved.tensors(part)[name]
    except KeyError:
        raise CorruptError(f"{saved.id}: no file of {part} holds the tensor {name}") from None


def _rows(one: SavedTensor, item: ReadItem) -> SavedTensor:
    """The rows, at the first index, of a tensor that a read needs. Raises CorruptError for what it does not have."""
    wanted = zip(item.storage_offsets, item.lengths, one.shape, strict=False)
    if len(item.lengths) != len(one.shape) or any(start + length > size for start, length, size in wanted):
        raise CorruptError(f"{one.name} is saved as {one.shape}, not as large as the snapshot says")
    if not one.shape or not one.shape[0]:
        return one
    row = one.length // one.shape[0]
    first, count = item.storage_offsets[0], item.lengths[0]
    return replace(one, shape=(count, *one.shape[1:]), offset=one.offset + first * row, length=count * row)
