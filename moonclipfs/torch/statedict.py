"""The structure of a state dict as JSON, its tensors apart under readable names; no pickle.

A tree is JSON with these additions. What JSON has itself stands as itself: null, true, numbers that are finite, text,
a list, a dict with text keys none of which begins with `$`. Anything else is an object whose `$` says what it is:

    {"$": "t"}                      a tensor; "n" is its name where that is not its place; "g" tells of a DTensor
    {"$": "a"}                      a NumPy array, stored as a tensor; "n" as above
    {"$": "np", "d": ..., "v": ...}  a NumPy scalar: its dtype and its bytes as hexadecimal digits
    {"$": "float", "v": ...}        nan or an infinity: the 8 bytes as hexadecimal digits, big-endian
    {"$": "complex", "v": [r, i]}   real and imaginary part, each written as a float
    {"$": "bytes", "v": ...}        base64
    {"$": "tuple" | "set" | "frozenset" | "size", "v": [...]}
    {"$": "dict" | "odict", "v": [[key, value], ...]}   "m": the `_metadata` that torch puts on a module's state dict
    {"$": "dtype" | "device", "v": ...}
    {"$": "pickle", "v": ...}       base64; only with allow_pickle=True

Of what is derived from a plain type only the value is kept: a defaultdict or a Counter comes back as a dict, an IntEnum
as an int, a bytearray as bytes.
"""

from __future__ import annotations

import base64
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moonclipfs import limits
from moonclipfs.errors import CorruptError, UsageError
from moonclipfs.torch import pickled
from moonclipfs.torch.dtypes import dtype_name, dtype_named
from moonclipfs.torch.sharded import describe_sharding, local_of

Path = tuple[object, ...]
Namer = Callable[[Path], str]
_DEPTH = 200
_SHOWN = 20
"""Keys of a path that a message shows."""
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}


def plain_name(path: Path) -> str:
    """The name of what stands at a path: its keys, with dots between."""
    return ".".join(str(key) for key in path)


def parameter_namer(names: Sequence[str]) -> Namer:
    """Names for an optimizer's state dict: `<parameter>.exp_avg` for the state of parameter number i, `names[i]`."""

    def name(path: Path) -> str:
        if len(path) >= 3 and path[0] == "state" and isinstance(path[1], int) and path[1] < len(names):
            return plain_name((names[path[1]], *path[2:]))
        return plain_name(path)

    return name


