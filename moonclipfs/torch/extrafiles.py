"""Files that a program gives to be kept beside its state, as `config.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from moonclipfs.errors import UsageError
from moonclipfs.torch import parts


def contents(files: Mapping[str, str | bytes | os.PathLike[str]]) -> dict[str, bytes]:
    """The bytes of extra files by name. Raises UsageError for a name that a part or the store has,
    and for a file that cannot be read.
    """
    found = {}
    for name, content in files.items():
        taken = name == parts.STATE_FILE or name.partition(".")[2].startswith("safetensors")
        if taken or not name or "/" in name or name in (".", "..") or "\0" in name:
            raise UsageError(f"extra_files: {name!r} cannot be the name of an extra file")
        if isinstance(content, bytes):
            found[name] = content
        elif isinstance(content, str):
            found[name] = content.encode()
        else:
            found[name] = _read(name, content)
    return found


def _read(name: str, path: os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"extra_files: {name!r} cannot be read from {path}: {error.strerror}") from error
