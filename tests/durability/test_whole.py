"""Power failures and kills at every call that changes the disk, while a layer with all that works behind it is at work:
journal, staging, packs and log.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from moonclipfs import limits
from tests import faults
from tests.durability.whole import Whole, broken
from tests.faults import crash_states, kill_states
from tests.layers.test_layer_crash import noise

OTHER_BOOT = b"other".ljust(16)
EVERY = pytest.mark.parametrize("every", [11, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INLINE_BYTES", 64)
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", 256)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", 128)
    monkeypatch.setattr(faults, "EVERY_CUT", 2)
    monkeypatch.setattr(faults, "CUTS", 2)


def check(life: Whole, tmp_path: Path, every: int) -> int:
    """Look at each `every`th state that a crash may leave; returns at how many."""
    life.close()
    total = 0
    for states, boot in ((crash_states, OTHER_BOOT), (kill_states, None)):
        for state in itertools.islice(states(life.recorder), 0, None, every):
            wrong = broken(life, state, tmp_path / "state", boot)
            assert wrong == "", (state.at, state.marks[-1:], boot)
            total += 1
    return total


@EVERY
def test_written_synced_stored_and_sealed(tmp_path: Path, every: int) -> None:
    life = Whole(tmp_path / "store")
    life.put("run/a/model", noise())
    life.fsync("run/a/model")
    life.put("run/a/model.tmp", noise())
    life.rename("run/a/model.tmp", "run/a/model")
    life.encode()
    life.seal("run/a")
    life.overwrite("run/a/model", 20, noise(30), sync=True)
    life.seal("run/a", wait=False)
    life.sync()
    assert check(life, tmp_path, every) > 100 // every


@EVERY
def test_a_directory_of_snapshots_moves(tmp_path: Path, every: int) -> None:
    """A directory with snapshots and unsealed files in it is at one place, whole, after any crash."""
    life = Whole(tmp_path / "store")
    life.put("run/a/model", noise(20))
    life.seal("run/a")
    life.put("run/log", noise(30))
    life.put("run/a/more", noise(30))
    life.sync()
    life.rename("run", "moved")
    life.put("moved/a/last", noise(25))
    life.fsync("moved/a/last")
    assert check(life, tmp_path, every) > 100 // every


@EVERY
def test_snapshots_are_removed_and_reclaimed(tmp_path: Path, every: int) -> None:
    life = Whole(tmp_path / "store")
    life.put("run/a/model", noise())
    life.seal("run/a")
    life.put("run/b/model", noise(140))
    life.sync()
    life.remove("run/a")
    life.sync()
    life.reclaim()
    life.remove("run/b")
    life.sync()
    life.reclaim()
    assert check(life, tmp_path, every) > 100 // every
