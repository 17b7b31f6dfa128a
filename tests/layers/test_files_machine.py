"""Random work with files of a layer, its encoder, its syncs and its crashes, beside a model of what each file may be:
in memory exactly one content, after a kill or a power failure one of a few.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonclipfs import limits
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.jobs import Job
from moonclipfs.layers.layer import Layer
from moonclipfs.store.store import Store
from tests.faults import UnsyncedOps
from tests.layers.filekit import encode, make_file, read_all, staging_names

NAMES = (b"a", b"b", b"c")
INLINE = 64
SIZE = 400
Mark = tuple[int, int]


class File:
    """What a file is and was. A run is one content and what writes in place made of it; cutting to nothing begins a
    new one. `kill` and `power` are the (run, version) that a crash may go back to.
    """

    def __init__(self) -> None:
        self.runs: list[list[bytes]] = [[b""]]
        self.kill: set[Mark] = {(0, 0)}
        self.power: set[Mark] = {(0, 0)}

    @property
    def now(self) -> bytes:
        return self.runs[-1][-1]

    @property
    def mark(self) -> Mark:
        return len(self.runs) - 1, len(self.runs[-1]) - 1

    def change(self, content: bytes) -> None:
        self.runs[-1].append(content)

    def clear(self) -> None:
        self.runs.append([b""])

    def journalled(self) -> None:
        self.kill = {self.mark}
        self.power.add(self.mark)

    def synced(self) -> None:
        self.kill = self.power = {self.mark}
        self.power = set(self.kill)

    def may_be_journalled(self, writers: bool) -> None:
        run = self.mark[0]
        half = writers and all(r != run for r, _ in self.kill) and any(self.runs[r][v] for r, v in self.kill)
        if not half:
            self.kill.add(self.mark)
            self.power.add(self.mark)

    def allows(self, marks: set[Mark], found: bytes) -> bool:
        return any(_mixed(self.runs[run][version:], found) for run, version in marks)

    def crashed(self, found: bytes, *, power: bool) -> None:
        if power:
            self.__init__()  # type: ignore[misc]
        self.runs.append([found])
        self.kill = {self.mark}
        self.power = {self.mark} if power else self.power | {self.mark}


def _mixed(versions: list[bytes], found: bytes) -> bool:
    """Whether each byte is that of one of the versions."""
    if len(found) not in {len(version) for version in versions}:
        return False
    columns = [version.ljust(len(found), b"\0") for version in versions]
    return all(byte in {column[at] for column in columns} for at, byte in enumerate(found))


class FilesMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.boot = 1
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "INLINE_BYTES", INLINE)
        self.patch.setattr(limits, "JOURNAL_RESERVE_BYTES", 4096)
        self.patch.setattr(limits, "JOURNAL_STEP_BYTES", 4096)
        self.patch.setattr("moonclipfs.layers.journal.this_boot", lambda: b"%016d" % self.boot)

        self.root = Path(tempfile.mkdtemp(prefix="moonclipfs-files-"))
        Store.create(self.root / "store").close()
        self.store = Store.open(self.root / "store", write=True, index_path=self.root / "index.sqlite")
        self.layer = Layer.open(self.store, "test", ops=UnsyncedOps())
        self.files: dict[bytes, File] = {}
        self.handles: list[tuple[File, OpenFile]] = []
        self.jobs: list[Job] = []
        self.clock = 10

    def teardown(self) -> None:
        self._close_all()
        self.layer.close()
        self.store.close()
        self.patch.undo()
        shutil.rmtree(self.root)

    @initialize()
    def begin(self) -> None:
        self.create(NAMES[0])

    def _file(self, pick: int) -> tuple[bytes, File] | None:
        known = sorted(self.files.items())
        return known[pick % len(known)] if known else None

    def _writers(self, file: File) -> bool:
        return any(other is file and handle.write_open for other, handle in self.handles)

    @rule(name=st.sampled_from(NAMES))
    def create(self, name: bytes) -> None:
        if name not in self.files:
            make_file(self.layer, name)
            self.layer.sync_directory(self.layer.root)
            self.files[name] = File()

    @rule(pick=st.integers(0, 2))
    def open(self, pick: int) -> None:
        found = self._file(pick)
        if found is not None and len(self.handles) < 4:
            inode = self.layer.resolve(found[0])
            self.handles.append((found[1], self.layer.open_file(inode, write=True)))

    @precondition(lambda self: self.handles)
    @rule(pick=st.integers(0, 3), offset=st.integers(0, SIZE), seed=st.integers(0, 1 << 16), large=st.booleans())
    def write(self, pick: int, offset: int, seed: int, large: bool) -> None:
        file, handle = self.handles[pick % len(self.handles)]
        data = random.Random(seed).randbytes(seed % (SIZE if large else 20) + 1)
        self.clock += 1
        handle.write(offset, data, self.clock)
        old = file.now
        file.change(old[:offset].ljust(offset, b"\0") + data + old[offset + len(data) :])

    @rule(pick=st.integers(0, 2), size=st.one_of(st.just(0), st.integers(0, SIZE)))
    def truncate(self, pick: int, size: int) -> None:
        found = self._file(pick)
        if found is None:
            return
        name, file = found
        self.layer.truncate(self.layer.resolve(name), size, self.clock)
        if size == 0 and file.now:
            file.clear()
        elif size != len(file.now):
            file.change(file.now[:size].ljust(size, b"\0"))
        if not self._writers(file):
            file.journalled()

    @precondition(lambda self: self.handles)
    @rule(pick=st.integers(0, 3), how=st.sampled_from(["flush", "sync", "close"]))
    def settle(self, pick: int, how: str) -> None:
        number = pick % len(self.handles)
        file, handle = self.handles[number]
        getattr(handle, how)()
        if how == "close":
            del self.handles[number]
        if how == "sync":
            file.synced()
        else:
            file.journalled()

    @rule()
    def sync_all(self) -> None:
        self.layer.sync_all()
        for file in self.files.values():
            if self._writers(file):
                file.may_be_journalled(True)
            else:
                file.synced()

    @rule()
    def checkpoint(self) -> None:
        self.layer.files.checkpoint()
        for file in self.files.values():
            if self._writers(file):
                file.may_be_journalled(True)
            else:
                file.synced()

    @rule(urgent=st.booleans(), pressure=st.booleans())
    def take(self, urgent: bool, pressure: bool) -> None:
        self.jobs += self.layer.take_jobs(0.0, urgent=urgent, pressure=pressure)

    @precondition(lambda self: self.jobs)
    @rule(pick=st.integers(0, 9))
    def stored(self, pick: int) -> None:
        encode(self.layer, self.jobs.pop(pick % len(self.jobs)))
        for file in self.files.values():
            file.may_be_journalled(self._writers(file))

    @rule(pick=st.integers(0, 2))
    def unlink(self, pick: int) -> None:
        found = self._file(pick)
        if found is not None:
            self.layer.unlink(self.layer.root, found[0], self.clock)
            self.layer.sync_directory(self.layer.root)
            del self.files[found[0]]

    @rule(pick=st.integers(0, 2), name=st.sampled_from(NAMES))
    def rename(self, pick: int, name: bytes) -> None:
        found = self._file(pick)
        if found is None or found[0] == name:
            return
        over = name in self.files
        self.layer.rename(self.layer.root, found[0], self.layer.root, name, self.clock)
        self.layer.sync_directory(self.layer.root)
        file = self.files[name] = self.files.pop(found[0])
        file.journalled()
        if over:
            file.synced()

    @rule(power=st.booleans())
    def crash(self, power: bool) -> None:
        self.handles, self.jobs = [], []
        self.layer.close()
        self.boot += power
        self.layer = Layer.open(self.store, "test", ops=UnsyncedOps())
        assert set(self.layer.names_in(self.layer.root)) == set(self.files)
        for name, file in self.files.items():
            content = read_all(self.layer, self.layer.resolve(name))
            assert file.allows(file.power if power else file.kill, content), (name, content, file.runs, file.power)
            file.crashed(content, power=power)

    @rule()
    def end(self) -> None:
        """Everything is stored: nothing is left in staging, and all is as it was."""
        self._close_all()
        self.sync_all()
        for job in self.jobs:
            encode(self.layer, job)
        self.jobs = []
        encode(self.layer, *self.layer.take_jobs(0.0, urgent=True))
        self.sync_all()
        assert self.layer.take_jobs(0.0, urgent=True) == []
        assert staging_names(self.layer) == [] and self.layer.staging.used == 0
        assert self.layer.files.log._pending == {} and not self.layer.files.log.disposal.kept

    def _close_all(self) -> None:
        for file, handle in self.handles:
            handle.close()
            file.journalled()
        self.handles = []

    @invariant()
    def same(self) -> None:
        for name, file in self.files.items():
            assert read_all(self.layer, self.layer.resolve(name)) == file.now, name
        for file, handle in self.handles:
            assert handle.read(0, handle.size) == file.now
        on_disk = {int(name, 16) for name in staging_names(self.layer)}
        assert self.layer.staging.used >= 0 and len(on_disk) < 100


def work(seed: int, steps: int) -> None:
    """What hypothesis would do with no wish for short examples: mostly writes, and of all else often enough."""
    rng, machine = random.Random(seed), FilesMachine()
    doing = {
        "open": 4, "write": 10, "truncate": 3, "settle": 6, "sync_all": 2, "checkpoint": 1, "take": 3, "stored": 3,
        "unlink": 1, "rename": 2, "create": 2, "crash": 2, "end": 1,
    }  # fmt: skip
    try:
        machine.begin()
        for _ in range(steps):
            (name,) = rng.choices(list(doing), list(doing.values()))
            arguments: dict[str, Any] = {
                "open": {"pick": rng.randrange(3)},
                "write": {"pick": rng.randrange(4), "offset": rng.randrange(SIZE), "seed": rng.randrange(1 << 16)},
                "truncate": {"pick": rng.randrange(3), "size": rng.choice([0, rng.randrange(SIZE)])},
                "settle": {"pick": rng.randrange(4), "how": rng.choice(["flush", "sync", "close"])},
                "take": {"urgent": True, "pressure": rng.random() < 0.3},
                "stored": {"pick": rng.randrange(10)},
                "unlink": {"pick": rng.randrange(3)},
                "rename": {"pick": rng.randrange(3), "name": rng.choice(NAMES)},
                "create": {"name": rng.choice(NAMES)},
                "crash": {"power": rng.random() < 0.5},
            }
            if name == "write":
                arguments["write"]["large"] = rng.random() < 0.5
            if (name in ("write", "settle") and not machine.handles) or (name == "stored" and not machine.jobs):
                continue
            getattr(machine, name)(**arguments.get(name, {}))
            machine.same()
        machine.end()
        machine.same()
    finally:
        machine.teardown()


@pytest.mark.parametrize("seed", range(8))
def test_random_work(seed: int) -> None:
    work(seed, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_more_random_work(seed: int) -> None:
    work(seed, 400)


TestFiles = FilesMachine.TestCase
TestFiles.settings = settings(stateful_step_count=40, max_examples=30, deadline=None)
