"""Every promise of SEMANTICS.md is kept by a test that states it in the same words."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def promises() -> list[str]:
    """The lines with a dash, without it."""
    text = (ROOT / "moonclipfs/layers/SEMANTICS.md").read_text()
    return [line[2:] for line in text.splitlines() if line.startswith("- ")]


def stated() -> set[str]:
    """First lines of the docstrings of all tests of the tree, the mount and the commands."""
    found = set()
    for room in ("layers", "fuse", "cli"):
        for path in (ROOT / "tests" / room).glob("test_*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    found.add((ast.get_docstring(node) or "").partition("\n")[0])
    return found


def test_every_promise_is_tested() -> None:
    assert len(promises()) > 40
    assert sorted(set(promises()) - stated()) == []


def test_no_promise_stands_twice() -> None:
    assert len(promises()) == len(set(promises()))
