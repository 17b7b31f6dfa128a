"""Ways to keep a list of files, each run on the same files: what it stores, how long writing and reading back take.

Every one reads back what it wrote and compares it with the originals, so that no figure stands for wrong bytes.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.common import timed

if TYPE_CHECKING:
    from moonclipfs.store.store import Store

READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes on disk, seconds to write and to read all files, and the bytes on disk after the first file."""

    stored: int
    write_seconds: float
    read_seconds: float
    first: int = 0


def _bytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _check(path: Path, data: bytes | bytearray | memoryview) -> None:
    if path.read_bytes() != data:
        raise ValueError(f"{path} came back with other bytes")


def plain(files: Sequence[Path], scratch: Path) -> Kept:
    """Copies: the yardstick for time."""
    _, write = timed(lambda: [shutil.copyfile(path, scratch / str(n)) for n, path in enumerate(files)])
    data, read = timed(lambda: [(scratch / str(n)).read_bytes() for n in range(len(files))])
    for path, content in zip(files, data, strict=True):
        _check(path, content)
    return Kept(_bytes_below(scratch), write, read)


def zstd(files: Sequence[Path], scratch: Path) -> Kept:
    """Each file by itself through zstd -3, on one thread as its command does."""
    import zstandard

    def write() -> None:
        for number, path in enumerate(files):
            (scratch / str(number)).write_bytes(zstandard.ZstdCompressor(level=3).compress(path.read_bytes()))

    def read() -> list[bytes]:
        return [zstandard.ZstdDecompressor().decompress((scratch / str(n)).read_bytes()) for n in range(len(files))]

    _, write_seconds = timed(write)
    data, read_seconds = timed(read)
    for path, content in zip(files, data, strict=True):
        _check(path, content)
    return Kept(_bytes_below(scratch), write_seconds, read_seconds)


def zipnn(files: Sequence[Path], scratch: Path) -> Kept:
    """Each file by itself through zipnn, with whichever of its element types makes it smallest."""
    from zipnn import ZipNN

    stored, write_seconds, read_seconds = 0, 0.0, 0.0
    for number, path in enumerate(files):
        original, best = path.read_bytes(), None
        for dtype in ("float32", "bfloat16", "float16"):
            coder = ZipNN(input_format="byte", bytearray_dtype=dtype)
            data = bytearray(original)  # its compressor reorders what it is given, in place
            packed, seconds = timed(lambda coder=coder, data=data: coder.compress(data))
            if best is None or len(packed) < len(best[1]):
                best = coder, bytes(packed), seconds
        coder, packed, seconds = best
        (scratch / str(number)).write_bytes(packed)
        data, taken = timed(lambda coder=coder, at=scratch / str(number): coder.decompress(at.read_bytes()))
        _check(path, data)
        stored, write_seconds, read_seconds = stored + len(packed), write_seconds + seconds, read_seconds + taken
    return Kept(stored, write_seconds, read_seconds)


def moonclip(files: Sequence[Path], scratch: Path) -> Kept | None:
    """The tensors of safetensors files as steps of one moonclip run; None where there are other files."""
    import torch
    from moonclip import CheckpointManager
    from safetensors.torch import load_file

    if any(path.suffix != ".safetensors" for path in files):
        return None

    class Model:
        """What the manager asks of a model: its state goes out, and comes back."""

        def __init__(self, state: dict[str, torch.Tensor]) -> None:
            self.state = state

        def state_dict(self) -> dict[str, torch.Tensor]:
            return self.state

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.state = state

    states = [load_file(path) for path in files]
    manager = CheckpointManager(str(scratch), async_save=False, max_full_snapshots=len(files))

    def read() -> list[dict[str, torch.Tensor]]:
        models = [Model({}) for _ in states]
        for snapshot, model in zip(snapshots, models, strict=True):
            manager.load(snapshot, model=model)
        return [model.state for model in models]

    def write() -> list[str]:
        return [manager.save(step=number, model=Model(state)) for number, state in enumerate(states)]

    snapshots, write_seconds = timed(write)
    loaded, read_seconds = timed(read)
    for state, back in zip(states, loaded, strict=True):
        for name, tensor in state.items():
            if not torch.equal(tensor.view(torch.uint8), back[name].view(torch.uint8)):
                raise ValueError(f"moonclip gave back other bytes for {name}")
    return Kept(_bytes_below(scratch), write_seconds, read_seconds)


def moonclipfs(files: Sequence[Path], scratch: Path) -> Kept:
    """A store, each file added by itself in order; the preallocated reserve and the index are not counted."""
    from moonclipfs.store.add import add
    from moonclipfs.store.store import Store

    def stored() -> int:
        return _bytes_below(scratch / "store" / "packs") + _bytes_below(scratch / "store" / "log")

    def write() -> int:
        first = 0
        Store.create(scratch / "store").close()
        with Store.open(scratch / "store", write=True, index_path=scratch / "index.sqlite") as store:
            for number, path in enumerate(files):
                add(store, [path], name=f"run/{number:04d}", provenance=None, progress=lambda progress: None)
                first = first or stored()
        return first

    def read() -> list[bytearray]:
        with Store.open(scratch / "store", index_path=scratch / "index.sqlite") as store:
            return [_read_back(store, f"run/{number:04d}", path.name) for number, path in enumerate(files)]

    first, write_seconds = timed(write)
    data, read_seconds = timed(read)
    for path, content in zip(files, data, strict=True):
        _check(path, content)
    return Kept(stored(), write_seconds, read_seconds, first)


def _read_back(store: Store, snapshot: str, name: str) -> bytearray:
    reader = store.open_file(store.lookup(store.resolve(snapshot), name.encode()))
    data = bytearray(reader.size)
    for offset in range(0, reader.size, READ_BYTES):
        reader.read_into(offset, memoryview(data)[offset : offset + READ_BYTES])
    return data


Rival = Callable[[Sequence[Path], Path], Kept | None]

RIVALS: dict[str, Rival] = {
    "plain files": plain,
    "zstd -3": zstd,
    "zipnn": zipnn,
    "moonclip": moonclip,
    "moonclipfs": moonclipfs,
}
_NEEDS = {"zstd -3": "zstandard", "zipnn": "zipnn", "moonclip": "moonclip"}


def installed() -> dict[str, Rival]:
    """The rivals that this environment has; the rest come with the extra `bench`."""
    return {name: keep for name, keep in RIVALS.items() if importlib.util.find_spec(_NEEDS.get(name, "moonclipfs"))}
