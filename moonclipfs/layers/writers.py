"""Which processes write to a layer: where what is sealed comes from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from moonclipfs import limits
from moonclipfs.layers.inodes import Inode
from moonclipfs.store.provenance import of_process, with_surroundings


class Writers:
    """Which process wrote to which directory first since its last seal. Thread-safe, and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[int, tuple[int, dict[str, object]]] = OrderedDict()

    def note(self, directory: Inode, pid: int) -> None:
        """Process `pid` writes to a file in a directory; cheap when that is known."""
        known = self._known.get(directory.number)
        if known is not None and known[0] == pid:
            return
        told = of_process(pid)
        with self._lock:
            self._known[directory.number] = pid, told
            self._known.move_to_end(directory.number)
            while len(self._known) > limits.WRITERS:
                self._known.popitem(last=False)

    def provenance(self, directories: Iterable[int]) -> dict[str, object]:
        """Where the contents of directories (inode numbers) come from: the process that wrote to the first known."""
        with self._lock:
            found = [self._known[number][1] for number in directories if number in self._known]
        told = [one for one in found if one]
        return with_surroundings(told[0]) if told else {}
