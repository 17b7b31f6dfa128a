"""The table of what each program's files took in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest


class Row(NamedTuple):
    """A test, the bytes of the files that it keeps, and the bytes of the packs that hold them."""

    test: str
    saved: int
    stored: int


ROWS = pytest.StashKey[list[Row]]()


def print_rows(rows: Sequence[Row], line: Callable[[str], None]) -> None:
    """Print one line a test."""
    if not rows:
        return
    width = max(len(row.test) for row in rows)
    line("")
    line(f"{'what was saved':{width}}  {'saved bytes':>12}  {'stored bytes':>12}  ratio")
    for row in rows:
        line(f"{row.test:{width}}  {row.saved:12,}  {row.stored:12,}  {row.saved / max(row.stored, 1):5.2f}")
