"""How far a long command is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Bytes of files, all of them together; `stored` is what they took in the store so far, `path` the last one."""

    total: int = 0
    done: int = 0
    stored: int = 0
    path: str = ""
