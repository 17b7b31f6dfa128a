"""The state dicts of a moonclip snapshot as the checkpoint manager's `state.json` tells them, made without torch.

moonclip keeps the structure of each state dict as a pickle beside its tensors: `model._metadata`,
`optimizer._metadata`, `extra/NAME._metadata`, in which a dict with the key `__tensor__` stands for each tensor. The
pickles are read as data: nothing that they name is imported or called. A tensor of a dtype that moonclip does not know
lies in the pickle itself, and so does a whole state dict of its first versions (`PREFIX._blob`). What has no place in a
tree is an error that names it.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonclipfs import limits
from moonclipfs.compat.moonclip_tensors import DTYPES
from moonclipfs.errors import CorruptError, ParseError, UsageError
from moonclipfs.formats import torchlegacy
from moonclipfs.formats.layout import RegionKind
from moonclipfs.formats.pickle_reader import Global, Node, Pairs, Value
from moonclipfs.formats.pickle_values import FROZEN_SET, SET, read_values
from moonclipfs.types import BytesSource

Path = tuple[object, ...]
STRUCTURE = "._metadata"
BLOB = "._blob"
_EXTRA = "extra/"
_DEPTH = 200
_NODES = 1 << 20
"""Values of one structure at most: a pickle may refer to one value any number of times."""
_PLACE = "__tensor__"
_NUMPY = ("numpy._core.multiarray", "numpy.core.multiarray")
_NUMPY_DTYPE = re.compile(r"[biufc]\d{1,2}")
_KINDS = {"b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"}
_KINDS |= {
    f"{kind}{bits // 8}": f"{word}{bits}" for kind, word in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
}


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of a part: the `key` of it in the snapshot, or, for an array that stood in a pickle, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    key: str = ""
    data: bytes = b""


@dataclass(slots=True)
class StatePart:
    """One state dict: its tree, its tensors by name, and the names of an optimizer's parameters."""

    tree: Any = None
    tensors: dict[str, Placed] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor that the snapshot has."""

    dtype: str
    shape: tuple[int, ...]
    length: int


def take_apart(known: Mapping[str, Known], load: Callable[[str], bytes]) -> dict[str, StatePart]:
    """The parts of a snapshot by name. `load` gives the bytes of a tensor.

    Raises UsageError, which names the place, for a value that has no place in a tree, CorruptError for a structure that
    does not fit the tensors.
    """
    structures = {name.removesuffix(STRUCTURE): name for name in known if name.endswith(STRUCTURE)}
    blobs = {name.removesuffix(BLOB): name for name in known if name.endswith(BLOB)}
    parts: dict[str, StatePart] = {}
    used = {*structures.values(), *blobs.values()}
    for prefix in sorted({*structures, *blobs}, key=lambda prefix: (prefix != "model", prefix)):
        name, place = _part_of(prefix)
        part = parts.setdefault(name, StatePart({} if place else None))
        taker = _Taker(known, part, prefix)
        source = blobs.get(prefix) or structures[prefix]  # of both, moonclip itself takes the blob
        value = _read(load(source), source)
        if name == "optimizer" and "model" in parts:
            part.parameters = taker.parameter_names(value, parts["model"])
        tree = taker.tree(value, place)
        used |= taker.used
        if place:
            part.tree[place[0]] = tree
        else:
            part.tree = tree
    rest = [name for name in known if name not in used and name.partition("/")[0] not in blobs]
    if rest:
        _add_raw(parts.setdefault("raw" if "model" in parts else "model", StatePart({})), rest, known)
    return parts


def _part_of(prefix: str) -> tuple[str, Path]:
    """The part that a prefix belongs to, and where in its tree: `extra/rng` is in `extra`."""
    if prefix.startswith(_EXTRA):
        return "extra", (prefix.removeprefix(_EXTRA),)
    return prefix.replace("/", ".") or "state", ()


def _add_raw(part: StatePart, names: Iterable[str], known: Mapping[str, Known]) -> None:
    """Tensors that were saved by name alone, in the order of their names."""
    nodes: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        one = known[name]
        shape = one.shape
        if not shape and one.length != _width(one.dtype, name):
            shape = (one.length // _width(one.dtype, name),)  # bytes that were given without a shape
        kept = name if name != "__metadata__" else "__metadata__#2"
        part.tensors[kept] = Placed(one.dtype, shape, name)
        nodes[name] = {"$": "t"} if kept == name else {"$": "t", "n": kept}
    marked = any(name.startswith("$") for name in nodes)
    part.tree = {"$": "dict", "v": [[name, node] for name, node in nodes.items()]} if marked else nodes


def _read(data: bytes, name: str) -> Value:
    try:
        return read_values(data, limits.FOREIGN_TENSOR_BYTES)
    except ParseError as error:
        raise CorruptError(f"{name} is not understood: {error}") from error


def _width(dtype: str, where: str) -> int:
    found = DTYPES.get(dtype)
    if found is None:
        raise CorruptError(f"{where} has the dtype {dtype!r}, which is not known")
    return found.dtype.bits // 8 * found.parts


class _Taker:
    """Makes the tree of one structure, and puts its tensors into the part."""

    def __init__(self, known: Mapping[str, Known], part: StatePart, prefix: str) -> None:
        self._known = known
        self._part = part
        self._prefix = prefix
        self._nodes = 0
        self.used: set[str] = set()

    def tree(self, value: Value, path: Path) -> Any:
        """The tree of a value at a path of its part."""
        self._nodes += 1
        if self._nodes > _NODES or len(path) > _DEPTH:
            raise CorruptError(f"{self._where(path)}: more values, or deeper ones, than any state dict has")
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return _float(value)
        if isinstance(value, bytes):
            return {"$": "bytes", "v": base64.b64encode(value).decode("ascii")}
        if isinstance(value, Pairs):
            return self._dict(value, path, "dict")
        if isinstance(value, Global):
            return self._global(value, path)
        if isinstance(value, list):
            return [self.tree(item, (*path, at)) for at, item in enumerate(value)]
        if isinstance(value, tuple):
            return self._sequence("tuple", value, path)
        if isinstance(value, Node):
            return self._made(value, path)
        raise self._odd(path, "value of a kind that is not read")

    def parameter_names(self, value: Value, model: StatePart) -> list[str]:
        """The names of an optimizer's parameters, where the shapes of its state leave no doubt; else none.

        An optimizer numbers them in the order in which the model has them.
        """
        fields = dict(value) if isinstance(value, Pairs) else {}
        state = fields.get("state")
        shapes: dict[int, tuple[int, ...]] = {}
        for number, inner in state if isinstance(state, Pairs) else ():
            if not isinstance(number, int) or not isinstance(inner, Pairs):
                return []
            found = [self._place(item)[1] for _, item in inner if isinstance(item, Pairs) and _is_place(item)]
            if found:
                shapes[number] = max(found, key=len)
        named = {name: one.shape for name, one in model.tensors.items() if one.key and one.dtype in _TRAINED}
        if not shapes or sorted(shapes) != list(range(len(shapes))):
            return []
        return _matched([shapes[number] for number in range(len(shapes))], named)

    def _dict(self, pairs: Pairs, path: Path, kind: str) -> Any:
        if _is_place(pairs):
            return self._tensor(pairs, path)
        keys = [key for key, _ in pairs]
        if kind == "dict" and all(type(key) is str and not key.startswith("$") for key in keys):
            return {str(key): self.tree(item, (*path, key)) for key, item in pairs}
        rows = [[self.tree(key, (*path, "a key")), self.tree(item, (*path, key))] for key, item in pairs]
        return {"$": kind, "v": rows}

    def _tensor(self, pairs: Pairs, path: Path) -> dict[str, Any]:
        key, shape, dtype = self._place(pairs)
        one = self._known.get(key)
        if one is None:
            raise CorruptError(f"{self._where(path)}: the snapshot has no tensor {key!r}")
        count = 1
        for size in shape:
            count *= size
        if dtype != one.dtype or count * _width(dtype, key) != one.length:
            raise CorruptError(f"{self._where(path)}: {key} is stored as {one.shape} of {one.dtype}")
        self.used.add(key)
        return self._keep(Placed(dtype, shape, key), path, "t")

    def _place(self, pairs: Pairs) -> tuple[str, tuple[int, ...], str]:
        fields = {key: value for key, value in pairs if isinstance(key, str)}
        key, shape, dtype = fields.get(_PLACE), fields.get("shape"), fields.get("dtype")
        if not isinstance(key, str) or not isinstance(dtype, str) or not isinstance(shape, list):
            raise CorruptError(f"{self._prefix}: a tensor without a name, shape or dtype")
        if len(shape) > limits.DIMENSIONS or any(type(one) is not int or not 0 <= one < 1 << 48 for one in shape):
            raise CorruptError(f"{self._prefix}: {key} has the shape {shape}")
        return key, tuple(shape), dtype

    def _keep(self, placed: Placed, path: Path, kind: str) -> dict[str, Any]:
        """Put a tensor into the part, under the name that the manager gives to its place, or one like it."""
        wanted = name = _name(path, self._part.parameters)
        number = 2
        while name in self._part.tensors or name == "__metadata__":
            name, number = f"{wanted}#{number}", number + 1
        if len(name.encode("utf-8", "surrogatepass")) > limits.TENSOR_NAME_BYTES:
            raise UsageError(f"{self._where(path)}: a name of more than {limits.TENSOR_NAME_BYTES} bytes")
        self._part.tensors[name] = placed
        return {"$": kind} if name == wanted else {"$": kind, "n": name}

    def _sequence(self, kind: str, items: Iterable[Value], path: Path) -> dict[str, Any]:
        return {"$": kind, "v": [self.tree(item, (*path, at)) for at, item in enumerate(items)]}

    def _global(self, value: Global, path: Path) -> Any:
        if value.module == "torch" and value.name in DTYPES:
            return {"$": "dtype", "v": value.name}
        raise self._odd(path, f"{value.module}.{value.name}")

    def _made(self, node: Node, path: Path) -> Any:
        function = node.function
        arguments = node.arguments if isinstance(node.arguments, tuple) else ()
        if not isinstance(function, Global):
            raise self._odd(path, "value of a kind that is not read")
        made = self._made_by(function, arguments, node, path)
        if made is None:
            raise self._odd(path, f"{function.module}.{function.name}")
        return made

    def _made_by(self, function: Global, arguments: tuple[Value, ...], node: Node, path: Path) -> Any:
        match (function.module, function.name, arguments):
            case "collections", "OrderedDict", ():
                return self._dict(node.pairs, path, "odict")
            case "collections", "Counter", (Pairs() as pairs,):
                return self._dict(pairs, path, "dict")
            case "collections", "defaultdict", _:
                return self._dict(node.pairs, path, "dict")
            case "builtins", "set" | "frozenset", _ if function in (SET, FROZEN_SET):
                items = arguments[0] if arguments and isinstance(arguments[0], list) else node.items
                return self._sequence(function.name, items, path)
            case "builtins", "complex", (float() | int() as real, float() | int() as imaginary):
                return {"$": "complex", "v": [_float(float(real)), _float(float(imaginary))]}
            case "torch", "Size", (tuple() | list() as sizes,):
                return self._sequence("size", sizes, path)
            case "torch", "device", (str() as kind, *number):
                return {"$": "device", "v": ":".join([kind, *(str(one) for one in number)])}
            case "torch._utils", "_rebuild_parameter", (Node() as inner, *_):
                return self.tree(inner, path)
            case "torch._utils", "_rebuild_tensor_v2", (Node() as storage, int() as first, tuple(), tuple(), *_):
                return self._pickled(storage, first, arguments, None, path)
            case "torch._utils", "_rebuild_tensor_v3", (Node() as storage, int() as first, tuple(), tuple(), *_, _, _):
                dtype = next((one for one in arguments[6:] if isinstance(one, Global)), None)
                return self._pickled(storage, first, arguments, dtype, path)
            case module, "scalar", (Node() as dtype, bytes() as data) if module in _NUMPY:
                return {"$": "np", "d": self._numpy_dtype(dtype, path), "v": data.hex()}
            case module, "_reconstruct", _ if module in _NUMPY and isinstance(node.state, tuple):
                return self._array(node.state, path)
        return None

    def _pickled(
        self, storage: Node, first: int, arguments: tuple[Value, ...], dtype: Value, path: Path
    ) -> dict[str, Any]:
        """A tensor over a storage that torch pickled on its own."""
        match (storage.function, storage.arguments):
            case (Global("torch.storage", "_load_from_bytes"), (bytes() as data,)):
                word, raw = _storage(data, self._where(path))
            case _:
                raise self._odd(path, "tensor over a storage that is not in its pickle")
        word = dtype.name if isinstance(dtype, Global) and dtype.module == "torch" else word
        if isinstance(arguments[-1], Pairs) and arguments[-1]:
            raise self._odd(path, "tensor that is conjugated or negated when it is read")
        sizes, strides = arguments[2], arguments[3]
        numbers = (first, *sizes, *strides) if isinstance(sizes, tuple) and isinstance(strides, tuple) else (-1,)
        if word not in DTYPES or any(type(one) is not int or not 0 <= one < 1 << 48 for one in numbers):
            raise self._odd(path, f"tensor of {word or 'no dtype'} that is not read")
        values = _strided(raw, _width(word, self._where(path)), numbers, self._where(path))
        return self._keep(Placed(word, values.shape, data=values.tobytes()), path, "t")

    def _array(self, state: tuple[Value, ...], path: Path) -> dict[str, Any]:
        """A NumPy array, whose state is (version, shape, dtype, whether it is in Fortran's order, bytes)."""
        match state:
            case (_, tuple() as shape, Node() as dtype, bool() as by_columns, bytes() as data):
                word = self._numpy_dtype(dtype, path)
            case _:
                raise self._odd(path, "NumPy array of a kind that is not read")
        if not all(type(one) is int and 0 <= one < 1 << 48 for one in shape):
            raise CorruptError(f"{self._where(path)}: an array of the shape {shape}")
        sizes = tuple(int(str(one)) for one in shape)
        values = np.frombuffer(data, word)
        if values.size != np.prod(sizes, dtype=object):
            raise CorruptError(f"{self._where(path)}: an array whose shape does not fit its bytes")
        ordered = values.reshape(sizes, order="F" if by_columns else "C")
        plain = np.ascontiguousarray(ordered, ordered.dtype.newbyteorder("<"))
        kind = _KINDS.get(plain.dtype.str[1:])
        if kind is None:
            raise self._odd(path, f"NumPy array of {word}")
        return self._keep(Placed(kind, sizes, data=plain.tobytes()), path, "a")

    def _numpy_dtype(self, node: Node, path: Path) -> str:
        match (node.function, node.arguments, node.state):
            case (Global("numpy", "dtype"), (str() as word, *_), state) if _NUMPY_DTYPE.fullmatch(word):
                order = state[1] if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">") else ""
                return f"{order}{word}"
        raise self._odd(path, "NumPy value of a kind that is not read")

    def _odd(self, path: Path, what: str) -> UsageError:
        return UsageError(f"{self._where(path)} is a {what}, which cannot be imported without running its pickle")

    def _where(self, path: Path) -> str:
        return self._prefix + "".join(f"[{key!r}]" for key in path)


