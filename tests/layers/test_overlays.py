"""The overlays of a store as one process has them: names, many at once, what dead processes leave, and dry runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from moonclipfs import limits
from moonclipfs.errors import BusyError, CorruptError, ExistsError, LimitError, NotFoundError, QuotaError, UsageError
from moonclipfs.layers.live import Live, LiveOptions
from moonclipfs.layers.overlay import Overlay
from moonclipfs.layers.overlays import Overlays
from moonclipfs.layers.overlayverbs import verbs
from moonclipfs.layers.room import with_room
from moonclipfs.layers.unfinished import check_layers
from moonclipfs.store import overlaydirs, reserve
from moonclipfs.store.check import verify
from moonclipfs.store.forget import held as kept
from moonclipfs.store.health import State
from moonclipfs.store.layerdirs import layer_names
from moonclipfs.store.overlaydirs import OverlayInfo, find_overlay, overlay_names, pinned_versions, sweep
from moonclipfs.store.retention import Rules, plan
from moonclipfs.store.store import Store
from tests.layers.filekit import read_all
from tests.layers.overlaykit import LocalOverlayEncoder, create, size_of_overlay, stored_bytes
from tests.layers.publish import Files, publish
from tests.layers.sealkit import model, put, tree

BASE: Files = {"m": model(1, 100_000), "d": {"x": b"1"}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    Store.create(tmp_path / "store").close()
    with Store.open(tmp_path / "store", write=True, index_path=tmp_path / "index.sqlite") as opened:
        publish(opened, "base", BASE)
        yield opened


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonclipfs.layers.overlay.OverlayEncoder", LocalOverlayEncoder)


@pytest.fixture
def overlays(store: Store) -> Iterator[Overlays]:
    with Overlays(store) as made:
        yield made


def test_names_come_and_go(overlays: Overlays, store: Store) -> None:
    """An overlay is made, found, renamed and discarded by its name."""
    told: list[str] = []
    overlays.on_change = told.append
    overlays.create("one", "base")
    overlays.create("two")
    assert overlays.names() == ["one", "two"]
    assert [(info.name, info.base, info.base_path, info.base_number) for info in overlays.infos()] == [
        ("one", "base@1", "base", 1),
        ("two", "", None, None),
    ]
    with pytest.raises(ExistsError, match="there is an overlay one"):
        overlays.create("one", "base")
    with pytest.raises(ExistsError):
        overlays.rename("two", "one")
    with pytest.raises(NotFoundError, match="did you mean one"):
        overlays.get("onne")
    for name in ("", ".x", "a/b", "ä", "x" * 300):
        with pytest.raises(UsageError, match="cannot name an overlay"):
            overlays.create(name)
        with pytest.raises(UsageError):
            overlays.rename("one", name)
    overlays.rename("two", "three")
    assert overlays.get("three").name == "three" and overlays.names() == ["one", "three"]
    overlays.discard("one")
    assert overlays.names() == ["three"] and len(layer_names(store.path)) == 1
    with pytest.raises(NotFoundError):
        overlays.discard("one")
    assert told == ["one", "two", "two", "three", "one"]
    assert sorted(os.listdir(store.path / "overlays")) == [".lock", "three"]


def test_a_base_that_is_not_there_leaves_nothing(overlays: Overlays, store: Store) -> None:
    for base in ("basse", "base@7", "/nowhere", "@overlays/none"):
        with pytest.raises(NotFoundError):
            overlays.create("x", base)
    assert overlays.names() == [] and layer_names(store.path) == []


def test_an_overlay_that_cannot_be_made_leaves_nothing(
    overlays: Overlays, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise QuotaError("full")

    monkeypatch.setattr("moonclipfs.layers.overlayopening.add_name", fail)
    with pytest.raises(QuotaError):
        overlays.create("x", "base")
    assert overlays.names() == [] and layer_names(store.path) == []


def test_a_hundred_overlays_over_one_base(store: Store, local: None) -> None:
    """A hundred overlays over one base work at once; each costs less than 100 KB and no thread."""
    threads = threading.active_count()
    with Overlays(store) as overlays:
        made = [overlays.create(f"n{number}", "base") for number in range(100)]
        assert threading.active_count() - threads <= 1
        assert max(size_of_overlay(store, one) for one in made) < 100_000
        for number, one in enumerate(made):
            put(one.layer, "own", b"%d" % number)
        assert [tree(one.layer)["own"] for one in made] == [b"%d" % number for number in range(100)]
        assert all(len(tree(one.layer)) == 3 for one in made)
    with Overlays(store) as overlays:
        assert tree(overlays.get("n57").layer)["own"] == b"57"


def test_only_so_many_are_open(overlays: Overlays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OVERLAYS_OPEN", 2)
    overlays.create("a")
    overlays.create("b")
    with pytest.raises(LimitError, match="2 overlays are open"):
        overlays.create("c")
    overlays.release(overlays.get("a"))
    overlays.create("c")


def test_bases_by_their_names(store: Store, overlays: Overlays, local: None) -> None:
    """A base is a snapshot, a version of it, another overlay, or nothing; a snapshot wins over an overlay."""
    publish(store, "base", {"second": b"2"})
    publish(store, "same", {"of": b"snapshot"})
    assert set(tree(overlays.create("a", "base@1").layer)) == {"m", "d/x"}
    assert set(tree(overlays.create("b", "base").layer)) == {"second"}
    put(overlays.get("b").layer, "own", b"1")
    assert set(tree(overlays.create("c", "b").layer)) == {"second", "own"}
    put(overlays.create("same").layer, "of-overlay", b"1")
    assert set(tree(overlays.create("d", "same").layer)) == {"of"}
    assert set(tree(overlays.create("e", "@overlays/same").layer)) == {"of-overlay"}


def test_a_version_that_an_overlay_stands_on_is_kept(store: Store, overlays: Overlays) -> None:
    """No rule forgets a version that an overlay stands on, also when it was moved; it is told which overlay."""
    overlays.create("one", "base")
    publish(store, "base", {})
    store.log.move("base", "moved")
    assert pinned_versions(store.path, store.names()) == {("moved", 1): ["one"]}
    decisions = {(one.version.path, one.version.number): one for one in plan(
        store.names(), Rules(keep_last=1, keep_versions=1), kept(store)
    ).decisions}  # fmt: skip
    assert decisions["moved", 1].keep and "overlay one stands on it" in decisions["moved", 1].reasons
    with pytest.raises(UsageError, match="overlay one stands on it"):
        plan(store.names(), Rules(names=("moved@1",)), kept(store))
    assert overlays.rebase("one") == [] and overlays.get("one").info.base == "moved@2"
    assert pinned_versions(store.path, store.names()) == {("moved", 2): ["one"]}
    overlays.discard("one")
    assert kept(store) == {}


# What dead processes leave


def test_half_made_overlays_are_cleared_away(store: Store, tmp_path: Path) -> None:
    """A layer directory without a name belongs to nobody: whoever opens the overlays next clears it away."""
    overlay = create(store, "one", "base")
    os.unlink(store.path / "overlays" / "one")
    assert sweep(store.backend) == [] and layer_names(store.path) == [overlay.info.layer]  # somebody has it
    overlay.close()
    (finding,) = check_layers(store.path)
    assert finding.state is State.NOTE and "ended in the middle" in finding.text
    (store.path / "overlays" / ".gone.overlay.0123456789abcdef.00").mkdir()
    with Overlays(store):
        assert layer_names(store.path) == [] and os.listdir(store.path / "overlays") == [".lock"]


def test_other_layers_are_left_alone(store: Store) -> None:
    """Only what belongs to overlays is cleared away, however else layers are called."""
    for name in ("overlay.local", "overlay.0123", "host"):
        with Live(store, LiveOptions(layer=name)) as live:
            put(live.layer, "f", b"1")
    with Overlays(store):
        assert layer_names(store.path) == ["host", "overlay.0123", "overlay.local"]


def run(store: Store, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process, which may end as it likes."""
    head = (
        "import os, sys\nfrom moonclipfs.store.store import Store\nfrom moonclipfs.layers.overlays import Overlays\n"
        "from moonclipfs.layers.live import Live, LiveOptions\nfrom moonclipfs.types import EntryType\n"
        f"store = Store.open({os.fspath(store.path)!r}, write=True)\n"
    )
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=60, check=False)


