"""The rescue reader: one file, another program's view of the format, the same bytes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from moonclipfs import _codec, rescue
from moonclipfs.codec.encoded import TRANSFORM_DELTA
from moonclipfs.store.add import add
from moonclipfs.store.directories import _encode_entry
from moonclipfs.store.objects import CONTEXTS, object_id
from moonclipfs.store.records import encode_record, record_name
from moonclipfs.store.store import Store
from moonclipfs.types import DType, Entry, EntryType, Kind
from tests.codec.samples import updated
from tests.store import kit

SCRIPT = Path(rescue.__file__)
zstandard = pytest.importorskip("zstandard", reason="the rescue reader needs zstandard")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def safetensors(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:
    header, data = {}, b""
    for name, (dtype, values) in tensors.items():
        raw = values.tobytes()
        header[name] = {"dtype": dtype, "shape": [values.size], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def family(seed: int) -> dict[str, bytes]:
    """One model in many dtypes: its casts are deltas across dtypes, two blocks and a tail each."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(150_001) * 0.02).astype(np.float32)
    moved = values * (1 + rng.standard_normal(values.size).astype(np.float32) * np.float32(1e-3))
    bits = moved.view(np.uint32)
    bf16 = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    integers = rng.integers(0, 50, values.size, dtype=np.int64)
    return {
        "a.safetensors": safetensors({"w": ("F32", values), "x": ("F64", values.astype(np.float64)[:70_000])}),
        "b.safetensors": safetensors({"w": ("F32", moved), "i": ("I64", integers)}),
        "c.safetensors": safetensors({"w": ("BF16", bf16), "z": ("F32", np.zeros(40_000, np.float32))}),
        "d.safetensors": safetensors({"w": ("F16", values.astype(np.float16))}),
        "text.json": b'{"a": 1}' * 9000,
        "noise.bin": kit.noise(seed, 400_000),
        "small": b"x",
        "empty": b"",
    }


def write_tree(root: Path, seed: int) -> Path:
    root.mkdir(parents=True)
    for name, data in family(seed).items():
        (root / name).write_bytes(data)
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "f\udcff").write_bytes(b"bytes in a name that is no text")
    (root / "link").symlink_to("a.safetensors")
    os.link(root / "small", root / "deep" / "hard")
    with open(root / "sparse", "wb") as file:
        file.seek(5_000_000)
        file.write(b"end")
    os.chmod(root / "small", 0o640)
    os.utime(root / "small", ns=(1_600_000_000_000_000_001, 1_600_000_000_000_000_001))
    return root


