"""Stores that moonclip's own wheels wrote come in bit for bit; damaged and hostile ones do no harm.

`make_moonclip.py` made the stores of `tests/corpus/moonclip`. C and a number are faults that moonclip had.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonclipfs.compat.moonclip_format import MoonclipStore
from moonclipfs.compat.moonclip_import import import_store
from moonclipfs.compat.moonclip_tensors import Tensors
from moonclipfs.errors import CorruptError, FormatVersionError, MoonclipError, NotFoundError
from moonclipfs.store import pins
from moonclipfs.store.check import verify
from moonclipfs.store.store import Store

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")
CORPUS = Path(__file__).parents[1] / "corpus" / "moonclip"
VERSIONS = ("0.3.1", "0.2.4")
Unpack = Callable[..., Path]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """Unpack a store of the corpus."""

    def unpack(name: str = "run", version: str = "0.3.1") -> Path:
        target = tmp_path / f"moonclip-{version}-{name}"
        zipfile.ZipFile(CORPUS / version / f"{name}.zip").extractall(target)
        return target

    return unpack


def expected(version: str = "0.3.1") -> dict[str, Any]:
    told: dict[str, Any] = json.loads((CORPUS / version / "expected.json").read_text())
    return told


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file as moonclip writes it: filled up with zeros."""
    document = json.loads(path.read_bytes().rstrip(b"\0"))
    change(document)
    data = json.dumps(document).encode()
    path.write_bytes(data + bytes(-len(data) % 4096))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["run", "odd", "exotic", "bf16", "fp16", "fp8", "fp64"])
def test_every_tensor_is_what_moonclip_itself_loads(unpack: Unpack, version: str, name: str) -> None:
    source = MoonclipStore(unpack(name, version))
    tensors = Tensors(source)
    told = expected(version)[name]
    assert [(head.id, head.step, head.metadata) for head in source.heads] == [
        (one["id"], one["step"], one["metadata"]) for one in told
    ]
    for head, one in zip(source.heads, told, strict=True):
        entries = source.ranks(head)[0].tensors
        assert entries.keys() == one["tensors"].keys()
        for key, (dtype, shape, digest) in one["tensors"].items():
            assert (tensors.dtype(entries[key]), list(entries[key].shape)) == (dtype, shape), key
            assert hashlib.sha256(tensors.load(head, 0, key)).hexdigest() == digest, (head.step, key)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_manager_loads_what_was_imported(unpack: Unpack, store: Store, version: str) -> None:
    from moonclipfs.torch.manager import CheckpointManager

    told = expected(version)
    report = import_store(unpack("run", version), store)
    assert [(one.step, one.id, one.reason) for one in report.snapshots] == [
        (s["step"], s["id"], "") for s in told["run"]
    ]
    assert verify(store).problems == []
    names = store.names()
    assert {path: [one.number for one in names.versions(path)] for path in names.bound()} == {
        "run/step-000010": [1], "run/step-000020": [1, 2], "run/step-000030": [1], "run/step-000040": [1],
        "run/step-000050": [1],
    }  # fmt: skip
    assert pins.pinned(names) == [("run/step-000020", 2), ("run/step-000040", 1)]
    with CheckpointManager(store.path, "run") as manager:
        assert manager.pinned_steps() == [20, 40] == told["pinned"]
        for snapshot, version_ in zip(told["run"], report.snapshots, strict=True):
            assert version_.version is not None
            loaded = manager.load(f"{version_.version.path}@{version_.version.number}")
            assert (loaded.step, loaded.metadata) == (snapshot["step"], snapshot["metadata"])
            model = loaded.state["model"]
            for key, tensor in model.items():
                dtype, shape, digest = snapshot["tensors"][f"model/{key}"]
                assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
                assert hashlib.sha256(tensor.numpy().tobytes()).hexdigest() == digest
            optimizer = loaded.state["optimizer"]
            flat = [one for inner in optimizer["state"].values() for one in inner.values() if torch.is_tensor(one)]
            digests = {hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in flat}
            assert digests == {row[2] for key, row in snapshot["tensors"].items() if key.startswith("optimizer/t")}
            assert optimizer["param_groups"][0]["params"] == [0, 1, 2, 3, 4]
            assert optimizer["param_groups"][0]["betas"] == (0.9, 0.999)
            assert loaded.state["scheduler"]["step_size"] == 2
        extra = manager.load(30).state["extra"]
        assert extra["seen"] == {"ids": [1, 2, (3, None)], "name": "tëst", "big": 1 << 70}
        assert np.array_equal(extra["numpy"], np.arange(6, dtype=np.float32).reshape(2, 3))
        assert extra["size"] == torch.Size([2, 3]) and extra["rng"].dtype is torch.uint8


