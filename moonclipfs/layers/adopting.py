"""Taking inodes of the base over into a layer, because something about them changes next.

Their metadata moves into the layer, one record for each name, and with it the directories above. Hard links of the base
are one inode: it is taken over with all its names.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonclipfs.errors import NotFoundError
from moonclipfs.layers.inodes import Inode, Lower, inode_number
from moonclipfs.layers.names import Area
from moonclipfs.layers.namesync import NameSync
from moonclipfs.layers.records import Adopt
from moonclipfs.types import NO_ID, EntryType, Kind, ObjectId, Version


class Adopting(NameSync):
    """See the module."""

    def adopt(self, inode: Inode, *, wait: bool = True) -> None:
        """Make an inode own, before its contents change. Raises NotFoundError for one that is not there any more."""
        self.run(lambda: self._adopt(inode), wait)

    def adopt_inside(self, inode: Inode) -> None:
        """As `adopt`, inside a call of `run`: raises Missing, so that what is missing is loaded without the lock."""
        self._adopt(inode)

    def adopt_links(self, directory: Inode) -> None:
        """Make all files own that are hard links in the base of a directory's tree, before the tree is sealed.

        What tells them from others there is a number that is another one in every version.
        """
        self.run(lambda: self._adopt_links(directory), wait=True)

    # Under the lock

    def _adopt_links(self, directory: Inode) -> None:
        todo = [directory]
        while todo:
            directory = todo.pop()
            todo += [child for child in directory.entries.values() if child.is_directory]
            lower = directory.lower
            if lower is None or not self.base.has_groups(lower.directory):
                continue
            for name, entry in self.base.entries(lower.directory).items():
                if name in directory.removed or name in directory.entries:
                    continue
                is_directory = entry.type is EntryType.DIRECTORY
                if not (entry.link_group or (is_directory and self.base.has_groups(entry.child))):
                    continue
                inode = self._find(directory, name)
                if inode is None or inode.sealed:
                    continue  # a name of the log hides it
                if is_directory:
                    todo.append(inode)
                else:
                    self._take(directory, name, inode)

    def _adopt(self, inode: Inode) -> None:
        """Make an inode own, with all its names, and the directories above. Raises NotFoundError if it is gone."""
        if inode.own:
            return
        if not inode.links:
            raise NotFoundError(f"{inode} is not there any more")
        for directory, name in self._places(inode):
            self._take(directory, name, inode)

    def _take(self, directory: Inode, name: bytes, inode: Inode) -> None:
        """Make `inode`, which stands at `name`, an own entry of a directory."""
        if directory.entries.get(name) is inode:
            return
        if inode.group and not inode.own and len(places := self._places(inode)) > 1:
            for place in places:
                self._take_one(*place, inode)
            return
        self._take_one(directory, name, inode)

    def _take_one(self, directory: Inode, name: bytes, inode: Inode) -> None:
        if directory.entries.get(name) is inode:
            return
        if self._find(directory, name) is not inode:
            raise NotFoundError(f"{inode} is not there any more")
        self._adopt(directory)
        child, kind = inode.child, Kind.RECIPE
        anchor, path, root = b"", b"", NO_ID
        if inode.lower is not None:
            anchor, path, child_directory, root = inode.lower
            if inode.is_directory:
                child, kind = child_directory, Kind.DIRECTORY
        refs: list[tuple[Kind, ObjectId]] = [(kind, child)] if child != NO_ID else []
        record = Adopt(
            inode.number, directory.number, name, inode.type, inode.mode, inode.uid, inode.gid, *self.times(inode),
            tuple(inode.xattrs.items()), inode.size, child, inode.target, anchor, path, root, inode.group, inode.sealed,
        )  # fmt: skip
        self.record(record, refs)

    def _places(self, inode: Inode) -> list[tuple[Inode, bytes]]:
        """Every (directory, name) of an inode of the base that is shown."""
        places = dict.fromkeys(inode.links)
        if inode.group and inode.lower is not None:
            members = self.base.groups(inode.lower.root).get(inode.group, ())
            starts = self._starts(inode, inode.lower, members)
            for path in members:
                for start, directory in starts:
                    place = self._place_below(directory, path[len(start) :], inode) if path.startswith(start) else None
                    if place is not None:
                        places[place] = None
        return list(places)

    def _starts(self, inode: Inode, lower: Lower, members: Iterable[bytes]) -> list[tuple[bytes, Inode]]:
        """Directories below which members of a group can be, by the beginnings of their paths in the base: where the
        base's root is, and where directories of it are that were moved.
        """
        starts: dict[bytes, Inode] = {}
        for directory, _ in inode.links:
            top = self._top(directory, lower.root)
            if top.lower is not None:
                starts[b"" if top.lower.directory == lower.root else top.lower.path + b"/"] = top
        for path in members:
            while path := path.rpartition(b"/")[0]:
                moved = self.state.own.get(inode_number(self.id, b"in", lower.anchor, path))
                if moved is not None and moved.lower is not None and moved.lower[:2] == (lower.anchor, path):
                    starts.setdefault(path + b"/", moved)
        below = self.root.lower if self.fixed else None
        if below is not None and (below.anchor, below.root) == (lower.anchor, lower.root):
            starts[b""] = self.root
        if b"" not in starts:
            leaves = self.view.area(Area.LIVE).leaves.items()
            for path in (path for path, leaf in leaves if isinstance(leaf, Version) and leaf.root == lower.root):
                starts[b""] = self._walk(self.root, path) or self.root
        return list(starts.items())

    def _top(self, directory: Inode, root: ObjectId) -> Inode:
        """The root of a base, seen from a directory in it, or else the topmost directory of it on the way there."""
        while directory.lower is not None and directory.lower.directory != root:
            above = next((parent for parent, _ in directory.links), None)
            if above is None or above.lower is None or above.lower.root != root:
                break
            directory = above
        return directory

    def _place_below(self, top: Inode, path: bytes, inode: Inode) -> tuple[Inode, bytes] | None:
        """The directory and the name at `path` below `top`, if `inode` is what stands there."""
        above, _, name = path.rpartition(b"/")
        directory = self._walk(top, above)
        return (directory, name) if directory is not None and self._find(directory, name) is inode else None

    def _walk(self, directory: Inode, path: bytes) -> Inode | None:
        found: Inode | None = directory
        for part in path.split(b"/") if path else ():
            found = None if found is None else self._find(found, part)
            if found is None or not found.is_directory:
                return None
        return found
