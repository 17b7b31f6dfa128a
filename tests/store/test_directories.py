"""Directory objects: what no disk should have, and some do."""

from __future__ import annotations

import pytest

from moonclipfs import limits
from moonclipfs.store.directories import decode_directory, encode_directory
from moonclipfs.types import NO_ID, Attributes, Entry, EntryType


@pytest.mark.parametrize(
    ("time_ns", "kept"),
    [(10**19, limits.LAST_TIME_NS), (-(10**19), -(1 << 63)), (limits.LAST_TIME_NS, limits.LAST_TIME_NS), (-1, -1)],
)
def test_a_time_past_what_an_entry_can_have_becomes_the_nearest(time_ns: int, kept: int) -> None:
    """ext4 has times until 2446."""
    entry = Entry(b"f", EntryType.FILE, Attributes(0o600, 0, 0, time_ns, time_ns, {}), 0, NO_ID)
    found = decode_directory(encode_directory([entry]))[b"f"].attributes
    assert (found.mtime_ns, found.ctime_ns) == (kept, kept)