def test_an_ephemeral_overlay_ends_with_its_process(store: Store) -> None:
    """An ephemeral overlay is discarded when it is closed, and after a kill when the overlays are opened next."""
    with Overlays(store) as overlays:
        overlays.create("mine", "base", ephemeral=True)
        overlays.create("kept", "base")
    assert overlay_names(store.path) == ["kept"]
    done = run(store, "Overlays(store).create('theirs', 'base', ephemeral=True)\nos.kill(os.getpid(), 9)")
    assert done.returncode == -9 and overlay_names(store.path) == ["kept", "theirs"]
    with Overlays(store) as overlays:
        assert overlays.names() == ["kept"] and len(layer_names(store.path)) == 1


def test_an_ephemeral_overlay_of_a_living_process_stays(store: Store) -> None:
    first = Overlays(store)
    first.create("mine", "base", ephemeral=True)
    with Store.open(store.path, write=True) as other, Overlays(other) as second:
        assert second.names() == ["mine"]
        with pytest.raises(BusyError, match="overlay mine is in use"):
            second.get("mine")
        with pytest.raises(BusyError):
            second.discard("mine")
    assert first.close() == [] and overlay_names(store.path) == []


# In the background


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def test_much_that_is_staged_is_encoded_without_being_asked(
    store: Store, overlays: Overlays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlay encodes by itself when much is staged, in a process that ends afterwards."""
    monkeypatch.setattr(limits, "OVERLAY_STAGED_BYTES", 50_000)
    monkeypatch.setattr(limits, "OVERLAY_ENCODER_LINGER_SECONDS", 0.2)
    overlay = overlays.create("one", "base")
    put(overlay.layer, "small", b"1" * 1000)
    time.sleep(0.7)
    assert overlay.status()["encoder"] == {} and overlay.layer.staging.used == 1000
    put(overlay.layer, "large", os.urandom(60_000))
    until(lambda: overlay.layer.staging.used == 0)
    until(lambda: overlay.status()["encoder"] == {})
    put(overlay.layer, "more", b"2")
    overlay.encoder.wake()
    until(lambda: overlay.layer.staging.used == 0)
    assert len(tree(overlay.layer)) == 5 and overlay.used == 61_001


def test_commit_and_flush_with_the_real_encoder(store: Store, overlays: Overlays) -> None:
    overlay = overlays.create("one", "base")
    put(overlay.layer, "large", os.urandom(300_000))
    overlay.flush()
    assert overlay.layer.staging.used == 0
    put(overlay.layer, "d/x", b"changed")
    version = overlay.commit("result")
    other = overlays.create("two", "result")
    assert tree(other.layer) == tree(overlay.layer) and overlay.status()["encoder"] == {}
    assert verify(store).problems == [] and version.number == 1


def test_a_full_staging_area_is_emptied_while_a_file_is_written(store: Store, overlays: Overlays) -> None:
    """Who writes more than may be staged waits until some of it is encoded, also of the file that is open."""
    overlay = overlays.create("one", "base")
    overlay.layer.staging.limit = 2_000_000
    data, inode = os.urandom(6_000_000), put(overlay.layer, "f", b"")
    file = overlay.layer.open_file(inode, write=True)
    for offset in range(0, len(data), 500_000):
        part = data[offset : offset + 500_000]
        with_room(overlay, partial(file.write, offset, part, 5), len(part))
        assert overlay.layer.staging.used <= 2_500_000
    file.close()
    assert read_all(overlay.layer, inode) == data and overlay.used == len(data)


def test_many_work_at_once(store: Store, overlays: Overlays, local: None) -> None:
    """Overlays are written, committed, renamed and stacked by several threads at a time."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            overlay = overlays.create(f"n{number}", "base")
            for round_ in range(5):
                put(overlay.layer, "d/own", b"%d %d" % (number, round_))
                version = overlay.commit(f"result/{number}")
                assert version.number == round_ + 1
                child = overlays.create(f"child{number}", f"@overlays/n{number}")
                assert tree(child.layer)["d/own"] == b"%d %d" % (number, round_)
                overlays.rename(f"child{number}", f"kid{number}")
                overlays.discard(f"kid{number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and overlays.names() == ["n0", "n1", "n2", "n3"]
    assert verify(store).problems == []


def test_discarding_while_it_is_encoded(store: Store, overlays: Overlays) -> None:
    overlay = overlays.create("one", "base")
    for number in range(20):
        put(overlay.layer, f"f{number}", os.urandom(100_000))
    overlay.encoder.wake()
    until(lambda: bool(overlay.status()["encoder"]))
    overlays.discard("one")
    assert overlays.names() == [] and layer_names(store.path) == []


def test_overlays_are_made_durable_by_themselves(
    store: Store, overlays: Overlays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SYNC_SECONDS", 0.05)
    overlay = overlays.create("one", "base")
    put(overlay.layer, "f", b"1")
    counter = overlay.layer.counter
    until(lambda: overlay._synced_counter >= counter)


def test_a_mount_reclaims_what_a_discarded_overlay_had(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a discarded overlay had stored is reclaimed by the live layer beside it."""
    monkeypatch.setattr("moonclipfs.layers.reclaim._REST", 0)
    monkeypatch.setattr(limits, "RECLAIM_BYTES", 100_000)
    packs = stored_bytes(store)
    with Live(store) as live, Overlays(store, live=live) as overlays:
        live.reclaimer.tick(time.monotonic())
        put(overlays.create("one", "base").layer, "f", os.urandom(500_000))
        overlays.get("one").flush()
        assert stored_bytes(store) - packs > 500_000
        overlays.discard("one")

        def freed() -> bool:
            live.reclaimer.tick(time.monotonic())
            return stored_bytes(store) <= packs

        until(freed)


# Verbs


def test_what_the_control_socket_offers(store: Store, overlays: Overlays, local: None) -> None:
    offered = verbs(overlays)
    made = offered["overlay_create"]({"name": "one", "base": "base", "quota": 100_000, "owner": {"command": "x"}})
    assert made["base"] == "base@1" and made["owner"]["command"] == "x" and made["owner"]["pid"] == os.getpid()
    put(overlays.get("one").layer, "f", b"12345")
    assert offered["overlay_status"]({"name": "one"})["used"] == 5
    assert offered["overlay_commit"]({"name": "one", "as": "result"})["path"] == "result"
    assert offered["overlay_rename"]({"name": "one", "new": "two"}) == {}
    assert [one["name"] for one in offered["overlay_list"]({})["overlays"]] == ["two"]
    publish(store, "base", {**BASE, "added": b"1"})
    assert offered["overlay_rebase"]({"name": "two"})["base"] == "base@2"
    assert "added" in tree(overlays.get("two").layer)
    offered["overlay_flush"]({"name": "two"})
    offered["overlay_discard"]({"name": "two"})
    assert overlays.names() == []
    for wrong in ({}, {"name": 5}, {"name": "x", "quota": "much"}, {"name": "x", "ephemeral": 1}):
        with pytest.raises(UsageError, match="JSON value"):
            offered["overlay_create"](wrong)


# Dry runs


def test_a_dry_run_keeps_nothing(store: Store) -> None:
    """A dry run shows all names, is writable throughout, tells nobody of it, and leaves nothing."""
    publish(store, "run/a", {"m": b"1"})
    publish(store, "run/b", {"m": b"2"})
    names = store.names()
    with Live(store, LiveOptions(dry_run=True)) as live:
        layer = live.layer
        assert live.status()["dry_run"] and layer.xattr(layer.resolve(b"run"), b"user.moonclip.dry_run") == b"1"
        layer.rename(layer.root, b"run", layer.root, b"moved", 5)
        layer.unlink(layer.resolve(b"moved/a"), b"m", 6)
        layer.rmdir(layer.resolve(b"moved"), b"a", 7)
        put(layer, "new/model.safetensors", model(1))
        publish(store, "run/c", {"m": b"3"})
        live.flush()
        layer.refresh(8)
        assert set(tree(layer)) == {"base/m", "base/d/x", "moved/b/m", "new/model.safetensors"}
        attempts: list[Callable[[], object]] = [
            lambda: live.seal(b"new"),
            lambda: live.seal(b"moved/b", wait=False),
            lambda: live.restore("base", 1),
            lambda: live.clone("base", "other"),
        ]
        for attempt in attempts:
            with pytest.raises(UsageError, match="this is a dry run"):
                attempt()
    assert store.names().sequence == names.sequence + 1 and layer_names(store.path) == []
    assert os.listdir(store.path / "overlays") == [".lock"]


def test_a_dry_run_that_is_killed_leaves_nothing(store: Store, tmp_path: Path) -> None:
    """What a killed dry run had staged, wherever, goes when the store is opened for overlays next."""
    done = run(
        store,
        f"live = Live(store, LiveOptions(dry_run=True, staging={os.fspath(tmp_path / 'elsewhere')!r}))\n"
        "inode = live.layer.make(live.layer.root, b'f', EntryType.FILE, 0o644, 0, 0, 1)\n"
        "live.layer.open_file(inode, write=True).write(0, bytes(100_000), 2)\n"
        "os.kill(os.getpid(), 9)",
    )
    assert done.returncode == -9, done.stderr
    assert len(layer_names(store.path)) == 1 and any((tmp_path / "elsewhere").rglob("0*"))
    with Overlays(store):
        assert layer_names(store.path) == [] and not any((tmp_path / "elsewhere").iterdir())


def test_dry_runs_beside_a_live_layer_and_each_other(store: Store) -> None:
    with Live(store) as live, Live(store, LiveOptions(dry_run=True)) as one:
        with Live(store, LiveOptions(dry_run=True)) as two:
            put(one.layer, "base/d/x", b"one")
            put(two.layer, "base/d/x", b"two")
            put(live.layer, "base/d/x", b"live")
            found = [read_all(each.layer, each.layer.resolve(b"base/d/x")) for each in (one, two, live)]
        assert found == [b"one", b"two", b"live"]
        assert live.seal(b"base") is not None and store.resolve("base").number == 2
        assert tree(one.layer)["base/d/x"] == b"one"


# Beside others


def test_names_of_a_shared_store_are_the_groups(tmp_path: Path) -> None:
    """In a shared store all of its group make and name overlays, whatever their umask."""
    before = os.umask(0o077)
    try:
        with Store.create(tmp_path / "shared", shared=True) as store:
            create(store, "one").close()
            modes = [(store.path / "overlays" / name).stat().st_mode & 0o7777 for name in (".", ".lock", "one")]
    finally:
        os.umask(before)
    assert modes == [0o2770, 0o660, 0o660]


def test_the_example_of_the_format_is_read_and_made_again() -> None:
    document = (Path(overlaydirs.__file__).parent / "FORMAT.md").read_text()
    data = document.partition("```json overlay\n")[2].partition("\n```")[0].encode()
    info = OverlayInfo.parse("x", data)
    assert info.base_path == "run/ck-1" and info.base_sequence == 17 and info.base_root.hex().startswith("1b971a")
    assert info.settings() == data
    for wrong in (b"", b"[]", b"{}", data.replace(b"overlay.0", b"overlay.x"), data.replace(b"1b97", b"97")):
        with pytest.raises(CorruptError, match="overlays/x is damaged"):
            OverlayInfo.parse("x", wrong)


def test_doctor_and_verify_know_overlays(store: Store, overlays: Overlays) -> None:
    overlay = overlays.create("one", "base")
    put(overlay.layer, "f", b"1")
    (finding,) = check_layers(store.path)
    assert finding.what == "overlay one" and finding.state is State.OK
    overlays.release(overlay)
    (finding,) = check_layers(store.path)
    assert finding.what == "overlay one" and "1 files" in finding.text
    assert verify(store).problems == []


def test_an_overlay_whose_layer_is_gone_is_told(store: Store) -> None:
    create(store, "one", "base").close()
    os.rename(store.path / "layers" / find_overlay(store.path, "one").layer, store.path / "elsewhere")
    with pytest.raises(Exception, match=r"overlay one: its directory layers/overlay\..* is gone"):
        Overlay.open(store, "one")


def test_the_reserve_is_taken_again_while_overlays_are_open(overlays: Overlays, store: Store) -> None:
    """After a full disk, once there is room: on the next one their files can be removed again."""
    overlays.create("one")
    assert reserve.release(store.path)
    deadline = time.monotonic() + 10
    while not (store.path / "reserve").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
