"""Plain values of a pickle: as `pickle_reader`, with floats, byte strings, long text and sets too."""

from __future__ import annotations

import struct

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.pickle_reader import Global, Node, PickleReader, Value
from moonclipfs.formats.window import Window
from moonclipfs.types import BytesSource

SET = Global("builtins", "set")
FROZEN_SET = Global("builtins", "frozenset")
_LONG_BYTES = 1024
"""A longer integer is none that a checkpoint has."""


class _ValueReader(PickleReader):
    """Keeps what the tensors' names do not need. A set is a `Node` that would call its type, with its items."""

    def _float(self) -> None:
        self._new(struct.unpack(">d", self._window.take(8))[0])

    def _bytes(self, length: int) -> None:
        self._new(self._window.take(length))

    def _text(self, length: int) -> None:
        self._new(self._window.take(length).decode("utf-8", "surrogatepass"))

    def _long(self, length: int) -> None:
        if length > _LONG_BYTES:
            raise ParseError(f"the pickle has an integer of {length} bytes")
        self._new(int.from_bytes(self._window.take(length), "little", signed=True))

    def _empty_set(self) -> None:
        self._new(Node(SET, ()))

    def _add_items(self) -> None:
        self._extend(self._pop_mark())

    def _frozen_set(self) -> None:
        node = Node(FROZEN_SET, ())
        node.items = self._pop_mark()
        self._new(node)


def read_values(data: bytes, most: int = limits.PICKLE_BYTES) -> Value:
    """The value of a whole pickle. Raises ParseError for one that is damaged, or longer than `most` bytes."""
    if len(data) > most:
        raise ParseError(f"a pickle of {len(data)} bytes, at most {most} are read")
    try:
        return _ValueReader(Window(BytesSource(data), 0, len(data))).read()
    except UnicodeDecodeError as error:
        raise ParseError(f"the pickle has text that is none: {error}") from error
