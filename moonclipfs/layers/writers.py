"""Which processes write to a layer: where what is sealed comes from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from moonclipfs import limits
from moonclipfs.layers.inodes import Inode
from moonclipfs.store.provenance import of_process, with_surroundings


class Writers:
    """Which process wrote to which directory last. Thread-safe, and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: OrderedDict[int, int] = OrderedDict()
        """By the inode number of the directory."""
        self._told: dict[int, dict[str, object]] = {}
        """What is known of the process of each directory; not there before `look`."""

    def note(self, directory: Inode, pid: int) -> None:
        """Process `pid` writes to a file in a directory. Waits for nothing: the process may be waiting for us."""
        if self._pids.get(directory.number) == pid:
            return
        with self._lock:
            self._pids[directory.number] = pid
            self._pids.move_to_end(directory.number)
            self._told.pop(directory.number, None)
            while len(self._pids) > limits.WRITERS:
                self._told.pop(self._pids.popitem(last=False)[0], None)

    def look(self) -> None:
        """Ask the system about processes that are new, while they are there."""
        with self._lock:
            new = {number: pid for number, pid in self._pids.items() if number not in self._told}
        for number, pid in new.items():
            told = of_process(pid)
            with self._lock:
                if self._pids.get(number) == pid:
                    self._told[number] = told

    def provenance(self, directories: Iterable[int]) -> dict[str, object]:
        """Where the contents of directories (inode numbers) come from, by the first that is known. Asks git."""
        self.look()
        with self._lock:
            found = [told for number in directories if (told := self._told.get(number))]
        return with_surroundings(found[0]) if found else {}