def test_training_goes_on_from_an_imported_snapshot(unpack: Unpack, store: Store) -> None:
    from moonclipfs.torch.manager import CheckpointManager
    from tests.compat.make_net import Net

    import_store(unpack(), store)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=7.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    with CheckpointManager(store.path, "run") as manager:
        assert manager.resume(net, optimizer, scheduler) == 51
        assert optimizer.param_groups[0]["lr"] != 7.0 and scheduler.step_size == 2
        digest = hashlib.sha256(net.inner.weight.detach().numpy().tobytes()).hexdigest()
        assert digest == expected()["run"][-1]["tensors"]["model/inner.weight"][2]
        manager.save(51, net, optimizer, scheduler)
        assert manager.resume(net, optimizer, scheduler) == 52


def test_tensors_saved_by_name_alone(unpack: Unpack, store: Store) -> None:
    """Every dtype, empty and 0-dim tensors, several compressed chunks, names with slashes."""
    from moonclipfs.torch.manager import CheckpointManager

    import_store(unpack("odd"), store, name="odd")
    told = expected()["odd"]
    with CheckpointManager(store.path, "odd") as manager:
        for snapshot in told:
            model = manager.load(snapshot["step"]).state["model"]
            assert model.keys() == snapshot["tensors"].keys()
            for key, (dtype, shape, digest) in snapshot["tensors"].items():
                assert (str(model[key].dtype), list(model[key].shape)) == (f"torch.{dtype}", shape)
                raw = bytes(model[key].contiguous().reshape(-1).view(torch.uint8).numpy())
                assert hashlib.sha256(raw).hexdigest() == digest, key


@pytest.mark.parametrize("version", VERSIONS)
def test_c20_tensors_that_moonclip_hides_in_pickles(unpack: Unpack, store: Store, version: str) -> None:
    """Complex and 8-bit buffers of a model; they come out as tensors of its file."""
    from moonclipfs.torch.manager import CheckpointManager

    report = import_store(unpack("exotic", version), store)
    assert report.problems == []
    layout = store.layout(store.lookup(store.resolve("run/step-000001"), b"model.safetensors"))
    assert {"freqs", "turned", "eighth", "wide"} <= {tensor.name for tensor in layout.tensors}
    with CheckpointManager(store.path, "run") as manager:
        model = manager.load(1).state["model"]
    for name, (dtype, shape, digest) in expected(version)["exotic_state"].items():
        assert (str(model[name].dtype), list(model[name].shape)) == (f"torch.{dtype}", shape)
        raw = bytes(model[name].contiguous().view(torch.uint8).numpy())
        assert hashlib.sha256(raw).hexdigest() == digest, name


def test_a_state_dict_that_is_one_pickle(store: Store) -> None:
    """As its first versions kept optimizers: `optimizer._blob`."""
    import pickle

    from moonclipfs.compat.moonclip_state import Known, take_apart

    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    data = pickle.dumps(optimizer.state_dict())
    known = {"optimizer._blob": Known("uint8", (), len(data))}
    part = take_apart(known, lambda name: data)["optimizer"]
    moment = part.tensors["state.0.exp_avg"]
    assert (moment.dtype, moment.shape) == ("float32", (2, 3))
    assert moment.data == optimizer.state_dict()["state"][0]["exp_avg"].numpy().tobytes()
    assert part.tree["param_groups"][0]["betas"] == {"$": "tuple", "v": [0.9, 0.999]}


@pytest.mark.parametrize(
    "change",
    [
        (b"K\x00K\x02K\x03\x86", b"K\x07K\x02K\x03\x86"),
        (b"K\x02K\x03\x86", b"K\xffK\xff\x86"),
        (b"FloatStorage", b"QuiltStorage"),
    ],
)
def test_pickled_tensors_that_reach_past_their_storage(change: tuple[bytes, bytes]) -> None:
    import pickle

    from moonclipfs.compat.moonclip_state import Known, take_apart
    from moonclipfs.errors import UsageError

    data = pickle.dumps({"a": torch.ones(2, 3)}, protocol=4)
    changed = data.replace(*change)
    assert changed != data
    known = {"model._metadata": Known("uint8", (), len(changed))}
    with pytest.raises((UsageError, CorruptError), match="model"):
        take_apart(known, lambda name: changed)


