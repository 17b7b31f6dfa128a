"""Lines for a person that never take training down, whatever the console is."""

from __future__ import annotations

from typing import TextIO


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
