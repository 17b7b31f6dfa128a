"""Makes the golden store of a release, which every later version must read: `python -m tests.store.make_golden`.

It writes `tests/corpus/stores/VERSION/`: a small store with every kind of object and record, with a layer and an
overlay that were left before all in them was stored; and `expected.json`, made of what was put in, not of what can be
read back. Run once, when the format of a release is final.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import moonclipfs
from moonclipfs import limits
from moonclipfs.layers.inodes import Inode
from moonclipfs.layers.layer import Layer
from moonclipfs.layers.live import Live, LiveOptions
from moonclipfs.layers.overlays import Overlays
from moonclipfs.store.gc import collect
from moonclipfs.store.pins import pin, unpin
from moonclipfs.store.publish import Ingest
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.types import NO_ID, Attributes, BytesSource, DType, Entry, EntryType, Version

STORES = Path(__file__).parents[1] / "corpus" / "stores"
TIME_NS = 1_796_000_000_123_456_789
CHECKPOINT_EVERY = 8
"""The checkpoint comes when all is bound, and each other kind of record behind it, where a reader has to apply it."""

LAYER = "golden"
OVERLAY = "trial"

Values = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class File:
    """A file, directory (`inside`) or symbolic link (`target`) to be stored."""

    data: bytes = b""
    inside: Mapping[bytes, File] | None = None
    target: bytes = b""
    mode: int = 0o644
    link_group: int = 0
    xattrs: Mapping[bytes, bytes] = field(default_factory=dict)

    @property
    def type(self) -> EntryType:
        """What it is."""
        if self.inside is not None:
            return EntryType.DIRECTORY
        return EntryType.SYMLINK if self.target else EntryType.FILE

    @property
    def attributes(self) -> Attributes:
        """With the time that all entries have."""
        return Attributes(self.mode, 1000, 1000, TIME_NS, TIME_NS, self.xattrs)


def describe(tree: Mapping[bytes, File], prefix: bytes = b"") -> Iterator[tuple[str, dict[str, object]]]:
    """What must come back, by path: bytes of names as in `os.fsdecode`, contents as SHA-256."""
    for name, file in sorted(tree.items()):
        path = prefix + name
        row: dict[str, object] = {"type": file.type.name, "mode": file.mode, "mtime_ns": TIME_NS}
        row["xattrs"] = {key.decode(): value.hex() for key, value in file.xattrs.items()}
        if file.type is EntryType.FILE:
            row |= {"size": len(file.data), "sha256": hashlib.sha256(file.data).hexdigest(), "links": file.link_group}
        elif file.type is EntryType.SYMLINK:
            row["target"] = file.target.decode()
        yield path.decode("utf-8", "surrogateescape"), row
        if file.inside is not None:
            yield from describe(file.inside, path + b"/")


def safetensors(tensors: Mapping[str, tuple[DType, Values]]) -> bytes:
    """A file of flat tensors; bits of types that NumPy has not come as unsigned integers."""
    header, data = {}, b""
    for name, (dtype, values) in tensors.items():
        end = len(data) + values.nbytes
        header[name] = {"dtype": dtype.name, "shape": [values.size], "data_offsets": [len(data), end]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even, as frameworks cast."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Model:
    """Weights of every element type that moves a little with each step."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(20261130)
        self.master = (self._rng.standard_normal(2500) * 0.02).astype(np.float32)
        self._wide = self._rng.choice(np.array([0.5, -0.5, 0.25, 2.0], np.float32), 70_000)
        self._half = (self._rng.standard_normal(3000) * 0.1).astype(np.float16)
        self._brain = to_bf16((self._rng.standard_normal(3000) * 0.1).astype(np.float32))
        self._double = self._rng.standard_normal(1000)
        self._counts = self._rng.integers(0, 5, 70_000, dtype=np.int64)
        self._eighth = self._rng.integers(0x20, 0x48, 6000, dtype=np.uint8)

    def file(self) -> bytes:
        """A checkpoint: objects of one block and of two."""
        return safetensors(
            {
                "master": (DType.F32, self.master),
                "wide": (DType.F32, self._wide),
                "half": (DType.F16, self._half),
                "brain": (DType.BF16, self._brain),
                "double": (DType.F64, self._double),
                "counts": (DType.I64, self._counts),
                "eighth": (DType.F8_E4M3, self._eighth),
                "zeros": (DType.F32, np.zeros(20_000, np.float32)),
                "scale": (DType.F32, np.array([0.125], np.float32)),
            }
        )

    def casts(self) -> bytes:
        """The master weights in narrower types: deltas across element types."""
        return safetensors(
            {"master": (DType.BF16, to_bf16(self.master)), "master.half": (DType.F16, self.master.astype(np.float16))}
        )

    def step(self) -> None:
        """Move on."""
        normal = self._rng.standard_normal
        self.master = self.master * (1 + normal(2500).astype(np.float32) * np.float32(1e-4))
        self._double = self._double * (1 + normal(1000) * 1e-9)
        for values in (self._half.view(np.uint16), self._brain, self._eighth, self._counts, self._wide.view(np.uint32)):
            values[self._rng.random(values.size) < 0.03] += 1


