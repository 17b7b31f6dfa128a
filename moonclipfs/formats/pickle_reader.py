"""Reads the opcodes of a pickle as data. Nothing is imported, called or constructed.

A pickle is a program, and one from outside may be a hostile one; this is a reader of programs.

Tuples, lists, strings, numbers, None and booleans come out as themselves, dicts as `Pairs`, a name of a class or
function as `Global`, everything made by calling one as `Node`, and what has no use here as `UNKNOWN`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.window import Window

Value: TypeAlias = object


class Global(NamedTuple):
    """A name that the pickle would import."""

    module: str
    name: str


class Pairs(list[tuple[Value, Value]]):
    """A dict as the pairs that were put into it; keys are never hashed."""

    __slots__ = ()


class Node:
    """An object that the pickle would make by calling `function` with `arguments`, then fill."""

    __slots__ = ("arguments", "function", "items", "pairs", "state")

    def __init__(self, function: Value, arguments: Value) -> None:
        self.function = function
        self.arguments = arguments
        self.items: list[Value] = []
        self.pairs = Pairs()
        self.state: Value = None


class _Unknown:
    """The type of UNKNOWN."""

    __slots__ = ()


UNKNOWN = _Unknown()
"""A value whose content has no use here: a float, bytes, a long string, a set."""

Reduce: TypeAlias = Callable[[Value, Value], Value]
Persistent: TypeAlias = Callable[[Value], Value]


class PickleReader:
    """Reads one pickle, protocols 1 to 5, from `window`, whose length the caller has bounded.

    `reduce(function, arguments)` gives the value of a call, `persistent(identifier)` that of a persistent id.
    """

    def __init__(self, window: Window, reduce: Reduce = Node, persistent: Persistent = lambda _: UNKNOWN) -> None:
        self._window = window
        self._reduce = reduce
        self._persistent = persistent
        self._stack: list[Value] = []
        self._marked: list[list[Value]] = []
        self._memo: dict[int, Value] = {}
        self._objects = 0

    def read(self) -> Value:
        """Return the value of the pickle; the window then stands after its STOP.

        Raises ParseError for an opcode that no checkpoint uses, and past the limits on opcodes and objects.
        """
        window, opcodes = self._window, _OPCODES
        for _ in range(limits.PICKLE_OPCODES):
            opcode = window.byte()
            if opcode == _STOP:
                return self._pop()
            handler = opcodes.get(opcode)
            if handler is None:
                raise ParseError(f"pickle opcode {opcode:#04x} at byte {window.position - 1} is not read")
            handler(self)
        raise ParseError(f"the pickle has more than {limits.PICKLE_OPCODES} opcodes")

    def _charge(self, count: int = 1) -> None:
        self._objects += count
        if self._objects > limits.PICKLE_OBJECTS:
            raise ParseError(f"the pickle makes more than {limits.PICKLE_OBJECTS} objects")

    def _pop(self) -> Value:
        if not self._stack:
            raise ParseError(f"pickle stack is empty at byte {self._window.position}")
        return self._stack.pop()

    def _top(self) -> Value:
        if not self._stack:
            raise ParseError(f"pickle stack is empty at byte {self._window.position}")
        return self._stack[-1]

    def _new(self, value: Value) -> None:
        """Push a value that takes memory."""
        self._charge()
        self._stack.append(value)

    def _mark(self) -> None:
        self._charge()
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Value]:
        if not self._marked:
            raise ParseError(f"pickle mark is missing at byte {self._window.position}")
        items = self._stack
        self._stack = self._marked.pop()
        return items

    def _pop_or_mark(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _drop_mark(self) -> None:
        self._pop_mark()

    def _dict(self) -> None:
        items = self._pop_mark()
        self._new(Pairs())
        self._set(items)

    def _empty_set(self) -> None:
        self._stack.append(UNKNOWN)

    def _add_items(self) -> None:
        self._pop_mark()

    def _frozen_set(self) -> None:
        self._pop_mark()
        self._stack.append(UNKNOWN)

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._new(tuple(reversed(items)))

    def _text(self, length: int) -> None:
        if length > limits.PICKLE_STRING_BYTES:
            self._window.skip(length)
            self._stack.append(UNKNOWN)
        else:
            self._new(self._window.take(length).decode("utf-8", "surrogateescape"))

    def _float(self) -> None:
        self._skip(8)

    def _bytes(self, length: int) -> None:
        self._skip(length)

    def _skip(self, length: int) -> None:
        self._window.skip(length)
        self._stack.append(UNKNOWN)

    def _long(self, length: int) -> None:
        if length > 16:
            self._skip(length)
        else:
            self._new(int.from_bytes(self._window.take(length), "little", signed=True))

    def _int32(self) -> None:
        self._stack.append(int.from_bytes(self._window.take(4), "little", signed=True))

    def _global(self) -> None:
        module = self._window.line(limits.TENSOR_NAME_BYTES)
        name = self._window.line(limits.TENSOR_NAME_BYTES)
        self._new(Global(module.decode("utf-8", "replace"), name.decode("utf-8", "replace")))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ParseError(f"pickle names a global by something else than text at byte {self._window.position}")
        self._new(Global(module, name))

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        self._new(self._reduce(function, arguments))

    def _construct_extended(self) -> None:
        self._pop()
        arguments, function = self._pop(), self._pop()
        self._new(Node(function, arguments))

    def _construct(self) -> None:
        arguments, function = self._pop(), self._pop()
        self._new(Node(function, arguments))

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if isinstance(target, Node):
            target.state = state

    def _extend(self, items: list[Value]) -> None:
        target = self._top()
        if isinstance(target, list) and not isinstance(target, Pairs):
            target.extend(items)
        elif isinstance(target, Node):
            target.items.extend(items)

    def _set(self, items: list[Value]) -> None:
        if len(items) % 2:
            raise ParseError(f"pickle sets a key without a value at byte {self._window.position}")
        target = self._top()
        pairs = target.pairs if isinstance(target, Node) else target
        if isinstance(pairs, Pairs):
            self._charge(len(items) // 2)
            pairs.extend(zip(items[::2], items[1::2], strict=True))

    def _pop_two(self) -> list[Value]:
        value, key = self._pop(), self._pop()
        return [key, value]

    def _put(self, index: int) -> None:
        self._charge()
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise ParseError(f"pickle memo {index} is missing at byte {self._window.position}")
        self._stack.append(self._memo[index])


_STOP = 0x2E

_OPCODES: dict[int, Callable[[PickleReader], None]] = {
    ord(opcode): handler
    for opcode, handler in {
        # framing
        "\x80": lambda r: r._window.skip(1),
        "\x95": lambda r: r._window.skip(8),
        # values
        "N": lambda r: r._stack.append(None),
        "\x88": lambda r: r._stack.append(True),
        "\x89": lambda r: r._stack.append(False),
        "K": lambda r: r._stack.append(r._window.byte()),
        "M": lambda r: r._stack.append(r._window.u16()),
        "J": PickleReader._int32,
        "\x8a": lambda r: r._long(r._window.byte()),
        "\x8b": lambda r: r._long(r._window.u32()),
        "G": lambda r: r._float(),
        "\x8c": lambda r: r._text(r._window.byte()),
        "X": lambda r: r._text(r._window.u32()),
        "\x8d": lambda r: r._text(r._window.u64()),
        # byte strings are text in the pickles of Python 2
        "U": lambda r: r._text(r._window.byte()),
        "T": lambda r: r._text(r._window.u32()),
        "C": lambda r: r._bytes(r._window.byte()),
        "B": lambda r: r._bytes(r._window.u32()),
        "\x8e": lambda r: r._bytes(r._window.u64()),
        "\x96": lambda r: r._bytes(r._window.u64()),
        # containers
        ")": lambda r: r._stack.append(()),
        "]": lambda r: r._new([]),
        "}": lambda r: r._new(Pairs()),
        "\x8f": lambda r: r._empty_set(),
        "t": lambda r: r._new(tuple(r._pop_mark())),
        "\x85": lambda r: r._tuple(1),
        "\x86": lambda r: r._tuple(2),
        "\x87": lambda r: r._tuple(3),
        "l": lambda r: r._new(r._pop_mark()),
        "d": PickleReader._dict,
        "\x91": lambda r: r._frozen_set(),
        "a": lambda r: r._extend([r._pop()]),
        "e": lambda r: r._extend(r._pop_mark()),
        "s": lambda r: r._set(r._pop_two()),
        "u": lambda r: r._set(r._pop_mark()),
        "\x90": lambda r: r._add_items(),
        # objects
        "c": PickleReader._global,
        "\x93": PickleReader._stack_global,
        "R": PickleReader._call,
        "\x81": PickleReader._construct,
        "\x92": PickleReader._construct_extended,
        "b": PickleReader._build,
        "Q": lambda r: r._stack.append(r._persistent(r._pop())),
        # stack and memo
        "(": PickleReader._mark,
        "0": PickleReader._pop_or_mark,
        "1": PickleReader._drop_mark,
        "2": lambda r: r._stack.append(r._top()),
        "q": lambda r: r._put(r._window.byte()),
        "r": lambda r: r._put(r._window.u32()),
        "\x94": lambda r: r._put(len(r._memo)),
        "h": lambda r: r._get(r._window.byte()),
        "j": lambda r: r._get(r._window.u32()),
    }.items()
}
