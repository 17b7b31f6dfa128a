"""Files and directories of the host become snapshots of a store."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moonclipfs import limits
from moonclipfs.errors import CorruptError, MoonclipError, NoSpaceError, NotFoundError, UsageError
from moonclipfs.formats.sniff import parse
from moonclipfs.store import move as moving
from moonclipfs.store.gc import collect
from moonclipfs.store.ingest import IngestStats, Intake
from moonclipfs.store.kept import Previous
from moonclipfs.store.log import Names
from moonclipfs.store.paths import check_path
from moonclipfs.store.progress import Progress
from moonclipfs.store.publish import Ingest
from moonclipfs.store.recipes import Recipe
from moonclipfs.store.scan import FileSource, Found, links_out, scan
from moonclipfs.store.sinks import EstimateSink
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType, ObjectId, Version, natural_key

log = logging.getLogger(__name__)

_ORDERED_BYTES = 64 * limits.KIB
"""Shorter files are not looked into before they are stored."""


@dataclass(frozen=True, slots=True)
class Added:
    """One snapshot of an `add`.

    `version` is None in a dry run; `unchanged` says that it was there already, with this very content, as `version`.
    """

    path: str
    version: Version | None
    unchanged: bool
    files: int
    bytes: int
    stats: IngestStats


@dataclass(slots=True)
class AddReport:
    """What an `add` did, or, in a dry run, would do."""

    snapshots: list[Added] = field(default_factory=list)
    stats: IngestStats = field(default_factory=IngestStats)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A snapshot to be made: from the contents of `root`, or (`merge`) from its children and what the newest has."""

    path: str
    root: Found
    merge: bool = False


def add(
    store: Store,
    paths: Sequence[Path],
    *,
    name: str | None = None,
    provenance: Mapping[str, object] | None = None,
    progress: Callable[[Progress], None] | None = None,
    dry_run: bool = False,
    move: bool = False,
) -> AddReport:
    """Store files and directories as snapshots, in natural order of their names.

    `name` ending in "/" keeps each basename below it: a directory becomes the snapshot `name/basename`, a plain file
    is merged into the newest version of the snapshot `name`. Else everything becomes one snapshot called `name` (None:
    the basename of the only path): the contents of a single directory, or each path under its basename.

    Content that the newest version of a name already has, with the same names, modes and times, makes no new version.
    Times of the last inode change are not kept: they are those of the last write. With `dry_run` nothing is written,
    and the sizes in the report are estimates. With `move` each snapshot is read back, compared with the originals,
    and these are deleted; an interrupted one is continued by the same call: a path that is gone while its snapshot is
    there counts as moved, which the log says; symbolic links, paths that lie in each other and directories whose
    symbolic links lead out of them are refused. `provenance` is kept in the log.

    Symbolic links in a directory are stored as links; the log says when some lead out of their snapshot.

    When it raises, the snapshots that came before are there and the one at fault is not. Raises NotFoundError,
    PermissionDeniedError, UsageError (devices, names that make no sense), BusyError (a file that changed meanwhile),
    NoSpaceError, LeaseLostError.
    """
    status = os.stat(store.path)
    move = move and not dry_run
    if move:
        moving.check_paths(store, paths)
        if len(paths) > 1 and not (name or "").endswith("/"):
            raise UsageError("moving several paths into one snapshot could not be resumed: use a name that ends in `/`")
        given, paths = paths, moving.resume(store, paths, name)
        if given and not paths:
            return AddReport()
    found = [scan(path, forbidden=(status.st_dev, status.st_ino)) for path in paths]
    plans = _plans(found, name)
    for plan in plans:
        _tell_links_out(plan, refuse=move)
    work = _Add(store, plans, dict(provenance or {}), progress or (lambda _: None))
    if dry_run:
        return work.estimate()
    return work.run(move=move)


def _plans(found: Sequence[Found], name: str | None) -> list[_Plan]:
    """Which snapshots are made of what."""
    if not found:
        raise UsageError("nothing to add: name at least one file or directory")
    names = Counter(one.name for one in found)
    for one, count in names.items():
        if count > 1 or not one:
            raise UsageError(f"{count} paths are called {os.fsdecode(one)!r}: add them one by one, with a name each")
    if name is not None and name.endswith("/"):
        prefix = name.rstrip("/")
        plans = [_Plan(_path(prefix, one.name), one) for one in _sorted(found) if one.type is EntryType.DIRECTORY]
        files = [one for one in _sorted(found) if one.type is not EntryType.DIRECTORY]
        if files and not prefix:
            raise UsageError("plain files need a snapshot to lie in: use --as NAME/")
        return plans + ([_Plan(check_path(prefix), _group(files), merge=True)] if files else [])
    if name is None:
        if len(found) > 1:
            raise UsageError("several paths need a name: --as NAME for one snapshot, --as NAME/ for one each")
        name = os.fsdecode(found[0].name)
    if len(found) == 1 and found[0].type is EntryType.DIRECTORY:
        return [_Plan(check_path(name), found[0])]
    return [_Plan(check_path(name), _group(found))]


