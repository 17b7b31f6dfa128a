"""gc, reports and `verify` beside layers: what only a journal names is needed, whoever has the layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moonclipfs.errors import CorruptError, FormatVersionError, MissingObjectError
from moonclipfs.layers.journal import Journal
from moonclipfs.layers.layer import Layer as RealLayer
from moonclipfs.layers.records import Counters, Make
from moonclipfs.store import gc
from moonclipfs.store.backend import FileOps
from moonclipfs.store.check import verify
from moonclipfs.store.frames import encode_frame
from moonclipfs.store.gc import GcReport, collect
from moonclipfs.store.layerdirs import layer_roots, make_layer
from moonclipfs.store.leases import LeaseState, live_leases
from moonclipfs.store.log import Names
from moonclipfs.store.problems import ProblemKind
from moonclipfs.store.publish import Ingest
from moonclipfs.store.segments import segment_name
from moonclipfs.store.store import Store
from moonclipfs.store.survey import Survey
from moonclipfs.store.usage import du, stats
from moonclipfs.types import Attributes, BytesSource, Entry, EntryType, Kind, ObjectId
from tests.store.kit import contents, noise, packs, publish, series


@dataclass
class Layer:
    """A layer as a process has it: a store of its own, and a journal."""

    store: Store
    journal: Journal
    path: Path
    number: int = 5

    def put(self, data: bytes) -> tuple[ObjectId, Ingest]:
        """Put a file in, durable, and not named by anything yet."""
        ingest = self.store.ingest()
        recipe, _, _ = ingest.put_file(BytesSource(data))
        ingest.complete([(Kind.RECIPE, recipe)])
        return recipe, ingest

    def name(self, kind: Kind, object_id: ObjectId) -> None:
        """Append a record that needs an object."""
        self.number += 1
        self.journal.append(Make(self.number, 1, b"n", 1, 0o644, 0, 0, b"", 7), [(kind, object_id)])

    def keep(self, data: bytes) -> ObjectId:
        """Put a file in and name it."""
        recipe, ingest = self.put(data)
        with ingest:
            self.name(Kind.RECIPE, recipe)
        return recipe

    def read(self, recipe: ObjectId) -> bytes:
        found = self.store.recipe_object(recipe)
        return self.store.open_file(Entry(b"", EntryType.FILE, Attributes(0), found.size, recipe)).read(0, found.size)


@pytest.fixture
def layer(store: Store, tmp_path: Path) -> Iterator[Layer]:
    with Store.open(store.path, write=True, index_path=tmp_path / "layer.sqlite") as own:
        path, layer_id = make_layer(own, "host")
        journal = Journal(path / "journal", FileOps(), layer_id=layer_id)
        assert list(journal.replay()) == []
        yield Layer(own, journal, path / "journal")
        journal.close()


def run_gc(store: Store, *others: Store) -> GcReport:
    """Collect until nothing more goes."""
    report = collect(store, wait_seconds=0.0)
    for one in others:
        one.names()
    return collect(store, wait_seconds=0.0) if report.waiting_packs else report


def test_what_a_journal_names_stays_until_it_is_written_anew(store: Store, layer: Layer) -> None:
    recipe = layer.keep(noise(1))
    other = layer.keep(noise(2))
    run_gc(store, layer.store)
    assert layer.read(recipe) == noise(1) and layer.read(other) == noise(2)
    layer.journal.rewrite([(Counters(1, 1, 1, 1), [(Kind.RECIPE, other)])])
    before = packs(store)
    run_gc(store, layer.store)
    assert len(packs(store)) < len(before)
    assert layer.read(other) == noise(2)
    assert verify(store).problems == []


def test_a_layer_that_nobody_has_keeps_its_objects(store: Store, layer: Layer) -> None:
    recipe = layer.keep(noise(1))
    layer.journal.close()
    layer.store.close()
    run_gc(store)
    assert verify(store).problems == [] and stats(store).layers.objects == 2
    assert store.recipe_object(recipe).size == len(noise(1))


def test_a_journal_keeps_whole_trees_and_the_bases_behind_them(store: Store, layer: Layer) -> None:
    """What an unmounted version was copied from: forgotten, and needed by the layer alone, with its bases."""
    first, second = series(2)
    publish(store, "a", {"m": first})
    version = publish(store, "b", {"m": second})
    layer.store.names()
    layer.name(Kind.DIRECTORY, version.root)
    store.log.forget([("a", 1), ("b", 1)])
    run_gc(store, layer.store)
    entry = layer.store.directory(version.root)[b"m"]
    assert layer.store.open_file(entry).read(0, entry.size) == second
    layer.journal.rewrite([])
    run_gc(store, layer.store)
    assert packs(store) == set()


def test_an_object_of_a_condemned_pack_is_copied_out_when_a_journal_comes_to_need_it(
    store: Store, layer: Layer
) -> None:
    version = publish(store, "a", {"m": noise(1), "n": noise(2)})
    entry = store.directory(version.root)[b"m"]
    layer.store.names()
    hold = layer.store.lease
    assert hold is not None
    with hold.hold(layer.store.log.names.sequence):
        store.log.forget([("a", 1)])
        assert collect(store, wait_seconds=0.0).waiting_packs == 1
        layer.name(Kind.RECIPE, entry.child)
        old = packs(store)
    layer.store.names()
    collect(store, wait_seconds=0.0)
    collect(store, wait_seconds=0.0)
    assert packs(store).isdisjoint(old)
    assert layer.read(entry.child) == noise(1)


# One step of a process between two steps of gc


class Pause:
    """Runs actions at named points of gc."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: dict[str, Callable[[], None]] = {}
        leases, marking = live_leases, Survey.mark

        def pausing_leases(root: Path, patience: float = 0.0) -> list[LeaseState]:
            self.reach("before the leases")
            found = leases(root, patience)
            self.reach("after the leases")
            return found

        def pausing_mark(survey: Survey, names: Names | None = None) -> Names:
            self.reach("before a mark")
            found = marking(survey, names)
            self.reach("after a mark")
            return found

        monkeypatch.setattr(gc, "live_leases", pausing_leases)
        monkeypatch.setattr(Survey, "mark", pausing_mark)

    def reach(self, point: str) -> None:
        if action := self.at.pop(point, None):
            action()


