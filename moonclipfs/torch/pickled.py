"""The only place that pickles: for values that nothing else can keep, where both sides said `allow_pickle=True`."""

from __future__ import annotations

import pickle
from typing import Any

from moonclipfs.errors import UsageError


def dump(value: object, where: str) -> bytes:
    """The pickle of a value. Raises UsageError, which names the value by `where`, when it has none."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:  # whatever its __reduce__ raises
        raise UsageError(f"{where} cannot be pickled: {error}") from error


def load(data: bytes) -> Any:
    """The value of a pickle: runs whatever code it names."""
    return pickle.loads(data)
