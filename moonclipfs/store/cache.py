"""A bounded cache: what was used least recently goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Values by key, of at most `capacity` in total weight. All methods may be called from several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._weight = 0
        self._lock = threading.Lock()
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the value and count it as used, or None."""
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        """Keep `value`, dropping the least recently used ones; a value heavier than the capacity is not kept."""
        with self._lock:
            self._drop(key)
            if weight > self._capacity:
                return
            self._items[key] = (value, weight)
            self._weight += weight
            while self._weight > self._capacity:
                self._drop(next(iter(self._items)))

    def drop(self, key: K) -> None:
        """Forget a key; harmless when it is absent."""
        with self._lock:
            self._drop(key)

    @property
    def weight(self) -> int:
        """Total weight of what is kept."""
        return self._weight

    def _drop(self, key: K) -> None:
        item = self._items.pop(key, None)
        if item is not None:
            self._weight -= item[1]