def tree(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        status = path.lstat()
        body: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[name] = (status.st_mode, None if path.is_dir() else status.st_mtime_ns, status.st_nlink, body)
    return found


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    Store.create(tmp_path / "store").close()
    sources = {name: write_tree(tmp_path / "in" / name, seed) for name, seed in (("run/a", 1), ("run/b", 1), ("c", 2))}
    with Store.open(tmp_path / "store", write=True) as store:
        for name, source in sources.items():
            add(store, [source], name=name)
    return tmp_path / "store", sources


def test_the_same_bytes_and_attributes(filled: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    path, sources = filled
    listed = run(path)
    assert (listed.returncode, listed.stdout.split()) == (0, ["c", "run/a", "run/b"]), listed.stderr
    done = run(path, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    for name, source in sources.items():
        assert tree(tmp_path / "out" / name) == tree(source)
    assert (tmp_path / "out/c/sparse").stat().st_blocks * 512 < 2_000_000


def test_the_store_has_every_kind_of_encoding(filled: tuple[Path, dict[str, Path]]) -> None:
    """Else the test above proves less than it says."""
    with Store.open(filled[0]) as store:
        locations = list(store.index.iterate())
    deltas = [location for location in locations if any(location.base)]
    by_id = {location.object_id: location for location in locations}
    assert any(by_id[delta.base].dtype is delta.dtype for delta in deltas)
    assert any(by_id[delta.base].dtype is not delta.dtype for delta in deltas)
    assert {location.kind for location in locations} == set(Kind)


def test_it_stands_alone(filled: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules['blake3'] = None\n"  # also without the fast hash
        f"sys.argv = ['rescue.py', {str(filled[0])!r}, {str(tmp_path / 'out')!r}, 'run/a']\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('moonclipfs', 'torch', 'pyfuse3')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert tree(tmp_path / "out/run/a") == tree(filled[1]["run/a"])


def test_names_removed_moved_and_forgotten(tmp_path: Path) -> None:
    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True) as store:
        for number in range(70):  # past a checkpoint of the log
            kit.publish(store, f"r/s{number % 7}", {"f": kit.noise(number, 5000)})
        store.log.move("r/s1", "moved/s1")
        store.log.unbind(["r/s2"])
        store.log.forget([("r/s3", store.log.names.versions("r/s3")[-1].number)])
        bound = {path: kit.contents(store, path)["f"] for path in store.names().bound()}
    done = run(tmp_path / "store", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "out"
    assert {str(p.parent.relative_to(out)): p.read_bytes() for p in out.rglob("f")} == bound
    assert "moved/s1" in bound and "r/s2" not in bound and "r/s3" not in bound


def test_damage_costs_only_what_it_hits(filled: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    path, sources = filled
    with Store.open(path) as store:
        victim = store.recipe(store.lookup(store.resolve("c"), b"noise.bin")).object_ids()[0]
        location = store.index.find(victim)
        assert location is not None
        pack = path / "packs" / f"{location.pack}.pack"
    data = bytearray(pack.read_bytes())
    data[location.offset + location.encoded_length // 2] ^= 4
    pack.chmod(0o600)
    pack.write_bytes(data)
    done = run(path, tmp_path / "out")
    assert done.returncode == 1
    assert "noise.bin" in done.stderr and victim.hex() in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out/c/noise.bin").exists()
    got, want = tree(tmp_path / "out/c"), tree(sources["c"])
    del want["noise.bin"]
    assert got == want


def test_a_pack_without_its_footer(filled: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    path, sources = filled
    for pack in (path / "packs").iterdir():
        pack.chmod(0o600)
        with open(pack, "r+b") as file:
            file.truncate(pack.stat().st_size - 1)
    done = run(path, tmp_path / "out")
    assert done.returncode == 0 and "looking for records" in done.stderr
    assert all(tree(tmp_path / "out" / name) == tree(source) for name, source in sources.items())


@pytest.mark.parametrize("name", ["../outside", "{outside}", "a/../../outside", "", ".", "a\0b", "\ud800", "a/link"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    """Also by a symbolic link in a snapshot that was written before."""
    outside = tmp_path / "outside"
    outside.mkdir()
    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True) as store:
        root = kit.publish(store, "fine", {"f": b"1"}).root.hex()
        sequence = store.names().sequence + 1
        if name == "a/link":
            link = Entry(b"link", EntryType.SYMLINK, kit.ATTRIBUTES, target=os.fsencode(outside))
            with store.ingest() as ingest:
                ingest.publish("a", ingest.put_directory([link]), {})
            sequence += 1
        body = {"path": name.format(outside=outside), "number": 1, "root": root, "time_ns": 1, "metadata": {}}
    log = tmp_path / "store" / record_name(sequence)
    log.write_bytes(encode_record(sequence, "bind", body))
    done = run(tmp_path / "store", tmp_path / "out")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr, done.stderr
    assert not list(outside.iterdir()) and not (tmp_path / "out" / "f").exists()
    assert (tmp_path / "out" / "fine" / "f").read_bytes() == b"1"


@pytest.mark.parametrize("names", [(b"..",), (b"../x",), (b"/x",), (b"",), (b"x", b"x"), (b"y", b"x")])
def test_directories_with_names_that_lead_out_are_refused(names: tuple[bytes, ...], tmp_path: Path) -> None:
    """A second entry of the same name would be written through the symbolic link that the first one is."""
    outside = tmp_path / "outside"
    outside.mkdir()
    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True) as store:
        inner = kit.publish(store, "fine", {"f": b"1"}).root
        entries = [Entry(names[0], EntryType.SYMLINK, kit.ATTRIBUTES, target=os.fsencode(outside))] * (len(names) - 1)
        entries.append(Entry(names[-1], EntryType.DIRECTORY, kit.ATTRIBUTES, child=inner))
    data = b"MCDR\x01\0\0\0" + len(entries).to_bytes(4, "little") + b"".join(map(_encode_entry, entries))
    reader, identity = rescue.Store(tmp_path / "store"), object_id(Kind.DIRECTORY, data)
    reader._remember(identity, data)
    with pytest.raises(rescue.Damaged, match="name"):
        rescue.Export(reader).directory(identity, os.fsencode(tmp_path / "x" / "out"), {})
    assert not list(outside.iterdir()) and [*tmp_path.rglob("f")] == []


@pytest.mark.parametrize("arguments", [["/no/such/store"], ["STORE", "out", "no/such/name"]])
def test_mistakes(arguments: list[str], filled: tuple[Path, dict[str, Path]], tmp_path: Path) -> None:
    done = run(*(str(filled[0]) if word == "STORE" else word for word in arguments))
    assert done.returncode == 3 and len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 7 * 1024, 100_003])
def test_its_blake3(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = kit.noise(length, length)
    monkeypatch.setattr(rescue, "fast_blake3", None)
    for kind in Kind:
        assert rescue.object_id(kind, data) == object_id(kind, data)
        assert rescue.object_id(kind, data) == blake3(data, derive_key_context=CONTEXTS[kind]).digest()


def test_it_is_named_in_every_store(store: Store) -> None:
    assert "rescue.py STORE TARGET" in (Path(store.path) / "README.txt").read_text()


def test_an_encoded_object_whose_shared_exponent_the_type_has_not() -> None:
    before, after = updated(1536, DType.F32, scale=1e-4)
    data = bytearray(_codec.encode(after, DType.F32, TRANSFORM_DELTA, before, DType.F32))
    assert rescue.decode(bytes(data), before) == after
    shared = data[44 : struct.unpack_from("<I", data, 24)[0]]
    if data[7]:
        plain = zstandard.ZstdDecompressor().decompress(shared, max_output_size=1 << 18)
        data[44 : 44 + len(shared)] = plain
        data[7] = 0
        struct.pack_into("<I", data, 24, 44 + len(plain))
    assert rescue.decode(bytes(data), before) == after
    data[45] ^= 1
    with pytest.raises(rescue.Damaged, match="exponent"):
        rescue.decode(bytes(data), before)
