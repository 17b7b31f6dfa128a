"""How a layer and the names of the log follow each other: adopting what others publish, and telling what was removed
or moved here.

While names are moved in the log, what the move touches stays as it is: whoever would change it waits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from moonclipfs.errors import ExistsError, MoonclipError, NotEmptyError, NotFoundError
from moonclipfs.layers.base import Caches, Missing
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.lookup import ABSENT, Lookup
from moonclipfs.layers.names import Area, View, join
from moonclipfs.layers.records import Dropped, Kept, Moving, Record, Rename, Unbinding, Unbound
from moonclipfs.store.log import Log, Names
from moonclipfs.store.replay import is_at_or_below
from moonclipfs.store.store import Store
from moonclipfs.types import Version

log = logging.getLogger(__name__)


class NothingToTell(MoonclipError):
    """The log needs no record."""


class NameSync(Lookup):
    """See the module. All blocking calls here take `names_lock` first."""

    _held: frozenset[tuple[Inode, bytes]] = frozenset()
    """Names that a move in the log is about to change."""
    _shut: frozenset[Inode] = frozenset()
    """Directories that get no new entries meanwhile."""

    def __init__(
        self,
        store: Store,
        name: str,
        layer_id: bytes,
        directory: Path,
        *,
        fixed: bool = False,
        caches: Caches | None = None,
        names_log: Log | None = None,
    ) -> None:
        """Use `Layer.open`."""
        super().__init__(store, name, layer_id, directory, fixed=fixed, caches=caches, names_log=names_log)
        self._changed_names: dict[tuple[bytes, bytes], None] = {}
        """(path of a directory, name) of what changed its meaning since it was last asked."""

    # What others publish

    def refresh(self, now_ns: int) -> list[tuple[Inode, bytes]]:
        """Read the log and adopt it; returns the (directory, name) that mean something else now.

        What is own and has unsealed changes stays as it is. Blocks. Raises BackendError, CorruptError, NoSpaceError.
        """
        if self.fixed:
            return []
        with self.names_lock:
            if self.state.moving is not None:
                self._finish_move()
            names = self.names()
            if names.sequence == self.view.sequence:
                self.saw(names)
            else:
                self._adopt_names(names, now_ns, list)
        return list(self._affected())

    def _adopt_names(self, names: Names, now_ns: int, records: Callable[[], Iterable[Record]]) -> None:
        """Show what `names` mean from now on; in the same step, journal and apply what `records` returns."""
        before, view = self.view, View(names, self.view, now_ns)
        changes = list(view.area(Area.LIVE).changes(before.area(Area.LIVE)))
        with self.lock:
            for record in records():
                self.record(record)
            self.view = view
            self.state.names_version += 1
            self._drop_clean(changes)
            self._changed_names.update(dict.fromkeys(changes))
        # Only now: what is adopted from here on is named by this view, or by a journal that gc reads.
        self.saw(names)

    def _affected(self) -> Iterator[tuple[Inode, bytes]]:
        with self.lock:
            changes, self._changed_names = self._changed_names, {}
        for path, name in changes:
            try:
                yield self.resolve(path), name
            except MoonclipError:
                continue  # the directory went away with it: then its own name is among the changes

    def _drop_clean(self, changes: Iterable[tuple[bytes, bytes]]) -> None:
        """Let go of own subtrees without changes whose snapshot others published anew, moved or removed; one with
        changes is no snapshot any more when others removed it.
        """
        live = self.view.area(Area.LIVE).directories
        for path, name in sorted(changes, key=lambda change: -len(join(*change).split(b"/"))):
            directory = self._own_directory(path)
            inode = directory.entries.get(name) if directory is not None else None
            if directory is None or inode is None or not inode.is_directory:
                continue
            leaf = live.get(path, {}).get(name)
            if self._is_dirty(inode):
                if inode.sealed and not isinstance(leaf, Version):
                    self.record(Kept(inode.number))
                continue
            if isinstance(leaf, Version) and leaf.sequence == inode.sealed:
                continue
            empty = name not in live.get(path, {}) and _is_left_over(directory, name, inode)
            if isinstance(leaf, Version) or inode.sealed or empty:
                self.record(Dropped(directory.number, name))

    def _is_dirty(self, inode: Inode) -> bool:
        """Whether there are changes at or below an own inode that no version holds."""
        return inode.below > 0 or inode.number in self.state.captured.values()

    def _own_directory(self, path: bytes) -> Inode | None:
        inode: Inode | None = self.root
        for name in path.split(b"/") if path else ():
            inode = None if inode is None else inode.entries.get(name)
        return inode if inode is not None and inode.is_directory else None

    def conflicts(self) -> list[str]:
        """The paths where live entries win over a version that others published meanwhile."""
        with self.lock:
            found = []
            for path, leaf in self.view.area(Area.LIVE).leaves.items():
                if not isinstance(leaf, Version) or leaf.sequence in self.state.unbinding:
                    continue
                inode = self._own_directory(path)
                ours = leaf.metadata.get("layer") == self.name
                hidden = inode is None and self._hides(path)
                if hidden or (inode is not None and inode.sealed != leaf.sequence and not ours):
                    found.append(leaf.path)
            return sorted(found)

    def _hides(self, path: bytes) -> bool:
        """Whether an own entry that is no directory stands in the way of a path."""
        inode: Inode | None = self.root
        for name in path.split(b"/"):
            inode = inode.entries.get(name) if inode is not None else None
            if inode is None:
                return False
            if not inode.is_directory:
                return True
        return False

    def _catch_up(self) -> None:
        """After a replay: end what was under way, and let go of what others published anew meanwhile."""
        with self.names_lock:
            self._finish_move()
            self._place_captured()
            with self.lock:
                self.state.names_version += 1
                leaves = self.view.area(Area.LIVE).leaves
                roots = [inode for inode in self.state.own.values() if inode.sealed]
                paths = {path for inode in roots if (path := self.state.path(inode)) is not None} | leaves.keys()
                self._drop_clean([(above, name) for above, _, name in (path.rpartition(b"/") for path in paths)])

    def _place_captured(self) -> None:
        """The version of a capture that is not settled yet may be bound where its directory is no more."""
        marks = {f"{self.id.hex()}.{number}": directory for number, directory in self.state.captured.items()}
        seen: set[object] = set()
        for version in sorted(self.names().all_versions() if marks else (), key=lambda one: one.sequence):
            mark = version.metadata.get("capture")
            if mark in marks and mark not in seen and not version.removed:
                self.place_version(version, self.state.own.get(marks[str(mark)]))
                self.follow()
            seen.add(mark)

    # What is sealed here

    def place_version(self, version: Version, directory: Inode | None) -> None:
        """Note that the name of a version is to follow its directory, where that was renamed or removed meanwhile:
        `follow` tells the log.
        """
        with self.lock:
            old, new = os.fsencode(version.path), None if directory is None else self.state.path(directory)
            if new is None:
                self.record(Unbinding(old, version.sequence))
            elif new != old:
                self.record(Moving(old, new, version.sequence))

    def follow(self) -> None:
        """Inside `naming`: tell the log what `place_version` noted. What fails is tried again later."""
        try:
            self._push_names()
            self._finish_move()
        except MoonclipError as error:
            log.warning("the log could not be told that a sealed directory was renamed or removed: %s", error)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """For whoever binds names for this layer: until `adopt_newest`, nobody else adopts or changes any.

        What was removed and moved here before is in the log. Raises BackendError and so on.
        """
        with self.names_lock:
            if self.state.moving is not None:
                self._finish_move()
            self._push_names()
            yield

    def adopt_newest(self, now_ns: int, settle: Callable[[Names], None]) -> None:
        """Inside `naming`: show what names mean now, in one step with what `settle` does under the lock."""
        names = self.names()

        def records() -> list[Record]:
            settle(names)
            return []

        self._adopt_names(names, now_ns, records)

    def shows_another(self, directory: bytes, name: bytes) -> None:
        """Under the lock: a name in the directory at a path means something else; `refresh` tells of it."""
        self._changed_names[directory, name] = None

    # What is removed here

    def push_names(self) -> int:
        """Tell the log which snapshots were removed here; returns how many. Blocks. Raises BackendError and so on."""
        if not self.state.unbinding:
            return 0
        with self.names_lock:
            return self._push_names()

    def _push_names(self) -> int:
        with self.lock:
            pending = dict(self.state.unbinding)
        if not pending:
            return 0

        def body(names: Names) -> Mapping[str, object]:
            paths = [version.path for version in names.bound().values() if version.sequence in pending]
            if not paths:
                raise NothingToTell
            return {"paths": paths}

        try:
            self.names_log.append("unbind", body)
        except NothingToTell:
            pass
        done = [Unbound(path, sequence) for sequence, path in pending.items()]
        self._adopt_names(self.names(), time.time_ns(), lambda: done)
        return len(done)

    # What moves here

    def names_at(self, directory: Inode, name: bytes) -> int:
        """The log record that bound one of the names that are shown at `name` of a directory or below; 0 for none.
        Under the lock.
        """
        path = self._names_path(directory)
        if path is None or self._leaf(path, name) is ABSENT:
            return 0
        live, path = self.view.area(Area.LIVE), join(path, name)
        leaf = live.leaves.get(path)
        if isinstance(leaf, Version) and leaf.sequence not in self.state.unbinding:
            return leaf.sequence
        return self._passes(path)

    def check_held(self, directory: Inode, name: bytes) -> None:
        """Under the lock: raise Missing, which waits for the end of the move, for a name that a move touches."""
        if self._held and ((directory, name) in self._held or directory in self._shut):
            self.check_unmoved()

    def check_unmoved(self) -> None:
        """Under the lock: the same while anything is being moved."""
        if self._held:
            raise Missing("move", self._wait_for_move)

    def _wait_for_move(self) -> None:
        with self.names_lock:
            pass

    def hold(self, names: frozenset[tuple[Inode, bytes]], closed: frozenset[Inode]) -> None:
        """Under the lock: let nobody but the thread that has `names_lock` change these names and directories."""
        self._held, self._shut = names, closed

    def move_names(self, prepare: Callable[[], Moving | None], finish: Callable[[], Rename]) -> None:
        """Move names in the log together with a rename of the layer.

        Under the lock, `prepare` checks the rename, holds what must not change, and returns the record to begin with;
        `finish` returns the rename. For everybody who looks at the layer, both happen in one step.
        """

        def begin() -> Moving | None:
            moving = prepare()
            if moving is not None:
                self.record(moving)
            return moving

        with self.names_lock:
            try:
                moving = self.run(begin, wait=True)
                if moving is not None:
                    self._move_names(moving, finish)
            finally:
                with self.lock:
                    self.hold(frozenset(), frozenset())

    def _move_names(self, moving: Moving, finish: Callable[[], Rename]) -> None:
        try:
            self.journal.commit()  # else a power failure could take the beginning, and leave what the log was told
            self._push_names()
            self.names_log.move(_text(moving.old), _text(moving.new))
        except MoonclipError as error:
            self._give_up(moving, error)
        self._adopt_names(self.names(), time.time_ns(), lambda: [finish()])

    def _give_up(self, moving: Moving, error: MoonclipError) -> None:
        """After a move that failed: whether it reached the log can be unknown."""
        try:
            done = self._has_moved(moving, self.names())
        except MoonclipError:
            raise error from None  # `_finish_move` looks again
        if done:
            return
        with self.lock:
            self.record(Moving(b"", b""))
        if isinstance(error, ExistsError):
            raise NotEmptyError(f"/{_text(moving.new)}: another process bound a snapshot there") from error
        raise error

    def _finish_move(self) -> None:
        """End a move that was begun and not ended, by where the names are now."""
        moving = self.state.moving
        if moving is None:
            return
        names, inode = self.names(), self._own_directory(moving.new)
        if inode is not None and self._is_ahead(inode, moving) and not self._has_moved(moving, names):
            self._take_along(moving, inode)
            names = self.names()

        def records() -> Iterable[Record]:
            if self._has_moved(moving, names) and (rename := self._rename_of(moving)) is not None:
                yield rename
            if self.state.moving is not None:
                yield Moving(b"", b"")

        self._adopt_names(names, time.time_ns(), records)

    def _is_ahead(self, inode: Inode, moving: Moving) -> bool:
        """Whether what is at the new place was renamed while it was sealed: no move of names begins so."""
        captured = inode.number in self.state.captured.values()
        return not moving.exchange and (inode.sealed == moving.sequence or captured)

    def _take_along(self, moving: Moving, inode: Inode) -> None:
        """Move the name of a directory that was renamed while it was sealed."""
        try:
            self.journal.commit()  # what the log is told is known to the layer after a power failure too
            self.names_log.move(_text(moving.old), _text(moving.new))
        except (ExistsError, NotFoundError) as error:
            log.warning("/%s was renamed while it was sealed; its snapshot stays: %s", _text(moving.old), error)
            with self.lock:
                self.record(Kept(inode.number))

    def _rename_of(self, moving: Moving) -> Rename | None:
        """The rename that belongs to a move; None when there is nothing to rename any more."""
        old, new = moving.old.rpartition(b"/"), moving.new.rpartition(b"/")
        parent, new_parent = self._own_directory(old[0]), self._own_directory(new[0])
        if parent is None or new_parent is None or old[2] not in parent.entries:
            return None
        if moving.exchange and new[2] not in new_parent.entries:
            return None
        now_ns, whiteout = parent.mtime_ns, parent.lower is not None and not moving.exchange
        return Rename(parent.number, old[2], new_parent.number, new[2], moving.exchange, now_ns, whiteout)

    def _has_moved(self, moving: Moving, names: Names) -> bool:
        """Whether the log has moved the names."""
        moved = (version.path for version in names.all_versions() if version.sequence == moving.sequence)
        return any(is_at_or_below(path, _text(moving.new)) for path in moved)


def _is_left_over(directory: Inode, name: bytes, inode: Inode) -> bool:
    """Whether a clean own directory is one that names of the log had made, and nothing is in it any more."""
    return not (inode.entries or inode.lower or inode.names_changed or name in directory.names_changed)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