_STORAGE = re.compile(rb"ctorch\n(\w{1,40})Storage\n")
_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}  # fmt: skip
_TRAINED = frozenset({"float64", "float32", "float16", "bfloat16"})


def _storage(data: bytes, where: str) -> tuple[str, bytes]:
    """The dtype that the class of a pickled storage tells, if any, and its bytes."""
    try:
        layout = torchlegacy.parse(BytesSource(data))
    except ParseError as error:
        raise CorruptError(f"{where}: its storage is not understood: {error}") from error
    spans = [region for region in layout.regions if region.kind is RegionKind.TENSOR]
    if len(spans) != 1 or layout.truncated:
        raise CorruptError(f"{where}: its storage is not whole")
    name = _STORAGE.search(data[: spans[0].offset])
    return _STORAGES.get(name[1].decode(), "") if name else "", data[spans[0].offset : spans[0].end]


def _strided(raw: bytes, width: int, numbers: tuple[Any, ...], where: str) -> NDArray[np.void]:
    """The elements of a view of a storage; `numbers` are its first element, its shape and its strides."""
    first, rest = numbers[0], numbers[1:]
    if len(rest) % 2 or len(rest) > 2 * limits.DIMENSIONS:
        raise CorruptError(f"{where}: shape and strides contradict each other")
    shape, strides = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    count = math.prod(shape)
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if count and ((last + 1) * width > len(raw) or count * width > max(len(raw), limits.TENSOR_SPREAD_BYTES)):
        raise CorruptError(f"{where}: it reaches past its storage")
    if not count:
        return np.empty(shape, f"V{width}")
    elements = np.frombuffer(raw, f"V{width}", len(raw) // width)[first:]
    return np.lib.stride_tricks.as_strided(elements, shape, [one * width for one in strides], writeable=False)


def _is_place(pairs: Pairs) -> bool:
    return any(key == _PLACE for key, _ in pairs)


def _name(path: Path, parameters: list[str]) -> str:
    """The name of the tensor at a path: its keys, or, in the state of an optimizer, that of its parameter."""
    if parameters and len(path) >= 3 and path[0] == "state" and isinstance(path[1], int) and path[1] < len(parameters):
        path = (parameters[path[1]], *path[2:])
    return ".".join(str(key) for key in path).encode("utf-8", "backslashreplace").decode()


def _matched(shapes: list[tuple[int, ...]], named: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The names that `shapes` belong to in their order; none unless there is just one way to choose them."""
    names = list(named)

    def search(order: Iterable[int]) -> list[str]:
        found, at = [], 0
        for number in order:
            while at < len(names) and named[names[at]] != shapes[number]:
                at += 1
            if at == len(names):
                return []
            found.append(names[at])
            at += 1
        return found

    first = search(range(len(shapes)))
    names.reverse()
    last = search(range(len(shapes) - 1, -1, -1))
    return first if first == last[::-1] else []


def _float(value: float) -> Any:
    return value if value - value == 0.0 else {"$": "float", "v": struct.pack(">d", value).hex()}
