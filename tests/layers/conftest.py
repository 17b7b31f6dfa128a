"""Fixtures for tests of layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moonclipfs import limits
from tests.layers.journalkit import RESERVE, Case


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A directory for a journal that preallocates little."""
    monkeypatch.setattr(limits, "JOURNAL_RESERVE_BYTES", RESERVE)
    monkeypatch.setattr(limits, "JOURNAL_STEP_BYTES", RESERVE // 2)
    made = Case(tmp_path)
    yield made
    made.clear()
