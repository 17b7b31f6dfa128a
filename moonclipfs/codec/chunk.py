"""Content-defined chunks: the cuts of bytes that no format explains, and which stay the same around an insertion."""

from __future__ import annotations

from moonclipfs import _codec
from moonclipfs.limits import CHUNK_AVERAGE, CHUNK_MAX, CHUNK_MIN
from moonclipfs.types import Buffer


class Chunker:
    """Cuts a stream into chunks of CHUNK_MIN to CHUNK_MAX bytes, about CHUNK_AVERAGE; only the last may be shorter.

    A gear hash h = (h << 1) + gear[byte] runs over the bytes of a chunk from CHUNK_MIN on; the chunk ends after the
    byte at which the highest log2(CHUNK_AVERAGE) + 2 bits of h (from CHUNK_AVERAGE on: - 2) are zero. `gear` is
    the first 256 outputs of splitmix64 from the seed 0. All this is store format.
    """

    def __init__(self, minimum: int = CHUNK_MIN, average: int = CHUNK_AVERAGE, maximum: int = CHUNK_MAX) -> None:
        self._chunker = _codec.Chunker(minimum, average, maximum)

    def push(self, data: Buffer) -> list[int]:
        """Take the next bytes of the stream and return the lengths of the chunks that they complete."""
        return self._chunker.push(data)

    def finish(self) -> list[int]:
        """Return the length of the last chunk (or none, for an empty rest), and begin a new stream."""
        return self._chunker.finish()
