"""Which tensors a torch pickle describes, under which names, over which storages: read from its opcodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

from moonclipfs import limits
from moonclipfs.errors import ParseError
from moonclipfs.formats.pickle_reader import UNKNOWN, Global, Node, Pairs, PickleReader, Value
from moonclipfs.formats.window import Window

ROOT_NAME = "tensor"
"""The name of a tensor that is the whole pickle."""

_REBUILD_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_ORDERED_DICT = Global("collections", "OrderedDict")


class StorageUse(NamedTuple):
    """A storage as the pickle names it: its key, its class (such as "FloatStorage") and its length in elements.

    `start` is the first element of a view of the storage, which very old files have.
    """

    key: str
    type_name: str
    elements: int
    start: int = 0


class View(NamedTuple):
    """A tensor over a storage; offset and strides in elements. `dtype_name` is empty where the storage tells it."""

    storage: StorageUse
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype_name: str = ""


class NamedView(NamedTuple):
    """A tensor under its name: the keys from the root of the pickle to it, joined by dots."""

    name: str
    view: View


class TensorPickle(NamedTuple):
    """What a pickle says: its tensors in its order, and every storage by key, even one that no tensor uses."""

    tensors: list[NamedView]
    storages: dict[str, StorageUse]


def read_tensors(window: Window) -> TensorPickle:
    """Return the tensors and storages of the pickle at the start of `window`.

    A tensor that several names lead to is there once for each. Names longer than the limit are left out. Raises
    ParseError.
    """
    storages: dict[str, StorageUse] = {}

    def persistent(identifier: Value) -> Value:
        value = _persistent(identifier)
        if isinstance(value, StorageUse):
            storages[value.key] = value
        return value

    root = PickleReader(window, _reduce, persistent).read()
    if isinstance(root, View):
        return TensorPickle([NamedView(ROOT_NAME, root)], storages)
    found: list[NamedView] = []
    for path, view in _walk(root):
        if len(found) >= limits.TENSORS:
            raise ParseError(f"the pickle names more than {limits.TENSORS} tensors")
        found.append(NamedView(path, view))
    return TensorPickle(found, storages)


def _walk(root: Value) -> Iterator[tuple[str, View]]:
    """Yield every tensor below `root` with its path; a container that is there twice is walked once."""
    seen: set[int] = set()
    levels = [("", _children(root, seen))]
    while levels:
        path, children = levels[-1]
        for key, value in children:
            if not isinstance(value, (View, Node, list, tuple)):
                continue
            below = _join(path, key)
            if below is None:
                continue
            if isinstance(value, View):
                yield below, value
            elif id(value) not in seen:
                levels.append((below, _children(value, seen)))
                break
        else:
            levels.pop()


def _join(path: str, key: Value) -> str | None:
    """Return `path` with `key` appended, None past the limit of a name.

    The dicts that a module keeps its parts in add nothing to a name.
    """
    if key in ("_parameters", "_buffers", "_modules"):
        return path
    part = key if isinstance(key, str) else str(key) if isinstance(key, int) and not isinstance(key, bool) else "?"
    # Before they are joined: one long key may be there many times.
    if len(path) + bool(path) + len(part) > limits.TENSOR_NAME_BYTES:
        return None
    return f"{path}.{part}" if path else part


def _children(value: Value, seen: set[int]) -> Iterator[tuple[Value, Value]]:
    """Yield what `value` holds, with its key or number. Containers walked go into `seen`, by id."""
    seen.add(id(value))
    if isinstance(value, Node):
        yield from value.pairs
        yield from enumerate(value.items)
        yield from _children_of_state(value.state, seen)
        yield from _children_of_arguments(value, seen)
    else:
        yield from _items(value)


def _items(container: Value) -> Iterator[tuple[Value, Value]]:
    """Yield what a container other than a Node holds, with its key or number."""
    if isinstance(container, Pairs):
        yield from container
    elif isinstance(container, (list, tuple)):
        yield from enumerate(container)


def _unseen(container: Value, seen: set[int]) -> bool:
    """Put a container into `seen` and tell whether it is new: many objects may share a state, or arguments."""
    new = id(container) not in seen
    seen.add(id(container))
    return new


def _children_of_state(state: Value, seen: set[int]) -> Iterator[tuple[Value, Value]]:
    """Yield the attributes of an object: its `__dict__`, or a pair of that and its slots."""
    if isinstance(state, Pairs):
        parts: tuple[Value, ...] = (state,)
    elif isinstance(state, tuple) and len(state) == 2:
        parts = state
    else:
        yield "state", state
        return
    for part in parts:
        if isinstance(part, Pairs) and _unseen(part, seen):
            yield from part


def _children_of_arguments(node: Node, seen: set[int]) -> Iterator[tuple[Value, Value]]:
    """Yield the arguments of a call; those of an ordered dict are a list of its pairs."""
    arguments = node.arguments
    if not isinstance(arguments, tuple) or not arguments:
        return
    if node.function != _ORDERED_DICT:
        if _unseen(arguments, seen):
            yield from enumerate(arguments)
    elif isinstance(arguments[0], list) and _unseen(arguments[0], seen):
        yield from ((pair[0], pair[1]) for pair in arguments[0] if isinstance(pair, (list, tuple)) and len(pair) == 2)


def _persistent(identifier: Value) -> Value:
    """Return the storage, or the class of a module, that a persistent id stands for."""
    if not isinstance(identifier, tuple) or len(identifier) < 2:
        return UNKNOWN
    if identifier[0] == "module":
        return identifier[1]
    if identifier[0] != "storage" or len(identifier) < 5:
        return UNKNOWN
    kind, key, count = identifier[1], identifier[2], identifier[4]
    if not isinstance(kind, Global) or not isinstance(key, str) or not _is_size(count):
        return UNKNOWN
    view = identifier[5] if len(identifier) > 5 else None
    start = view[1] if isinstance(view, tuple) and len(view) == 3 and _is_size(view[1]) else 0
    return StorageUse(key, kind.name, count, start)


def _reduce(function: Value, arguments: Value) -> Value:
    """Return the tensor that a call of torch's rebuild functions makes; any other call is a Node.

    Takes the same few steps whatever the arguments hold, since a pickle can make calls of shared arguments many times.
    """
    call = function, arguments
    if function == _REBUILD_FROM_TYPE and isinstance(arguments, tuple) and len(arguments) > 2:
        function, arguments = arguments[0], arguments[2]
    if not isinstance(function, Global) or not isinstance(arguments, tuple) or function.module != "torch._utils":
        return Node(*call)
    made: Value = None
    if function.name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_qtensor"):
        made = _view(arguments, "")
    elif function.name == "_rebuild_tensor_v3" and len(arguments) > 6:
        made = _view(arguments, arguments[6].name if isinstance(arguments[6], Global) else "")
    elif function.name in ("_rebuild_parameter", "_rebuild_parameter_with_state") and arguments:
        made = arguments[0]
    return made if isinstance(made, View) else Node(*call)


def _view(arguments: tuple[Value, ...], dtype_name: str) -> View | None:
    """Return the tensor that (storage, offset, shape, strides, ...) describe, None when they are something else."""
    if len(arguments) < 4:
        return None
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, StorageUse) or not _is_size(offset) or not _are_sizes(shape) or not _are_sizes(strides):
        return None
    if len(shape) != len(strides):
        return None
    return View(storage, storage.start + offset, shape, strides, dtype_name)


def _is_size(value: Value) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63


def _are_sizes(value: Value) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and len(value) <= limits.DIMENSIONS and all(map(_is_size, value))
