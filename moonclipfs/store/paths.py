"""The paths that snapshots can have."""

from __future__ import annotations

from moonclipfs import limits
from moonclipfs.errors import UsageError


def check_path(path: str) -> str:
    """Return `path` if a snapshot can have it, else raise UsageError. It may hold any bytes, as surrogate escapes."""
    parts = path.split("/")
    try:
        encoded = [part.encode("utf-8", "surrogateescape") for part in parts]
    except UnicodeEncodeError as error:
        raise UsageError(f"{path!r} cannot be a snapshot's name: it is not text") from error
    if "" in parts or "." in parts or ".." in parts or "\0" in path:
        raise UsageError(f"{path!r} cannot be a snapshot's name: use NAME or DIRECTORY/NAME, without '.' or '..'")
    if path.startswith("@"):
        raise UsageError(f"{path!r} cannot be a snapshot's name: names that begin with @ are taken")
    if max(map(len, encoded)) > limits.NAME_BYTES or len(parts) > limits.PATH_DEPTH:
        raise UsageError(f"{path[:60]!r}... cannot be a snapshot's name: a part is too long, or there are too many")
    if sum(map(len, encoded)) + len(parts) > limits.PATH_BYTES:
        raise UsageError(f"{path[:60]!r}... cannot be a snapshot's name: it is longer than {limits.PATH_BYTES} bytes")
    return path
