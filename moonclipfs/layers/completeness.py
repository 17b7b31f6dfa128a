"""Whether a checkpoint is all there, by its layout: what is missing, in words."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats import jsontext
from moonclipfs.formats.contents import Files, findings
from moonclipfs.formats.layout import OPAQUE_FORMAT
from moonclipfs.layers.units import is_checkpoint_file, is_partial, masked

_HEAD_BYTES = 64
_PIPELINE = "model_index.json"


def missing(files: Files, siblings: Sequence[Collection[str]] = ()) -> list[str]:
    """Return what keeps a unit from being complete, one line for each; nothing when it is.

    Looked for are truncated and unwritten files, shards that an index names, files that the metadata of a distributed
    checkpoint names, gaps in ranks, components of a pipeline, files still being fetched, and what all `siblings`
    (the paths of the files of each) have. What `files` raises passes through.
    """
    paths = sorted(files.paths())
    lines = [f"{path}: is being written" for path in paths if any(map(is_partial, os.fsencode(path).split(b"/")))]
    lines += [f"{path}: {message}" for path, message in _unwritten(files, paths)]
    lines += [f"{one.path}: {one.message}" for one in findings(files) if one.is_unfinished]
    lines += [f"{_PIPELINE}: names missing {name}" for name in _components(files, paths)]
    lines += [f"{path}: missing, and its siblings have it" for path in _unlike(paths, siblings)]
    return list(dict.fromkeys(lines))


def _unwritten(files: Files, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Find checkpoint files of no known format that are empty, or begin as a hole does."""
    for path in paths:
        if not is_checkpoint_file(os.fsencode(path.rpartition("/")[2])) or files.layout(path).format != OPAQUE_FORMAT:
            continue
        source = files.source(path)
        if not any(bytes(source.read(0, min(source.size, _HEAD_BYTES)))):
            yield path, "has no contents yet"


def _components(files: Files, paths: Sequence[str]) -> Iterator[str]:
    """Find the components that the index of a pipeline names and that have no directory."""
    if _PIPELINE not in paths:
        return
    source = files.source(_PIPELINE)
    if source.size > limits.INDEX_BYTES:
        return
    try:
        named = jsontext.fields(jsontext.load(bytes(source.read(0, source.size))), _PIPELINE)
    except ParseError:
        yield "components: it is not readable"
        return
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    for name, value in named.items():
        is_component = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
        if is_component and not name.startswith("_") and name not in folders:
            yield name


def _unlike(paths: Sequence[str], siblings: Sequence[Collection[str]]) -> list[str]:
    """The files that all siblings have and this one has not; other numbers in a name do not count as a difference."""
    if not siblings:
        return []
    common = set(siblings[0]).intersection(*siblings[1:])
    present = {masked(os.fsencode(path)) for path in paths}
    return sorted(path for path in common if masked(os.fsencode(path)) not in present)
