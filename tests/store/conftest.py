"""Fixtures of the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonclipfs.store.backend import LocalBackend
from moonclipfs.store.log import Log
from tests.faults import UnsyncedOps
from tests.store.ground import Ground
from tests.store.logkit import make_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty store directory without a config."""
    return make_root(tmp_path / "store")


@pytest.fixture
def log(root: Path) -> Log:
    """The log of `root`; it never waits for the disk."""
    return Log(LocalBackend(root, UnsyncedOps()))


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    """An empty `Ground`; the indexes that it opened are closed."""
    ground = Ground(tmp_path / "store")
    yield ground
    for index in ground.opened:
        index.close()
