"""How many bytes an overlay has of its own, and the limit of that.

Of a file, those count that were written here and not cut off since, once each for as long as they wait to be encoded:
never more than the file is long. What shows through from the base costs nothing, nor do names, attributes and holes.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonclipfs.errors import QuotaError
from moonclipfs.layers.contents_records import content_of, size_of
from moonclipfs.layers.core import Core
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.records import Charged


class Quota:
    """Counts the bytes of one overlay. All of this is under the layer's lock."""

    def __init__(self, layer: Core, limit: int | None) -> None:
        """At most `limit` bytes; None only counts. Applies the records of what is counted from here on."""
        self.limit = limit
        self.used = 0
        """Bytes."""
        self._layer = layer
        self._charged: dict[int, int] = {}
        """Bytes written here of what is encoded by now, by number of the file."""
        self._counted: dict[int, int] = {}
        """What of `used` each file is."""
        layer.state.handle(Charged, self._charge)

    def admit(self, inode: Inode, offset: int, length: int) -> None:
        """Raise QuotaError when a write is too much."""
        if self.limit is None:
            return
        size, before = max(size_of(inode), offset + length), self._counted.get(inode.number, 0)
        growth = min(size, self._own(inode) + length) - before
        if growth > 0 and self.used + growth > self.limit:
            name = self._layer.facts.get(b"overlay", b"").decode()
            raise QuotaError(f"overlay {name} has {self.used} bytes of its own, of at most {self.limit}: remove some")

    def cut(self, inode: Inode, size: int) -> None:
        """A file is about to be cut off; raises NoSpaceError, BackendError. One that is open and cut to nothing comes
        back as it was after a crash: the journal learns of it with what is written next.
        """
        if self._charged.get(inode.number, 0) > size:
            if size or not inode.writers:
                self._layer.record(Charged(inode.number, size))
            self._charged[inode.number] = size

    def changed(self, inode: Inode) -> None:
        """The content of an own file changed."""
        size, number = size_of(inode), inode.number
        count = min(size, self._own(inode))
        self.used += count - self._counted.get(number, 0)
        self._counted[number] = count
        if not count:
            del self._counted[number]

    def encoding(self, inode: Inode, generation: int) -> Iterable[Charged]:
        """What is to be journalled before a file is said to be encoded up to a generation."""
        staged = content_of(inode).staged_bytes(generation)
        if staged:
            yield Charged(inode.number, min(size_of(inode), self._charged.get(inode.number, 0) + staged))

    def gone(self, inode: Inode) -> None:
        """A file has no names and no handles any more."""
        self._charged.pop(inode.number, None)
        self.used -= self._counted.pop(inode.number, 0)

    def recount(self) -> None:
        """After a replay."""
        own = self._layer.state.own
        self._charged = {number: count for number, count in self._charged.items() if number in own}
        self._counted, self.used = {}, 0
        for inode in own.values():
            if inode.is_file:
                self.changed(inode)

    def records(self) -> Iterable[Charged]:
        """For a journal that is written anew."""
        return [Charged(number, count) for number, count in self._charged.items() if number in self._layer.state.own]

    def _own(self, inode: Inode) -> int:
        staged = 0 if inode.content is None else inode.content.staged_bytes()
        return self._charged.get(inode.number, 0) + staged

    def _charge(self, record: Charged) -> None:
        self._charged[record.number] = record.bytes
