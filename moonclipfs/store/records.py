"""Log records: one change of names each, as a line of JSON under a line with its type and digest (see FORMAT.md)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from moonclipfs import limits
from moonclipfs.errors import CorruptError, LimitError

_MAGIC = "moonclipfs-log"
VERSION = 1
TYPES = ("bind", "unbind", "move", "forget", "pin", "condemn", "checkpoint")
_BOUND = re.compile(rb'(?:"number":(\d{1,18}),)?"path":("(?:[^"\\]|\\.)*"),"root":')


def record_name(sequence: int) -> str:
    """Key of log record `sequence`: fixed width, so that names sort as numbers."""
    return f"log/{sequence:016d}.json"


def record_sequence(key: str) -> int | None:
    """The number of a log record's key, or None for anything else in the log directory."""
    name = key.removeprefix("log/")
    return int(name[:16]) if len(name) == 21 and name.endswith(".json") and name[:16].isdigit() else None


def encode_record(sequence: int, type_: str, body: Mapping[str, Any]) -> bytes:
    """Serialise a record. File and snapshot names are str; bytes that are not UTF-8 stand as lone surrogates."""
    text = json.dumps({"sequence": sequence, "type": type_, **body}, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest()
    data = f"{_MAGIC} {VERSION} {type_} {digest}\n".encode() + text + b"\n"
    if len(data) > limits.LOG_RECORD_BYTES:
        raise LimitError(f"log record of {len(data)} bytes: longer than {limits.LOG_RECORD_BYTES}")
    return data


def record_type(data: bytes) -> str:
    """The type that a record's first line names, damaged or not; empty when there is none."""
    words = data[:100].partition(b"\n")[0].split(b" ")
    return words[2].decode("ascii", "replace") if len(words) == 4 else ""


def read_bound(data: bytes) -> tuple[str, int | None] | None:
    """The path and number that a damaged bind record still tells, the number None where it is not readable; or None.

    Nothing proves them: the damage may be in them.
    """
    for number, path in reversed(_BOUND.findall(data)):
        try:
            return str(json.loads(path)), int(number) if number else None
        except ValueError:
            continue
    return None


def decode_record(data: bytes, sequence: int) -> dict[str, Any]:
    """Parse record `sequence`. Raises CorruptError when the digest, the number or the shape is wrong."""
    head, _, body = data.partition(b"\n")
    words = head.split(b" ")
    if len(words) != 4 or words[0] != _MAGIC.encode() or words[1] != str(VERSION).encode():
        raise CorruptError(f"log record {sequence}: unknown first line {head[:60]!r}")
    text = body.removesuffix(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != words[3]:
        raise CorruptError(f"log record {sequence}: SHA-256 does not match")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"log record {sequence}: not JSON ({error})") from error
    if not isinstance(record, dict) or record.get("sequence") != sequence or record.get("type") not in TYPES:
        raise CorruptError(f"log record {sequence}: wrong number, or of an unknown type")
    if record["type"].encode() != words[2]:
        raise CorruptError(f"log record {sequence}: its two types differ")
    return record
