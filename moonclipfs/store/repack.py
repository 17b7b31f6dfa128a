"""Copying needed objects into new packs, as they are encoded, each proved before and read back after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from moonclipfs.store.audit import audit_all
from moonclipfs.store.packs import Location, PackWriter
from moonclipfs.store.reachable import OBJECT_OVERHEAD
from moonclipfs.store.store import Store


@dataclass(slots=True)
class Copied:
    """`packs` are the new packs, `bytes` what the copies take; `broken` says per old pack what cannot be copied."""

    packs: list[str] = field(default_factory=list)
    bytes: int = 0
    broken: dict[str, str] = field(default_factory=dict)


def copy_objects(
    store: Store, locations: Iterable[Location], progress: Callable[[int], None] = lambda count: None
) -> Copied:
    """Copy objects into new packs and publish these; `progress` is told the bytes of each.

    An object that does not decode to its id is not copied. Raises NoSpaceError, BackendError: then new packs that
    were published are copies which nothing needs. Raises CorruptError when a copy does not read back.
    """
    copied = Copied()
    copies: list[Location] = []
    writer = PackWriter(store.backend, store.index.add_pack)
    try:
        for found in audit_all(locations, store.packs, store.objects):
            if found.error is not None:
                copied.broken.setdefault(found.location.pack, str(found.error))
            else:
                copies.append(_add_copy(writer, found.location, found.encoded))
                copied.bytes += found.location.encoded_length + OBJECT_OVERHEAD
            progress(found.location.encoded_length + OBJECT_OVERHEAD)
        copied.packs = writer.flush()
    finally:
        writer.abort()
    for copy in copies:
        store.packs.read(copy, 0, copy.encoded_length)
    return copied


def _add_copy(writer: PackWriter, old: Location, encoded: bytes) -> Location:
    """Add an object with everything that was told of it but its place."""
    return writer.add(
        encoded,
        object_id=old.object_id,
        kind=old.kind,
        raw_length=old.raw_length,
        dtype=old.dtype,
        depth=old.depth,
        base=old.base,
        base_start=old.base_start,
        label=old.label,
        sketch=old.sketch,
        generation=old.generation,
    )
