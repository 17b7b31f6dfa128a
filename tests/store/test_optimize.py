"""Short chains for the newest: what is read stays the same, whoever reads, saves or deletes meanwhile."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from moonclipfs.errors import CorruptError, NotFoundError, UsageError
from moonclipfs.store import optimize as module
from moonclipfs.store.alternates import make_private_store
from moonclipfs.store.check import verify
from moonclipfs.store.optimize import newest_of_lines, optimize
from moonclipfs.store.packs import pack_key
from moonclipfs.store.store import Store
from moonclipfs.types import Attributes, BytesSource, Entry, EntryType
from tests.store.kit import contents, noise, packs, publish, series


def tensors(values: dict[str, np.ndarray], dtype: str = "F32") -> bytes:
    """A safetensors file of tensors of one dtype."""
    header, at = {}, 0
    for name, value in values.items():
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in values.values())


def links(store: Store, name: str, elsewhere: Path | None = None) -> int:
    """The most links behind any object of a snapshot, as a process sees them that knows nothing of the store yet."""
    index = store.path.parent / f"links-{len(list(store.path.parent.iterdir()))}.sqlite"
    with Store.open(store.path, index_path=index) as other:
        found = [0]
        for _, entry in other.walk(other.resolve(name)):
            found += [len(other.objects.chain(one)) - 1 for one in other.recipe(entry).object_ids()]
        return max(found)


def line(store: Store, count: int = 4, run: str = "run", seed: int = 0) -> dict[str, dict[str, bytes]]:
    """A line of snapshots of which the last is the deepest."""
    kept = {f"{run}/step-{number}": {"m": data} for number, data in enumerate(series(count, seed=seed))}
    for name, files in kept.items():
        publish(store, name, files)
    return kept


def test_the_newest_of_each_line_gets_one_link(store: Store) -> None:
    kept = line(store) | line(store, 4, "other")
    assert links(store, "run/step-3") > 1
    report = optimize(store, ["run"])
    assert ([f"{one.path}@{one.number}" for one in report.snapshots], report.objects) == (["run/step-3@1"], 1)
    assert report.links > 1 and report.bytes > 0 and report.problems == [] and report.gc is not None
    assert links(store, "run/step-3") == 1
    assert {name: contents(store, name) for name in kept} == kept
    assert verify(store).problems == []
    assert optimize(store).objects <= 1 and links(store, "other/step-3") <= 1
    again = optimize(store)
    assert (again.objects, again.gc) == (0, None)


def test_what_it_replaces_is_freed(store: Store) -> None:
    kept = line(store)
    for name in ("run/step-1", "run/step-2"):
        del kept[name]
        store.log.forget([(name, 1)])
    before = packs(store)
    report = optimize(store)
    assert report.gc is not None and report.gc.deleted_packs >= 2
    assert links(store, "run/step-3") <= 1 and not before <= packs(store)
    assert {name: contents(store, name) for name in kept} == kept and verify(store).problems == []


def test_a_dry_run_writes_nothing(store: Store) -> None:
    line(store)
    before = packs(store)
    report = optimize(store, dry_run=True)
    assert (report.objects, report.gc, report.dry_run) == (1, None, True) and packs(store) == before
    with Store.open(store.path, index_path=store.path.parent / "other") as other:
        assert optimize(other, dry_run=True).objects == 1
        with pytest.raises(UsageError, match="reading only"):
            optimize(other)


def test_names_are_snapshots_or_what_lies_above_them(store: Store) -> None:
    line(store, 3)
    publish(store, "top", {"f": noise(1)})
    names = store.names()
    assert [one.path for one in newest_of_lines(names)] == ["run/step-2", "top"]
    assert [one.path for one in newest_of_lines(names, ["run"])] == ["run/step-2"]
    assert [one.path for one in newest_of_lines(names, ["run/step-1"])] == ["run/step-1"]
    with pytest.raises(NotFoundError):
        newest_of_lines(names, ["ru"])
    publish(store, "run/step-0", {"f": noise(2)})
    assert [one.path for one in newest_of_lines(store.names(), ["run"])] == ["run/step-0"], "the last that was bound"


def test_c01_c02_tensors_gained_lost_and_changed_back_are_as_the_newest_says(store: Store) -> None:
    rng = np.random.default_rng(0)
    first = {name: rng.standard_normal(20_000).astype(np.float32) for name in ("kept", "lost", "back")}
    values, kept = dict(first), {}
    for number in range(5):
        if number == 2:
            values["gained"] = rng.standard_normal(20_000).astype(np.float32)
            del values["lost"]
        if number == 4:
            values["back"] = first["back"]
        kept[f"run/step-{number}"] = {"m": tensors(values)}
        publish(store, f"run/step-{number}", kept[f"run/step-{number}"])
        values = {
            name: one * (1 + rng.standard_normal(20_000) * 1e-5).astype(np.float32) for name, one in values.items()
        }
    optimize(store)
    assert {name: contents(store, name) for name in kept} == kept
    layout = store.layout(store.lookup(store.resolve("run/step-4"), b"m"))
    assert sorted(tensor.name for tensor in layout.tensors) == ["back", "gained", "kept"]
    assert links(store, "run/step-4") <= 1


def test_c28_a_flipped_byte_is_found_and_nothing_is_deleted(store: Store) -> None:
    kept = line(store)
    (identity,) = [
        one for one in store.recipe(store.lookup(store.resolve("run/step-3"), b"m")).object_ids()
        if len(store.objects.chain(one)) > 1
    ]  # fmt: skip
    location = store.objects.chain(identity)[0].location
    with (store.path / pack_key(location.pack)).open("r+b") as file:
        file.seek(location.offset + location.encoded_length // 2)
        file.write(b"\xff\x00\xff\x00")
    before = packs(store)
    report = optimize(store)
    assert report.objects == 0 and len(report.problems) == 1 and "cannot be read" in report.problems[0]
    assert before <= packs(store)
    found = verify(store)
    assert found.problems, "the damage is not made to look whole"
    assert contents(store, "run/step-0") == kept["run/step-0"]


def test_narrower_copies_get_one_link_too(store: Store) -> None:
    """A model in bf16 beside its master in fp32, on which it leans as long as that is full."""
    rng = np.random.default_rng(0)
    values, kept = rng.standard_normal(20_000).astype(np.float32), {}
    for number in range(4):
        narrow = (values.view(np.uint32) >> 16).astype(np.uint16)
        files = {"a-master": tensors({"w": values}), "model": tensors({"w": narrow}, "BF16")}
        kept[f"run/{number}"] = files
        publish(store, f"run/{number}", files)
        values = values * (1 + rng.standard_normal(20_000).astype(np.float32) * np.float32(1e-5))
    assert links(store, "run/3") > 1
    optimize(store)
    assert links(store, "run/3") == 1 and verify(store).problems == []
    assert {name: contents(store, name) for name in kept} == kept


def test_what_ends_in_the_base_store_of_a_private_one_is_left_alone(store: Store) -> None:
    kept = line(store, 3)
    state = store.path.parent / "private"
    with make_private_store(state, store.path) as private:
        previous = kept["run/step-2"]["m"]
        for number, data in enumerate(series(6)[3:], 3):
            with private.ingest() as ingest:
                child, size, _ = ingest.put_file(BytesSource(data))
                entry = Entry(b"m", EntryType.FILE, Attributes(0o644), size, child)
                ingest.publish(f"run/step-{number}", ingest.put_directory([entry]), {})
            kept[f"run/step-{number}"] = {"m": data}
        optimize(private, wait_seconds=0)
        assert {f"run/step-{number}": contents(private, f"run/step-{number}") for number in (3, 4, 5)} == {
            name: files for name, files in kept.items() if int(name[-1]) > 2
        }
        assert verify(private).problems == [] and previous == contents(store, "run/step-2")["m"]


def test_copies_are_proved_before_anything_goes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = line(store)
    before = packs(store)

    class Broken(module.PackWriter):
        def add(self, encoded, **rest):  # type: ignore[no-untyped-def]
            return super().add(bytes(encoded[:-1]) + bytes([encoded[-1] ^ 1]), **rest)

    monkeypatch.setattr(module, "PackWriter", Broken)
    with pytest.raises(CorruptError, match="nothing is deleted"):
        optimize(store)
    monkeypatch.undo()
    assert before <= packs(store)
    assert {name: contents(store, name) for name in kept} == kept


def test_c04_readers_and_savers_are_not_disturbed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that refers to what is about to be stored anew, and a reader that knows the old places."""
    kept = line(store)
    with (
        Store.open(store.path, write=True, index_path=store.path.parent / "saver") as saver,
        Store.open(store.path, index_path=store.path.parent / "reader") as reader,
    ):
        contents(reader, "run/step-3")
        with saver.ingest() as ingest:
            before = saver.open_file(saver.lookup(saver.resolve("run/step-3"), b"m"))
            recipe, stats = ingest.put_contents(BytesSource(series(5)[4]), before)
            optimize(store, wait_seconds=0)
            assert {name: contents(reader, name) for name in kept} == kept
            identity = ingest.put_recipe(recipe, stats)
            root = ingest.put_directory(
                [
                    entry.__class__(b"m", entry.type, entry.attributes, recipe.size, identity)
                    for entry in saver.directory(saver.resolve("run/step-3").root).values()
                ]
            )
            ingest.publish("run/step-4", root, {})
        optimize(store, wait_seconds=0)
        kept["run/step-4"] = {"m": series(5)[4]}
        for one in (reader, saver, store):
            assert {name: contents(one, name) for name in kept} == kept
    assert verify(store).problems == [] and links(store, "run/step-4") <= 1