def _tell_links_out(plan: _Plan, *, refuse: bool) -> None:
    """Log, or `refuse` with a UsageError, that what symbolic links point to is not in the snapshot."""
    links = links_out(plan.root)
    if not links:
        return
    count = "1 symbolic link leads" if len(links) == 1 else f"{len(links)} symbolic links lead"
    place = os.fsdecode(plan.root.path) or plan.path
    what = f"{count} out of {place}, the first is {os.fsdecode(links[0])}"
    if refuse:
        raise UsageError(f"{what}: what they point to would not be stored; add it without --move, or replace the links")
    log.warning("%s: stored as links, what they point to is not stored", what)


def _path(prefix: str, name: bytes) -> str:
    return check_path(f"{prefix}/{os.fsdecode(name)}" if prefix else os.fsdecode(name))


def _sorted(found: Sequence[Found]) -> list[Found]:
    return sorted(found, key=lambda one: (natural_key(os.fsdecode(one.name)), one.name))


def _group(found: Sequence[Found]) -> Found:
    """A directory that exists nowhere, over the paths given."""
    newest = max(one.attributes.mtime_ns for one in found)
    attributes = Attributes(0o755, os.getuid(), os.getgid(), newest, newest)
    return Found(b"", b"", EntryType.DIRECTORY, attributes, children=_sorted(found))


class _MovedError(Exception):
    """The version that files were merged into is no longer the newest."""


class _Add:
    """One run of `add`."""

    def __init__(
        self,
        store: Store,
        plans: Sequence[_Plan],
        provenance: dict[str, object],
        tell: Callable[[Progress], None],
    ) -> None:
        self._store = store
        self._plans = plans
        self._provenance = provenance
        self._tell = tell
        self._progress = Progress(sum(one.size for plan in plans for one in plan.root.walk()))
        self._report = AddReport()

    def run(self, *, move: bool) -> AddReport:
        """Store and publish each snapshot."""
        try:
            return self._run(move=move)
        except NoSpaceError:
            self._reclaim()
            raise

    def _reclaim(self) -> None:
        """Give the disk back what was stored and is referred to by nothing."""
        try:
            collect(self._store, repack=False)
        except MoonclipError as error:
            log.warning(
                "cannot give back what was stored already (%s): free some space, then run `moonclipfs gc`", error
            )

    def _run(self, *, move: bool) -> AddReport:
        for plan in self._plans:
            with self._store.ingest() as ingest:
                earlier = self._earlier(plan.path)
                tree = _Tree(ingest, plan.root, partial(self._file_of, earlier), self._count)
                added = self._publish(ingest, plan, tree)
            self._note(added)
            if move and added.version is not None:
                moving.verify_and_delete(self._store, added.version, plan.root)
        return self._report

    def estimate(self) -> AddReport:
        """Go through the motions without writing; each snapshot offers bases to those that follow it."""
        self._store.names()
        self._store.index.sync()
        planned: dict[bytes, Previous] = {}
        intake = Intake(EstimateSink(self._store.index, self._store.objects), self._store.config.cut)
        try:
            for plan in self._plans:
                previous = partial(self._planned_or_stored, planned, self._earlier(plan.path))
                planned = {}
                tree = _Tree(intake, plan.root, previous, self._count, planned)
                tree.directory(plan.root)
                self._note(Added(plan.path, None, False, tree.stats.files, tree.stats.raw_bytes, tree.stats))
        finally:
            intake.close()
        return self._report

    def _publish(self, ingest: Ingest, plan: _Plan, tree: _Tree) -> Added:
        """Bind the tree; when files are merged into a version, into the newest, whoever made that meanwhile."""
        while True:
            current = self._store.names().bound().get(plan.path)
            base = current if plan.merge else None
            kept = (
                []
                if base is None
                else [
                    e
                    for e in self._store.directory(base.root).values()
                    if e.name not in {one.name for one in plan.root.children}
                ]
            )
            root = tree.directory(plan.root, kept)
            files, size = self._totals(plan.root, kept)
            if current is not None and current.root == root:
                return Added(plan.path, current, True, files, size, tree.stats)
            attributes = plan.root.attributes if base is None else self._store.root_entry(base).attributes
            metadata: dict[str, object] = {"attributes": root_metadata(attributes), "files": files, "bytes": size}
            if self._provenance:
                metadata["provenance"] = self._provenance

            def unmoved(names: Names, plan: _Plan = plan, base: Version | None = base) -> None:
                if plan.merge and names.bound().get(plan.path) != base:
                    raise _MovedError

            try:
                return Added(
                    plan.path, ingest.publish(plan.path, root, metadata, unmoved), False, files, size, tree.stats
                )
            except _MovedError:
                continue

    def _earlier(self, path: str) -> Version | None:
        """The snapshot before `path` in its line: its own newest version, else the newest sibling under its parent."""
        names = self._store.names()
        own = names.versions(path)
        if own:
            return own[-1]
        parent = path.rpartition("/")[0]
        siblings = (version for version in names.all_versions() if version.path.rpartition("/")[0] == parent)
        return max(siblings, key=lambda version: version.order, default=None)

    def _file_of(self, version: Version | None, path: bytes) -> Previous | None:
        """The file at `path` in a version, if there is one."""
        if version is None:
            return None
        try:
            entry = self._store.lookup(version, path)
            return self._store.open_file(entry) if entry.type is EntryType.FILE else None
        except NotFoundError:
            return None
        except CorruptError as error:
            log.warning("%s cannot be read, so nothing is stored as a delta against it: %s", version.path, error)
            return None

    def _planned_or_stored(
        self, planned: Mapping[bytes, Previous], version: Version | None, path: bytes
    ) -> Previous | None:
        return planned.get(path) or self._file_of(version, path)

    def _totals(self, root: Found, kept: Sequence[Entry]) -> tuple[int, int]:
        """Files and bytes of a snapshot made of what was found and of entries that are kept."""
        sizes = [one.size for one in root.walk() if one.type is EntryType.FILE]
        for entry in kept:
            below = self._store.walk_directory(entry.child) if entry.type is EntryType.DIRECTORY else [(b"", entry)]
            sizes += [one.size for _, one in below if one.type is EntryType.FILE]
        return len(sizes), sum(sizes)

    def _count(self, path: str, done: int, stored: int) -> None:
        self._progress.path = path
        self._progress.done += done
        self._progress.stored += stored
        self._tell(self._progress)

    def _note(self, added: Added) -> None:
        self._report.snapshots.append(added)
        self._report.stats.add(added.stats)


