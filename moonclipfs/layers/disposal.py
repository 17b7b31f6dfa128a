"""When staged bytes may go: not while the journal, a job or a capture still needs them.

A generation that a synced record of contents names is needed until a later record that replaces it is on the disk:
after a power failure, the earlier one counts again. One that only unsynced records name goes as soon as the journal
says so, since only this boot reads these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moonclipfs.layers.staging import Generation, Staging


class Disposal:
    """Deletes generations of one layer. Everything here happens under the layer's lock."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._pins: Counter[Generation] = Counter()
        self._doomed: set[Generation] = set()
        """Pinned ones that go when the last pin does."""
        self._awaiting: list[Generation] = []
        """Those that go after the next commit."""

    def pin(self, generations: Iterable[Generation]) -> None:
        """Keep generations until they were unpinned as often."""
        self._pins.update(generations)

    def unpin(self, generations: Iterable[Generation], *, after_commit: bool = False) -> None:
        """Undo a `pin`; with `after_commit`, what that lets go of is needed until the journal so far is on the disk."""
        for generation in generations:
            self._pins[generation] -= 1
            if not self._pins[generation]:
                del self._pins[generation]
                if generation in self._doomed:
                    self._doomed.remove(generation)
                    (self.drop_after_commit if after_commit else self.drop)([generation])

    def drop(self, generations: Iterable[Generation]) -> None:
        """No record of the journal and no content names these any more: they go."""
        for generation in generations:
            if generation in self._pins:
                self._doomed.add(generation)
            else:
                self._staging.delete(generation)

    def drop_after_commit(self, generations: Iterable[Generation]) -> None:
        """As `drop`, once what the journal has now is on the disk."""
        self._awaiting += generations

    def begin(self) -> list[Generation]:
        """Take what may be dropped when a commit that starts after this has ended."""
        ready, self._awaiting = self._awaiting, []
        return ready

    def failed(self, ready: list[Generation]) -> None:
        """The commit did not succeed: what `begin` returned waits for the next one."""
        self._awaiting += ready

    @property
    def kept(self) -> set[int]:
        """Numbers of generations that are in no content, and must not be taken for orphans."""
        return {generation.number for generation in (*self._pins, *self._doomed, *self._awaiting)}
