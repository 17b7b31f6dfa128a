"""JSON from outside, read within limits."""

from __future__ import annotations

import json
from typing import NoReturn

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.layout import quoted


def load(data: bytes) -> object:
    """Return the JSON value in `data`, with a tuple of (key, value) pairs for each object: nothing is lost or merged.

    Raises ParseError for text that is not JSON, and past the limit on values.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > limits.JSON_VALUES:
        raise ParseError(f"JSON of more than {limits.JSON_VALUES} values")
    try:
        value: object = json.loads(data.decode("utf-8"), object_pairs_hook=tuple, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"not JSON: {error}") from error
    return value


def fields(value: object, what: str) -> dict[str, object]:
    """Return the fields of a JSON object that `load` gave, which messages call `what`.

    Raises ParseError for another value, or a key twice.
    """
    if not isinstance(value, tuple):
        raise ParseError(f"{quoted(what)} is not a JSON object")
    result: dict[str, object] = {}
    for key, field in value:
        if key in result:
            raise ParseError(f"DuplicateKey({quoted(key)}): {quoted(what)} names it twice")
        result[key] = field
    return result


def _refuse(word: str) -> NoReturn:
    raise ParseError(f"not JSON: {word}")
