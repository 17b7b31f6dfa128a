"""A frozen overlay, or a live directory that is to be the base of one, as objects: with a name, or for a journal.

Runs in the encoder's process. The snapshot is exactly what the overlay shows: nothing of others is merged into it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from moonclipfs.layers.assembly import Assembly
from moonclipfs.store.log import Names
from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.types import Kind, ObjectId, Version


class _MovedError(Exception):
    """Somebody else published under this name meanwhile."""


def capture(store: Store, request: Mapping[str, Any]) -> dict[str, Any]:
    """Store what `request` froze (see `assembly.Assembly`) without a name; whoever asks holds the lease until a journal
    names it.

    Answers with `root` and `files` (inode, freeze, recipe, size) that were encoded here. Raises what `Ingest.complete`
    raises.
    """
    with store.ingest() as ingest:
        assembly, root = _assembled(store, ingest, request)
        _complete(ingest, assembly, root)
        return {"root": root, "files": assembly.encoded()}


def commit(store: Store, request: Mapping[str, Any]) -> dict[str, Any]:
    """The same as the next version of the name `path`, unless its newest one is that; `metadata`, JSON, goes into the
    log. The answer has the `sequence` of the version too. Raises what `Ingest.publish` raises.
    """
    path = os.fsdecode(request["path"])
    with store.ingest() as ingest:
        assembly, root = _assembled(store, ingest, request)
        metadata = assembly.metadata(root, json.loads(request["metadata"]))
        version = _bind(store, ingest, path, root, metadata)
        _complete(ingest, assembly, root)  # also where nothing new was bound
        return {"root": root, "files": assembly.encoded(), "sequence": version.sequence}


def _assembled(store: Store, ingest: Ingest, request: Mapping[str, Any]) -> tuple[Assembly, ObjectId]:
    assembly = Assembly(store, ingest, request)
    assembly.encode()
    assembly.number_groups(None)
    return assembly, assembly.assemble()


def _complete(ingest: Ingest, assembly: Assembly, root: ObjectId) -> None:
    recipes = [(Kind.RECIPE, recipe) for _, _, recipe, _ in assembly.encoded()]
    ingest.complete([(Kind.DIRECTORY, root), *recipes])


def _bind(store: Store, ingest: Ingest, path: str, root: ObjectId, metadata: Mapping[str, object]) -> Version:
    while True:
        newest = store.names().bound().get(path)
        if newest is not None and _is_same(store, newest, root, metadata):
            return newest

        def unmoved(names: Names, newest: Version | None = newest) -> None:
            now = names.bound().get(path)
            if (now and now.sequence) != (newest and newest.sequence):
                raise _MovedError

        try:
            return ingest.publish(path, root, metadata, unmoved)
        except _MovedError:
            continue


def _is_same(store: Store, newest: Version, root: ObjectId, metadata: Mapping[str, object]) -> bool:
    """Whether a version is what is to be committed; one that its maker called incomplete counts for less."""
    attributes = root_metadata(store.root_entry(newest).attributes)
    return newest.root == root and attributes == metadata["attributes"] and not newest.metadata.get("incomplete")
