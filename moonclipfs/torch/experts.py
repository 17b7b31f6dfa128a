"""A directory of experts, one file each: on a local disk, in a mount, or in an overlay that no mount shows.

experts/e00017.safetensors           expert 17 of one pool; .npz as mini-AGI writes it
@experts/NAME/L003/e00017.safetensors    expert (3, 17): the 17th of layer 3
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import torch

from moonclipfs.errors import CorruptError, NotFoundError, ReadOnlyError, UsageError
from moonclipfs.layers.dryness import is_dry_run
from moonclipfs.layers.layerfile import LayerFile
from moonclipfs.layers.layerpath import LayerPath
from moonclipfs.torch.expertformats import FORMATS, SAFETENSORS, ExpertFile, write
from moonclipfs.types import DType

ExpertId: TypeAlias = int | tuple[int, int]
"""The number of an expert; in a directory of layers, the layer and the number of the expert in it."""
AnyPath: TypeAlias = Path | LayerPath

_FILE = re.compile(r"e(\d{5}|[1-9]\d{5,8})\.(?:" + "|".join(FORMATS) + ")")
_LAYER = re.compile(r"L(\d{3}|[1-9]\d{3,8})")
_USED = ".next-expert"
"""Holds the number above the highest that was ever deleted, so that none is given twice."""


@dataclass(frozen=True, slots=True)
class ExpertStat:
    """What an expert's file tells before its tensors are read: `tensors` has dtype and shape of each, in order."""

    size: int
    mtime_ns: int
    format: str
    tensors: Mapping[str, tuple[DType, tuple[int, ...]]]