def test_files_have_the_time_of_the_save_and_deltas_pay(unpack: Unpack, store: Store) -> None:
    report = import_store(unpack("odd"), store)
    versions = [one.version for one in report.snapshots]
    assert versions[0] is not None and versions[1] is not None
    entries = store.directory(versions[1].root)
    assert sorted(entries) == [b"model.safetensors", b"state.json"]
    written = entries[b"state.json"].attributes.mtime_ns
    assert abs(written - (CORPUS / "0.3.1/odd.zip").stat().st_mtime_ns) < 10**18 and written % 10**9
    sizes = sum(place.encoded_length for place in store.index.iterate())
    assert sizes < 400_000, "5 MB of one tensor that hardly changed"


def test_an_import_is_continued_and_never_doubled(
    unpack: Unpack, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = unpack()
    from moonclipfs.store.publish import Ingest

    real, calls = Ingest.publish, 0

    def interrupted(ingest: Ingest, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(ingest, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Ingest, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            import_store(source, store)
    again = import_store(source, store)
    assert [one.there for one in again.snapshots] == [True, True, False, False, False, False]
    assert all(one.there for one in import_store(source, store).snapshots)
    assert sum(1 for _ in store.names().all_versions()) == 6
    assert len(import_store(source, store, name="other").snapshots) == 6


def test_c12_lost_or_garbled_lists_are_made_anew_from_the_packs(
    unpack: Unpack, store: Store, expect_log: Callable[[str], None]
) -> None:
    expect_log("manifest.json: .*the list of snapshots is made anew from the packs")
    expect_log("pins.json: .*the pins are those of the list")
    expect_log("ranks.json: .*what it says is taken from the packs")
    source = unpack()
    (source / "manifest.json").write_bytes(b'{"format_version": 3, "snap' + bytes(100))
    for path in list(source.glob("snapshots/*/ranks.json"))[::2]:
        path.unlink()
    for path in list(source.glob("snapshots/*/ranks.json")):
        path.write_bytes(b"\xff" * 4096)
    (source / "pins.json").write_bytes(b"[20")
    report = import_store(source, store)
    assert [(one.step, one.id, one.reason) for one in report.snapshots] == [
        (one["step"], one["id"], "") for one in expected()["run"]
    ]
    with pytest.raises(NotFoundError):
        import_store(source / "snapshots", store)


def test_c32_a_missing_base_makes_only_what_depends_on_it_unreadable(unpack: Unpack, store: Store) -> None:
    source = unpack()
    first = expected()["run"][0]["id"]
    (source / "snapshots" / first / "rank_0.pack").unlink()
    report = import_store(source, store)
    assert [bool(one.reason) for one in report.snapshots] == [True, True, True, True, False, False]
    assert len(report.problems) == 4 and sorted(store.names().bound()) == ["run/step-000040", "run/step-000050"]


def test_c28_a_flipped_byte_is_found(unpack: Unpack, store: Store) -> None:
    source = unpack("odd")
    head = MoonclipStore(source).heads[1]
    entry = MoonclipStore(source).ranks(head)[0].tensors["gained"]
    pack = source / "snapshots" / head.id / "rank_0.pack"
    data = bytearray(pack.read_bytes())
    data[entry.offset + entry.compressed_size - 3] ^= 0x10
    pack.write_bytes(data)
    report = import_store(source, store)
    assert [bool(one.reason) for one in report.snapshots] == [False, True]
    assert "gained in snapshot" in report.problems[0]


def test_c18_an_unknown_dtype_is_an_error(unpack: Unpack, store: Store) -> None:
    source = unpack("odd")
    head = MoonclipStore(source).heads[0]

    def change(document: Any) -> None:
        for one in document["ranks"]["0"]["tensors"]:
            one["dtype"] = "float128" if one["name"] == "scalar" else one["dtype"]

    edit(source / "snapshots" / head.id / "ranks.json", change)
    report = import_store(source, store)
    assert "'float128', which is not known" in report.snapshots[0].reason


def test_what_was_never_finished_is_not_imported(unpack: Unpack, store: Store) -> None:
    source = unpack()
    edit(source / "manifest.json", lambda document: document["snapshots"][-1].update(finalized=False))
    assert len(import_store(source, store).snapshots) == 5


def test_several_ranks_that_brought_the_same_and_a_missing_one(unpack: Unpack, store: Store) -> None:
    source = unpack("odd")
    for head in MoonclipStore(source).heads:
        directory = source / "snapshots" / head.id
        shutil.copy(directory / "rank_0.pack", directory / "rank_1.pack")

        def change(document: Any, head: Any = head) -> None:
            other = {**document["ranks"]["0"], "rank": 1, "pack_file": f"snapshots/{head.id}/rank_1.pack"}
            document["ranks"]["1"] = other

        edit(directory / "ranks.json", change)
    edit(source / "manifest.json", lambda document: document.update(world_size=2))
    (directory / "rank_1.pack").unlink()
    report = import_store(source, store)
    assert [bool(one.reason) for one in report.snapshots] == [False, True]
    version = report.snapshots[0].version
    assert version is not None
    assert [path for path, _ in store.walk(version)] == [b"model.safetensors", b"state.json"], "both have the same"


@pytest.mark.parametrize("version", VERSIONS)
def test_c11_c35_what_ranks_have_of_their_own_is_loaded_by_its_rank(unpack: Unpack, store: Store, version: str) -> None:
    """A model that both have, and an optimizer's state that is each one's own."""
    from moonclipfs.errors import UsageError
    from moonclipfs.torch.manager import CheckpointManager
    from tests.compat.make_net import Net

    report = import_store(unpack("ranks", version), store)
    assert report.problems == []
    found = report.snapshots[1].version
    assert found is not None
    assert [path for path, _ in store.walk(found)] == [
        *(b"model.safetensors", b"rank-00000", b"rank-00000/optimizer.safetensors", b"rank-00000/state.json"),
        *(b"rank-00001", b"rank-00001/optimizer.safetensors", b"rank-00001/state.json", b"state.json"),
    ]
    for rank in (0, 1):
        with CheckpointManager(store.path, "run", world_size=2, rank=rank) as manager:
            loaded = manager.load(2)
            assert loaded.state["optimizer"]["lr"] == [0.1, rank] and loaded.metadata == {"ranks": "two"}
            assert torch.equal(loaded.state["optimizer"]["state"][0]["exp_avg"], torch.full((4, 3), 2 + rank / 2))
            assert "inner.weight" in loaded.state["model"]
    with CheckpointManager(store.path, "run") as manager:
        net = Net()
        manager.load(2, net)  # what is replicated loads everywhere
        assert torch.equal(net.inner.weight, loaded.state["model"]["inner.weight"])
        with pytest.raises(UsageError, match="saved by 2 ranks"):
            manager.load(2, optimizer={})


def test_best_snapshots_keep_their_metric(unpack: Unpack, store: Store) -> None:
    source = unpack()

    def change(document: Any) -> None:
        for at, value in ((0, 0.5), (2, 0.75)):
            document["snapshots"][at]["metadata"] = {"best": "true", "accuracy": f"{value:.6f}", "note": "x"}

    edit(source / "manifest.json", change)
    import_store(source, store)
    assert store.resolve("run/step-000030").metadata["metric"] == {"name": "accuracy", "value": 0.75, "goal": "max"}
    assert "metric" not in store.resolve("run/step-000040").metadata


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda d: d.update(format_version=4), "format 4"),
        (lambda d: d.update(snapshots={}), "made anew"),
        (lambda d: d["snapshots"][0].update(id="../../../etc"), "made anew"),
        (lambda d: d["snapshots"][0].update(step=-1), "made anew"),
        (lambda d: d["snapshots"][0].update(step="1"), "made anew"),
        (lambda d: d.update(world_size=1 << 40), "made anew"),
    ],
)
def test_hostile_lists(
    unpack: Unpack, store: Store, expect_log: Callable[[str], None], change: Callable[[Any], object], what: str
) -> None:
    source = unpack("odd")
    edit(source / "manifest.json", change)
    if what == "format 4":
        with pytest.raises(FormatVersionError, match=what):
            import_store(source, store)
    else:
        expect_log(what)
        assert len(import_store(source, store).snapshots) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 50},
        {"compressed_size": 1 << 50},
        {"raw_size": 8},
        {"shape": [1 << 40]},
        {"storage": "Skipped"},
        {"storage": "DeltaXor"},
        {"storage": "Alias", "alias_of": "scalar"},
        {"storage": "Alias", "alias_of": "nothing"},
        {"hash_raw": "0" * 32},
        {"original_dtype": "int8"},
    ],
    ids=str,
)
def test_hostile_tensors_leave_out_their_snapshot_alone(unpack: Unpack, store: Store, change: dict[str, Any]) -> None:
    source = unpack("odd")
    head = MoonclipStore(source).heads[0]

    def apply(document: Any) -> None:
        (one,) = [one for one in document["ranks"]["0"]["tensors"] if one["name"] == "scalar"]
        one |= change

    edit(source / "snapshots" / head.id / "ranks.json", apply)
    report = import_store(source, store)
    assert report.snapshots[0].reason and not report.snapshots[1].reason


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", -1),
        ("raw_size", 1 << 60),
        ("shape", [1 << 60]),
        ("shape", [1] * 100),
        ("shape", [-1]),
        ("storage", "Other"),
        ("hash_raw", "x"),
        ("name", "a" * 5000),
        ("name", None),
        ("quant_scale", "1"),
    ],
)
def test_lists_that_make_no_sense_are_made_anew_from_the_pack(
    unpack: Unpack, store: Store, expect_log: Callable[[str], None], key: str, value: Any
) -> None:
    source = unpack("odd")
    path = source / "snapshots" / MoonclipStore(source).heads[0].id / "ranks.json"
    edit(path, lambda document: document["ranks"]["0"]["tensors"][0].update({key: value}))
    expect_log("what it says is taken from the packs")
    assert [one.reason for one in import_store(source, store).snapshots] == ["", ""]


