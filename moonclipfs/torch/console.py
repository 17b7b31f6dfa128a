"""Lines for a person that never take training down, whatever the console is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO


def tell(text: str, stream: TextIO | None) -> None:
    """Write a line to a stream if that can be: signs that it cannot show are replaced, and one that is gone is left."""
    if stream is None:
        return
    try:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding, "replace") + "\n")
        stream.flush()
    except (OSError, ValueError, LookupError):
        return  # closed, or a pipe that nobody reads


def tell_stats(found: Mapping[str, Any], stream: TextIO | None) -> None:
    """Write what `CheckpointManager.stats` found, as `tell` does."""
    ratio = "" if found["ratio"] is None else f", {found['ratio']:.1f} times less than the files"
    tell(
        f"{found['run']} in {found['store']}: {found['snapshots']} snapshots, the latest of step "
        f"{found['latest_step']}; {found['bytes'] / 1e6:.1f} MB of files, the store takes "
        f"{found['store_bytes'] / 1e6:.1f} MB{ratio}",
        stream,
    )