class Taker:
    """Takes the tensors out of one state dict: `tensors` has them by name after `tree`."""

    def __init__(self, part: str, namer: Namer = plain_name, *, allow_pickle: bool = False) -> None:
        """`part` stands in front of paths in messages."""
        self.tensors: dict[str, torch.Tensor] = {}
        self._part = part
        self._namer = namer
        self._allow_pickle = allow_pickle
        self._above: set[int] = set()

    def tree(self, value: object, path: Path = ()) -> Any:
        """The structure of `value` as JSON values. Raises UsageError, which names the path, for what cannot be kept."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value, path)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return _float(float(value))
        if isinstance(value, (list, tuple, dict, set, frozenset)):
            return self._container(value, path)
        if isinstance(value, (bytes, bytearray)):
            return {"$": "bytes", "v": base64.b64encode(value).decode("ascii")}
        if isinstance(value, complex):
            return {"$": "complex", "v": [_float(value.real), _float(value.imag)]}
        if isinstance(value, torch.dtype):
            return {"$": "dtype", "v": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"$": "device", "v": str(value)}
        return self._odd(value, path)

    def where(self, path: Path) -> str:
        """How messages name a place: `extra["args"]["seed"]`."""
        shown = path if len(path) <= _SHOWN else path[:_SHOWN]
        return self._part + "".join(f"[{key!r}]" for key in shown) + ("..." if len(shown) < len(path) else "")

    def _container(self, value: Any, path: Path) -> Any:
        if id(value) in self._above or len(path) > _DEPTH:
            raise UsageError(f"{self.where(path)} contains itself, or is nested more than {_DEPTH} deep")
        self._above.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value, path)
            if type(value) is list:
                return [self.tree(item, (*path, at)) for at, item in enumerate(value)]
            kind = _SEQUENCES.get(type(value))
            if kind is None:
                return self._odd(value, path)
            items: Iterable[Any] = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return {"$": kind, "v": [self.tree(item, (*path, at)) for at, item in enumerate(items)]}
        finally:
            self._above.discard(id(value))

    def _dict(self, value: Mapping[Any, Any], path: Path) -> Any:
        ordered = isinstance(value, OrderedDict)
        metadata = getattr(value, "_metadata", None) if ordered else None
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        if plain and not ordered:
            return {key: self.tree(item, (*path, key)) for key, item in value.items()}
        pairs = [[self._key(key, path), self.tree(item, (*path, key))] for key, item in value.items()]
        node: dict[str, Any] = {"$": "odict" if ordered else "dict", "v": pairs}
        if metadata is not None:
            node["m"] = self.tree(metadata, (*path, "_metadata"))
        return node

    def _key(self, key: object, path: Path) -> Any:
        if isinstance(key, torch.Tensor):
            raise UsageError(f"{self.where(path)} has a tensor as a key: a dict must have keys of text or numbers")
        return self.tree(key, (*path, "a key"))

    def _tensor(self, value: torch.Tensor, path: Path) -> dict[str, Any]:
        node: dict[str, Any] = {"$": "t"}
        sharding = describe_sharding(value)
        if sharding is not None:
            node["g"] = sharding
        name = self._keep(local_of(value, self.where(path)), path)
        if name != self._namer(path):
            node["n"] = name
        return node

    def _numpy(self, value: Any, path: Path) -> Any:
        if isinstance(value, np.generic):
            if value.dtype.hasobject:
                return self._odd(value, path)
            return {"$": "np", "d": value.dtype.str, "v": value.tobytes().hex()}
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except (TypeError, ValueError):
            return self._odd(value, path)
        name = self._keep(tensor, path)
        return {"$": "a"} if name == self._namer(path) else {"$": "a", "n": name}

    def _keep(self, tensor: torch.Tensor, path: Path) -> str:
        wanted = name = self._namer(path).encode("utf-8", "backslashreplace").decode()
        number = 2
        while name in self.tensors or name == "__metadata__":
            name, number = f"{wanted}#{number}", number + 1
        if len(name.encode()) > limits.TENSOR_NAME_BYTES:
            raise UsageError(
                f"{self.where(path)}: no tensor can have this name, since it is longer than "
                f"{limits.TENSOR_NAME_BYTES} bytes"
            )
        self.tensors[name] = tensor
        return name

    def _odd(self, value: object, path: Path) -> Any:
        if self._allow_pickle:
            return {"$": "pickle", "v": base64.b64encode(pickled.dump(value, self.where(path))).decode("ascii")}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, (np.ndarray, np.generic)):
            kind += f" of {value.dtype}"  # there are arrays that are kept
        raise UsageError(
            f"{self.where(path)} is a {kind}, which cannot be kept: give tensors, arrays of numbers, numbers, text, "
            "bytes and containers of these, or set allow_pickle=True"
        )


class Maker:
    """Makes a state dict of its tree again; `tensor` gives each tensor, by its name and its node."""

    def __init__(
        self,
        tensor: Callable[[str, Mapping[str, Any], Path], object],
        namer: Namer = plain_name,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self._tensor = tensor
        self._namer = namer
        self._allow_pickle = allow_pickle

    def value(self, node: Any, path: Path = ()) -> Any:
        """The value of a tree. Raises CorruptError for what is no tree, UsageError for a pickle that is not allowed."""
        if isinstance(node, list):
            return [self.value(item, (*path, at)) for at, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if "$" not in node:
            return {key: self.value(item, (*path, key)) for key, item in node.items()}
        try:
            return self._marked(node, path)
        except (KeyError, TypeError, ValueError, IndexError, struct.error) as error:
            raise CorruptError(f"state.json: {plain_name(path) or 'its root'} is not understood ({error!r})") from error

    def _marked(self, node: dict[str, Any], path: Path) -> Any:
        kind = node["$"]
        if kind in ("t", "a"):
            return self._tensor(node.get("n") or self._namer(path), node, path)
        value = node["v"]
        if kind in ("dict", "odict"):
            return self._dict(node, path)
        if kind in ("tuple", "set", "frozenset", "size"):
            make = {name: type_ for type_, name in _SEQUENCES.items()}[kind]
            return make(self.value(item, (*path, at)) for at, item in enumerate(value))
        if kind == "float":
            return struct.unpack(">d", bytes.fromhex(value))[0]
        if kind == "complex":
            return complex(*(self.value(one) for one in value))
        if kind == "bytes":
            return base64.b64decode(value, validate=True)
        if kind == "np":
            return np.frombuffer(bytes.fromhex(value), np.dtype(node["d"]))[0]
        if kind == "dtype":
            return _dtype(value)
        if kind == "device":
            return torch.device(value)
        if kind == "pickle":
            return self._pickle(value, path)
        raise CorruptError(f"state.json: {plain_name(path)} is a {kind!r}, which this version does not know")

    def _dict(self, node: dict[str, Any], path: Path) -> Any:
        pairs = [(self.value(key), item) for key, item in node["v"]]
        made = ((key, self.value(item, (*path, key))) for key, item in pairs)
        if node["$"] == "dict":
            return dict(made)
        result = OrderedDict(made)
        if "m" in node:
            result._metadata = self.value(node["m"], (*path, "_metadata"))  # type: ignore[attr-defined]
        return result

    def _pickle(self, value: str, path: Path) -> Any:
        if not self._allow_pickle:
            raise UsageError(
                f"{plain_name(path)} was saved as a pickle, which may run code: load it with allow_pickle=True if you "
                "trust whoever saved it"
            )
        return pickled.load(base64.b64decode(value, validate=True))


def _float(value: float) -> Any:
    if value - value == 0.0:
        return value
    return {"$": "float", "v": struct.pack(">d", value).hex()}


def _dtype(name: str) -> torch.dtype:
    found = dtype_named(name)
    if found is None:
        raise CorruptError(f"state.json: this torch has no dtype {name}")
    return found
