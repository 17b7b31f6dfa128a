"""A saved snapshot, opened: its `state.json`, and its tensors by part and name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moonclipfs import limits
from moonclipfs.errors import CorruptError, NotFoundError, UsageError
from moonclipfs.formats.layout import Tensor
from moonclipfs.store.filereader import FileReader
from moonclipfs.store.store import Store
from moonclipfs.store.target import close_names
from moonclipfs.torch.casting import Cast
from moonclipfs.torch.dtypes import BY_WORD, CARRIERS, dtype_named
from moonclipfs.torch.parts import STATE_FILE, namer_of
from moonclipfs.torch.runs import thinned_of
from moonclipfs.torch.saving import FORMAT, VERSION
from moonclipfs.torch.statedict import Namer
from moonclipfs.types import Version


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of a snapshot: what it is to torch, and where its bytes are.

    `cast` tells how it was cast for saving: it has the dtype `cast.dtype` in the file then, and is to become `dtype`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    reader: FileReader
    offset: int
    length: int
    cast: Cast | None = None


class Saved:
    """One version that a manager saved. Raises CorruptError for what contradicts itself, NotFoundError for any other
    snapshot.
    """

    def __init__(self, store: Store, version: Version, topology: tuple[int, int] = (1, 0)) -> None:
        """`topology` is the number of ranks of whoever loads, and which of them that is: what is each rank's own is
        there for as many ranks as saved it.
        """
        self.store = store
        self.version = version
        self.id = f"{version.path}@{version.number}"
        self.state = self._read_state(STATE_FILE)
        self.ranks = int(self.state.get("world_size", 1))
        """How many saved it."""
        self.others: list[str] = []
        """The parts that are each rank's own, and not for this topology."""
        self._take_in_own(*topology)
        self._tensors: dict[str, dict[str, SavedTensor]] = {}

    @property
    def step(self) -> int:
        """The step that it was saved at."""
        return int(self.state["step"])

    @property
    def metadata(self) -> dict[str, Any]:
        """What the caller of `save` said of it."""
        return dict(self.state["metadata"])

    @property
    def parts(self) -> Mapping[str, Any]:
        """What `state.json` says of each part."""
        found: Mapping[str, Any] = self.state["parts"]
        return found

    @property
    def whole_parts(self) -> list[str]:
        """The parts of which nothing was dropped by thinning."""
        gone = set(thinned_of(self.version))
        return [part for part, about in self.parts.items() if not gone & set(about["files"])]

    def tree(self, part: str) -> Any:
        """The structure of a part. Raises NotFoundError."""
        return self._part(part)["tree"]

    def namer(self, part: str) -> Namer:
        """How the tensors of a part are named. Raises NotFoundError."""
        return namer_of(self._part(part)["parameters"])

    def _take_in_own(self, world_size: int, rank: int) -> None:
        ranked = [str(part) for part in self.state.get("ranked", ())]
        if not ranked:
            return
        if world_size != self.ranks:
            self.others = ranked
            return
        directory = f"rank-{rank:05}"
        own = self._read_state(f"{directory}/{STATE_FILE}")
        for about in own["parts"].values():
            about["files"] = [f"{directory}/{file}" for file in about["files"]]
        self.state["parts"] |= own["parts"]
        self.state["shared"] += own["shared"]

    def _part(self, part: str) -> Any:
        if part in self.others:
            raise UsageError(
                f"{self.id} was saved by {self.ranks} ranks, each with {part} of its own: load it with "
                f"world_size={self.ranks} and a rank, or save and load with moonclipfs.torch.dcp, which reshards"
            )
        if part not in self.parts:
            raise NotFoundError(f"{self.id} has no {part}; it has {', '.join(self.parts) or 'nothing'}")
        return self.parts[part]

    def tensors(self, part: str) -> Mapping[str, SavedTensor]:
        """The tensors of a part by name; reads the headers of its files."""
        if part not in self._tensors:
            about = self._part(part)
            found = {}
            for file in about["files"]:
                for tensor, reader in self._in_file(file):
                    found[tensor.name] = self._saved(tensor, reader, about)
            self._tensors[part] = found
        return self._tensors[part]

    def find(self, name: str) -> SavedTensor:
        """The tensor NAME or PART:NAME. Raises NotFoundError, UsageError for a NAME that several parts have."""
        part, colon, inner = name.partition(":")
        if colon and part in self.parts and inner in self.tensors(part):
            return self.tensors(part)[inner]
        having = [part for part in self.whole_parts if name in self.tensors(part)]
        if not having:
            known = [one for part in self.whole_parts for one in self.tensors(part)]
            close = close_names(name, known)
            gone = thinned_of(self.version)
            raise NotFoundError(
                f"no tensor {name} in {self.id}"
                + (f"; did you mean {' or '.join(close)}?" if close else "")
                + (f"; it was thinned, and {', '.join(gone)} is gone" if gone else "")
            )
        if len(having) > 1:
            raise UsageError(f"tensor {name} is in {' and '.join(having)} of {self.id}: say {having[0]}:{name}")
        return self.tensors(having[0])[name]

    def _saved(self, tensor: Tensor, reader: FileReader, about: Mapping[str, Any]) -> SavedTensor:
        word = tensor.dtype_name or tensor.dtype.name
        named = about["dtypes"].get(tensor.name)
        dtype = dtype_named(named) if named else BY_WORD.get(word)
        carrier = CARRIERS.get(dtype) if dtype is not None else None
        if dtype is None or carrier is None or carrier.word != word:
            raise CorruptError(f"{self.id}: {tensor.name} is of {named or word}, a dtype that this torch does not have")
        shape = tensor.shape if carrier.parts == 1 else tensor.shape[:-1]
        how = None
        if tensor.name in about.get("cast", {}):
            source, exponent = about["cast"][tensor.name]
            was = dtype_named(source)
            if was is None:
                raise CorruptError(f"{self.id}: {tensor.name} was of {source}, a dtype that this torch does not have")
            how, dtype = Cast(was, dtype, int(exponent)), was
        return SavedTensor(tensor.name, dtype, shape, reader, tensor.offset, tensor.length, how)

    def _in_file(self, file: str) -> list[tuple[Tensor, FileReader]]:
        try:
            entry = self.store.lookup(self.version, file.encode())
        except NotFoundError as error:
            if file in thinned_of(self.version):
                raise UsageError(
                    f"{self.id} was thinned: {file} is gone, so no training goes on from it; what it has can be loaded"
                ) from error
            raise CorruptError(f"{self.id} has no {file}, which its {STATE_FILE} names") from error
        layout = self.store.layout(entry)
        if layout.reason:
            raise CorruptError(f"{self.id}: {file} is not readable: {layout.reason}")
        reader = self.store.open_file(entry)
        return [(tensor, reader) for tensor in layout.tensors]

    def _read_state(self, place: str) -> dict[str, Any]:
        try:
            entry = self.store.lookup(self.version, place.encode())
        except NotFoundError as error:
            raise NotFoundError(f"{self.id} was not saved by a checkpoint manager: it has no {STATE_FILE}") from error
        if entry.size > limits.HEADER_BYTES:
            raise CorruptError(f"{self.id}: {STATE_FILE} is longer than {limits.HEADER_BYTES} bytes")
        data = self.store.open_file(entry).read(0, entry.size)
        try:
            state = json.loads(data)
            if state["format"] != FORMAT:
                raise NotFoundError(f"{self.id} was not saved by a checkpoint manager: its {STATE_FILE} is another's")
            if state["version"] > VERSION:
                raise UsageError(
                    f"{self.id} was saved by a newer moonclipfs: its {STATE_FILE} is of version "
                    f"{state['version']}, and this one reads {VERSION}"
                )
            parts = state["parts"].values()
            if not all(isinstance(part["files"], list) and "tree" in part for part in parts):
                raise TypeError("a part without files or tree")
            int(state["step"]), dict(state["metadata"]), list(state["shared"])
            int(state.get("world_size", 1)), list(state.get("ranked", ()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{self.id}: {STATE_FILE} is not understood ({error!r})") from error
        return dict(state)
