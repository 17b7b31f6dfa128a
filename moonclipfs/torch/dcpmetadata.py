"""What `torch.distributed.checkpoint` knows of a checkpoint, as JSON: its own way is a pickle, which loading would run.

{"version": ...,
 "tensors": {NAME: {"dtype", "size", "requires_grad", "pin_memory", "chunks": [[offsets, sizes], ...]}},
 "values": [NAME, ...],
 "planner": a tree of `statedict`,
 "places": [[NAME, offsets, part, name there], ...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.torch.dtypes import dtype_name, dtype_named
from moonclipfs.torch.statedict import Maker, Taker

Place = tuple[str, str]
"""Where an item is in a snapshot: the part, and the name there."""


def encode(metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> dict[str, Any]:
    """As JSON values. Raises UsageError for a planner's data that nothing but a pickle can hold."""
    tensors: dict[str, Any] = {}
    values = []
    for name, one in metadata.state_dict_metadata.items():
        if isinstance(one, TensorStorageMetadata):
            tensors[name] = {
                "dtype": dtype_name(one.properties.dtype),
                "size": list(one.size),
                "requires_grad": one.properties.requires_grad,
                "pin_memory": one.properties.pin_memory,
                "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in one.chunks],
            }
        else:
            values.append(name)
    taker = Taker("the planner's data")
    planner = taker.tree(metadata.planner_data)
    if taker.tensors:
        raise UsageError("the data of this planner has tensors in it, which cannot be kept")
    return {
        "version": metadata.version,
        "tensors": tensors,
        "values": values,
        "planner": planner,
        "places": [
            [index.fqn, None if index.offset is None else list(index.offset), part, name]
            for index, (part, name) in places.items()
        ],
    }


def decode(about: Any, checkpoint_id: str) -> Metadata:
    """What `encode` took apart; `storage_data` are the places. Raises CorruptError."""
    try:
        tensors = {name: _tensor(one) for name, one in about["tensors"].items()}
        values = {str(name): BytesStorageMetadata() for name in about["values"]}
        places = {MetadataIndex(fqn, offset): (str(part), str(name)) for fqn, offset, part, name in about["places"]}
        return Metadata(
            state_dict_metadata={**tensors, **values},
            planner_data=Maker(_no_tensor).value(about["planner"]),
            storage_data=places,
            storage_meta=StorageMeta(checkpoint_id=checkpoint_id),
            version=about["version"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{checkpoint_id}: what is told of its tensors is not understood ({error!r})") from error


def _tensor(one: Mapping[str, Any]) -> TensorStorageMetadata:
    dtype = dtype_named(one["dtype"])
    if dtype is None:
        raise CorruptError(f"this torch has no dtype {one['dtype']}")
    properties = TensorProperties(
        dtype=dtype, requires_grad=bool(one["requires_grad"]), pin_memory=bool(one["pin_memory"])
    )
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in one["chunks"]]
    return TensorStorageMetadata(properties, torch.Size(one["size"]), chunks)


def _no_tensor(name: str, node: Mapping[str, Any], path: tuple[object, ...]) -> object:
    raise ValueError(f"a tensor {name}")
