"""Encoded objects that hold their raw bytes as they are: made and read at the speed of memory."""

from __future__ import annotations

import struct
from typing import Final

from moonclipfs import _codec
from moonclipfs.codec.encoded import PREFIX_BYTES, TRANSFORM_BYTES
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.limits import BLOCK_BYTES, BLOCK_ELEMENTS, RAW_BYTES
from moonclipfs.types import Buffer, DType

_PREFIX: Final = struct.Struct("<4sBBBBQQII")
_ENTRY: Final = struct.Struct("<IQ")
_MAGIC: Final = b"MCE\x01"
_NO_DTYPE: Final = 255
_RAW: Final = 1
"""The method of a plane that is stored as it is."""


def encode_plain(raw: Buffer, dtype: DType) -> bytearray:
    """Encode `raw` with every block as it is. What was copied has been compared with `raw`: CorruptError if it differs.

    Raises UsageError above `limits.RAW_BYTES`.
    """
    view = memoryview(raw).cast("B")
    if len(view) > RAW_BYTES:
        raise UsageError(f"{len(view)} bytes: an object has at most {RAW_BYTES}")
    block = BLOCK_BYTES if dtype is DType.BYTES else BLOCK_ELEMENTS * dtype.width
    starts = range(0, len(view), block)
    head = PREFIX_BYTES + len(starts) * _ENTRY.size
    out = bytearray(head + len(starts) + len(view))
    at = head
    with memoryview(out) as whole:
        for number, start in enumerate(starts):
            part = view[start : start + block]
            whole[at] = _RAW
            copy = whole[at + 1 : at + 1 + len(part)]
            copy[:] = part
            check = _codec.xxh3_64(copy)
            if check != _codec.xxh3_64(part):
                raise CorruptError(f"block {number} was copied wrongly: the memory is at fault")
            _ENTRY.pack_into(out, PREFIX_BYTES + number * _ENTRY.size, 1 + len(part), check)
            at += 1 + len(part)
    _PREFIX.pack_into(out, 0, _MAGIC, dtype, _NO_DTYPE, TRANSFORM_BYTES, 0, len(view), 0, head, 0)
    check = _codec.xxh3_64(out[: PREFIX_BYTES - 4] + out[PREFIX_BYTES:head]) & 0xFFFFFFFF
    struct.pack_into("<I", out, PREFIX_BYTES - 4, check)
    return out
