"""The log under any sequence of changes, by several processes, against a simple model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from moonclipfs import limits
from moonclipfs.errors import ExistsError, NotFoundError, UsageError
from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.log import Log
from tests.faults import UnsyncedOps
from tests.store.logkit import content, make_root, root_id

PATHS = st.sampled_from(["a", "a/b", "a/b/c", "b", "b/c", "c"])


class LogMachine(RuleBasedStateMachine):
    """Two processes change names; a third that opens the log anew sees what a simple model says."""

    versions = Bundle("versions")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        root = make_root(Path(self.directory.name) / "store")
        self.root = root
        self.logs = [Log(LocalBackend(root, UnsyncedOps())), Log(LocalBackend(root, UnsyncedOps()))]
        self.kept: dict[bytes, str] = {}
        self.bound: dict[str, bytes] = {}
        self.count = 0

    def teardown(self) -> None:
        self.directory.cleanup()

    @rule(target=versions, who=st.integers(0, 1), path=PATHS)
    def bind(self, who: int, path: str) -> bytes:
        self.count += 1
        version = self.logs[who].bind(path, root_id(self.count), {})
        self.kept[version.root], self.bound[path] = path, version.root
        return version.root

    @rule(who=st.integers(0, 1), path=PATHS)
    def unbind(self, who: int, path: str) -> None:
        if path not in self.bound:
            with pytest.raises(NotFoundError):
                self.logs[who].unbind([path])
            return
        self.logs[who].unbind([path])
        del self.bound[path]

    @rule(who=st.integers(0, 1), old=PATHS, new=PATHS)
    def move(self, who: int, old: str, new: str) -> None:
        before = self.logs[who].refresh()
        try:
            self.logs[who].move(old, new)
        except (UsageError, ExistsError, NotFoundError):
            return
        for path in [path for path in self.bound if path == old or path.startswith(old + "/")]:
            target = new + path[len(old) :]
            self.bound[target] = self.bound.pop(path)
            for version in before.versions(path):
                if not version.removed:
                    self.kept[version.root] = target

    @rule(who=st.integers(0, 1), root=consumes(versions))
    def forget(self, who: int, root: bytes) -> None:
        path = self.kept.pop(root)
        (number,) = [v.number for v in self.logs[who].refresh().versions(path) if v.root == root]
        self.logs[who].forget([(path, number)])
        if self.bound.get(path) == root:
            del self.bound[path]

    @rule(who=st.integers(0, 1))
    def trim(self, who: int) -> None:
        self.logs[who].trim()

    @invariant()
    def all_readers_agree(self) -> None:
        fresh = Log(LocalBackend(self.root)).refresh()
        assert not fresh.damaged
        assert {path: version.root for path, version in fresh.bound().items()} == self.bound
        assert {version.root: version.path for version in fresh.all_versions()} == self.kept
        numbers = [(version.path, version.number) for version in fresh.all_versions()]
        assert len(numbers) == len(set(numbers))
        for log in self.logs:
            assert content(log.refresh())[:3] == content(fresh)[:3]


class TestLogMachine(LogMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=15, stateful_step_count=30, deadline=None)

    @pytest.fixture(autouse=True)
    def frequent_checkpoints(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "LOG_CHECKPOINT_EVERY", 5)
