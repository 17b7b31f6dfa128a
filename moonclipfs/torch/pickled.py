"""The only place that pickles: for values that nothing else can keep, where both sides said `allow_pickle=True`, and
for what planners of torch hand over within this process.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

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


def load_own_file(data: bytes) -> Any:
    """What this very process has just written with `torch.save`. Raises ValueError for bytes that it did not write."""
    try:
        return torch.load(io.BytesIO(data), weights_only=False)
    except Exception as error:  # whatever other bytes lead it to
        raise ValueError("not written by torch.save") from error
