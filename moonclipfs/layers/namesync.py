"""How a layer and the names of the log follow each other: adopting what others publish, and telling what was removed
or moved here.

While names are moved in the log, what the move touches stays as it is: whoever would change it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from moonclipfs.errors import ExistsError, MoonclipError, NotEmptyError
from moonclipfs.layers.base import Missing
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.lookup import ABSENT, Lookup
from moonclipfs.layers.names import Area, View
from moonclipfs.layers.records import Dropped, Moving, Rename, Unbound
from moonclipfs.store.log import Names
from moonclipfs.types import Version


class NothingToTell(MoonclipError):
    """The log needs no record."""


class NameSync(Lookup):
    """See the module. All blocking calls here take `names_lock` first."""

    _held: frozenset[tuple[Inode, bytes]] = frozenset()
    """Names that a move in the log is about to change."""
    _closed: frozenset[Inode] = frozenset()
    """Directories that get no new entries meanwhile."""

    # What others publish

    def refresh(self, now_ns: int) -> list[tuple[Inode, bytes]]:
        """Read the log and adopt it; returns the (directory, name) that mean something else now.

        What is own and has unsealed changes stays as it is. Blocks. Raises BackendError, CorruptError, NoSpaceError.
        """
        with self.names_lock:
            if self.state.moving is not None:
                self._finish_move()
            names = self.store.log.refresh()
            if names.sequence == self.view.sequence:
                self.store.saw(names)
                return []
            before, view = self.view, View(names, self.view, now_ns)
            changes = list(view.area(Area.LIVE).changes(before.area(Area.LIVE)))
            with self.lock:
                self._drop_clean(view, changes)
                self._adopt_view(view)
            # Only now: what is adopted from here on is named by this view, or by a journal that gc reads.
            self.store.saw(names)
        return list(self._affected(changes))

    def _adopt_view(self, view: View) -> None:
        self.view = view
        self.state.names_version += 1

    def _affected(self, changes: list[tuple[bytes, bytes]]) -> Iterator[tuple[Inode, bytes]]:
        for path, name in changes:
            try:
                yield self.resolve(path), name
            except MoonclipError:
                continue  # the directory went away with it: then its own name is among the changes

    def _drop_clean(self, view: View, changes: list[tuple[bytes, bytes]]) -> None:
        """Let go of own subtrees without changes whose snapshot others published anew, moved or removed."""
        live = view.area(Area.LIVE).directories
        for path, name in changes:
            directory = self._own_directory(path)
            inode = directory.entries.get(name) if directory is not None else None
            if directory is None or inode is None or not inode.is_directory or self._is_dirty(inode):
                continue
            leaf = live.get(path, {}).get(name)
            if isinstance(leaf, Version) and leaf.sequence == inode.sealed:
                continue
            if isinstance(leaf, Version) or inode.sealed:
                self.record(Dropped(directory.number, name))

    def _is_dirty(self, inode: Inode) -> bool:
        """Whether there are changes at or below an own inode that no version holds."""
        return inode.below > 0

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
            with self.lock:
                leaves = self.view.area(Area.LIVE).leaves
                roots = [inode for inode in self.state.own.values() if inode.sealed]
                paths = {path for inode in roots if (path := self.state.path(inode)) is not None} | leaves.keys()
                self._drop_clean(self.view, [(above, name) for above, _, name in (p.rpartition(b"/") for p in paths)])

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
            self.store.log.append("unbind", body)
        except NothingToTell:
            pass
        names = self.store.log.refresh()
        view = View(names, self.view)
        changes = list(view.area(Area.LIVE).changes(self.view.area(Area.LIVE)))
        with self.lock:
            self._drop_clean(view, changes)
            for sequence, path in pending.items():
                self.record(Unbound(path, sequence))
            self._adopt_view(view)
        self.store.saw(names)
        return len(pending)

    # What moves here

    def has_names(self, directory: Inode, name: bytes) -> bool:
        """Whether names of the log are shown at `name` of a directory, or below. Under the lock."""
        path = self._names_path(directory)
        return path is not None and self._leaf(path, name) is not ABSENT

    def check_held(self, directory: Inode, name: bytes) -> None:
        """Under the lock: raise Missing, which waits for the end of the move, for a name that a move touches."""
        if self._held and ((directory, name) in self._held or directory in self._closed):
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
        self._held, self._closed = names, closed

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
            self._push_names()
            self.store.log.move(_text(moving.old), _text(moving.new))
        except MoonclipError as error:
            self._give_up(moving, error)
        names = self.store.log.refresh()
        view = View(names, self.view)
        changes = list(view.area(Area.LIVE).changes(self.view.area(Area.LIVE)))
        with self.lock:
            self.record(finish())
            self._adopt_view(view)
            self._drop_clean(view, changes)
        self.store.saw(names)

    def _give_up(self, moving: Moving, error: MoonclipError) -> None:
        """After a move that failed: whether it reached the log can be unknown."""
        try:
            done = self._has_moved(moving, self.store.log.refresh())
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
        names = self.store.log.refresh()
        view = View(names, self.view)
        with self.lock:
            if self._has_moved(moving, names):
                rename = self._rename_of(moving)
                if rename is not None:
                    self.record(rename)
            if self.state.moving is not None:
                self.record(Moving(b"", b""))
            changes = list(view.area(Area.LIVE).changes(self.view.area(Area.LIVE)))
            self._adopt_view(view)
            self._drop_clean(view, changes)
        self.store.saw(names)

    def _rename_of(self, moving: Moving) -> Rename | None:
        """The rename that belongs to a move; None when there is nothing to rename any more."""
        old, new = moving.old.rpartition(b"/"), moving.new.rpartition(b"/")
        parent, new_parent = self._own_directory(old[0]), self._own_directory(new[0])
        if parent is None or new_parent is None or old[2] not in parent.entries:
            return None
        inode, now_ns = parent.entries[old[2]], parent.mtime_ns
        if (new[2] in new_parent.entries) != moving.exchange or inode is new_parent:
            return None
        return Rename(
            parent.number, old[2], new_parent.number, new[2], moving.exchange, now_ns, parent.lower is not None
        )

    def _has_moved(self, moving: Moving, names: Names) -> bool:
        """Whether the log has moved names: those at the new place are the ones that were at the old one."""
        live = View(names).area(Area.LIVE)
        return not _any_at(live.leaves, moving.old) and _any_at(live.leaves, moving.new)


def _any_at(leaves: Mapping[bytes, object], path: bytes) -> bool:
    return any(leaf == path or leaf.startswith(path + b"/") for leaf in leaves)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
