"""Private stores: what is written over a base store that is only read goes into a store of its own.

A private store is a store like any other, whose config names its base store. An object that it lacks is read there,
and a delta here may have its base there. It cannot keep the base store from deleting what it needs: that is missing
then, and reported with the name of both. To keep something for good it is copied into a store that has it all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import CorruptError, DeltaCycleError, FormatVersionError, NotFoundError, UsageError
from moonclipfs.store.audit import Audited, audit_all
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.config import KEY, Alternate, create_store, load_config, move_alternate
from moonclipfs.store.objects import object_id as id_of
from moonclipfs.store.packs import Location
from moonclipfs.store.publish import Ingest
from moonclipfs.store.reachable import Needed
from moonclipfs.store.store import Store
from moonclipfs.types import NO_ID, Kind, ObjectId, Version


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


@contextmanager
def temporary_private_store(base: str | os.PathLike[str], *, purpose: str = "") -> Iterator[Path]:
    """A private store over `base` in the directory for temporary files, gone after the block: for what is not to be
    kept of work over a store that can only be read. Raises as `make_private_store`.
    """
    with tempfile.TemporaryDirectory(prefix="moonclipfs-") as directory:
        state = Path(directory) / "state"
        make_private_store(state, base, purpose=purpose).close()
        yield state


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
    with nullcontext() if source.lease is None else source.lease.hold(source.log.names.sequence):
        needed = Needed()
        needed.add(source, Kind.DIRECTORY, root)
        return _copy_into(source, needed, target, name, root, metadata, progress)


def _copy_into(
    source: Store,
    needed: Needed,
    target: Store,
    name: str,
    root: ObjectId,
    metadata: Mapping[str, object],
    progress: Callable[[int, int], None],
) -> Version:
    with target.ingest() as ingest:
        lacking = list(_lacking(source, needed, ingest))
        done, total = 0, sum(location.encoded_length for location in lacking)
        for found in audit_all(lacking, source.packs, source.objects):
            _adopt(source, ingest, found)
            done += found.location.encoded_length
            progress(done, total)
        bound = target.log.refresh().bound().get(name)
        if bound is not None and bound.root == root and bound.metadata.get("attributes") == metadata.get("attributes"):
            return bound
        return ingest.publish(name, root, metadata)


def _lacking(source: Store, needed: Needed, ingest: Ingest) -> Iterator[Location]:
    """What an ingest does not find, where it lies in `source`: bases before what is encoded against them."""
    source.index.sync()
    seen: set[ObjectId] = set()
    for object_id in needed.ids():
        if object_id in seen or ingest.finds(object_id):
            continue
        chain = [source.index.locate(object_id)]
        while (base := chain[-1].base) != NO_ID and base not in seen and not ingest.finds(base):
            if len(chain) > limits.CHAIN_READ_DEPTH:
                raise DeltaCycleError(f"{chain[0]}: more than {limits.CHAIN_READ_DEPTH} bases behind it")
            chain.append(source.index.locate(base))
        seen.update(location.object_id for location in chain)
        yield from reversed(chain)


def _adopt(source: Store, ingest: Ingest, found: Audited) -> None:
    """Store an object as it is encoded. One of which this copy is gone or damaged meanwhile, or whose base has too many
    bases in the target, is stored in full. Raises CorruptError when no copy can be read.
    """
    if found.error is None and ingest.adopt(found.location, found.encoded):
        return
    location = found.location
    raw = source.objects.load(location.object_id, location.kind)
    if id_of(location.kind, raw) != location.object_id:
        raise CorruptError(f"{location}: its bytes do not have its id")
    ingest.adopt_whole(location, raw)
