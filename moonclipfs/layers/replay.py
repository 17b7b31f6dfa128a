"""Opening a layer: its journal is replayed, staged bytes are found again, and what nobody needs is cleared away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from moonclipfs import limits
from moonclipfs.layers.changes import Changes
from moonclipfs.layers.contents_records import ContentReplay, content_of
from moonclipfs.layers.files import Files
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.records import PART_RECIPE, Contents, Stored

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovery:
    """What opening a layer found: counts, and bytes where the name says so."""

    records: int = 0
    """Replayed."""
    staged_files: int = 0
    staged_bytes: int = 0
    orphans: int = 0
    """Staging files that nothing needs."""
    lost_records: int = 0
    """Changes that were not durable when the power failed."""
    lost_contents: int = 0
    """The same for contents, whose files keep what they were before."""

    def __str__(self) -> str:
        """One line for a person; empty when there is nothing to tell."""
        parts = []
        if self.staged_files:
            parts.append(f"{self.staged_files} files ({self.staged_bytes / limits.MIB:.1f} MiB) are to be encoded")
        if self.orphans:
            parts.append(f"{self.orphans} staging files that nothing needs are cleared away")
        if self.lost_records or self.lost_contents:
            lost = self.lost_records + self.lost_contents
            parts.append(f"{lost} changes were not durable when the machine went down, and are gone")
        return "; ".join(parts)


def replay(layer: Changes, files: Files, captured: Callable[[], set[int]] = set) -> Recovery:
    """Apply all records of the journal that count, and take up the files that are staged.

    `captured` tells, after that, the numbers of the generations in files that captures need. Raises CorruptError,
    FormatVersionError, NoSpaceError, BackendError. What is staged but missing is CorruptError for whoever reads it.
    """
    state, contents, recovery = layer.state, ContentReplay(layer.state, layer.staging), Recovery()
    state.on_gone = contents.gone
    state.handle(Contents, contents.contents)
    state.handle(Stored, contents.stored)
    for record in layer.journal.replay():
        state.apply(record)
        recovery.records += 1
    with layer.lock:
        state.on_gone = files.gone
        _take_up(layer, files, contents, recovery)
        _find_orphans(layer, files, contents, captured(), recovery)
    contents.forget()
    dropped = layer.journal.recovered
    recovery.lost_records, recovery.lost_contents = dropped.records, dropped.contents
    if line := str(recovery):
        log.info("layer %s: %s", layer.name, line)
    return recovery


def _take_up(layer: Changes, files: Files, contents: ContentReplay, recovery: Recovery) -> None:
    """What is staged goes on from here: frozen, since jobs and captures may need it as it is."""
    for inode in layer.state.own.values():
        if inode.content is None:
            continue
        if _is_stored(inode, contents):
            content = content_of(inode)
            inode.child, inode.size, inode.content = content.recipe, content.size, None
            continue
        generations = content_of(inode).generations()
        for generation in generations:
            generation.frozen = True
        if inode in contents.unsynced:
            files.log.replayed(inode, contents.unsynced[inode])
        files.jobs.closed(inode)
        recovery.staged_files += 1
        recovery.staged_bytes += sum(generation.bytes for generation in generations)


def _find_orphans(
    layer: Changes, files: Files, contents: ContentReplay, captured: set[int], recovery: Recovery
) -> None:
    """What is staged and in no file any more goes when the journal that says so is on the disk."""
    contained = (inode.content for inode in layer.state.own.values() if inode.content is not None)
    used = captured | {generation.number for content in contained for generation in content.generations()}
    for inode, held in contents.unsynced.items():
        used |= {generation.number for generation in held if inode.links}
    unused = [generation for number, generation in contents.generations.items() if number not in used]
    # One that the journal has in memory had its file too late: no record tells of it.
    in_files = {number for number, generation in contents.generations.items() if generation.path is not None}
    files.orphans = layer.staging.orphans(captured | in_files)
    layer.state.generations = max([layer.state.generations, *files.orphans])
    there = set(layer.staging.orphans(set()))
    # Of a file that was deleted long ago, the journal names bytes still: they are not to count as staged.
    deleted = {generation for generation in unused if generation.number in in_files - there}
    files.log.disposal.drop(deleted)
    files.log.disposal.drop_after_commit(generation for generation in unused if generation not in deleted)
    recovery.orphans = len(files.orphans) + sum(generation.number in there for generation in unused)


def _is_stored(inode: Inode, contents: ContentReplay) -> bool:
    """Whether a file consists of its recipe and nothing else."""
    content = content_of(inode)
    parts = content.parts(0, content.size)
    if any(part.kind != PART_RECIPE for part in parts) or inode in contents.unsynced:
        return False
    return contents.sizes.get(content.recipe, 0 if not parts else -1) == content.size