def test_links_and_fifos_are_not_followed(unpack: Unpack, store: Store, tmp_path: Path) -> None:
    source = unpack("odd")
    first, second = MoonclipStore(source).heads
    outside = tmp_path / "outside.pack"
    pack = source / "snapshots" / first.id / "rank_0.pack"
    pack.rename(outside)
    pack.symlink_to(outside)
    fifo = source / "snapshots" / second.id / "rank_0.pack"
    fifo.unlink()
    os.mkfifo(fifo)
    report = import_store(source, store)
    assert all(one.reason for one in report.snapshots)


def test_a_pickle_is_never_run(unpack: Unpack, tmp_path: Path) -> None:
    import pickle

    from moonclipfs.compat.moonclip_state import Known, take_apart
    from moonclipfs.errors import UsageError

    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    for value in ({"a": Bomb()}, Bomb(), [1, (Bomb(),)], {Bomb(): 1}):
        data = pickle.dumps(value)
        known = {"model._metadata": Known("uint8", (), len(data))}
        with pytest.raises((UsageError, CorruptError), match="model"):
            take_apart(known, lambda name, data=data: data)
    assert not (tmp_path / "ran").exists()


def test_a_bomb_of_references_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    from moonclipfs.compat import moonclip_state
    from moonclipfs.compat.moonclip_state import Known, take_apart

    monkeypatch.setattr(moonclip_state, "_NODES", 10_000)

    value: Any = []
    for _ in range(60):
        value = [value, value]
    data = pickle.dumps(value)
    with pytest.raises(CorruptError, match="more values"):
        take_apart({"model._metadata": Known("uint8", (), len(data))}, lambda name: data)


