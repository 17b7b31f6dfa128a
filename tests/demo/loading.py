"""Load files in every usual way, and compare what comes back bit for bit."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy
import safetensors
import safetensors.torch
import torch

from moonclipfs.api import Snapshot


def _safe_open(path: Path) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)


def _through(path: Path, load: Callable[[BinaryIO], object]) -> object:
    with path.open("rb") as file:
        return load(file)


PATH_LOADERS: dict[str, dict[str, Callable[[Path], object]]] = {
    ".pt": {
        "torch.load": lambda path: torch.load(path, weights_only=False),
        "torch.load(mmap=True)": lambda path: torch.load(path, mmap=True),
        "torch.load(weights_only=True)": lambda path: torch.load(path, weights_only=True),
    },
    ".safetensors": {
        "safetensors load_file": safetensors.torch.load_file,
        "safetensors safe_open": _safe_open,
    },
    ".npy": {
        "numpy.load": numpy.load,
        "numpy.load(mmap_mode='r')": lambda path: numpy.load(path, mmap_mode="r"),
    },
}
"""By suffix; the first of each is the one that reads a file first."""

FILE_LOADERS: dict[str, dict[str, Callable[[BinaryIO], object]]] = {
    ".pt": {"torch.load(file)": lambda file: torch.load(file, weights_only=True)},
    ".safetensors": {"safetensors load(bytes)": lambda file: safetensors.torch.load(file.read())},
    ".npy": {"numpy.load(file)": lambda file: numpy.load(io.BytesIO(file.read()))},
}
"""For where nothing can be mounted: they take an open file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere that checkpoints can be loaded from: names of loaders by suffix, and how each runs on a file."""

    loaders: Mapping[str, Mapping[str, Callable[[str], object]]]
    digest: Callable[[str], str]


def in_directory(root: Path) -> Place:
    """Files at ordinary paths: the originals, or those of a mount."""
    loaders = {
        suffix: {name: _at(root, load) for name, load in by_name.items()} for suffix, by_name in PATH_LOADERS.items()
    }
    return Place(loaders, lambda file: _through(root / file, _sha256))


def _at(root: Path, load: Callable[[Path], object]) -> Callable[[str], object]:
    return lambda file: load(root / file)


def in_python(root: Path) -> Place:
    """The originals, opened as files."""
    return _opened(lambda file: (root / file).open("rb"))


def in_snapshots(snapshots: Mapping[str, Snapshot]) -> Place:
    """The snapshots of a store, through the Python reader."""

    def open_file(file: str) -> BinaryIO:
        name, _, rest = file.rpartition("/")
        return snapshots[name].open(rest)

    return _opened(open_file)


def _opened(open_file: Callable[[str], BinaryIO]) -> Place:
    def through(load: Callable[[BinaryIO], object]) -> Callable[[str], object]:
        def run(file: str) -> object:
            with open_file(file) as opened:
                return load(opened)

        return run

    loaders = {suffix: {name: through(load) for name, load in by.items()} for suffix, by in FILE_LOADERS.items()}
    return Place(loaders, lambda file: str(through(_sha256)(file)))


def _sha256(file: BinaryIO) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


@dataclass(slots=True)
class Count:
    """How many tensors and other values were compared, and where they differ."""

    tensors: int = 0
    values: int = 0
    different: list[str] = field(default_factory=list)


def _flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf of nested dicts, lists and tuples, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _flat(item, f"{path}[{number}]")
    else:
        yield path, value


def _same(left: object, right: object) -> bool:
    """The same type and value; for tensors and arrays the same dtype, shape and bits."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        left_bits, right_bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
        return torch.equal(left_bits, right_bits)
    if isinstance(left, numpy.ndarray) and isinstance(right, numpy.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    return type(left) is type(right) and left == right


def compare(expected: object, got: object, where: str, count: Count) -> None:
    """Compare two loaded checkpoints leaf by leaf, adding to `count`."""
    left, right = dict(_flat(expected)), dict(_flat(got))
    count.different += [f"{where}{path}: only on one side" for path in left.keys() ^ right.keys()]
    for path in left.keys() & right.keys():
        if isinstance(left[path], torch.Tensor | numpy.ndarray):
            count.tensors += 1
        else:
            count.values += 1
        if not _same(left[path], right[path]):
            count.different.append(where + path)
