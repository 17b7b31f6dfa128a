"""Replacing ranges of bytes of several files of a layer in one step: whoever reads sees all old or all new bytes.

The new bytes go into staging generations of their own, which the files get all at once, under the lock, when they are
complete. What fails before that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moonclipfs import limits
from moonclipfs.errors import BusyError
from moonclipfs.layers.contents_records import content_of
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.staging import Generation
from moonclipfs.types import Buffer

_ATTEMPTS = 8


class Patch(NamedTuple):
    """`length` bytes at `offset` of a file become those which `read` tells, given an offset in them and a length."""

    offset: int
    length: int
    read: Callable[[int, int], Buffer]


def patch(layer: Layer, files: Mapping[OpenFile, Sequence[Patch]], now_ns: int) -> None:
    """Replace ranges, all inside files that are open for writing and stay as long as they are.

    Raises StagingFullError, QuotaError, NoSpaceError, BackendError, BusyError when the files are captured again and
    again meanwhile: then all is as it was.
    """
    for _ in range(_ATTEMPTS):
        new: dict[Inode, Generation] = {}
        try:
            for file, patches in files.items():
                new[file.inode] = _generation(layer, file.inode, patches)
            if _attach(layer, {file.inode: patches for file, patches in files.items()}, new, now_ns):
                return
        except BaseException:
            _drop(layer, new)
            raise
        _drop(layer, new)
    raise BusyError("the files that hold the expert are captured all the time: try again")


def _generation(layer: Layer, inode: Inode, patches: Sequence[Patch]) -> Generation:
    """A generation of a file that holds the new bytes, which the file does not know of yet."""
    with layer.lock:
        if layer.files.quota is not None:
            layer.files.quota.admit(inode, _ranges(patches))
        layer.staging.admit(sum(one.length for one in patches))
        layer.state.generations += 1
        generation = layer.staging.create(layer.state.generations)
    try:
        for one in patches:
            for at in range(0, one.length, limits.PATH_WRITE_BYTES):
                count = min(limits.PATH_WRITE_BYTES, one.length - at)
                generation.write(one.offset + at, one.read(at, count))
    except BaseException:
        _drop(layer, {inode: generation})
        raise
    return generation


def _attach(layer: Layer, patches: Mapping[Inode, Sequence[Patch]], new: dict[Inode, Generation], now_ns: int) -> bool:
    """Let the files have their new bytes; False when one was captured or taken for encoding since its generation was
    made: generations with lower numbers count as part of that. When it fails, what the journal knows of by then is
    taken out of `new`: it goes with the next record of that file.
    """
    log, quota = layer.files.log, layer.files.quota
    with layer.lock:
        if any(content_of(inode).frozen >= generation.number for inode, generation in new.items()):
            return False
        before = {
            inode: (content_of(inode).copy(), inode.mtime_ns, inode.ctime_ns, log.cleared(inode)) for inode in new
        }
        counted = {inode: quota.saved(inode) for inode in new} if quota is not None else {}
        known: list[Inode] = []
        try:
            for inode, generation in new.items():
                content = content_of(inode)
                if quota is not None:  # once more: by now the files before it have theirs
                    quota.admit(inode, _ranges(patches[inode]))
                log.changing(inode)
                for one in patches[inode]:
                    content.wrote(generation, one.offset, one.length)
                if quota is not None:
                    quota.wrote(inode, _ranges(patches[inode]))
                inode.mtime_ns = inode.ctime_ns = now_ns
                log.journal(inode)
                known.append(inode)
        except BaseException:
            for inode, (content, mtime_ns, ctime_ns, cleared) in before.items():
                inode.content, inode.mtime_ns, inode.ctime_ns = content, mtime_ns, ctime_ns
                log.undone(inode, cleared)
                if quota is not None:
                    quota.restore(inode, counted[inode])
            for inode in known:
                del new[inode]
            raise
    return True


def _ranges(patches: Sequence[Patch]) -> list[tuple[int, int]]:
    return [(one.offset, one.offset + one.length) for one in patches]


def _drop(layer: Layer, new: Mapping[Inode, Generation]) -> None:
    with layer.lock:
        layer.files.log.disposal.drop(set(new.values()))