class ExpertStore:
    """Experts by their numbers, read and written whole or by tensor. Thread-safe; one process at a time should write.

    `root` is a path, or a `LayerPath`. New files are of `file_format` ("safetensors" or "npz"): by default, that of the
    files that are there. An expert is replaced by renaming a complete file over it, so readers see the old or the new
    one, also after a crash. Files of other names, such as temporaries, are never taken for experts.

    Methods raise NotFoundError for an expert that is not there, CorruptError for a file that is damaged, ReadOnlyError
    for a change of a store opened with `read_only`, and OSError as the file system answers.
    """

    def __init__(
        self, root: str | os.PathLike[str] | LayerPath, read_only: bool = False, *, file_format: str | None = None
    ) -> None:
        """Raises NotFoundError when a directory to read does not exist; one to write is made with the first expert."""
        self.root: AnyPath = root if isinstance(root, LayerPath | Path) else Path(root)
        self.read_only = read_only
        if file_format is not None and file_format not in FORMATS:
            raise UsageError(f"expert files are {' or '.join(FORMATS)}, not {file_format}")
        if read_only and not self.root.is_dir():
            raise NotFoundError(f"{self.root} is no directory of experts")
        self._format = file_format
        self._lock = threading.Lock()

    @property
    def is_temporary(self) -> bool:
        """Whether the experts lie in an overlay that is thrown away at its end: a dry run."""
        return is_dry_run(self.root)

    def ids(self) -> list[ExpertId]:
        """Return the numbers of all experts, in order. Raises UsageError when two files are the same expert."""
        names = _names(self.root)
        layers = (int(match[1]) for match in map(_LAYER.fullmatch, names) if match)
        layered = [(layer, one) for layer in layers for one in _numbers(self.root / _layer_name(layer))]
        return [*sorted(_numbers(self.root, names)), *sorted(layered)]

    def exists(self, expert: ExpertId) -> bool:
        """Whether there is an expert of this number."""
        return self._find(expert) is not None

    def stat(self, expert: ExpertId) -> ExpertStat:
        """Return size, time of the last change, and the tensors of an expert."""
        with self._opened(expert) as (path, file):
            parts = [file.part(name) for name in file.names]
            tensors = {part.name: (part.dtype, part.shape) for part in parts}
            return ExpertStat(file.size, path.stat().st_mtime_ns, _format_of(path), tensors)

    def read(
        self, expert: ExpertId, names: Collection[str] | None = None, *, pinned: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of an expert by their names, in the order of the file, each in RAM of its own.

        With `names`, only these, and only their bytes are read. Raises NotFoundError for a name that is not there.
        """
        with self._opened(expert) as (path, file):
            absent = [name for name in names or () if name not in file.names]
            if absent:
                raise NotFoundError(f"{path} has no tensor {', '.join(absent)}; it has {', '.join(file.names)}")
            wanted = [name for name in file.names if names is None or name in names]
            return {name: file.load(file.part(name), pinned=pinned) for name in wanted}

    def holds(self, expert: ExpertId, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether an expert is there, undamaged, and has just these tensors, bit for bit."""
        try:
            with self._opened(expert) as (_, file):
                return tensors.keys() == set(file.names) and all(
                    file.holds(file.part(name), tensor) for name, tensor in tensors.items()
                )
        except (NotFoundError, CorruptError):
            return False

    def write(self, expert: ExpertId, tensors: Mapping[str, torch.Tensor]) -> int:
        """Make these the tensors of an expert, old or new, and return the length of its file.

        The file is synced before it gets its name: after a crash, the whole old or the whole new one is there.
        A safetensors file keeps the metadata of the one that it replaces; one that is damaged is replaced all the same.
        Raises UsageError for the number of an expert
        that was deleted, and for tensors that the file cannot hold.
        """
        self._require_writable(expert)
        path, metadata = self._find(expert), None
        if path is None:
            self.check_unused(expert)
            path = self._directory(expert) / f"{_file_name(expert)}.{self._new_format()}"
        else:
            metadata = self._metadata(expert)
        with _replacing(path) as new:
            write(new, _format_of(path), tensors, metadata)
            return new.tell()

    def create(self, tensors: Mapping[str, torch.Tensor], layer: int | None = None) -> ExpertId:
        """Write a new expert and return its number, which no expert of this directory (of `layer`) ever had."""
        with self._lock:
            directory = self._directory(0 if layer is None else (layer, 0))
            number = max([_next_unused(directory), *(one + 1 for one in _numbers(directory))])
            expert = number if layer is None else (layer, number)
            self.write(expert, tensors)
        return expert

    def delete(self, expert: ExpertId) -> None:
        """Remove an expert; its number is not used again."""
        self._require_writable(expert)
        with self._lock:
            path = self._path(expert)
            directory, above = path.parent, _number_of(expert) + 1
            if _next_unused(directory) < above:
                with _replacing(directory / _USED) as new:
                    new.write(f"{above}\n".encode())
            path.unlink()

    def check_unused(self, expert: ExpertId) -> None:
        """Raises UsageError when there was an expert of this number, which was deleted."""
        if not self.exists(expert) and _number_of(expert) < _next_unused(self._directory(expert)):
            raise UsageError(f"expert {expert} of {self.root} was deleted, and numbers are never used again")

    def _directory(self, expert: ExpertId) -> AnyPath:
        return self.root / _layer_name(expert[0]) if isinstance(expert, tuple) else self.root

    def _find(self, expert: ExpertId) -> AnyPath | None:
        """Return the file of an expert, None when there is none."""
        stem = self._directory(expert) / _file_name(expert)
        for suffix in FORMATS:
            path = stem.with_name(f"{stem.name}.{suffix}")
            if path.exists():
                return path
        return None

    def _path(self, expert: ExpertId) -> AnyPath:
        path = self._find(expert)
        if path is None:
            raise NotFoundError(f"expert {expert} is not in {self.root}")
        return path

    @contextmanager
    def _opened(self, expert: ExpertId) -> Iterator[tuple[AnyPath, ExpertFile]]:
        path = self._path(expert)
        try:
            file: IO[bytes] = path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise NotFoundError(f"expert {expert} is not in {self.root}") from error
        with file:
            yield path, ExpertFile(file, str(path), _format_of(path))

    def _metadata(self, expert: ExpertId) -> Mapping[str, str]:
        try:
            with self._opened(expert) as (_, file):
                return file.metadata
        except CorruptError:
            return {}

    def _new_format(self) -> str:
        """The format of a new file: what was asked for, else that of the first file found, else safetensors."""
        if self._format is None:
            found = next(iter(self.ids()), None)
            self._format = SAFETENSORS if found is None else _format_of(self._path(found))
        return self._format

    def _require_writable(self, expert: ExpertId) -> None:
        if self.read_only:
            raise ReadOnlyError(f"expert {expert} cannot be changed: {self.root} is open for reading only")


def _number_of(expert: ExpertId) -> int:
    return expert[1] if isinstance(expert, tuple) else expert


def _file_name(expert: ExpertId) -> str:
    return f"e{_number_of(expert):05d}"


def _layer_name(layer: int) -> str:
    return f"L{layer:03d}"


def _format_of(path: AnyPath) -> str:
    return path.suffix[1:]


def _names(directory: AnyPath) -> list[str]:
    """Return the names in a directory, none when it is not there."""
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []


def _numbers(directory: AnyPath, names: Collection[str] | None = None) -> list[int]:
    """Return the numbers of the experts in one directory. Raises UsageError when two files have the same."""
    found: set[int] = set()
    for match in map(_FILE.fullmatch, _names(directory) if names is None else names):
        if match is not None:
            if int(match[1]) in found:
                raise UsageError(f"{directory} has two files of expert {int(match[1])}: remove one of them")
            found.add(int(match[1]))
    return list(found)


def _next_unused(directory: AnyPath) -> int:
    """Return the number above the highest that was deleted from a directory, 0 when none was."""
    try:
        text = (directory / _USED).read_bytes()
    except FileNotFoundError:
        return 0
    if not re.fullmatch(rb"\d{1,9}\n", text):
        raise CorruptError(f"{directory / _USED} does not hold a number: delete it if no expert was ever deleted")
    return int(text)


@contextmanager
def _replacing(path: AnyPath) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path` when the block ends, synced first, and nothing when it fails.

    Its name until then is hidden, and another one for each writer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            raw = getattr(file, "raw", None)
            if isinstance(raw, LayerFile):
                raw.sync()
            else:
                os.fsync(file.fileno())
        temporary.replace(path)  # type: ignore[arg-type]  # both are of the same kind
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
