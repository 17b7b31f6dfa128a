"""A mount that real programs save into, and what each of them took in the store: a table at the end.

`make test-ecosystem` installs the programs and runs these tests; the ordinary suite does not look here.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before any of the programs is imported: they read these once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="",
)

import torch

from moonclipfs.fuse.control import ask
from moonclipfs.fuse.mount import unmount
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.demo.gpt import quiet_torch
from tests.ecosystem.tables import ROWS, Row, print_rows
from tests.fuse.conftest import Mounted, Mounter, eventually, fuse, mounter

__all__ = ["fuse", "mounter"]

SEAL_AFTER_SECONDS = 1.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this directory; what the programs warn of is theirs to mend."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ecosystem)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_configure(config: pytest.Config) -> None:
    """Begin a table."""
    config.stash[ROWS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    print_rows(config.stash[ROWS], terminalreporter.write_line)


class Workspace:
    """A store, mounted to be written to; what is complete is sealed a second after it was written."""

    def __init__(self, store: Store, mounter: Mounter) -> None:
        self.store = store
        self._mounter = mounter
        self.mounted = self._mount()

    def _mount(self) -> Mounted:
        return self._mounter(self.store.path, read_only=False, seal_after=SEAL_AFTER_SECONDS)

    @property
    def path(self) -> Path:
        """Where it is mounted."""
        return self.mounted.path

    def second(self, at: Path) -> Path:
        """Mount the store once more, in a layer of its own."""
        return self._mounter(self.store.path, at, read_only=False, seal_after=None, layer="second").path

    def flush(self) -> None:
        """Return when everything that nobody has open to write is encoded."""
        ask(str(self.path), "flush")
        status = ask(str(self.path), "status")
        assert not status["failed_files"] and not status["troubles"] and not status["conflicts"]

    def _staged_bytes(self) -> int:
        return int(ask(str(self.path), "status")["staged_bytes"])

    def remount(self) -> None:
        """Unmount, as a user would, and mount again: everything is read from the store then."""
        gc.collect()  # what is mapped holds the mount
        unmount(self.path)
        self.no_trouble()
        self.mounted = self._mount()

    def no_trouble(self) -> None:
        """The server has logged nothing to worry about."""
        text = self.mounted.log_text()
        assert "WARNING" not in text and "ERROR" not in text, text

    def snapshots(self) -> dict[str, int]:
        """The number of the newest version of each snapshot that is bound."""
        return {path: version.number for path, version in self.store.names().bound().items()}

    def await_snapshots(self, *names: str, seconds: float = 60.0) -> None:
        """Wait until just these snapshots are bound, and each holds what its directory does."""
        eventually(lambda: set(self.snapshots()) == set(names) and all(map(self._is_sealed, names)), seconds)

    def await_version(self, name: str, number: int) -> None:
        """Wait until a snapshot has this version, and the mount shows it."""
        eventually((self.path / "@versions" / name / str(number)).exists, 60)

    def missing(self, name: str) -> list[str]:
        """What keeps a directory from becoming a snapshot."""
        return list(ask(str(self.path), "status")["missing"].get(name, []))

    def stays_without_snapshot(self) -> None:
        """Nothing here is a checkpoint."""
        time.sleep(3 * SEAL_AFTER_SECONDS)
        assert self.snapshots() == {}

    def _is_sealed(self, name: str) -> bool:
        version = self.store.names().bound()[name]
        entries = {os.fsdecode(path): entry for path, entry in self.store.walk(version)}
        there = {str(path.relative_to(self.path / name)): path for path in (self.path / name).rglob("*")}
        return entries.keys() == there.keys() and all(
            entry.type is not EntryType.FILE or entry.attributes.mtime_ns == there[path].lstat().st_mtime_ns
            for path, entry in entries.items()
        )

    def everywhere(self, check: Callable[[], None]) -> None:
        """What was written is right at once, when all of it is encoded, and when it is mounted again."""
        check()
        gc.collect()  # what is mapped stays staged when it was replaced
        self.flush()
        eventually(lambda: self._staged_bytes() == 0)
        check()
        self.remount()
        check()

    def saved_bytes(self) -> int:
        """Bytes of the files that are kept: those of each version, and those that no version holds."""
        sizes: dict[tuple[object, ...], int] = {}
        names = self.store.names()
        for version in names.all_versions():
            for place, entry in self.store.walk(version):
                if entry.type is EntryType.FILE:
                    sizes[version.path, place, entry.child] = entry.size
        bound = {self.path / name for name in names.bound()}
        for path in self.path.rglob("*"):
            if bound.isdisjoint(path.parents) and path.is_file() and not path.is_symlink():
                sizes[(path.stat().st_ino,)] = path.stat().st_size
        return sum(sizes.values())

    def stored_bytes(self) -> int:
        """Bytes of all packs of the store."""
        return sum(pack.stat().st_size for pack in self.store.path.glob("packs/**/*.pack"))


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    """Small models are fastest on one thread."""
    quiet_torch()


@pytest.fixture
def workspace(
    store: Store, mounter: Mounter, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Workspace]:
    """An empty store, mounted to be written to. What the test took there is a row of the table at the end."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    torch.manual_seed(0)
    made = Workspace(store, mounter)
    yield made
    if request.node.stash.get(PASSED, False):
        gc.collect()
        made.flush()
        request.config.stash[ROWS].append(Row(request.node.name, made.saved_bytes(), made.stored_bytes()))
        unmount(made.path)
        made.no_trouble()


PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Let fixtures know whether their test has passed."""
    report = yield
    if call.when == "call":
        item.stash[PASSED] = call.excinfo is None
    return report
