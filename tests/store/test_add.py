"""Files of the host become snapshots: names, trees, what is refused, and what a second time costs."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from moonclipfs.errors import (
    BusyError,
    MoonclipError,
    NotFoundError,
    PermissionDeniedError,
    UsageError,
)
from moonclipfs.store import sinks
from moonclipfs.store.add import AddReport, add
from moonclipfs.store.ingest import Intake
from moonclipfs.store.progress import Progress
from moonclipfs.store.scan import FileSource, scan
from moonclipfs.store.store import Store
from moonclipfs.types import EntryType
from tests.store.kit import contents, noise, series
from tests.store.test_ingest import floats, safetensors


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def lay(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def snapshots(store: Store) -> dict[str, int]:
    return {path: version.number for path, version in store.names().bound().items()}


def test_one_directory_is_the_root_of_a_snapshot(store: Store, work: Path) -> None:
    lay(work / "run", {"a": b"1", "sub/b": b"22", "sub/deeper/c": b"", "d": noise(1)})
    report = add(store, [work / "run"])
    assert snapshots(store) == {"run": 1}
    assert contents(store, "run") == {"a": b"1", "d": noise(1), "sub/b": b"22", "sub/deeper/c": b""}
    (one,) = report.snapshots
    assert (one.path, one.files, one.bytes, one.unchanged) == ("run", 4, 20_003, False)
    assert one.version == store.resolve("run")
    assert one.version.metadata["files"] == 4
    assert one.version.metadata["bytes"] == 20_003


def test_files_lie_under_their_basenames(store: Store, work: Path) -> None:
    lay(work, {"a": b"1", "dir/b": b"2"})
    add(store, [work / "a"])
    add(store, [work / "a", work / "dir"], name="both")
    assert snapshots(store) == {"a": 1, "both": 1}
    assert contents(store, "a") == {"a": b"1"}
    assert contents(store, "both") == {"a": b"1", "dir/b": b"2"}


def test_a_name_that_ends_in_a_slash_keeps_each_basename(store: Store, work: Path) -> None:
    lay(work, {"ckpt-10/m": b"10", "ckpt-2/m": b"2", "log.txt": b"l", "args.json": b"{}"})
    report = add(store, sorted(work.iterdir()), name="run1/")
    assert [one.path for one in report.snapshots] == ["run1/ckpt-2", "run1/ckpt-10", "run1"]
    assert contents(store, "run1") == {"args.json": b"{}", "log.txt": b"l"}
    assert contents(store, "run1/ckpt-10") == {"m": b"10"}
    sequences = [one.version.sequence for one in report.snapshots if one.version is not None]
    assert sequences == sorted(sequences)
    assert snapshots(store) == {"run1": 1, "run1/ckpt-2": 1, "run1/ckpt-10": 1}


def test_plain_files_are_merged_into_the_newest_version(store: Store, work: Path) -> None:
    lay(work, {"old/a": b"1", "old/d/b": b"2", "a": b"new", "c": b"3"})
    add(store, [work / "old"], name="run")
    report = add(store, [work / "a", work / "c"], name="run/")
    assert contents(store, "run") == {"a": b"new", "c": b"3", "d/b": b"2"}
    assert snapshots(store) == {"run": 2}
    assert (report.snapshots[0].files, report.snapshots[0].bytes) == (3, 5)
    assert store.root_entry(store.resolve("run")).attributes == store.root_entry(store.resolve("run@1")).attributes


def test_files_merged_by_two_processes_are_all_there(store: Store, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(work, {"a": b"1", "b": b"2"})
    plain = Intake.put_directory
    raced = False

    def racing(self: Intake, entries: object) -> bytes:
        nonlocal raced
        if not raced:
            raced = True
            with Store.open(store.path, write=True) as other:
                add(other, [work / "b"], name="run/")
        return plain(self, entries)  # type: ignore[arg-type]

    monkeypatch.setattr(Intake, "put_directory", racing)
    add(store, [work / "a"], name="run/")
    assert contents(store, "run") == {"a": b"1", "b": b"2"}
    assert snapshots(store) == {"run": 2}


@pytest.mark.parametrize(
    ("paths", "name", "message"),
    [
        ([], "x", "nothing to add"),
        (["a", "b"], None, "need a name"),
        (["a", "d/a"], "x", "2 paths are called 'a'"),
        (["a"], "/", "need a snapshot to lie in"),
        (["a"], "@x", "begin with @"),
        (["a"], "x//y", "cannot be a snapshot's name"),
        (["d"], "", "cannot be a snapshot's name"),
        (["d"], "../x", "cannot be a snapshot's name"),
    ],
)
def test_names_that_make_no_sense(store: Store, work: Path, paths: list[str], name: str | None, message: str) -> None:
    lay(work, {"a": b"1", "b": b"2", "d/a": b"3"})
    with pytest.raises(UsageError, match=message):
        add(store, [work / path for path in paths], name=name)
    assert not snapshots(store)


def test_the_same_content_again_is_no_new_version(store: Store, work: Path) -> None:
    lay(work / "run", {"a": noise(1), "sub/b": noise(2)})
    add(store, [work / "run"])
    report = add(store, [work / "run"])
    assert report.snapshots[0].unchanged
    assert report.snapshots[0].version == store.resolve("run@1")
    assert report.stats.stored_bytes == 0
    os.utime(work / "run" / "a", ns=(5, 5))
    assert not add(store, [work / "run"]).snapshots[0].unchanged
    assert store.lookup(store.resolve("run@2"), b"a").attributes.mtime_ns == 5
    assert snapshots(store) == {"run": 2}


def test_every_kind_of_entry(store: Store, work: Path, expect_log: Callable[[str], None]) -> None:
    expect_log(r"1 symbolic link leads out of .*work/run")
    root = lay(work / "run", {"file": b"x", "sub/file": b"y"})
    (root / "link").symlink_to("../outside\udcff")
    os.link(root / "file", root / "sub" / "again")
    os.mkfifo(root / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
        os.mkdir(root / "empty", 0o700)
        os.chmod(root / "sub", 0o2750)
        os.setxattr(root / "file", "user.note", b"kept")
        add(store, [root])
    entries = dict(store.walk(store.resolve("run")))
    assert {path.decode(): entry.type.name for path, entry in entries.items()} == {
        "empty": "DIRECTORY",
        "fifo": "FIFO",
        "file": "FILE",
        "link": "SYMLINK",
        "socket": "SOCKET",
        "sub": "DIRECTORY",
        "sub/again": "FILE",
        "sub/file": "FILE",
    }
    assert entries[b"link"].target == b"../outside\xff"
    assert entries[b"file"].link_group == entries[b"sub/again"].link_group != 0
    assert entries[b"sub/file"].link_group == 0
    assert entries[b"fifo"].attributes.mode == 0o640
    assert entries[b"sub"].attributes.mode == 0o2750
    assert entries[b"file"].attributes.xattrs == {b"user.note": b"kept"}
    status = os.stat(root / "sub" / "file")
    kept = entries[b"sub/file"].attributes
    assert (kept.mode, kept.uid, kept.gid) == (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    assert kept.mtime_ns == kept.ctime_ns == status.st_mtime_ns


def test_names_are_bytes(store: Store, work: Path) -> None:
    name = os.fsencode(work) + b"/\xff\n\xe4"
    os.mkdir(name)
    with open(name + b"/f\xfe", "wb") as file:
        file.write(b"x")
    add(store, [Path(os.fsdecode(name))])
    assert list(store.names().bound()) == [os.fsdecode(b"\xff\n\xe4")]
    assert [path for path, _ in store.walk(store.resolve(os.fsdecode(b"\xff\n\xe4")))] == [b"f\xfe"]


def test_a_symlink_given_by_name_is_followed(store: Store, work: Path) -> None:
    lay(work / "run-7", {"a": b"1"})
    (work / "latest").symlink_to("run-7")
    add(store, [work / "latest"])
    assert contents(store, "latest") == {"a": b"1"}


def test_symbolic_links_that_lead_out_are_told_once_for_each_snapshot(
    store: Store, work: Path, caplog: pytest.LogCaptureFixture, expect_log: Callable[[str], None]
) -> None:
    lay(work, {"a/m": b"1", "a-2/m": b"2", "b/m": b"3", "b/sub/n": b"4"})
    for name, target in {
        "a/one": "../a-2/m",
        "a/two": "/nowhere",
        "a-2/through": "../b/sub",
        "b/same": "m",
        "b/sub/up": "../m",
        "b/sub/top": "..",
        "b/dangling": "nothing",
        "b/circle": "circle",
        "b/absolute": f"{work}/b/m",
        "b/out and back": "../b/m",
    }.items():
        (work / name).symlink_to(target)
    expect_log(r"2 symbolic links lead out of .*work/a, the first is .*work/a/one: stored as links, what they point to")
    expect_log(r"1 symbolic link leads out of .*work/a-2, the first is .*work/a-2/through: stored as links, what they")
    add(store, [work / "a", work / "a-2", work / "b"], name="run/")
    assert len(caplog.records) == 2
    assert store.lookup(store.resolve("run/a"), b"one").target == b"../a-2/m"
    add(store, [work / "a-2", work / "b"], name="both")  # one snapshot holds what the link points to
    assert len(caplog.records) == 2
    expect_log(r"2 symbolic links lead out of others, the first is .*work/a/one")
    add(store, [work / "a", work / "b"], name="others")
    assert len(caplog.records) == 3


def test_devices_the_store_itself_and_missing_paths_are_refused(store: Store, work: Path) -> None:
    with pytest.raises(UsageError, match="/dev/null is a device"):
        add(store, [Path("/dev/null")])
    with pytest.raises(UsageError, match="the store itself"):
        add(store, [Path(store.path).parent], name="x")
    with pytest.raises(NotFoundError, match="nowhere"):
        add(store, [work / "nowhere"])
    assert not snapshots(store)


def test_an_unreadable_file_is_named_and_nothing_is_published(
    store: Store, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(work / "run", {"a": noise(1), "secret": noise(2)})
    plain = os.open

    def refusing(path: object, *arguments: object, **more: object) -> int:
        if os.fsencode(str(path)).endswith(b"secret'") or str(path).endswith("secret'"):
            raise PermissionError(13, "Permission denied", path)
        return plain(path, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(PermissionDeniedError, match="run/secret: Permission denied"):
        add(store, [work / "run"])
    assert not snapshots(store)


@pytest.mark.parametrize("change", ["shorter", "written", "replaced"])
def test_a_file_that_changes_while_it_is_read_is_named(
    store: Store, work: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    lay(work / "run", {"a": noise(1, 3_000_000)})
    path = work / "run" / "a"
    plain = FileSource.read

    def meddling(self: FileSource, offset: int, length: int) -> bytes:
        if change == "shorter":
            os.truncate(path, 1000)
        elif change == "written":
            os.utime(path, ns=(1, 1))
        return plain(self, offset, length)

    if change == "replaced":
        scanned = scan(work / "run")
        os.replace(lay(work, {"b": noise(2, 3_000_000)}) / "b", path)
        with pytest.raises(BusyError, match=r"run/a changed while it was read"):
            FileSource(scanned.children[0]).open()
        return
    monkeypatch.setattr(FileSource, "read", meddling)
    with pytest.raises(BusyError, match=r"run/a changed while it was read"):
        add(store, [work / "run"])
    assert not snapshots(store)


def test_what_came_before_the_one_at_fault_is_there(store: Store, work: Path) -> None:
    lay(work, {"c-1/a": b"1", "c-2/a": b"2", "c-10/a": b"3"})
    plain = FileSource.read

    def failing(self: FileSource, offset: int, length: int) -> bytes:
        if "c-10" in self.name:
            raise BusyError("no")
        return plain(self, offset, length)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(BusyError):
        patch.setattr(FileSource, "read", failing)
        add(store, [work / "c-10", work / "c-2", work / "c-1"], name="run/")
    assert snapshots(store) == {"run/c-1": 1, "run/c-2": 1}


def test_a_line_is_stored_as_deltas_whatever_its_files_are_called(store: Store, work: Path) -> None:
    for number, data in enumerate(series(6)):
        lay(work, {f"c-{number}/model-{number}.safetensors": data})
    report = add(store, [work / f"c-{number}" for number in range(6)], name="run/")
    assert [one.stats.delta_bytes > 0 for one in report.snapshots] == [False] + [True] * 5
    for number, data in enumerate(series(6)):
        assert contents(store, f"run/c-{number}") == {f"model-{number}.safetensors": data}


def test_a_tensor_that_grew_is_a_delta_against_the_shorter_one(store: Store, work: Path) -> None:
    values = floats(1, 60_000)
    lay(work, {"c-0/m": safetensors({"emb": ("F32", values)})})
    lay(work, {"c-1/m": safetensors({"emb": ("F32", values + floats(2, 3000))})})
    stats = add(store, [work / "c-0", work / "c-1"], name="run/").snapshots[1].stats
    assert stats.delta_bytes == 63_000 * 4
    assert stats.delta_stored < 13_000
    assert contents(store, "run/c-1")["m"].endswith(floats(2, 3000))


def test_a_flat_line_of_files_in_one_snapshot_is_stored_as_deltas(store: Store, work: Path) -> None:
    lay(work / "run", {f"step-{number}.safetensors": data for number, data in enumerate(series(6))})
    stats = add(store, [work / "run"]).stats
    assert stats.delta_bytes == 5 * 80_000


def test_narrow_copies_come_from_their_masters_in_any_order_of_names(store: Store, work: Path) -> None:
    values = np.random.default_rng(1).standard_normal(300_000).astype(np.float32)
    words = values.view(np.uint32)
    narrow = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    lay(
        work / "run",
        {
            "a-bf16.safetensors": safetensors({"w": ("BF16", narrow)}),
            "b.safetensors": safetensors({"w": ("F32", values.tobytes())}),
        },
    )
    stats = add(store, [work / "run"]).stats
    assert (stats.delta_bytes, stats.full_bytes) == (600_000, 1_200_000)
    assert stats.delta_stored < 6000


def test_provenance_and_progress(store: Store, work: Path) -> None:
    lay(work, {"c-1/a": noise(1, 3_000_000), "c-2/a": noise(1, 3_000_000)})
    seen: list[tuple[int, int, int, str]] = []

    def tell(progress: Progress) -> None:
        seen.append((progress.total, progress.done, progress.stored, progress.path))

    report = add(store, [work / "c-1", work / "c-2"], name="run/", provenance={"host": "h"}, progress=tell)
    assert store.resolve("run/c-1").metadata["provenance"] == {"host": "h"}
    assert "provenance" not in store.resolve(add(store, [work / "c-1"], name="x").snapshots[0].path).metadata
    assert {total for total, *_ in seen} == {6_000_000}
    assert [done for _, done, *_ in seen] == sorted(done for _, done, *_ in seen)
    assert seen[-1][1:3] == (6_000_000, report.stats.stored_bytes)
    assert len(seen) > 10
    assert seen[0][3].endswith("c-1/a")


def dry_and_real(store: Store, paths: list[Path]) -> tuple[AddReport, AddReport]:
    dry = add(store, paths, name="run/", dry_run=True)
    assert not list((Path(store.path) / "packs").iterdir())
    assert not snapshots(store)
    return dry, add(store, paths, name="run/")


def test_a_dry_run_foretells_the_size_within_a_tenth(store: Store, work: Path) -> None:
    for number, data in enumerate(series(4, 700_000)):
        lay(work, {f"c-{number}/model.safetensors": data, f"c-{number}/log.txt": b"line of text\n" * 50_000})
    lay(work, {"c-0/ema.safetensors": safetensors({"e": ("F32", floats(3, 600_000))})})
    dry, real = dry_and_real(store, [work / f"c-{number}" for number in range(4)])
    for one, other in zip(dry.snapshots, real.snapshots, strict=True):
        assert one.version is None
        assert (one.path, one.files, one.bytes) == (other.path, other.files, other.bytes)
        assert one.stats.stored_bytes == pytest.approx(other.stats.stored_bytes, rel=0.1)
        assert one.stats.shared_bytes == other.stats.shared_bytes
    assert dry.stats.delta_bytes == real.stats.delta_bytes > 0


def test_a_dry_run_knows_what_the_store_has(store: Store, work: Path) -> None:
    lay(work / "c", {"m": series(1)[0]})
    add(store, [work / "c"], name="run/")
    lay(work / "d", {"m": series(2)[1]})
    packs = sorted((Path(store.path) / "packs").iterdir())
    assert add(store, [work / "c"], name="run/", dry_run=True).stats.stored_bytes < 1000
    assert add(store, [work / "d"], name="run/", dry_run=True).stats.delta_bytes > 0
    assert sorted((Path(store.path) / "packs").iterdir()) == packs


def test_the_time_of_a_snapshot_is_that_of_its_directory(store: Store, work: Path) -> None:
    lay(work / "c", {"a": b"1"})
    os.utime(work / "c", ns=(7, 7))
    os.chmod(work / "c", 0o750)
    add(store, [work / "c"])
    root = store.root_entry(store.resolve("c"))
    assert (root.type, root.attributes.mtime_ns, root.attributes.mode) == (EntryType.DIRECTORY, 7, 0o750)


@pytest.mark.parametrize("action", [lambda path: os.mkfifo(path), lambda path: os.symlink("x", path)])
def test_a_single_special_file(store: Store, work: Path, action: Callable[[Path], None]) -> None:
    action(work / "special")
    try:
        add(store, [work / "special"])
    except MoonclipError as error:
        assert isinstance(error, NotFoundError)  # a symlink to nothing
        return
    assert [entry.type for _, entry in store.walk(store.resolve("special"))] == [EntryType.FIFO]


def test_adding_again_decodes_and_encodes_nothing(store: Store, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(work / "c", {"m": safetensors({"w": ("F32", floats(1, 2_000_000))})})
    add(store, [work / "c"])
    monkeypatch.setattr(sinks, "encode", None)
    before = store.objects.counters.blocks_decoded
    assert add(store, [work / "c"]).snapshots[0].unchanged
    assert store.objects.counters.blocks_decoded - before < 5, "directory, recipe and header at most"