class _Tree:
    """The files of a tree put into an intake, and its directories made of them."""

    def __init__(
        self,
        intake: Intake,
        root: Found,
        previous: Callable[[bytes], Previous | None],
        count: Callable[[str, int, int], None],
        planned: dict[bytes, Previous] | None = None,
    ) -> None:
        """Put every file in. `planned` is told where each can be read again, for a dry run."""
        self._intake = intake
        self._count = count
        self._planned = planned
        self.stats = IngestStats()
        self._children: dict[bytes, ObjectId] = {}
        self._groups = _link_groups(root)
        by_group: dict[int, ObjectId] = {}
        for path, found in _widest_first(_files(root)):
            group = self._groups.get(found.identity, 0)
            if group not in by_group or not group:
                by_group[group] = self._put(found, path, previous(path))
            self._children[found.path] = by_group[group]

    def directory(self, found: Found, kept: Sequence[Entry] = ()) -> ObjectId:
        """Store a directory and all below it, with `kept` entries beside what was found."""
        return self._intake.put_directory([*kept, *(self._entry(child) for child in found.children)])

    def _put(self, found: Found, path: bytes, previous: Previous | None) -> ObjectId:
        source = FileSource(found)
        name = source.name
        source.open()
        try:
            recipe, stats = self._intake.put_contents(source, previous, lambda done: self._count(name, done, 0))
            source.check()
        finally:
            source.close()
        child = self._intake.put_recipe(recipe, stats)
        self.stats.add(stats)
        self._count(name, 0, stats.stored_bytes)
        if self._planned is not None:
            self._planned[path] = _Planned(source, recipe)
        return child

    def _entry(self, found: Found) -> Entry:
        child = NO_ID
        if found.type is EntryType.FILE:
            child = self._children[found.path]
        elif found.type is EntryType.DIRECTORY:
            child = self.directory(found)
        group = self._groups.get(found.identity, 0) if found.type is EntryType.FILE else 0
        return Entry(found.name, found.type, found.attributes, found.size, child, found.target, group)


class _Planned:
    """A file of the host with the recipe that it would get."""

    def __init__(self, source: FileSource, recipe: Recipe) -> None:
        self.recipe = recipe
        self.size = source.size
        self.read = source.read


def _files(root: Found, prefix: bytes = b"") -> Iterator[tuple[bytes, Found]]:
    """(path, file) of all files below a directory, in natural order."""
    for child in root.children:
        if child.type is EntryType.FILE:
            yield prefix + child.name, child
        elif child.type is EntryType.DIRECTORY:
            yield from _files(child, prefix + child.name + b"/")


def _widest_first(files: Iterable[tuple[bytes, Found]]) -> list[tuple[bytes, Found]]:
    """Files with the widest elements first: an fp32 tensor foretells its bf16 copy to the bit, not the reverse."""
    return sorted(files, key=lambda item: -_width(item[1]))


def _width(found: Found) -> int:
    """Bytes of an element of most tensors of a file; 1 for files that are too short to matter."""
    if found.size < _ORDERED_BYTES:
        return 1
    sizes: Counter[int] = Counter()
    for region in parse(FileSource(found)).regions:
        sizes[region.dtype.width] += region.length
    return sizes.most_common(1)[0][0]


def _link_groups(root: Found) -> dict[tuple[int, int], int]:
    """A number for each file that has several names in the tree, by its identity."""
    names = Counter(one.identity for one in root.walk() if one.type is EntryType.FILE and one.links > 1)
    several = [identity for identity, count in names.items() if count > 1]
    return {identity: number for number, identity in enumerate(several, 1)}
