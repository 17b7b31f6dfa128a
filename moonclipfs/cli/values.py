"""Sizes and times as people write them on a command line: `16G`, `500M`; `7d`, `12h`, `30m`, `45`."""

from __future__ import annotations

import re

import click

from moonclipfs import limits

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": limits.KIB, "m": limits.MIB, "g": limits.GIB, "t": 1024 * limits.GIB}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", re.IGNORECASE)
_TIME_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def size(text: str) -> int:
    """Bytes; K, M, G and T are powers of 1024. Raises click.BadParameter."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (found := int(float(match[1]) * _SIZE_UNITS[match[2].lower()])) > limits.FILE_BYTES:
        raise click.BadParameter(f"{text!r} is no size: write 500M or 16G")
    return found


def duration(text: str) -> float:
    """Seconds; units are s, m, h, d and w. Raises click.BadParameter."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no time: write 45, 30m, 12h or 7d")
    return float(match[1]) * _TIME_UNITS[match[2].lower()]


def duration_or_off(text: str) -> float | None:
    """As `duration`; None for the word `off`."""
    return None if text.strip() == "off" else duration(text)


def time_text(seconds: float) -> str:
    """Seconds in the largest unit that goes into them: `7d`, `90`."""
    for unit in ("d", "h", "m"):
        if seconds >= _TIME_UNITS[unit] and seconds % _TIME_UNITS[unit] == 0:
            return f"{seconds / _TIME_UNITS[unit]:.0f}{unit}"
    return f"{seconds:g}"


def size_text(size: int) -> str:
    """Bytes in the largest unit that goes into them: `16G`."""
    for unit in ("t", "g", "m", "k"):
        if size >= _SIZE_UNITS[unit] and size % _SIZE_UNITS[unit] == 0:
            return f"{size // _SIZE_UNITS[unit]}{unit.upper()}"
    return str(size)
