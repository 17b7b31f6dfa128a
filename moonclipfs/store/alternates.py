"""Private stores: what is written over a base store that is only read goes into a store of its own.

A private store is a store like any other, whose config names its base store. An object that it lacks is read there,
and a delta here may have its base there. It cannot keep the base store from deleting what it needs: that is missing
then, and reported with the name of both. To keep something for good it is copied into a store that has it all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from moonclipfs.errors import FormatVersionError, NotFoundError, UsageError
from moonclipfs.store.audit import Audited, audit_all
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.config import KEY, Alternate, create_store, load_config, move_alternate
from moonclipfs.store.packs import Location
from moonclipfs.store.publish import Ingest
from moonclipfs.store.reachable import Needed
from moonclipfs.store.store import Store
from moonclipfs.types import Kind, ObjectId, Version


def make_private_store(state: str | os.PathLike[str], base: str | os.PathLike[str], *, purpose: str = "") -> Store:
    """Open the private store at `state` over the store at `base` for writing; it is made where nothing is.

    A base store that was moved is found again so: its id decides. Raises UsageError when `state` is a store of another
    kind, is over another one, or lies in the base store; ExistsError when something else is there; NotFoundError when
    there is no base store; PermissionDeniedError, NoSpaceError.
    """
    here, there = Path(os.path.realpath(state)), Path(os.path.realpath(base))
    wanted = load_config(LocalBackend(there))
    if here == there or there in here.parents or here in there.parents:
        raise UsageError(f"{here} cannot be a private store over {there}: one lies in the other")
    try:
        found = load_config(LocalBackend(here))
    except (NotFoundError, FormatVersionError):
        if (here / KEY).exists():
            raise
        create_store(here, cut=wanted.cut, alternate=Alternate(str(there), wanted.store_id))
    else:
        _require_base(here, found.alternate, there, wanted.store_id)
        move_alternate(LocalBackend(here, shared=found.shared), str(there))
    return Store.open(here, write=True, purpose=purpose)


def _require_base(here: Path, alternate: Alternate | None, there: Path, wanted: str) -> None:
    if alternate is None:
        raise UsageError(f"{here} is a store of its own, not a private store over {there}: take another directory")
    if alternate.store_id != wanted:
        raise UsageError(
            f"{here} is a private store over the store {alternate.store_id}, last seen at {alternate.path}, and at "
            f"{there} is {wanted}: take another directory, or name the place where its base store is"
        )


def copy_version_into(
    source: Store,
    root: ObjectId,
    target: Store,
    name: str,
    metadata: Mapping[str, object],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Version:
    """Bind the directory object `root` of `source` to `name` in `target`, and return that version.

    What `target` lacks is copied as it is encoded, with the bases behind it, each object decoded and hashed first;
    `progress` is told encoded bytes (done, total). When `name` is bound to just that already, this is that version.
    Raises CorruptError when something cannot be read, and what `Ingest.publish` raises.
    """
    needed = Needed()
    needed.add(source, Kind.DIRECTORY, root)
    with target.ingest() as ingest:
        lacking = list(_lacking(source, needed, ingest))
        done, total = 0, sum(location.encoded_length for location in lacking)
        for found in audit_all(lacking, source.packs, source.objects):
            if found.error is not None:
                raise found.error
            _adopt(source, ingest, found)
            done += found.location.encoded_length
            progress(done, total)
        bound = target.log.refresh().bound().get(name)
        if bound is not None and bound.root == root and bound.metadata.get("attributes") == metadata.get("attributes"):
            return bound
        return ingest.publish(name, root, metadata)


def _lacking(source: Store, needed: Needed, ingest: Ingest) -> Iterator[Location]:
    """What an ingest does not find, where it lies in `source`: bases before what is encoded against them."""
    seen: set[ObjectId] = set()
    for object_id in needed.ids():
        if ingest.finds(object_id):
            continue
        for link in reversed(source.objects.chain(object_id)):
            one = link.location.object_id
            if one not in seen and (one == object_id or not ingest.finds(one)):
                seen.add(one)
                yield link.location


def _adopt(source: Store, ingest: Ingest, found: Audited) -> None:
    """Store an object as it is encoded, or in full where its base has too many bases there already."""
    if not ingest.adopt(found.location, found.encoded):
        location = found.location
        ingest.adopt_whole(location, source.objects.load(location.object_id, location.kind))
