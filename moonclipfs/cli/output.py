"""How things are printed: sizes, times, tables, JSON, and names that a terminal can stand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from datetime import datetime

import click

from moonclipfs.types import Version

PROGRAM = "moonclipfs"
COMPLETE_VARIABLE = "_MOONCLIPFS_COMPLETE"
"""The environment variable through which shells ask for completions."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def human(size: float) -> str:
    """`size` bytes in powers of 1024: `512 B`, `3.4 MiB`."""
    if abs(size) < 1024:
        return f"{size:.0f} B"
    unit = 0
    while abs(size) >= 1023.95 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.1f} {_UNITS[unit]}"


def ratio(raw: float, stored: float) -> str:
    """How many times smaller `stored` is than `raw`: `3.42x`, `-` where nothing is stored."""
    if not stored:
        return "-"
    value = raw / stored
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def when(time_ns: int) -> str:
    """Nanoseconds since the epoch as local time to the second."""
    try:
        return datetime.fromtimestamp(time_ns // 1_000_000_000).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns"  # a time that no calendar holds, from a foreign or damaged source


def printable(name: str | bytes) -> str:
    """`name` with everything escaped that could move the cursor, hide text or is not UTF-8; twice is as once."""
    text = os.fsdecode(name) if isinstance(name, bytes) else name
    if text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if character.isprintable():
        return character
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}"


def table(
    rows: Iterable[Sequence[str]], header: Sequence[str] = (), right: Iterable[int] = (), *, err: bool = False
) -> None:
    """Print aligned columns, on stderr if `err`; those numbered in `right` (from 0) are flush right."""
    lines = [list(row) for row in rows]
    if header:
        lines.insert(0, list(header))
    if not lines:
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    flush_right = frozenset(right)
    for line in lines:
        cells = [
            cell.rjust(width) if number in flush_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip(), err=err)


def emit_json(value: object) -> None:
    """Print one JSON document; bytes that are not UTF-8 appear as lone surrogates (Python's surrogateescape)."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=True))


def version_json(version: Version) -> dict[str, object]:
    """The JSON of one version of a snapshot."""
    return {
        "name": version.path, "version": version.number, "files": number(version, "files"),
        "bytes": number(version, "bytes"), "time_ns": version.time_ns,
    }  # fmt: skip


def number(version: Version, key: str) -> int:
    """A count in a version's metadata; 0 when its log record has none."""
    value = version.metadata.get(key)
    return value if isinstance(value, int) else 0
