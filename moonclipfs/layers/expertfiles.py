"""An open file of an expert of a layer: a head, and behind it bytes of the files that hold the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from moonclipfs.errors import MoonclipError, NotFoundError, NotPermittedError, ParseError, UsageError
from moonclipfs.formats import safetensors
from moonclipfs.formats.experts import Component, Parts
from moonclipfs.layers.experttables import Contents, Expert, read_whole
from moonclipfs.layers.files import OpenFile
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.patching import Patch, patch
from moonclipfs.types import Buffer


class _Piece(NamedTuple):
    """`length` bytes of an expert's file from `start` on, which are at `offset` of a file."""

    start: int
    length: int
    file: OpenFile
    offset: int


class ExpertFile:
    """An open file of an expert; reads and writes as `files.OpenFile` does. Thread-safe.

    It stays what it was when it was opened: the same ranges of the same files, whatever their names become.
    """

    def __init__(self, inode: Inode, expert: Expert, files: Mapping[str, OpenFile]) -> None:
        """Use `open_expert`."""
        self.inode = inode
        self.size = expert.size
        self._head = expert.head
        self._files = list(files.values())
        starts = accumulate((part.length for part in expert.parts), initial=len(self._head))
        self._pieces = [
            _Piece(start, part.length, files[part.file], part.offset)
            for start, part in zip(starts, expert.parts, strict=False)
        ]

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes at `offset`, fewer only at the end of the file. Raises CorruptError."""
        out = bytearray(max(0, min(length, self.size - offset)))
        return bytes(out[: self.read_into(offset, memoryview(out))])

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill `out` from `offset` on, up to the end of the file; return the count of bytes.

        Raises NotFoundError when the tensors are not there any more, CorruptError.
        """
        head = self._head[offset : offset + len(out)]
        out[: len(head)] = head
        at = len(head)
        for piece, inside, length in self._within(offset, len(out)):
            count = piece.file.read_into(piece.offset + inside, out[at : at + length])
            at += count
            if count < length:
                raise NotFoundError(f"a file that holds the expert was cut off at {piece.offset + inside + count}")
        return at

    def cached(self, offset: int, length: int) -> Buffer | None:
        """Return what `read` would if that waits for nothing, else None."""
        found: list[Buffer] = [self._head[offset : offset + length]]
        for piece, inside, count in self._within(offset, length):
            data = piece.file.cached(piece.offset + inside, count)
            if data is None or len(data) != count:
                return None
            found.append(data)
        return b"".join(found)

    def prefetch(self, offset: int, length: int) -> None:
        """Decode a range, clipped to the file, into the cache of blocks. Raises CorruptError."""
        for piece, inside, count in self._within(offset, length):
            piece.file.prefetch(piece.offset + inside, count)

    def write(self, offset: int, data: Buffer, now_ns: int) -> int:
        """Write all of `data` at `offset`, inside the tensors. Raises NotPermittedError outside, and as `OpenFile`."""
        view = memoryview(data).cast("B")
        if offset < len(self._head) or offset + len(view) > self.size:
            raise NotPermittedError("the head of an expert's file, and its length, stay as they are")
        at = 0
        for piece, inside, length in self._within(offset, len(view)):
            at += piece.file.write(piece.offset + inside, view[at : at + length], now_ns)
        return at

    def flush(self) -> None:
        """See `OpenFile.flush`."""
        for file in self._files:
            file.flush()

    def sync(self, data_only: bool = False) -> None:
        """See `OpenFile.sync`."""
        for file in self._files:
            file.sync(data_only)

    def close(self) -> None:
        """See `OpenFile.close`."""
        _close(self._files)

    def _within(self, offset: int, length: int) -> Iterator[tuple[_Piece, int, int]]:
        """Each piece that has bytes of a range, the offset in it, and how many."""
        for piece in self._pieces:
            start, end = max(piece.start, offset), min(piece.start + piece.length, offset + length)
            if start < end:
                yield piece, start - piece.start, end - start


def open_expert(layer: Layer, inode: Inode, expert: Expert, *, write: bool, privileged: bool, wait: bool) -> ExpertFile:
    """Open the file of an expert. Raises NotPermittedError to write where the format has checksums, and as
    `Files.open`.
    """
    return ExpertFile(inode, expert, _open_sources(layer, expert, write=write, privileged=privileged, wait=wait))


def replace_expert(layer: Layer, expert: Expert, new: Inode, now_ns: int) -> None:
    """The bytes of an expert become those of a safetensors file with the same tensors.

    Raises UsageError when it has others, NotPermittedError, StagingFullError, QuotaError, NoSpaceError, BackendError:
    then all is as it was.
    """
    source = layer.open_file(new, write=False)
    try:
        offsets = _matching(source, expert.parts)
        files = _open_sources(layer, expert, write=True, privileged=True, wait=True)
        try:
            patches: dict[OpenFile, list[Patch]] = {file: [] for file in files.values()}
            for part, offset in zip(expert.parts, offsets, strict=True):
                patches[files[part.file]].append(Patch(part.offset, part.length, _reader(source, offset)))
            patch(layer, patches, now_ns)
        except ParseError as error:
            raise UsageError(f"what is to replace an expert changes: {error}") from error
        finally:
            _close(files.values())
    finally:
        source.close()


def _reader(source: OpenFile, offset: int) -> Callable[[int, int], Buffer]:
    return lambda at, length: read_whole(source, offset + at, length)


def _matching(source: OpenFile, parts: Parts) -> list[int]:
    """Where the tensors of an expert are in a file that has the same ones. Raises UsageError when it has not."""
    try:
        layout = safetensors.parse(Contents(source))
    except ParseError as error:
        raise UsageError(f"what is to replace an expert is no safetensors file: {error}") from error
    found = {tensor.name: tensor for tensor in layout.tensors}
    if layout.reason or found.keys() != {part.name for part in parts}:
        raise UsageError(f"what is to replace an expert has other tensors {layout.reason}")
    for part in parts:
        tensor = found[part.name]
        if (tensor.dtype, tensor.shape, tensor.length) != (part.dtype, part.shape, part.length):
            raise UsageError(f"{part.name} is {_described(part)}, and stays that")
    return [found[part.name].offset for part in parts]


def _described(part: Component) -> str:
    return f"{part.dtype.name} {list(part.shape)}"


def _open_sources(layer: Layer, expert: Expert, *, write: bool, privileged: bool, wait: bool) -> Mapping[str, OpenFile]:
    if write and not expert.writable:
        raise NotPermittedError("tensors can be changed in safetensors and GGUF files only")
    opened: dict[str, OpenFile] = {}
    try:
        for name, source in expert.sources.items():
            opened[name] = layer.open_file(source.inode, write=write, privileged=privileged, wait=wait)
    except BaseException:
        _close(opened.values())
        raise
    return opened


def _close(files: Iterable[OpenFile]) -> None:
    """Close all of them. Raises the first error, after having tried all."""
    failure: BaseException | None = None
    for file in files:
        try:
            file.close()
        except MoonclipError as error:
            failure = failure or error
    if failure is not None:
        raise failure
