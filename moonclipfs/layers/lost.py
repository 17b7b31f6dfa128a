"""Staged bytes that are lost: somebody deleted or cut off a staging file, or its disk did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from moonclipfs.layers.captured import CapturedEntry
from moonclipfs.layers.contents_records import content_of
from moonclipfs.layers.names import join
from moonclipfs.layers.records import PART_STAGED
from moonclipfs.layers.staging import Generation

if TYPE_CHECKING:
    from moonclipfs.layers.capture import Capture
    from moonclipfs.layers.core import Core
    from moonclipfs.layers.inodes import Inode

ADVICE = "remove the file, or write it anew"


def lost_bytes(parts: Iterable[tuple[int, int, Generation | None]]) -> str:
    """What is lost of ranges (offset, length, generation) of a file, for a person; empty for nothing."""
    ends: dict[Generation, int] = {}
    for offset, length, generation in parts:
        if generation is not None:
            ends[generation] = max(ends.get(generation, 0), offset + length)
    return next((lost for generation, end in ends.items() if (lost := generation.lost(end))), "")


def lost_of_files(layer: Core, files: Iterable[Inode]) -> Iterator[tuple[bytes, str]]:
    """The files whose staged bytes are lost: the path of each, and what is lost. Not under the lock."""
    for inode in files:
        with layer.lock:
            path = layer.state.path(inode)
            if path is None or inode.content is None:
                continue
            content = content_of(inode)
            parts = [(part.offset, part.length, part.generation) for part in content.parts(0, content.size)]
        if lost := lost_bytes(parts):
            yield path, lost


def lost_of_capture(capture: Capture, tree: CapturedEntry) -> Iterator[tuple[bytes, str]]:
    """The same of a capture; `tree` is what is still needed of its tree, and paths begin with the directory's."""
    generations = {generation.number: generation for generation in capture.pinned}
    todo = [(capture.path, tree)]
    while todo:
        path, entry = todo.pop()
        todo += [(join(path, one.name), one) for one in entry.entries]
        parts = [
            (offset, length, generations.get(number))
            for offset, length, kind, number in entry.parts
            if kind == PART_STAGED
        ]
        if lost := lost_bytes(parts):
            yield path, lost