def text(lines: int) -> bytes:
    """Lines of a log: many chunks, each of which compresses."""
    rng = np.random.default_rng(7)
    return b"".join(
        b"step %06d: all is well, loss %s\n" % (n, b"abcd"[c : c + 1]) * 3
        for n, c in enumerate(rng.integers(0, 4, lines))
    )


def checkpoint(model: Model, number: int) -> dict[bytes, File]:
    """A directory as a training run leaves it, and what else can lie in one."""
    random = np.random.default_rng(number).bytes
    shared = File(random(6000), link_group=1, mode=0o600)
    return {
        b"model.safetensors": File(model.file()),
        b"casts.safetensors": File(model.casts()),
        b"train.log": File(text(9000) + b"end of %d\n" % number, xattrs={b"user.step": b"%d" % number}),
        b"config.json": File(b'{"step": %d}' % number),
        b"empty": File(),
        b"sparse": File(bytes(3_000_000) + b"end" + bytes(70_000), mode=0o755),
        b"shared.bin": shared,
        b"latest": File(target=b"deep/er/f\xc3\xa9"),
        b"deep": File(
            inside={
                b"er": File(inside={b"f\xc3\xa9": File(b"letters"), b"\xff\xfe": File(b"no letters")}, mode=0o750),
                b"hard": shared,
                b"void": File(inside={}, mode=0o700),
            },
            mode=0o755,
            xattrs={b"user.empty": b"", b"user.bytes": bytes(range(256))},
        ),
    }


