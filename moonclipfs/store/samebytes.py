"""Whether a file of the host has the bytes of a stored one."""

from __future__ import annotations

import errno
import os

from moonclipfs import limits
from moonclipfs.store.backend import read_range
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.objects import object_id
from moonclipfs.types import Extent, Kind


def same_bytes(fd: int, reader: FileReader) -> bool:
    """Whether the open file has the very bytes that `reader` gives.

    Whole objects are told by their ids, and holes by those of the host, so that next to nothing is decoded. Raises
    OSError, CorruptError.
    """
    if os.fstat(fd).st_size != reader.size:
        return False
    offset = 0
    for extent in reader.recipe.extents:
        if not (_is_zero(fd, offset, extent.length) if extent.is_hole else _has(fd, offset, extent, reader)):
            return False
        offset += extent.length
    return True


def _has(fd: int, offset: int, extent: Extent, reader: FileReader) -> bool:
    if extent.object_id is not None and extent.object_offset == 0 and extent.length <= limits.OBJECT_BYTES:
        data = read_range(fd, offset, extent.length)
        if len(data) == extent.length and object_id(Kind.DATA, data) == extent.object_id:
            return True
    # A part of an object, or other bytes.
    end = offset + extent.length
    for at in range(offset, end, limits.PREFETCH_BYTES):
        stored = memoryview(bytearray(min(limits.PREFETCH_BYTES, end - at)))
        reader.stream_into(at, stored)
        if read_range(fd, at, len(stored)) != stored:
            return False
    return True


def _is_zero(fd: int, offset: int, length: int) -> bool:
    end = offset + length
    while offset < end:
        try:
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return True  # nothing but holes up to the end of the file
            raise
        data = read_range(fd, offset, min(limits.PREFETCH_BYTES, end - offset))
        if data.count(0) != len(data) or (not data and offset < end):
            return False
        offset += len(data)
    return True
