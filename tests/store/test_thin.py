"""Optimizer state dropped from older snapshots: the weights stay, their places in the line too, and space is freed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonclipfs.errors import NotFoundError, UsageError
from moonclipfs.layers.names import _newest
from moonclipfs.store import pins
from moonclipfs.store import thin as module
from moonclipfs.store.check import verify
from moonclipfs.store.optimize import newest_of_lines
from moonclipfs.store.publish import Ingest
from moonclipfs.store.rebind import restore
from moonclipfs.store.retention import Rules, plan
from moonclipfs.store.store import Store, root_metadata
from moonclipfs.store.thin import thin
from moonclipfs.types import Attributes, BytesSource, Entry, EntryType
from tests.store.kit import contents, noise, packs, publish


def save(store: Store, path: str, seed: int, **more: bytes) -> dict[str, bytes]:
    files = {
        "model.safetensors": noise(seed, 30_000),
        "optimizer.safetensors": noise(1000 + seed, 60_000),
        "rng_state.pth": noise(2000 + seed, 6_000),
        "config.json": b"{}" * 300,
        **more,
    }
    attributes = {"attributes": root_metadata(Attributes(0o750, 7, 8, 9, 10))}
    publish(store, path, files, step=seed, provenance={"host": "x"}, **attributes)
    return files


def line(store: Store, count: int = 4) -> list[dict[str, bytes]]:
    return [save(store, f"run/step-{number}", number) for number in range(count)]


def pack_bytes(store: Store) -> int:
    return sum((store.path / "packs" / f"{pack}.pack").stat().st_size for pack in packs(store))


def test_older_snapshots_lose_optimizer_and_rng_and_keep_weights(store: Store) -> None:
    saved = line(store)
    before = pack_bytes(store)
    report = thin(store, "run", keep_optimizer_last=2)
    assert [one.dropped for one in report.snapshots] == [("optimizer.safetensors", "rng_state.pth")] * 2 + [()] * 2
    assert [one.bytes for one in report.snapshots] == [66_000, 66_000, 0, 0]
    assert report.gc is not None and report.gc.freed_bytes > 120_000 and pack_bytes(store) < before - 120_000
    for number, files in enumerate(saved):
        left = files if number >= 2 else {name: files[name] for name in ("config.json", "model.safetensors")}
        assert contents(store, f"run/step-{number}") == left
    version = store.resolve("run/step-1")
    assert (version.number, version.metadata["thinned"]) == (2, ["optimizer.safetensors", "rng_state.pth"])
    assert version.metadata["step"] == 1 and version.metadata["provenance"] == {"host": "x"}
    assert version.metadata["files"] == 2 and version.metadata["bytes"] == 30_600
    assert store.root_entry(version).attributes.mode == 0o750
    assert [one.number for one in store.names().versions("run/step-1")] == [2], "the version before is forgotten"
    assert verify(store).problems == []


def test_a_thinned_snapshot_keeps_its_place_in_the_line(store: Store) -> None:
    """The latest stays the one that was saved last, and rules count as before."""
    line(store)
    thin(store, "run", keep_optimizer_last=1)
    names = store.names()
    assert [one.path for one in newest_of_lines(names, ["run"])] == ["run/step-3"]
    newest = _newest({path.encode(): version for path, version in names.bound().items()})
    assert newest is not None and newest.path == "run/step-3"
    assert [one.path for one in plan(names, Rules(keep_last=2)).keep] == ["run/step-2", "run/step-3"]
    restore(store, "run/step-0", 2, to="run/again")
    assert [one.path for one in newest_of_lines(store.names(), ["run"])] == ["run/again"]


def test_thinning_again_finds_nothing_and_goes_on_with_newer_ones(store: Store) -> None:
    line(store)
    thin(store, "run", keep_optimizer_last=2)
    again = thin(store, "run", keep_optimizer_last=2)
    assert [one.reason for one in again.snapshots] == ["has no optimizer state"] * 2 + ["among the last 2"] * 2
    assert again.gc is None
    save(store, "run/step-4", 4)
    assert [bool(one.dropped) for one in thin(store, "run", keep_optimizer_last=2).snapshots] == [
        *(False, False, True, False, False)
    ]
    more = thin(store, "run", keep_optimizer_last=1, also=["config.*"])
    assert more.snapshots[0].dropped == ("config.json",)
    assert store.resolve("run/step-0").metadata["thinned"] == ["config.json", "optimizer.safetensors", "rng_state.pth"]


def test_a_dry_run_tells_and_changes_nothing(store: Store) -> None:
    saved = line(store)
    sequence, before = store.names().sequence, pack_bytes(store)
    report = thin(store, "run", keep_optimizer_last=3, dry_run=True)
    assert [bool(one.dropped) for one in report.snapshots] == [True, False, False, False]
    assert report.gc is not None and report.gc.dry_run
    assert (store.names().sequence, pack_bytes(store)) == (sequence, before)
    assert contents(store, "run/step-0") == saved[0]


def test_what_is_pinned_stays_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = line(store)
    pins.pin(store, [("run/step-0", 1)])
    monkeypatch.setattr(module, "held", lambda store: {("run/step-1", 1): ["overlay try stands on it"]})
    report = thin(store, "run", keep_optimizer_last=1)
    assert [one.reason for one in report.snapshots] == ["pinned", "overlay try stands on it", "", "among the last 1"]
    assert contents(store, "run/step-0") == saved[0] and contents(store, "run/step-1") == saved[1]


def test_names_of_several_frameworks(store: Store) -> None:
    names = [
        *(
            "optimizer.pt",
            "optimizer-00001-of-00002.safetensors",
            "optimizer.safetensors.index.json",
            "optimizer_1.bin",
        ),
        *("rng_state_0.pth", "random_states_0.pkl", "rng.safetensors", "distrib_optim.pt"),
        *("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_3_mp_rank_00_model_states.pt"),
    ]
    kept = ["model.safetensors", "mp_rank_00_model_states.pt", "trainer_state.json", "scheduler.pt", "state.json"]
    publish(store, "run/1", {name: noise(at) for at, name in enumerate([*names, *kept])})
    publish(store, "run/2", {"model.safetensors": noise(99)})
    report = thin(store, "run", keep_optimizer_last=1)
    assert sorted(report.snapshots[0].dropped) == sorted(names)
    assert sorted(contents(store, "run/1")) == sorted(kept)


def test_directories_go_as_a_whole_and_others_stay_as_they_are(store: Store) -> None:
    with store.ingest() as ingest:
        child, size, _ = ingest.put_file(BytesSource(noise(1)))
        file = Entry(b"f", EntryType.FILE, Attributes(0o600, 1, 2, 3, 4), size, child)
        inner = ingest.put_directory([file])
        weights, length, _ = ingest.put_file(BytesSource(noise(2)))
        entries = [
            Entry(b"optimizer_0", EntryType.DIRECTORY, Attributes(0o700), child=inner),
            Entry(b"deep", EntryType.DIRECTORY, Attributes(0o711, 5, 6, 7, 8, {b"user.a": b"b"}), child=inner),
            Entry(b"link", EntryType.SYMLINK, Attributes(0o777), 4, target=b"deep"),
            Entry(b"model.safetensors", EntryType.FILE, Attributes(0o644), length, weights),
        ]
        ingest.publish("run/1", ingest.put_directory(entries), {})
    publish(store, "run/2", {"model.safetensors": noise(99)})
    report = thin(store, "run", keep_optimizer_last=1)
    assert report.snapshots[0].dropped == ("optimizer_0",) and report.snapshots[0].bytes == size
    assert list(store.directory(store.resolve("run/1").root).values()) == entries[1:]


def test_the_only_weights_are_never_dropped(store: Store) -> None:
    """ZeRO-3 keeps the weights in the files of the optimizer."""
    files = {
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": noise(1),
        "zero_pp_rank_0_mp_rank_00_model_states.pt": noise(2),
        "latest": b"global_step1" * 100,
    }
    publish(store, "run/1", files)
    publish(store, "run/2", {"model.safetensors": noise(99)})
    report = thin(store, "run", keep_optimizer_last=1)
    assert report.snapshots[0].reason == "no file with weights would be left"
    assert contents(store, "run/1") == files


def test_each_line_counts_for_itself(store: Store) -> None:
    for run in ("a", "b"):
        for number in range(2):
            save(store, f"runs/{run}/{number}", number)
    report = thin(store, "runs", keep_optimizer_last=1)
    assert [(one.version.path, bool(one.dropped)) for one in report.snapshots] == [
        *(("runs/a/0", True), ("runs/a/1", False), ("runs/b/0", True), ("runs/b/1", False))
    ]


def test_wrong_use_is_told(store: Store) -> None:
    line(store, 1)
    with pytest.raises(UsageError, match="1 or more"):
        thin(store, "run", keep_optimizer_last=0)
    with pytest.raises(NotFoundError, match="ru"):
        thin(store, "ru", keep_optimizer_last=1)


def test_who_saves_the_name_meanwhile_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    line(store, 2)
    real = Ingest.publish
    with Store.open(store.path, write=True, index_path=store.path.parent / "other") as other:

        def late(ingest: Ingest, path: str, *rest: object) -> object:
            monkeypatch.setattr(Ingest, "publish", real)
            save(other, path, 77)
            return real(ingest, path, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(Ingest, "publish", late)
        report = thin(store, "run", keep_optimizer_last=1)
    assert [one.reason for one in report.snapshots] == ["changed meanwhile", "among the last 1"]
    assert contents(store, "run/step-0")["optimizer.safetensors"] == noise(1077, 60_000)


def test_a_run_that_was_killed_is_taken_up_by_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line(store, 3)

    def killed(store: Store, versions: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "drop", killed)
        with pytest.raises(KeyboardInterrupt):
            thin(store, "run", keep_optimizer_last=1)
    assert [one.number for one in store.names().versions("run/step-0")] == [1, 2]
    report = thin(store, "run", keep_optimizer_last=1)
    assert [one.number for one in store.names().versions("run/step-0")] == [2]
    assert report.gc is not None and report.gc.freed_bytes > 100_000
