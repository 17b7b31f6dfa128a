"""Safetensors files that exist nowhere yet: a header, and tensors in host memory, read as one file."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonclipfs.types import Buffer

SUFFIX = ".safetensors"
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file: `word` is the safetensors name of its dtype, `length` its bytes.

    `read(offset, length)` gives a part of these bytes. `unchanged` says that they are those of the snapshot before.
    """

    name: str
    word: str
    shape: tuple[int, ...]
    length: int
    read: Callable[[int, int], Buffer]
    unchanged: bool = False


class TensorFile:
    """A safetensors file as a `types.Source`. The same tensors give the same bytes, in whatever order they come."""

    def __init__(self, tensors: Iterable[FileTensor]) -> None:
        self.tensors = sorted(tensors, key=_order)
        self.header = _header(self.tensors)
        self._starts = []
        at = len(self.header)
        for tensor in self.tensors:
            self._starts.append(at)
            at += tensor.length
        self.size = at

    def read(self, offset: int, length: int) -> Buffer:
        """Exactly `length` bytes at `offset`: a view where they are those of one tensor."""
        end = offset + length
        parts: list[Buffer] = []
        if offset < len(self.header):
            parts.append(self.header[offset:end])
        at = max(0, bisect_right(self._starts, offset) - 1)
        while at < len(self.tensors) and self._starts[at] < end:
            start, tensor = self._starts[at], self.tensors[at]
            low, high = max(offset, start), min(end, start + tensor.length)
            if low < high:
                parts.append(tensor.read(low - start, high - low))
            at += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def unchanged(self) -> list[tuple[int, int]]:
        """(offset, length) of the tensors that are as they were."""
        places = zip(self._starts, self.tensors, strict=True)
        return [(start, tensor.length) for start, tensor in places if tensor.unchanged]


def shards(tensors: Sequence[FileTensor], most: int) -> list[list[FileTensor]]:
    """Tensors in their order, split where a file would get more than `most` bytes of them; one list at least."""
    groups: list[list[FileTensor]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda one: one.name):
        if groups[-1] and size + tensor.length > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.length
    return groups


def part_files(part: str, tensors: Sequence[FileTensor], most: int) -> tuple[dict[str, TensorFile], bytes]:
    """The files of a part by name, and the JSON index of the tensors where there are several, else nothing."""
    groups = shards(tensors, most)
    if len(groups) == 1:
        return {part + SUFFIX: TensorFile(groups[0])}, b""
    names = [f"{part}-{number:05}-of-{len(groups):05}{SUFFIX}" for number in range(1, len(groups) + 1)]
    files = {name: TensorFile(group) for name, group in zip(names, groups, strict=True)}
    total = sum(tensor.length for tensor in tensors)
    where = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return files, json.dumps(index, indent=2).encode()


def _order(tensor: FileTensor) -> tuple[int, str]:
    # The widest elements first, so that each lies at a multiple of its size: a mapped file can be used as it is.
    return -_SIZES.get(tensor.word, 1), tensor.name


def _header(tensors: Sequence[FileTensor]) -> bytes:
    fields: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.length]
        fields[tensor.name] = {"dtype": tensor.word, "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.length
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