def test_whatever_is_garbled_ends_in_an_error_or_a_report(
    unpack: Unpack, store: Store, expect_log: Callable[[str], None]
) -> None:
    """Bytes are changed all over the files: never anything but errors of ours, and what comes in is what was saved."""
    expect_log("moonclipfs.compat.moonclip_format")
    rng = random.Random(0)
    whole = unpack("bf16")
    good = {one["id"]: one for one in expected()["bf16"]}
    for turn in range(40):
        source = whole.parent / "garbled"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(whole, source)
        for _ in range(rng.randrange(1, 4)):
            path = rng.choice([path for path in sorted(source.rglob("*")) if path.is_file()])
            data = bytearray(path.read_bytes())
            if rng.random() < 0.3:
                data = data[: rng.randrange(len(data) + 1)]
            used = len(bytes(data).rstrip(b"\0"))
            for _ in range(rng.randrange(1, 4) if used else 0):
                data[rng.randrange(used)] = rng.choice([0, 0x22, 0x2C, 0x39, 0x7B, 0xFF, rng.randrange(256)])
            path.write_bytes(data)
        try:
            report = import_store(source, store, name=f"turn{turn}")
        except MoonclipError:
            continue
        for one in report.snapshots:
            if one.version is not None and one.id in good:
                layout = store.layout(store.lookup(one.version, b"model.safetensors"))
                for tensor in layout.tensors:
                    raw = store.open_file(store.lookup(one.version, b"model.safetensors")).read(
                        tensor.offset, tensor.length
                    )
                    digests = {row[2] for snapshot in good.values() for row in snapshot["tensors"].values()}
                    assert hashlib.sha256(raw).hexdigest() in digests
