"""Object ids: what makes two pieces of bytes the same object."""

from __future__ import annotations

from blake3 import blake3

from moonclipfs.types import Buffer, Kind, ObjectId

CONTEXTS = {
    Kind.DATA: "moonclipfs 2026-11 data object",
    Kind.RECIPE: "moonclipfs 2026-11 recipe",
    Kind.DIRECTORY: "moonclipfs 2026-11 directory",
}
"""BLAKE3 key derivation contexts: a recipe never has the id of the same bytes stored as data."""


def object_id(kind: Kind, data: Buffer) -> ObjectId:
    """Return the 32-byte id of `data` as an object of `kind`. Releases the GIL for large data."""
    return blake3(data, derive_key_context=CONTEXTS[kind]).digest()