POINTS = ("before the leases", "after the leases", "before a mark", "after a mark")


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("point", POINTS)
def test_a_record_appended_at_any_point_of_gc(
    store: Store, layer: Layer, monkeypatch: pytest.MonkeyPatch, point: str, step: int
) -> None:
    """An ingest has found what gc is about to condemn or delete, appends its record and lets go, all at that point."""
    version = publish(store, "old", {"m": noise(1)})
    child = store.directory(version.root)[b"m"].child
    layer.store.names()
    recipe, ingest = layer.put(noise(1))
    assert recipe == child
    store.log.forget([("old", 1)])
    pause = Pause(monkeypatch)

    def finish() -> None:
        layer.name(Kind.RECIPE, recipe)
        ingest.close()
        layer.store.names()

    def wait(times: int) -> Callable[[], None]:
        return finish if times == 1 else lambda: pause.at.update({point: wait(times - 1)})

    pause.at[point] = wait(step)
    collect(store, wait_seconds=0.0)
    if pause.at:
        pause.at.clear()
        finish()
    for _ in range(3):
        collect(store, wait_seconds=0.0)
        layer.store.names()
    assert layer.read(recipe) == noise(1)
    assert verify(store).problems == []


@pytest.mark.parametrize("point", POINTS)
def test_a_seal_and_a_new_journal_at_any_point_of_gc(
    store: Store, layer: Layer, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """An object goes from the journal to a name, and the journal forgets it."""
    recipe = layer.keep(noise(1))

    def seal() -> None:
        with layer.store.ingest() as ingest:
            entry = Entry(b"m", EntryType.FILE, Attributes(0o644), len(noise(1)), recipe)
            ingest.publish("sealed", ingest.put_directory([entry]), {})
        layer.journal.rewrite([])
        layer.store.names()

    pause = Pause(monkeypatch)
    pause.at[point] = seal
    for _ in range(3):
        collect(store, wait_seconds=0.0)
        layer.store.names()
    assert contents(store, "sealed") == {"m": noise(1)}
    assert verify(store).problems == []


def test_what_moves_between_journal_and_names_while_they_are_read_is_needed(
    store: Store, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = layer.keep(noise(1))
    version = publish(store, "adopted", {"m": noise(2)})
    child = store.directory(version.root)[b"m"].child
    layer.store.names()
    names = Store.names

    def while_read(one: Store) -> Names:
        monkeypatch.setattr(Store, "names", names)
        layer.name(Kind.RECIPE, child)
        store.log.forget([("adopted", 1)])
        found = one.names()
        with layer.store.ingest() as ingest:
            entry = Entry(b"m", EntryType.FILE, Attributes(0o644), len(noise(1)), recipe)
            ingest.publish("sealed", ingest.put_directory([entry]), {})
        layer.journal.rewrite([(Counters(1, 1, 1, 1), [(Kind.RECIPE, child)])])
        return found

    monkeypatch.setattr(Store, "names", while_read)
    survey = Survey(store)
    survey.mark()
    assert {recipe, child} <= set(survey.ids())


# What cannot be read


def damage(layer: Layer) -> Path:
    """Flip a byte of a record that is known to be durable."""
    layer.keep(noise(1))
    layer.journal.commit()
    layer.keep(noise(2))
    layer.journal.commit()
    path = layer.path / segment_name(1)
    data = bytearray(path.read_bytes())
    data[data.index(noise_id(layer)) + 3] ^= 1
    path.write_bytes(data)
    return path


def noise_id(layer: Layer) -> ObjectId:
    return next(layer_roots(layer.store.path))[1]


def test_a_damaged_journal_stops_gc_and_is_a_problem_of_verify(store: Store, layer: Layer) -> None:
    path = damage(layer)
    publish(store, "dead", {"f": noise(3)})
    store.log.forget([("dead", 1)])
    before = packs(store)
    with pytest.raises(CorruptError, match=rf"layer host: .*{segment_name(1)}: damaged at offset \d+"):
        collect(store, wait_seconds=0.0)
    assert packs(store) == before
    found = [problem for problem in verify(store).problems if problem.kind is ProblemKind.LAYER]
    assert [problem.affected for problem in found] == [["layer host/"]] and str(path) in found[0].message


def test_a_journal_of_a_newer_version_stops_gc(store: Store, layer: Layer) -> None:
    path = layer.path / segment_name(2)
    path.write_bytes(encode_frame(b"MCJOURNL" + (2).to_bytes(2, "little") + bytes(60), 0))
    with pytest.raises(FormatVersionError, match=r"layer host: .*version 2"):
        collect(store, wait_seconds=0.0)


def test_an_object_that_a_layer_lacks_stops_gc(store: Store, layer: Layer) -> None:
    recipe = layer.keep(noise(1))
    (lost,) = layer.store.recipe_object(recipe).object_ids()
    publish(store, "other", {"f": noise(2)})
    pack = layer.store.index.find(lost)
    assert pack is not None
    recipe_pack = layer.store.index.find(recipe)
    assert recipe_pack is not None and recipe_pack.pack == pack.pack
    os.unlink(store.path / "packs" / f"{pack.pack}.pack")
    with pytest.raises(MissingObjectError, match="layer host"):
        collect(store, wait_seconds=0.0)
    assert any("layer host" in name for problem in verify(store).problems for name in problem.affected)


# Reports


def test_reports_count_what_layers_need(store: Store, layer: Layer) -> None:
    publish(store, "a", {"m": noise(1)})
    publish(store, "b", {"m": noise(2)})
    versions = [store.resolve("a"), store.resolve("b")]
    ratio, alone = stats(store).ratio, du(store, versions)
    assert alone.exclusive == alone.stored > 40_000
    layer.store.names()
    layer.keep(noise(3))
    layer.name(Kind.DIRECTORY, versions[0].root)
    shared = du(store, versions)
    assert shared.versions[0].exclusive == 0 and shared.versions[1].exclusive == alone.versions[1].exclusive
    assert shared.exclusive == alone.versions[1].exclusive
    found = stats(store)
    assert (found.layers.objects, found.dead) == (2, 0) and found.layers.raw > 20_000
    assert found.ratio == pytest.approx(ratio, rel=0.01), "files of no version yet are no loss"
    parts = [found.full, found.delta, found.trees, found.only_bases, found.layers]
    assert sum(part.stored for part in parts) + found.dead + found.overhead == found.pack_bytes


def test_gc_beside_a_real_layer(store: Store, tmp_path: Path) -> None:
    """A file is encoded, and in no snapshot: gc keeps it over a remount, and takes it when it was removed."""
    with Store.open(store.path, write=True, index_path=tmp_path / "own.sqlite") as own:
        tree = RealLayer.open(own, "real")
        file = tree.make(tree.root, b"f", EntryType.FILE, 0o644, 0, 0, 7)
        handle = tree.open_file(file, write=True)
        handle.write(0, noise(1, 200_000), 7)
        handle.close()
        (job,) = tree.take_jobs(0.0, urgent=True)
        with own.ingest() as ingest:
            recipe, size, _ = ingest.put_file(BytesSource(noise(1, 200_000)))
            ingest.complete([(Kind.RECIPE, recipe)])
            tree.stored(job, recipe, size)
        tree.sync_all()
        collect(store, wait_seconds=0.0)
        tree.refresh(8)
        collect(store, wait_seconds=0.0)
        tree.close()
        tree = RealLayer.open(own, "real")
        collect(store, wait_seconds=0.0)
        tree.refresh(8)
        collect(store, wait_seconds=0.0)
        file = tree.lookup(tree.root, b"f")
        handle = tree.open_file(file, write=False)
        assert handle.read(0, 200_000) == noise(1, 200_000)
        handle.close()
        tree.unlink(tree.root, b"f", 8)
        tree.files.checkpoint()
        assert collect(store, wait_seconds=0.0).waiting_packs == 1
        tree.refresh(9)
        collect(store, wait_seconds=0.0)
        assert packs(store) == set()
        tree.close()
