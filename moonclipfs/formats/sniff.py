"""The format of a file, told by its first bytes, and its layout. Names do not matter."""

from __future__ import annotations

from collections.abc import Callable

from moonclipfs.errors import ParseError, TruncatedError
from moonclipfs.formats import distcp, gguf, npy, npz, safetensors, torchlegacy, torchzip, zipdir
from moonclipfs.formats.layout import Layout, opaque
from moonclipfs.types import Source

_HEAD_BYTES = 64


def parse(source: Source) -> Layout:
    """Return the layout of a file of any content.

    Never raises for what the file holds: bytes that are not understood are one OPAQUE region with a reason. What
    `source.read` raises passes through.
    """
    size = source.size
    if not size:
        return opaque(0, "the file is empty")
    found = _parser(bytes(source.read(0, min(size, _HEAD_BYTES))))
    if found is None:
        return opaque(size, "no known format")
    name, parser = found
    try:
        return parser(source)
    except ParseError as error:
        return opaque(size, f"{name}: {error}", truncated=isinstance(error, TruncatedError))


def _parser(head: bytes) -> tuple[str, Callable[[Source], Layout]] | None:
    """Return the format that `head`, the first bytes of a file, announces, and its parser."""
    if head.startswith(zipdir.MAGIC):
        return "zip", _parse_zip
    if head.startswith(gguf.MAGIC):
        return gguf.FORMAT, gguf.parse
    if head.startswith(npy.MAGIC):
        return npy.FORMAT, npy.parse
    if torchlegacy.is_magic(head):
        return torchlegacy.FORMAT, torchlegacy.parse
    # The header of safetensors has no magic: a length below 2^32, then the brace of a JSON object.
    if head[4:9] == b"\0\0\0\0{":
        return safetensors.FORMAT, safetensors.parse
    return None


def _parse_zip(source: Source) -> Layout:
    if distcp.is_shard(source):
        return distcp.parse(source)
    members = zipdir.read(source)
    root = torchzip.root_of(members)
    if root is not None:
        return torchzip.parse(source, members, root)
    if any(member.name.endswith(npz.SUFFIX) for member in members):
        return npz.parse(source, members)
    raise ParseError("neither torch's data.pkl nor NumPy arrays are in the archive")