def test_several_at_once_beside_saves(store: Store) -> None:
    kept = line(store, 6)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Store.open(store.path, write=True, index_path=store.path.parent / f"w{number}") as other:
                for at in range(3):
                    if number == 0:
                        publish(other, f"run/more-{at}", {"m": series(9)[6 + at]})
                    optimize(other, wait_seconds=0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    kept |= {f"run/more-{at}": {"m": series(9)[6 + at]} for at in range(3)}
    optimize(store)
    assert {name: contents(store, name) for name in kept} == kept
    assert links(store, "run/more-2") <= 1 and verify(store).problems == []


def test_c10_killed_at_any_point_leaves_every_snapshot(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends before each change of a file in turn; the next one goes on, and reads all the same."""
    kept: dict[str, dict[str, bytes]] = {}
    killed = 0

    class Killed(BaseException):
        pass

    for stop in range(12):
        run = f"run-{stop}"
        kept |= line(store, 4, run, stop)
        for number in (1, 2):
            store.log.forget([(f"{run}/step-{number}", 1)])
            del kept[f"{run}/step-{number}"]
        left = [stop]

        def count_down(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with monkeypatch.context() as patch:
            for name in ("create", "delete", "upload", "settle", "sync_directory"):
                real = getattr(store.backend, name)
                patch.setattr(store.backend, name, lambda *a, real=real, **k: (count_down(), real(*a, **k))[1])
            try:
                optimize(store, [run], wait_seconds=0)
            except Killed:
                killed += 1
        with Store.open(store.path, write=True, index_path=store.path.parent / f"after-{stop}") as other:
            assert {name: contents(other, name) for name in kept} == kept
            optimize(other, [run], wait_seconds=0)
        assert links(store, f"{run}/step-3") <= 1
    assert killed >= 5 and verify(store).problems == []
