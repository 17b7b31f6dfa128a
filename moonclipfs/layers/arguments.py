"""The arguments of a request to a mount: JSON values, of which nothing is known yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonclipfs.errors import UsageError


def argument(arguments: Mapping[str, Any], name: str, kind: type, *default: Any) -> Any:
    """An argument of a request, which may be left out when there is a default. Raises UsageError for another type."""
    value = arguments.get(name, *default)
    if type(value) is not kind and not (default and value is default[0]):  # a bool is no int here
        raise UsageError(f"{name} is to be a JSON value of type {kind.__name__}, not {value!r}")
    return value