class Golden:
    """A store in the making, and what must come back of it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.expected: dict[tuple[str, int], Mapping[bytes, File]] = {}

    def publish(self, path: str, tree: Mapping[bytes, File], previous: Version | None = None) -> Version:
        """Store a tree; deltas are made against `previous`."""
        with self.store.ingest() as ingest:
            root = ingest.put_directory(self._entries(ingest, tree, previous, b""))
            metadata = {"attributes": root_metadata(File(inside=tree, mode=0o755).attributes)}
            version = ingest.publish(path, root, metadata)
        self.expected[version.path, version.number] = tree
        return version

    def _entries(
        self, ingest: Ingest, tree: Mapping[bytes, File], previous: Version | None, prefix: bytes
    ) -> Iterator[Entry]:
        for name, file in tree.items():
            child, size = NO_ID, len(file.target)
            if file.inside is not None:
                child = ingest.put_directory(self._entries(ingest, file.inside, previous, prefix + name + b"/"))
            elif file.type is EntryType.FILE:
                place = None if previous is None else self.store.lookup(previous, prefix + name)
                earlier = None if place is None else self.store.open_file(place)
                child, size, _ = ingest.put_file(BytesSource(file.data), earlier)
            yield Entry(name, file.type, file.attributes, size, child, file.target, file.link_group)

    def rename(self, old: str, new: str) -> None:
        """Move a snapshot."""
        self.store.log.move(old, new)
        for path, number in [key for key in self.expected if key[0] == old]:
            self.expected[new, number] = self.expected.pop((path, number))


def fill(golden: Golden, index_path: Path) -> None:
    """Every kind of object, and every kind of log record."""
    store, model = golden.store, Model()
    doomed = golden.publish("doomed", {b"f": File(np.random.default_rng(99).bytes(5000))})
    previous: Version | None = None
    for number in (1, 2, 3):
        previous = golden.publish(f"run/step-{number}", checkpoint(model, number), previous)
        model.step()
    pin(store, [("run/step-1", 1), ("run/step-2", 1)])
    golden.publish("run/step-3", {b"note": File(b"a second version of step 3" * 300)})
    golden.publish("removed", {b"f": File(np.random.default_rng(1).bytes(5000))})
    golden.publish("before", {b"f": File(np.random.default_rng(2).bytes(5000))})
    store.log.unbind(["removed"])
    golden.rename("before", "after/the move")
    # While another process has not seen that it is condemned, a pack stays.
    with Store.open(store.path, index_path=index_path):
        store.log.forget([(doomed.path, doomed.number)])
        del golden.expected[doomed.path, doomed.number]
        waiting = collect(store, wait_seconds=0, repack=False).waiting_packs
    if waiting != 1:
        raise SystemExit(f"{waiting} packs are condemned instead of 1")
    unpin(store, [("run/step-2", 1)])
    golden.publish("last", {b"f": File(b"after the last checkpoint" * 300)})


def fill_layer(store: Store, golden: Golden) -> dict[bytes, File]:
    """A layer with an encoded file, a staged one, and names that were removed and renamed; what it shows then."""
    live = Live(store, LiveOptions(layer=LAYER, seal_after=None))
    layer = live.layer
    shown: dict[bytes, File] = {b"work": File(inside={}, mode=0o755)}
    for path, version in store.names().bound().items():
        *parents, name = path.encode().split(b"/")
        place = shown
        for parent in parents:
            place = _inside(place.setdefault(parent, File(inside={}, mode=0o755)))
        place[name] = File(inside=dict(golden.expected[path, version.number]), mode=0o755)
    work = layer.make(layer.root, b"work", EntryType.DIRECTORY, 0o755, 1000, 1000, TIME_NS)
    in_work = _inside(shown[b"work"])
    live.encoder.start()
    in_work[b"encoded.log"] = save(layer, work, b"encoded.log", text(4000))
    in_work[b"after"] = save(layer, work, b"before", np.random.default_rng(3).bytes(3000))
    save(layer, work, b"gone", np.random.default_rng(4).bytes(3000))
    live.flush()
    live.encoder.stop()
    in_work[b"staged"] = save(layer, work, b"staged", np.random.default_rng(5).bytes(3000))
    layer.rename(work, b"before", work, b"after", TIME_NS)
    layer.unlink(work, b"gone", TIME_NS)
    layer.unlink(layer.resolve(b"run/step-1"), b"config.json", TIME_NS)
    step = layer.resolve(b"run/step-2")
    layer.rename(step, b"config.json", step, b"settings.json", TIME_NS)
    steps = _inside(shown[b"run"])
    del _inside(steps[b"step-1"])[b"config.json"]
    _inside(steps[b"step-2"])[b"settings.json"] = _inside(steps[b"step-2"]).pop(b"config.json")
    layer.sync_all()
    layer.close()
    return shown


def fill_overlay(store: Store, golden: Golden) -> dict[bytes, File]:
    """An overlay over a snapshot, likewise; what it shows then."""
    shown = dict(golden.expected["run/step-2", 1])
    with Overlays(store) as overlays:
        overlay = overlays.create(OVERLAY, "run/step-2", quota=1 << 30)
        layer = overlay.layer
        shown[b"encoded.log"] = save(layer, layer.root, b"encoded.log", text(4000))
        overlay.flush()
        shown[b"staged"] = save(layer, layer.root, b"staged", np.random.default_rng(6).bytes(3000))
        layer.unlink(layer.root, b"config.json", TIME_NS)
        layer.rename(layer.root, b"train.log", layer.root, b"trained.log", TIME_NS)
        del shown[b"config.json"]
        shown[b"trained.log"] = shown.pop(b"train.log")
    return shown


def save(layer: Layer, directory: Inode, name: bytes, data: bytes) -> File:
    """Write a file into a layer."""
    inode = layer.make(directory, name, EntryType.FILE, 0o640, 1000, 1000, TIME_NS)
    file = layer.open_file(inode, write=True)
    file.write(0, data, TIME_NS)
    file.flush()
    file.close()
    return File(data, mode=0o640)


def _inside(file: File) -> dict[bytes, File]:
    assert isinstance(file.inside, dict)
    return file.inside


def make(target: Path) -> None:
    """Write store and `expected.json` into the new directory `target`."""
    limits.LOG_CHECKPOINT_EVERY = CHECKPOINT_EVERY
    limits.JOURNAL_RESERVE_BYTES = limits.JOURNAL_STEP_BYTES = limits.KIB
    target.mkdir(parents=True)
    path = target / "store"
    with tempfile.TemporaryDirectory() as scratch:
        Store.create(path).close()
        (path / "index.sqlite").unlink(missing_ok=True)
        with Store.open(path, write=True, index_path=Path(scratch) / "index.sqlite") as store:
            golden = Golden(store)
            fill(golden, Path(scratch) / "other.sqlite")
            names = store.names()
            bound = {version.path: version.number for version in names.bound().values()}
            condemned = sorted(names.condemned())
            pins = {f"{name}@{number}": list(why) for (name, number), why in names.pins().items()}
            layer, overlay = fill_layer(store, golden), fill_overlay(store, golden)
    # What only matters to those who write, and is large or empty.
    (path / "reserve").unlink()
    for lock in (*path.glob("layers/*/lock"), path / "overlays" / ".lock"):
        lock.unlink()
    (path / "index.sqlite").unlink(missing_ok=True)
    for name in ("tmp", "leases"):
        (path / name).rmdir()
    expected = {
        "bound": bound,
        "condemned": condemned,
        "pins": pins,
        "files": {
            str(found.relative_to(path)): found.stat().st_size for found in sorted(path.rglob("*")) if found.is_file()
        },
        "versions": {f"{name}@{number}": dict(describe(tree)) for (name, number), tree in golden.expected.items()},
        "layer": dict(describe(layer)),
        "overlay": dict(describe(overlay)),
    }
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if sys.argv[1:] else STORES / moonclipfs.__version__)
